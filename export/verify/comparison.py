"""How far what a stage says is from what PyTorch says, in terms that fit every model.

Owns: the running comparison of one stage. Does not own: how far is too far (`tolerances.py`), running anything.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mirrorsd.graphs.manifest import VerifyResult

Array = npt.NDArray[Any]

_LEAST_SPREAD = 1e-6
_LEAST_SHARE = 1e-12


@dataclass(slots=True)
class Comparison:
    """Largest error, equal best tokens and divergence of one stage over all rows so far; what is no number is inf."""

    stage: str
    error: float = 0.0
    relative_error: float = 0.0
    total_divergence: float = 0.0
    num_equal: int = 0
    num_rows: int = 0

    def add(self, found: Array, expected: Array, spread: Array) -> None:
        """Compare numbers `[R, n]`; `spread [R]` is the standard deviation of what the reference says at a row."""
        errors = np.abs(found - expected).max(axis=-1)
        self.error = max(self.error, _largest(errors))
        self.relative_error = max(self.relative_error, _largest(errors / np.maximum(spread, _LEAST_SPREAD)))

    def add_choices(self, is_equal: Array, divergences: Array) -> None:
        """Count rows where the best token is the same, and the rows' divergences in nats, each `[R]`."""
        self.num_equal += int(is_equal.sum())
        self.num_rows += is_equal.size
        self.total_divergence += float(np.where(np.isfinite(divergences), divergences, np.inf).sum())

    def result(self, text: str) -> VerifyResult:
        """The comparison as the manifest writes it."""
        return VerifyResult(
            stage=self.stage,
            max_abs_error=self.error,
            top1_agreement=self.num_equal / self.num_rows,
            positions=self.num_rows,
            text=text,
            max_relative_error=self.relative_error,
            mean_divergence=self.total_divergence / self.num_rows,
        )


def _largest(errors: Array) -> float:
    """The largest; infinite where one is no number, as no comparison with a bound would notice that."""
    return float(np.where(np.isfinite(errors), errors, np.inf).max(initial=0.0))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities of `logits [..., V]`, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def divergences(found: Array, expected: Array) -> Array:
    """Kullback-Leibler divergence of `found` from `expected` in nats, `[...]`, for log-probabilities `[..., n]`.

    They may be those of some tokens only: all others then count as one.

    >>> halves, quarters = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])
    >>> divergences(quarters, halves).round(3).tolist()  # 0.5 ln 2 + 0.25 ln 0.5 + 0.25 ln 1
    [0.173]
    """
    ours, true = (_with_rest(logprobs.astype(np.float64)) for logprobs in (found, expected))
    total: Array = (np.exp(true) * (true - ours)).sum(axis=-1)
    return total


def _with_rest(logprobs: Array) -> Array:
    rest = np.log(np.maximum(1.0 - np.exp(logprobs).sum(axis=-1, keepdims=True), _LEAST_SHARE))
    return np.concatenate((logprobs, rest), axis=-1)
