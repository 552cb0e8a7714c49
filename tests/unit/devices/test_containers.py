"""Bounds of control groups, of both versions, whichever of the groups around a process has them."""

from pathlib import Path

import psutil
import pytest

from mirrorsd.devices import layouts
from mirrorsd.devices.containers import available_memory, processors, total_memory

GIB = 1 << 30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n", encoding="ascii")


def test_the_new_version(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/box\n", encoding="ascii")
    stat = f"anon 5\ninactive_file {GIB // 4}"
    write(
        tmp_path / "pod",
        memory__max=str(GIB),
        memory__current=str(GIB // 2),
        memory__stat=stat,
        cpu__max="150000 100000",
    )
    write(tmp_path / "pod" / "box", memory__max="max", memory__current="7", cpu__max="max 100000")
    assert total_memory(tmp_path, own) == GIB
    assert available_memory(tmp_path, own) == GIB - GIB // 4
    assert processors(tmp_path, own) == 1.5


def test_the_old_version(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/\n", encoding="ascii")
    write(tmp_path / "memory", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="9")
    write(tmp_path / "memory" / "box", memory__limit_in_bytes=str(GIB), memory__usage_in_bytes=str(GIB // 2))
    write(tmp_path / "cpu,cpuacct" / "box", **{"cpu__cfs_quota_us": "400000", "cpu__cfs_period_us": "100000"})
    write(tmp_path / "cpu,cpuacct", **{"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"})
    assert (total_memory(tmp_path, own), available_memory(tmp_path, own)) == (GIB, GIB // 2)
    assert processors(tmp_path, own) == 4.0


def test_without_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert total_memory(tmp_path, tmp_path / "none") == psutil.virtual_memory().total
    assert processors(tmp_path, tmp_path / "none") is None


def test_threads_are_as_many_as_there_is_time_for_and_keep_to_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every container would keep to the first cores of the machine, else."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(layouts, "processors", lambda: 2.5)
    assert layouts.usable_cores("none-{}") == ((), 2)
    monkeypatch.setattr(layouts, "processors", lambda: 0.5)
    assert layouts.usable_cores("none-{}") == ((), 1)
    monkeypatch.setattr(layouts, "processors", lambda: 8.0)
    assert layouts.usable_cores("none-{}").num_threads == 8
