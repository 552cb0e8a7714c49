"""Joules from RAPL's files and NVIDIA's library, here made up: sums, counters that start again or are not to be had."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mirrorsd.cli.commands.machine.doctor import SelfTest, check_energy, energy_cell, measured, speeds_by_turns
from mirrorsd.machine.doctor import energy
from mirrorsd.machine.doctor.energy import EnergyMeter
from mirrorsd.texts.config import GenerationConfig


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of counters, and no NVIDIA library."""
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path


def write(folder: Path, name: str, microjoules: int, range_uj: int = 1_000_000_000) -> None:
    folder.mkdir(exist_ok=True)
    for file, content in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", range_uj)):
        (folder / file).write_text(f"{content}\n", encoding="ascii")


def test_packages_and_memory_are_added_and_what_is_within_them_is_not(powercap: Path) -> None:
    domains = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:1": "psys"}
    for folder, name in domains.items():
        write(powercap / folder, name, 5_000_000)
    write(powercap / "intel-rapl-mmio:0", "package-0", 5_000_000)
    meter = EnergyMeter()
    assert meter.names == ("package-0", "dram")
    meter.start()
    for folder, name in domains.items():
        write(powercap / folder, name, 7_500_000)
    assert meter.joules() == pytest.approx(5.0)


def test_a_counter_that_starts_again_goes_on(powercap: Path) -> None:
    write(powercap / "intel-rapl:0", "package-0", 9_000_000, range_uj=10_000_000)
    meter = EnergyMeter()
    meter.start()
    write(powercap / "intel-rapl:0", "package-0", 1_500_000, range_uj=10_000_000)
    assert meter.joules() == pytest.approx(2.5)


def test_without_counters_the_energy_is_unknown(powercap: Path) -> None:
    assert EnergyMeter().joules() is None
    (powercap / "intel-rapl:0").mkdir()
    (powercap / "intel-rapl:0" / "name").write_text("package-0", encoding="ascii")
    (powercap / "intel-rapl:0" / "energy_uj").mkdir()  # as unreadable as a file of root's
    assert EnergyMeter().names == ()
    assert check_energy().found == "unknown"


def test_nvidia_s_millijoules_are_counted_too(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter((0, 4000, 10_000))
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(spent),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    meter = EnergyMeter()
    assert meter.names == ("GPU 0",)
    meter.start()
    assert meter.joules() == pytest.approx(6.0)


def test_a_gpu_that_does_not_count_is_left_out(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("not supported")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=RuntimeError, nvmlInit=refuse))
    assert EnergyMeter().names == ()


def test_a_text_s_joules_are_shared_out_among_its_tokens(powercap: Path) -> None:
    write(powercap / "intel-rapl:0", "package-0", 0)

    def generate() -> Any:
        write(powercap / "intel-rapl:0", "package-0", 8_000_000)
        return SimpleNamespace(num_tokens=16)

    _, joules = measured(EnergyMeter(), generate)
    assert joules == 0.5
    speeds: dict[str, Any] = {"plain_tokens_per_second": 1.0, "mirror_tokens_per_second": 1.0, "identical": True}
    counted = SelfTest(
        device_map="cpu", load_seconds=1.0, **speeds, plain_joules_per_token=joules, mirror_joules_per_token=0.25
    )
    assert energy_cell(counted) == "0.50, 0.25"
    assert energy_cell(SelfTest(device_map="cpu", load_seconds=1.0, **speeds)) == "unknown"


def test_a_counter_that_fails_meanwhile_is_unknown(powercap: Path) -> None:
    """Its run is not lost with it."""
    write(powercap / "intel-rapl:0", "package-0", 1_000_000)
    meter = EnergyMeter()
    meter.start()
    assert meter.joules() is not None
    for path in powercap.glob("*/energy_uj"):
        path.unlink()
    assert meter.joules() is None


def test_both_methods_are_timed_alike() -> None:
    """Whoever comes second would find the prompt read; whoever comes first finds cold devices."""
    acts: list[str] = []

    class Session:
        def forget(self) -> None:
            acts.append("forget")

        def generate(self, prompt: str, config: Any, method: str) -> Any:
            acts.append(method)
            return SimpleNamespace(num_tokens=4, stats=SimpleNamespace(tokens_per_second=float(len(acts))))

        def close(self) -> None:
            acts.append("close")

    asked: list[Any] = []
    pipe: Any = SimpleNamespace(session=lambda speculation: asked.append(speculation) or Session())
    found = speeds_by_turns(pipe, EnergyMeter(), GenerationConfig())
    assert acts == [*("forget", "plain", "forget", "mirror") * 3, "close"]
    assert asked == [{"pad_rows_to": 0}], "passes as texts have them"
    assert (found["plain"].tokens_per_second, found["mirror"].tokens_per_second) == (10.0, 12.0)
