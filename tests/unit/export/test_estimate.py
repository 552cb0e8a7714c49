"""What an export takes, held against the exports that were measured."""

import json
from pathlib import Path

import pytest

from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.estimate import (
    ExportEstimate,
    _second_form,
    estimate_export,
    estimate_sizes,
    running_bytes,
    shortages,
)
from mirrorsd.export.options import ExportOptions

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results" / "epyc"


@pytest.mark.parametrize("size", ["1b", "8b"])
def test_the_estimate_is_near_what_was_measured(size: str) -> None:
    found = json.loads((RESULTS / f"export_memory_{size}_int4.json").read_text(encoding="utf-8"))
    estimate = estimate_sizes(found["num_parameters"], 0, ExportOptions(precision="int4"))
    assert estimate.bundle_bytes == pytest.approx(found["target_bytes"], rel=0.05)
    assert estimate.memory_bytes == pytest.approx(found["export"]["vm_hwm_bytes"], rel=0.15)
    assert estimate.seconds[0] <= found["export"]["seconds"] <= 1.05 * estimate.seconds[1]


def test_a_large_draft_is_mapped_and_computed_in_fp32() -> None:
    """Of Qwen2.5-Coder-0.5B, 630 million numbers, both took 3.1 GB from a file in fp16, and 4.6 GB from one in fp32."""
    by_precision = {
        precision: estimate_sizes(1, 630_167_424, ExportOptions(draft_precision=precision)).memory_bytes
        for precision in ("fp32", "fp16", "int8")
    }
    assert by_precision["int8"] == by_precision["fp16"] == pytest.approx(4.6e9, rel=0.02)
    assert by_precision["fp32"] == pytest.approx(5.9e9, rel=0.02)


@pytest.mark.parametrize(
    ("parameters", "options", "gigabytes", "seconds"),
    [
        ((134_515_008, 10_620_864), ExportOptions(precision="int8", draft_precision="int8"), 1.87 - 0.1, 140),
        (
            (1_777_088_000, 630_167_424),
            ExportOptions(precision="int8", draft_precision="int4-blocks"),
            7.31 - 1.12,
            587,
        ),
    ],
)
def test_products_of_integers_take_what_was_measured(
    parameters: tuple[int, int], options: ExportOptions, gigabytes: float, seconds: float
) -> None:
    """SmolLM2-135M and Qwen2.5-Coder-1.5B with their drafts, on two cores, but for the mapped file of the target."""
    estimate = estimate_sizes(*parameters, options, has_integers=True)
    assert gigabytes <= estimate.memory_bytes / 1e9 <= 1.25 * gigabytes
    assert estimate.seconds[0] <= seconds <= estimate.seconds[1]


@pytest.mark.parametrize(
    ("parameters", "peak"), [((134_515_008, 10_620_864), 745e6), ((1_777_088_000, 630_167_424), 3728e6)]
)
def test_what_answers_take_is_near_the_peaks_of_chats(parameters: tuple[int, int], peak: float) -> None:
    """SmolLM2-135M and Qwen2.5-Coder-1.5B with their drafts, all in int8; the latter of a file whose head is apart."""
    assert running_bytes(*parameters, "int8", "int8") == pytest.approx(peak, rel=0.1)


def test_it_reads_as_a_sentence() -> None:
    words = str(ExportEstimate(bundle_bytes=8_700_000_000, memory_bytes=11_500_000_000, seconds=(880.0, 2000.0)))
    assert words == "about 8.7 GB of disk, 11.5 GB of memory, 15 to 33 minutes"
    assert str(ExportEstimate(bundle_bytes=0, memory_bytes=0, seconds=(20.0, 40.0))).endswith(", 1 minute")


def test_what_is_on_the_disk_meanwhile_is_said_and_asked_for(tmp_path: Path) -> None:
    estimate = ExportEstimate(bundle_bytes=25_000_000, memory_bytes=1, seconds=(1.0, 1.0), work_bytes=1 << 60)
    assert str(estimate).startswith("about 25 MB of disk (up to 1152921504.6 GB while it works), ")
    assert shortages(estimate, tmp_path / "out.mirror", 1 << 30)
    assert shortages(estimate, Path("/"), 1 << 30)


def test_what_there_is_too_little_of_is_said(tmp_path: Path) -> None:
    huge = ExportEstimate(bundle_bytes=1 << 60, memory_bytes=1 << 40, seconds=(1.0, 2.0))
    disk, memory = shortages(huge, tmp_path / "new" / "out.mirror", 1 << 30)
    assert f"are free in {tmp_path}" in disk
    assert "1.1 GB of memory" in memory
    assert shortages(ExportEstimate(bundle_bytes=1, memory_bytes=1, seconds=(1, 1)), tmp_path / "o", 1 << 30) == []


def test_a_tied_embedding_may_keep_its_blocks_beside_a_head_by_row() -> None:
    config, options = (
        {"tie_word_embeddings": True, "vocab_size": 49152, "hidden_size": 576},
        ExportOptions(precision="int8"),
    )
    assert _second_form(config, options) == pytest.approx(30e6, rel=0.01)
    assert _second_form(config | {"tie_word_embeddings": False}, options) == 0
    assert _second_form(config, ExportOptions(precision="int8", products="blocks")) == 0


@pytest.mark.parametrize(("precision", "num_bytes"), [("fp32", 8), ("fp16", 6), ("int8", 6)])
def test_a_draft_lies_on_the_disk_twice_while_it_is_written(
    precision: str, num_bytes: int, tiny_pair: tuple[Path, Path]
) -> None:
    """As ONNX in fp32 and as an IR."""
    options = ExportOptions(precision="int4", draft_precision=precision)
    num_parameters = open_checkpoint(tiny_pair[1], "draft").source.num_parameters
    assert estimate_export(*tiny_pair, options).work_bytes == num_bytes * num_parameters


def test_what_a_compressed_draft_is_made_from_stays_beside_it(tiny_pair: tuple[Path, Path]) -> None:
    target, draft = tiny_pair
    options = ExportOptions(precision="fp32", draft_precision="int8")
    found = estimate_export(target, draft, options)
    num_parameters = open_checkpoint(draft, "draft").source.num_parameters
    assert found.work_bytes == found.bundle_bytes + 2 * num_parameters
