import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mirrorsd.graphs import atomic_folder as atomic
from mirrorsd.graphs.atomic_folder import atomic_folder, check_place
from mirrorsd.graphs.errors import ConfigError, ExportError, ParityError

KILLED = """
import os, signal, sys
from pathlib import Path
from mirrorsd.graphs.atomic_folder import atomic_folder, check_place
with atomic_folder(Path(sys.argv[1]), overwrite=False) as folder:
    (folder / "half").write_text("written")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL if os.name != "nt" else signal.SIGTERM)
"""


def fill(folder: Path, content: str) -> None:
    (folder / "file").write_text(content)
    (folder / "manifest.json").write_text("{}")


def test_the_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "out.mirror"
    with atomic_folder(final, overwrite=False) as folder:
        (folder / "file").write_text("x")
        assert not final.exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["deep", "out.mirror", "file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), atomic_folder(tmp_path / "out.mirror", overwrite=False) as folder:
        (folder / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_bundle_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(final), "kill"], check=False)
    assert killed.returncode != 0
    assert not final.exists()
    assert {path.name for path in tmp_path.iterdir()} == {".out.mirror.partial", ".out.mirror.lock"}
    subprocess.run([sys.executable, "-c", KILLED, str(final), "finish"], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_an_existing_folder_is_not_replaced_unasked(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    final.mkdir()
    for overwrite in (False, True):
        with (
            pytest.raises(ExportError, match="is not a bundle, so it is never"),
            atomic_folder(final, overwrite=overwrite),
        ):
            pass
    (final / "manifest.json").write_text("{}")
    with (
        pytest.raises(ExportError, match=r"out\.mirror exists already; .*--overwrite"),
        atomic_folder(final, overwrite=False),
    ):
        pass


def test_overwriting_replaces_a_bundle_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    final.mkdir()
    (final / "manifest.json").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(final, overwrite=True):
        raise RuntimeError
    assert (final / "manifest.json").read_text() == "old"
    with atomic_folder(final, overwrite=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert (final / "manifest.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_a_full_disk_is_an_export_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ExportError, match="no space left beside"),
        atomic_folder(tmp_path / "out.mirror", overwrite=False),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_an_export_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ExportError, match="cannot write into"),
        atomic_folder(tmp_path / "file" / "out.mirror", overwrite=False),
    ):
        pass


def test_a_second_export_to_one_place_is_refused_and_the_first_one_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    with atomic_folder(final, overwrite=False) as folder:
        (folder / "file").write_text("first")
        second = subprocess.run(
            [sys.executable, "-c", KILLED, str(final), "finish"], check=False, capture_output=True, text=True
        )
        assert second.returncode != 0
        assert "ConfigError" in second.stderr
        with (
            pytest.raises(ConfigError, match=r"written by another export to out\.mirror \(process \d+, which holds"),
            atomic_folder(final, overwrite=True),
        ):
            pass
    assert (final / "file").read_text() == "first"
    assert [path.name for path in tmp_path.rglob("*")] == ["out.mirror", "file"]


@pytest.mark.parametrize("name", [".", "", "../here", "below/.."])
def test_the_folder_that_one_is_in_is_no_bundle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ExportError, match="here exists and is not a bundle"), atomic_folder(Path(name), overwrite=True):
        pass
    with pytest.raises(ExportError, match="cannot be a bundle"), atomic_folder(Path("/"), overwrite=True):
        pass
    assert {path.name for path in tmp_path.rglob("*")} == {"here", "below"}


@pytest.mark.skipif(os.name == "nt", reason="links need a right of their own there")
def test_a_link_stays_one_however_often_it_is_exported_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out.mirror"
    link.symlink_to(tmp_path / "disk" / "real.mirror")
    for content in ("first", "second", "third"):  # at first there is nothing behind it
        with atomic_folder(link, overwrite=True) as folder:
            fill(folder, content)
        assert link.is_symlink() and (link / "file").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out.mirror"]
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real.mirror"]


def test_a_bundle_in_use_costs_no_finished_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, where what is open has no other name."""
    final = tmp_path / "out.mirror"
    with atomic_folder(final, overwrite=False) as folder:
        fill(folder, "old")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "in use")))

    def goes_on(left: Path) -> bool:
        return (left / "journal").exists()

    with (
        pytest.raises(ExportError, match=r"cannot replace .* close what uses it there"),
        atomic_folder(final, overwrite=True, goes_on=goes_on, work_files=["journal"]) as folder,
    ):
        fill(folder, "new")
        (folder / "journal").touch()
    assert goes_on(tmp_path / ".out.mirror.partial")
    assert (final / "file").read_text() == "old"


def test_an_interrupt_at_the_very_end_brings_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "out.mirror"
    with atomic_folder(final, overwrite=False) as folder:
        fill(folder, "old")
    monkeypatch.setattr(atomic, "flush_to_disk", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(atomic, "_flush", lambda _: None)
    with pytest.raises(KeyboardInterrupt), atomic_folder(final, overwrite=True) as folder:
        fill(folder, "new")
    assert (final / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    final = tmp_path / "out.mirror"
    subprocess.run([sys.executable, "-c", KILLED, str(final), "kill"], check=False)
    assert (tmp_path / ".out.mirror.lock").exists()
    with atomic_folder(final, overwrite=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_what_appeared_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    """The finished work is kept: the same export with `--overwrite` only has to rename it."""
    final = tmp_path / "out.mirror"
    is_mine = {"goes_on": lambda left: (left / "mine").is_file(), "work_files": ["mine"]}
    with (
        pytest.raises(ExportError, match=r"out\.mirror exists already; .*--overwrite"),
        atomic_folder(final, overwrite=False, **is_mine) as folder,
    ):
        (folder / "mine").write_text("")
        (folder / "file").write_text("ours")
        final.mkdir()
        (final / "manifest.json").write_text("theirs")
    assert (final / "manifest.json").read_text() == "theirs"
    with atomic_folder(final, overwrite=True, **is_mine) as folder:
        assert (folder / "file").read_text() == "ours"
    assert [path.name for path in tmp_path.rglob("*")] == ["out.mirror", "file"]


@pytest.mark.parametrize(
    ("error", "is_kept"), [(ExportError, True), (ParityError, True), (ConfigError, True), (RuntimeError, False)]
)
def test_a_refusal_keeps_what_is_finished(tmp_path: Path, error: type[Exception], is_kept: bool) -> None:
    final = tmp_path / "out.mirror"
    finished = [False]
    with pytest.raises(error), atomic_folder(final, overwrite=False, goes_on=lambda left: finished[0]) as folder:
        finished[0] = True
        raise error
    assert folder.exists() == is_kept


def test_the_old_bundle_comes_back_where_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses to rename a folder in which a file is open."""
    final = tmp_path / "out.mirror"
    final.mkdir()
    (final / "manifest.json").write_text("old")
    rename = Path.rename

    def refuse_the_new_one(path: Path, target: Path) -> Path:
        if path.name == ".out.mirror.partial":
            raise PermissionError(errno.EACCES, "in use")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(ExportError, match="cannot name the finished"), atomic_folder(final, overwrite=True) as folder:
        (folder / "manifest.json").write_text("new")
    assert (final / "manifest.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.mirror"]


def test_an_old_bundle_that_stood_aside_when_the_power_went_gets_its_name_back(tmp_path: Path) -> None:
    old = tmp_path / ".out.mirror.old"
    old.mkdir()
    (old / "manifest.json").write_text("old")
    final = tmp_path / "out.mirror"
    with pytest.raises(ExportError, match="exists already"), atomic_folder(final, overwrite=False):
        pass
    assert (final / "manifest.json").read_text() == "old"


def test_a_place_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_place(tmp_path / "new" / "out.mirror", overwrite=False)
    assert list(tmp_path.iterdir()) == [], "nothing is made"
    (tmp_path / "file").write_text("x")
    (tmp_path / "there.mirror").mkdir()
    (tmp_path / "there.mirror" / "manifest.json").write_text("{}")
    check_place(tmp_path / "there.mirror", overwrite=True)
    for place, words in {
        "there.mirror": "exists already; choose another name",
        "file": "exists and is not a bundle",
        "file/out.mirror": r"cannot write into .*file is a file\): choose another folder",
    }.items():
        with pytest.raises(ExportError, match=words):
            check_place(tmp_path / place, overwrite=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ExportError, match=r"cannot write into .* \(Permission denied\)"):
        check_place(tmp_path / "out.mirror", overwrite=False)
