"""What the target's precision costs: perplexity and best tokens of the exported stages against the fp32 model.

Owns: the calibration text and its windows, the reference's and the stages' numbers on them. Does not own: the bounds
beyond which a user is warned (`graphs/quality_bounds.py`), running the stages (`target.py`).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from mirrorsd.export.checkpoints.checkpoint import Checkpoint
from mirrorsd.export.checkpoints.weightless import WeightlessModel
from mirrorsd.export.verify.comparison import divergences, log_softmax
from mirrorsd.export.verify.target import TargetRun
from mirrorsd.export.verify.text_passes import Pass
from mirrorsd.graphs import names
from mirrorsd.graphs.documents import DocumentError, read_text
from mirrorsd.graphs.errors import ExportError, ParityError
from mirrorsd.graphs.manifest import QualityEntry
from mirrorsd.graphs.shipped_files import shipped

Array = npt.NDArray[Any]

WINDOW_ROWS = 256
NUM_WINDOWS = 4
FITTED_WINDOWS = 32
"""GPTQ of nine of SmolLM2-135M's products on 3 windows leaves twice the error that it leaves on 32."""
RANGE_WINDOWS = 12
"""Some 3,000 tokens: ranges that 768 of one kind had shown cost SmolLM2-135M four times the divergence on code."""
LIKELIEST = 64
_BUILT_IN, _BUILT_IN_NAME = Path(__file__).with_name(names.CALIBRATION_FILE), "built-in"
_RANGES = Path(__file__).with_name("ranges.txt")
"""Chats, code, data, tables and several languages, a little of each: what an input's range must hold."""


class CalibrationText(NamedTuple):
    """Windows of equal length: `measured` ones for the report, `fitted` ones for rounding that looks at inputs.

    `name` says in the manifest what the text was: "given", "calibration.txt" (the checkpoint's own) or "built-in".
    """

    measured: Array
    fitted: Array
    name: str


class Choices(NamedTuple):
    """What a model makes of windows `[W, L]`.

    Attributes:
        windows: The ids.
        best: Best next ids `[W, L]`.
        losses: Of the true next ids, in nats, `[W, L - 1]`.
        likely_ids: `[W, L, k]` next ids that the reference finds likeliest.
        likely_logprobs: Their log-probabilities.
    """

    windows: Array
    best: Array
    losses: Array
    likely_ids: Array
    likely_logprobs: Array


def calibration_text(target: Checkpoint, given: str | None, context: int) -> CalibrationText:
    """Cut the calibration text into windows of up to 256 ids: the last four are measured, up to 32 before them fitted.

    The text in the package has fewer of these, and text of many kinds fills them up; a text that is given says what the
    model is for, and stays alone. One of four windows or less is measured and fitted; a very short one gives one window
    as long as it is.

    Raises:
        ExportError: the text has fewer than two tokens.
    """
    windows, fitted, name = _own_windows(target, given, context)
    fitted = fitted[-FITTED_WINDOWS:]
    if name == _BUILT_IN_NAME:
        fitted = _filled_up(target, fitted, FITTED_WINDOWS)
    return CalibrationText(windows[-NUM_WINDOWS:], fitted, name)


