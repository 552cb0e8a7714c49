"""The report on quality: windows of the text, losses, and the words where a precision costs too much."""

import doctest
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.verify import quality
from mirrorsd.export.verify.quality import Choices, calibration_text, measure_quality
from mirrorsd.graphs.errors import ExportError, ParityError
from mirrorsd.graphs.manifest import QualityEntry, SourceModel
from mirrorsd.graphs.quality_bounds import quality_warnings

ROOT = Path(__file__).resolve().parents[4]


def checkpoint(folder: Path) -> Checkpoint:
    source = SourceModel(name="target", family="llama", licence="unknown", num_parameters=1)
    return Checkpoint(folder=folder, role="target", config={}, generation={}, source=source, tensors={})


STORYTELLER = ROOT / "samples" / "storyteller" / "target"


def test_the_last_windows_are_measured_and_others_fitted(tmp_path: Path) -> None:
    own = calibration_text(checkpoint(STORYTELLER), None, context=1024)
    assert own.name == "calibration.txt"
    assert (own.measured.shape, own.fitted.shape) == ((4, 256), (11, 256))
    assert not (own.measured[:, None] == own.fitted).all(axis=-1).any()
    story = "The fox went into the wood, and the wood was dark. "
    long = calibration_text(checkpoint(STORYTELLER), story * 900, context=1024)
    assert (long.measured.shape, long.fitted.shape) == ((4, 256), (32, 256))
    (tmp_path / "tokenizer.json").write_bytes((STORYTELLER / "tokenizer.json").read_bytes())
    built_in = calibration_text(checkpoint(tmp_path), None, context=128)
    assert (built_in.name, built_in.measured.shape) == ("built-in", (4, 128))
    short = calibration_text(checkpoint(tmp_path), "Once upon a time there was a fox.", context=1024)
    assert short.name == "given"
    assert np.array_equal(short.measured, short.fitted)
    with pytest.raises(ExportError, match=r"the calibration text \(given\) has 0 tokens; give one of a thousand"):
        calibration_text(checkpoint(tmp_path), "", context=1024)


def test_text_of_many_kinds_fills_up_the_text_in_the_package(tmp_path: Path) -> None:
    """That leaves two windows: far fewer inputs than a wide product has channels."""
    (tmp_path / "tokenizer.json").write_bytes((STORYTELLER / "tokenizer.json").read_bytes())
    target = checkpoint(tmp_path)
    story = "The fox went into the wood, and the wood was dark. " * 900
    long, built_in = (calibration_text(target, given, context=1024) for given in (story, None))
    ranges = quality.range_windows(target, story, context=1024)

    assert len(built_in.fitted) == 32
    assert len(np.unique(built_in.fitted, axis=0)) == 32
    assert np.array_equal(ranges[:6], long.fitted[-6:])
    assert (built_in.fitted[:, None] == ranges[6:]).all(axis=-1).any(axis=0).all()
    assert not (long.fitted[:, None] == ranges[6:]).all(axis=-1).any()


class ScriptedRun:
    """Stages whose logits are given: `[L, V]`, the same for every window."""

    def __init__(self, logits: Any) -> None:
        self.logits = np.asarray(logits, np.float16)
        self.plan = SimpleNamespace(shape=SimpleNamespace(dtype="float16"))

    def outputs(self, steps: Any) -> Any:
        return (({}, self.logits) for _ in steps)


def test_perplexity_and_agreement_by_hand() -> None:
    """Token 1 has probability 3/4 at row 0 and token 2 1/2 at row 1, so the perplexity is sqrt(4/3 * 2)."""
    windows = np.array([[0, 1, 2]])
    likely = np.array([[[1], [1], [0]]])
    reference = Choices(windows, np.array([[1, 1, 0]]), np.array([[0.0, np.log(4.0)]]), likely, np.log([[[0.75]] * 3]))
    logits = np.log([[1 / 8, 3 / 4, 1 / 8], [1 / 4, 1 / 4, 1 / 2], [1 / 2, 1 / 4, 1 / 4]])
    found = measure_quality(ScriptedRun(logits), reference, "given")  # type: ignore[arg-type]
    assert found.positions == 3
    assert found.perplexity == pytest.approx(np.sqrt(8 / 3), rel=1e-3)
    assert found.reference_perplexity == pytest.approx(2.0)
    assert found.top1_agreement == pytest.approx(2 / 3)
    by_hand = [0.0, 0.75 * np.log(3) + 0.25 * np.log(1 / 3), 0.75 * np.log(1.5) + 0.25 * np.log(0.5)]
    assert found.mean_divergence == pytest.approx(np.mean(by_hand), rel=1e-2)


def test_logits_that_are_no_numbers_are_refused_with_a_precision_that_helps() -> None:
    windows = np.array([[0, 1, 2]])
    reference = Choices(windows, windows, np.zeros((1, 2)), windows[..., None], np.zeros((1, 3, 1)))
    run = ScriptedRun([[0.0, 1.0, 2.0], [0.0, np.inf, 0.0], [0.0, 1.0, 2.0]])
    with np.errstate(invalid="ignore"), pytest.raises(ParityError, match=r"in float16 .* choose --precision fp32"):
        measure_quality(run, reference, "given")  # type: ignore[arg-type]


def test_warnings_begin_past_the_bounds() -> None:
    def entry(perplexity: float, agreement: float) -> QualityEntry:
        return QualityEntry(
            text="t", positions=9, perplexity=perplexity, reference_perplexity=10.0, top1_agreement=agreement
        )

    diverging = replace(entry(10.0, 1.0), mean_divergence=0.2)
    assert "diverge from the fp32 model's by 0.20 nats, above 0.1" in quality_warnings(diverging)[0]

    assert quality_warnings(entry(10.5, 0.9)) == ()
    assert quality_warnings(None) == ()
    both = quality_warnings(entry(float("nan"), 0.89))
    assert ["perplexity rises" in both[0], "at 89.0% of 9 positions, below 90%" in both[1]] == [True, True]


def test_worked_example() -> None:
    assert doctest.testmod(quality).failed == 0
