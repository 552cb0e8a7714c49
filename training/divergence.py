"""How far a student's predictions are from the target's, row by row, and the gradient of it.

Three measures of the same two distributions. KL is the usual one. Total variation is the share of tokens that exact
sampling rejects, so its gradient asks for acceptance itself (LK losses, arXiv 2602.23881: `-log` of what is accepted).

Rows of a whole vocabulary are what a training of a small draft spends its time on, not the draft's layers. So they are
never kept: heads, distances and gradients are computed for a few rows at a time, while those are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mirrorsd.families.decoder_parts import LogitScale

__all__ = ["LOSSES", "Distance", "HeadRows", "Wanted", "distance"]

_CHUNK_NUMBERS = 1 << 22
"""Logits at a time, 16 MiB in single precision: fewer read the heads too often, more gain nothing."""


class HeadRows(NamedTuple):
    """Rows behind the final norm `[..., H]`, the head `[V, H]` that reads them, and what happens to its logits."""

    rows: Tensor
    head: Tensor
    scale: LogitScale = LogitScale()


class Wanted(NamedTuple):
    """What a training asks for: `loss` (one of `LOSSES`), and a share of cross-entropy with the target's best token.

    That is what greedy decoding asks for.
    """

    loss: str = "kl"
    argmax_weight: float = 0.0


class Distance(NamedTuple):
    """The weighted sum over all rows, which carries the gradients, and what each row `[...]` says.

    `soft` is the loss (KL and LK in nats, TV as a share), `hard` the cross-entropy (nats), `is_best` whether both have
    the same best token (0 or 1).
    """

    total: Tensor
    soft: Tensor
    hard: Tensor
    is_best: Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]
def distance(target: HeadRows, student: HeadRows, weights: Tensor, wanted: Wanted) -> Distance:
    """Compare the student's rows with the target's, at temperature 1.

    Ids that only one of the heads has (padding at the end of a vocabulary) are left out. Gradients go to the student's
    rows and head.

    Args:
        target: `[..., H]` with its head; constant.
        student: As many rows, of another width perhaps.
        weights: How much each row counts, `[...]`; constant.
        wanted: The distance, and what the best token counts.
    """
    size = min(len(target.head), len(student.head))
    rows = [given.rows.reshape(-1, given.rows.shape[-1]) for given in (student, target)]
    kinds = (student.scale, target.scale), wanted
    with torch.autocast(rows[0].device.type, enabled=False):
        total, *found = cast(Any, _Weighted).apply(
            rows[0], student.head[:size], rows[1].detach(), target.head[:size].detach(), weights.reshape(-1), kinds
        )
    return Distance(total, *(values.reshape(weights.shape) for values in found))


class _Weighted(torch.autograd.Function):
    """The weighted sum of all rows' distances; its gradients are made on the way, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: Tensor, by_target: Tensor, its_head: Tensor, weights: Tensor, kinds: Any
    ) -> Any:
        scales, wanted = kinds
        (rows, head), dtypes = _narrow(rows, head), (rows.dtype, head.dtype)
        by_target, its_head = _narrow(by_target, its_head)
        slopes = rows.new_empty(len(rows), len(head)) if any(ctx.needs_input_grad[:2]) else None
        found = []
        for first in range(0, len(rows), step := max(1, _CHUNK_NUMBERS // len(head))):
            part = slice(first, first + step)
            logits = scales[0]((rows[part] @ head.T).float())
            pair = _Pair.of(scales[1]((by_target[part] @ its_head.T).float()), logits)
            found.append(pair.distances(wanted))
            if slopes is not None:
                slopes[part] = _through(scales[0], logits, pair.slopes(wanted).mul_(weights[part, None]))
        soft, hard, is_best = (torch.cat(values) for values in zip(*found, strict=True))
        if slopes is not None:
            ctx.save_for_backward((slopes @ head).to(dtypes[0]), (slopes.T @ rows).to(dtypes[1]))
        ctx.mark_non_differentiable(soft, hard, is_best)
        mixed = (1 - wanted.argmax_weight) * soft + wanted.argmax_weight * hard
        return (mixed * weights).sum(), soft, hard, is_best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> Any:
        to_rows, to_head = ctx.saved_tensors
        return gradient * to_rows, gradient * to_head, None, None, None, None


def _through(scale: LogitScale, scaled: Tensor, slopes: Tensor) -> Tensor:
    """Slopes of the head's own logits from those of the scaled ones."""
    if scale.cap is not None:
        slopes = slopes * (1 - (scaled / scale.cap).square())
    return slopes if scale.divisor == 1.0 else slopes / scale.divisor


def _narrow(rows: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the narrower of their types: that is what autocast multiplies in."""
    dtype = torch.bfloat16 if torch.bfloat16 in (rows.dtype, head.dtype) else rows.dtype
    return rows.to(dtype), head.to(dtype)


class _Pair(NamedTuple):
    """Log-probabilities and probabilities of a chunk, `[n, V]` in single precision, and the target's best `[n, 1]`."""

    target_log: Tensor
    student_log: Tensor
    target: Tensor
    student: Tensor
    best: Tensor

    @classmethod
    def of(cls, by_target: Tensor, by_student: Tensor) -> _Pair:
        """From logits `[n, V]`."""
        target_log, student_log = torch.log_softmax(by_target, -1), torch.log_softmax(by_student, -1)
        return cls(target_log, student_log, target_log.exp(), student_log.exp(), by_target.argmax(-1, keepdim=True))

    def distances(self, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
        """`soft`, `hard` and `is_best` of each row."""
        hard = -self.student_log.gather(-1, self.best)[:, 0]
        is_best = (-hard >= self.student_log.amax(-1)).float()
        return LOSSES[wanted.loss].value(self), hard, is_best

    def slopes(self, wanted: Wanted) -> Tensor:
        """The gradient of a row's loss to the student's logits, `[n, V]`."""
        slopes = LOSSES[wanted.loss].slope(self).mul_(1 - wanted.argmax_weight)
        slopes.add_(self.student, alpha=wanted.argmax_weight)
        own = torch.full_like(self.best, wanted.argmax_weight, dtype=slopes.dtype)
        return slopes.scatter_add_(-1, self.best, -own)

    def shared(self) -> Tensor:
        """What exact sampling accepts, `[n]`: the mass that both distributions share."""
        return torch.minimum(self.target, self.student).sum(-1)

    def lost(self) -> Tensor:
        """The gradient of minus the shared mass to the student's logits, `[n, V]`."""
        below = self.student * (self.student < self.target)
        return self.student * below.sum(-1, keepdim=True) - below


class Kind(NamedTuple):
    """A distance of each row `[n]`, and its gradient to the student's logits `[n, V]`."""

    value: Callable[[_Pair], Tensor]
    slope: Callable[[_Pair], Tensor]


_LEAST_SHARED = 1e-6

LOSSES: Mapping[str, Kind] = MappingProxyType(
    {
        "kl": Kind(
            lambda pair: (pair.target * (pair.target_log - pair.student_log)).sum(-1),
            lambda pair: pair.student - pair.target,
        ),
        "tv": Kind(lambda pair: 1 - pair.shared(), lambda pair: pair.lost()),
        "lk": Kind(
            lambda pair: -pair.shared().clamp(min=_LEAST_SHARED).log(),
            lambda pair: pair.lost() / pair.shared().clamp(min=_LEAST_SHARED)[:, None],
        ),
    }
)
