"""The pace of a machine that is not here, from a card, a report of the NPU's compiler and the sizes of a pair."""

import json
from pathlib import Path

import pytest

from mirrorsd.cli.input.estimated_pace import estimated_pace, with_host_ms
from mirrorsd.device_maps import load_device_map
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.machine.npu.compiler import ShapeReport
from mirrorsd.machine.npu.report import report_document

CARD = load_device_map("lunar-lake")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    times = {
        "4x1x256": 200.0,
        "4x4x256": 300.0,
        "8x8x256": 400.0,
        "64x1x256": 640.0,
        "8x8x512": 500.0,
        "64x1x512": 700.0,
    }
    reports = [
        ShapeReport(shape=shape, platform="4000", weight_bytes=1, estimated_us=us) for shape, us in times.items()
    ]
    reports.append(ShapeReport(shape="16x16x256", platform="4000", weight_bytes=1, error="too large"))
    reports.append(ShapeReport(shape="exit3-8", platform="4000", weight_bytes=1, estimated_us=9.0))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report_document("4000", reports, "x")), encoding="utf-8")
    return path


def test_rounds_are_those_of_the_slots_that_the_texts_need(report: Path, tmp_path: Path) -> None:
    assert CARD.estimate is not None
    host = CARD.estimate.host_ms
    short = estimated_pace(CARD, tmp_path, 100, report, "1.0,0.1,0")
    assert short.draft_ms == ((4.0, pytest.approx(0.3 + host)), (8.0, pytest.approx(0.4 + host)))
    assert short.prefill_ms_per_row == pytest.approx(0.01)
    long = estimated_pace(CARD, tmp_path, 300, report, "1.0,0.1,0")
    assert long.draft_ms == ((8.0, pytest.approx(0.5 + host)),)
    assert estimated_pace(CARD, tmp_path, 9999, report, "1.0,0.1,0") == long


def test_sizes_are_given_or_the_bundles(report: Path, tmp_path: Path) -> None:
    one, two = (estimated_pace(CARD, tmp_path, 9, report, given) for given in ("1.0,0.25,0", "2.0,0.5,0"))
    assert two.target_ms[0][1] == pytest.approx(2 * one.target_ms[0][1], rel=0.01)
    assert two.exit_ms == pytest.approx(2 * one.exit_ms, rel=0.01)
    with pytest.raises(ConfigError, match=r"give --target-size, such as 4.5,0.3,36"):
        estimated_pace(CARD, tmp_path / "texts.npz", 9, report, None)
    with pytest.raises(ConfigError, match=r"--target-size is 'much'"):
        estimated_pace(CARD, tmp_path, 9, report, "much")


def test_what_the_processor_takes_may_be_supposed_otherwise(report: Path, tmp_path: Path) -> None:
    pace = estimated_pace(with_host_ms(CARD, 2.0), tmp_path, 9, report, "1.0,0.1,0")
    assert pace.draft_ms[-1] == (8.0, pytest.approx(2.4))


def test_a_card_without_suppositions_and_a_report_that_is_missing_or_anothers(report: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"igpu-npu has no \[pace\] and no \[estimate\]"):
        estimated_pace(load_device_map("igpu-npu"), tmp_path, 9, report, "1.0,0.1,0")
    with pytest.raises(ConfigError, match=r"run mirrorsd compile BUNDLE --npu 4000 first"):
        estimated_pace(CARD, tmp_path, 9, None, "1.0,0.1,0")
    with pytest.raises(ConfigError, match=r"A recording holds no report .*--npu-report, as .* --npu 4000 writes it"):
        estimated_pace(CARD, tmp_path / "texts.npz", 9, None, "1.0,0.1,0")
    with pytest.raises(ConfigError, match=r"is of NPU 4000; the card's is 5010"):
        estimated_pace(load_device_map("panther-lake"), tmp_path, 9, report, "1.0,0.1,0")