def range_windows(target: Checkpoint, given: str | None, context: int) -> Array:
    """Windows `[W, L]` of what is fitted of the calibration text, and of text of many kinds: half of each."""
    _, fitted, _ = _own_windows(target, given, context)
    return _filled_up(target, fitted[-RANGE_WINDOWS // 2 :], RANGE_WINDOWS)


def _own_windows(target: Checkpoint, given: str | None, context: int) -> tuple[Array, Array, str]:
    """All windows of the calibration text, those that are fitted, and its name."""
    text, name = _find_text(target, given)
    ids = _ids_of(target, text)
    if len(ids) < 2:
        raise ExportError(f"the calibration text ({name}) has {len(ids)} tokens; give one of a thousand or more")
    windows = _windows_of(ids, min(WINDOW_ROWS, context, len(ids)))
    return windows, windows[:-NUM_WINDOWS] if len(windows) > NUM_WINDOWS else windows, name


def _filled_up(target: Checkpoint, windows: Array, count: int) -> Array:
    """`windows` `[W, L]` and as many of text of many kinds as make them `count`."""
    more = text_windows(target, shipped(_RANGES).read_text(encoding="utf-8"), windows.shape[1])
    return np.concatenate([windows, more[: count - len(windows)]])


def text_windows(target: Checkpoint, text: str, rows: int = WINDOW_ROWS) -> Array:
    """All whole windows `[W, rows]` of a text."""
    return _windows_of(_ids_of(target, text), rows)


def _windows_of(ids: list[int], rows: int) -> Array:
    return np.array(ids[: len(ids) // rows * rows], np.int64).reshape(-1, rows)


def _ids_of(target: Checkpoint, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(target.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _find_text(target: Checkpoint, given: str | None) -> tuple[str, str]:
    if given is not None:
        return given, "given"
    own = target.folder / names.CALIBRATION_FILE
    if own.is_file():
        try:
            return read_text(own), names.CALIBRATION_FILE
        except DocumentError as error:
            raise ExportError(
                f"{own} {error}. It is taken for the calibration text: repair it, or move it away"
            ) from error
    return shipped(_BUILT_IN).read_text(encoding="utf-8"), _BUILT_IN_NAME


def reference_choices(model: WeightlessModel, windows: Array) -> Choices:
    """Run the float32 `model` over `windows` with Hugging Face's eager attention, one module's weights at a time.

    Raises:
        ExportError: it gives logits that are no numbers.
    """
    logits = model.logits(windows)
    if not np.isfinite(logits).all():
        raise ExportError("the target gives logits that are no numbers in PyTorch too: download its weights again")
    count = min(LIKELIEST, logits.shape[-1])
    likely = torch.topk(torch.from_numpy(logits), count).indices.numpy()
    return _choices(windows, logits, likely)


def mean_divergence(model: WeightlessModel, reference: Choices) -> float:
    """How far `model`'s next ids are from the reference's in nats, over the reference's windows."""
    found = _choices(reference.windows, model.logits(reference.windows), reference.likely_ids)
    return float(divergences(found.likely_logprobs, reference.likely_logprobs).mean())


def measure_quality(run: TargetRun, reference: Choices, name: str) -> QualityEntry:
    """Run the exported stages, in their own precision, over the reference's windows and compare.

    Raises:
        ParityError: the stages give logits that are no numbers.
    """
    steps = [Pass(0, tuple(window.tolist()), len(window)) for window in reference.windows]
    found = _choices(reference.windows, (logits for _, logits in run.outputs(steps)), reference.likely_ids)
    if not np.isfinite(found.losses).all():
        raise ParityError(
            f"the exported target computes logits in {run.plan.shape.dtype} that are no numbers, though its graphs are "
            "right in float32 (float16 ends at 65,504): choose --precision fp32, int8 or int4"
        )
    return QualityEntry(
        text=name,
        positions=int(found.best.size),
        perplexity=_perplexity(found.losses),
        reference_perplexity=_perplexity(reference.losses),
        top1_agreement=float((found.best == reference.best).mean()),
        mean_divergence=float(divergences(found.likely_logprobs, reference.likely_logprobs).mean()),
    )


def _perplexity(losses: Array) -> float:
    """Exponential of the mean loss in nats, kept finite: random weights can lose more than a float's exponent holds.

    >>> round(_perplexity(np.array([0.0, 2.0])), 3), _perplexity(np.array([2000.0])) < float("inf")
    (2.718, True)
    """
    return float(np.exp(min(float(losses.mean()), 700.0)))


def _choices(windows: Array, logits: Iterable[Array], likely_ids: Array) -> Choices:
    """Read what matters off the logits `[L, V]` of each window."""
    best, losses, likely = [], [], []
    for window, rows, ids in zip(windows, logits, likely_ids, strict=True):
        logprobs = [log_softmax(row) for row in rows.astype(np.float32, copy=False)]
        best.append(rows.argmax(-1))
        losses.append([-row[token] for row, token in zip(logprobs[:-1], window[1:], strict=True)])
        likely.append([row[of_row] for row, of_row in zip(logprobs, ids, strict=True)])
    return Choices(windows, np.stack(best), np.array(losses), likely_ids, np.array(likely))
