"""Cards of machines that are not here: what they suppose, and the pace that follows."""

from dataclasses import replace
from pathlib import Path

import pytest

from mirrorsd.cli.input.estimated_pace import rounds_in
from mirrorsd.device_maps import Estimate, load_device_map
from mirrorsd.graphs.errors import ConfigError

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "other"
MACHINES = {"lunar-lake": "4000", "panther-lake": "5010", "arrow-lake": "3720"}


@pytest.mark.parametrize("name", MACHINES)
def test_cards_of_real_machines_suppose_a_pace_and_slow_nothing(name: str) -> None:
    card = load_device_map(name)
    assert card.pace is None
    assert card.estimate is not None
    assert card.estimate.npu == MACHINES[name]
    assert (card.target.device, card.draft.device) == ("GPU", "NPU")


@pytest.mark.parametrize("name", MACHINES)
def test_a_paced_form_has_the_times_that_simulating_its_card_has(name: str) -> None:
    """For the 8 B pair whose draft was compiled from random weights of the right shapes."""
    paced, machine = load_device_map(f"paced-{name}"), load_device_map(name)
    assert machine.estimate is not None
    report = RESULTS / f"npu_drafts_thin_head_8b_{machine.estimate.npu}.json"
    sizes = (4.5, 0.3, 36)
    rounds = rounds_in(report, machine.estimate.npu, 256)
    assert paced.pace == replace(machine.estimate, host_ms=1.3).pace(*sizes, rounds)
    assert paced.speculation == machine.speculation
    assert "not measured" in paced.description
    assert (paced.target.is_on_cpu, paced.draft.is_on_cpu, paced.fallbacks) == (True, True, ())


def test_faster_memory_makes_faster_passes_and_the_same_rounds() -> None:
    slow, fast = (
        Estimate(npu="4000", gpu_gb_per_s=bandwidth, layer_ms=0.0).pace(1.0, 0.1, 30, {8: 400.0, 128: 1000.0})
        for bandwidth in (100.0, 200.0)
    )
    assert slow.target_ms[0][1] == pytest.approx(2 * fast.target_ms[0][1], rel=0.01)
    assert slow.exit_ms == pytest.approx(2 * fast.exit_ms, rel=0.01)
    assert slow.draft_ms == fast.draft_ms == ((8.0, 0.8),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('npu = "4001"', "estimate.npu is '4001'; allowed: 3720, 4000, 5010"),
        ('npu = "4000"\ngpu_gb_per_s = 0', "a bandwidth is above 0"),
        ('npu = "4000"\ngpu_gb_per_s = 100\ngpu_share = 1.5', "up to 1"),
        ('npu = "4000"\ngpu_gb_per_s = 100\nhost_ms = -1', r"estimate.host_ms is -1.0; allowed: 0 or more"),
        ('npu = "4000"', "'estimate.gpu_gb_per_s' is missing"),
    ],
)
def test_faulty_suppositions_are_refused(tmp_path: Path, line: str, message: str) -> None:
    card = tmp_path / "mine.toml"
    more = "" if "gpu_gb" in line or "4001" not in line else "\ngpu_gb_per_s = 100"
    card.write_text(f"[estimate]\n{line}{more}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_device_map(str(card))


def test_a_report_of_one_number_of_rows_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="a single number of rows"):
        Estimate(npu="4000", gpu_gb_per_s=100.0).pace(1.0, 0.1, 30, {8: 400.0})
