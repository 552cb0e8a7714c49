"""What the target's precision costs: perplexity and best tokens of the exported stages against the fp32 model.

Owns: the calibration text and its windows, the reference's and the stages' numbers on them. Does not own: the bounds
beyond which a user is warned (`tolerances.py`), running the stages (`verify_target.py`).
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from mirrorsd.graphs.errors import ExportError
from mirrorsd.graphs.manifest import QualityEntry

from .checkpoint import Checkpoint
from .verify_target import Pass, TargetRun
from .weightless import WeightlessModel

Array = npt.NDArray[Any]

CALIBRATION_FILE = "calibration.txt"
WINDOW_ROWS = 256
NUM_WINDOWS = 4
_BUILT_IN = Path(__file__).with_name(CALIBRATION_FILE)


class CalibrationText(NamedTuple):
    """Windows of equal length: `measured` ones for the report, `fitted` ones for rounding that looks at inputs.

    `name` says in the manifest what the text was: "given", "calibration.txt" (the checkpoint's own) or "built-in".
    """

    measured: Array
    fitted: Array
    name: str


class Choices(NamedTuple):
    """What a model makes of windows `[W, L]`: best next ids `[W, L]`, losses of the true next ids `[W, L - 1]`."""

    windows: Array
    best: Array
    losses: Array


def calibration_text(target: Checkpoint, given: str | None, context: int) -> CalibrationText:
    """Cut the calibration text into windows of up to 256 ids: the last four are measured, those before them fitted.

    A short text gives fewer windows, and the same ones for both; a very short one gives one window as long as it is.

    Raises:
        ExportError: the text has fewer than two tokens.
    """
    text, name = _find_text(target, given)
    tokenizer = Tokenizer.from_file(str(target.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < 2:
        raise ExportError(f"the calibration text ({name}) has {len(ids)} tokens; give one of a thousand or more")
    rows = min(WINDOW_ROWS, context, len(ids))
    windows = np.array(ids[: len(ids) // rows * rows], np.int64).reshape(-1, rows)
    fitted = windows[:-NUM_WINDOWS] if len(windows) > NUM_WINDOWS else windows
    return CalibrationText(windows[-NUM_WINDOWS:], fitted[:NUM_WINDOWS], name)


def _find_text(target: Checkpoint, given: str | None) -> tuple[str, str]:
    if given is not None:
        return given, "given"
    own = target.folder / CALIBRATION_FILE
    if own.is_file():
        return own.read_text(encoding="utf-8"), CALIBRATION_FILE
    return _BUILT_IN.read_text(encoding="utf-8"), "built-in"


def reference_choices(model: WeightlessModel, windows: Array) -> Choices:
    """Run the float32 `model` over `windows` with Hugging Face's eager attention, one module's weights at a time."""
    network = model.network
    network.set_attn_implementation("eager")
    with torch.no_grad(), model.on_demand():
        logits = network(torch.from_numpy(windows), use_cache=False).logits.numpy()
    rows = [_choices_of(window, found) for window, found in zip(windows, logits, strict=True)]
    return _stack(windows, rows)


def measure_quality(run: TargetRun, reference: Choices, name: str) -> QualityEntry:
    """Run the exported stages over the reference's windows and compare."""
    steps = [Pass(0, tuple(window.tolist()), len(window)) for window in reference.windows]
    rows = [
        _choices_of(window, logits.astype(np.float32))
        for window, (_, logits) in zip(reference.windows, run.outputs(steps), strict=True)
    ]
    found = _stack(reference.windows, rows)
    return QualityEntry(
        text=name,
        positions=int(found.best.size),
        perplexity=_perplexity(found.losses),
        reference_perplexity=_perplexity(reference.losses),
        top1_agreement=float((found.best == reference.best).mean()),
    )


def _perplexity(losses: Array) -> float:
    """Exponential of the mean loss in nats, kept finite: random weights can lose more than a float's exponent holds.

    >>> round(_perplexity(np.array([0.0, 2.0])), 3), _perplexity(np.array([2000.0])) < float("inf")
    (2.718, True)
    """
    return float(np.exp(min(float(losses.mean()), 700.0)))


def _choices_of(window: Array, logits: Array) -> tuple[Array, Array]:
    """Best ids `[L]` and losses `[L - 1]` in nats of one window with logits `[L, V]`."""
    best = logits.argmax(-1)
    before = logits[:-1]
    true = np.take_along_axis(before, window[1:, None], -1)[:, 0]
    highest = before.max(-1)
    total = highest + np.log(np.exp(before - highest[:, None]).sum(-1))
    return best, total - true


def _stack(windows: Array, rows: list[tuple[Array, Array]]) -> Choices:
    return Choices(windows, np.stack([best for best, _ in rows]), np.stack([losses for _, losses in rows]))
