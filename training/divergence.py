"""How far a student's predictions are from the target's, row by row, and the gradient of it.

Three measures of the same two distributions. KL is the usual one. Total variation is the share of tokens that exact
sampling rejects, so its gradient asks for acceptance itself (LK losses, arXiv 2602.23881: `-log` of what is accepted).
The cross-entropy with the target's best token is what greedy decoding asks for.

Rows of a whole vocabulary are what a training of a small draft spends its time on, not the draft's layers. So they are
never kept: heads are read for some rows at a time, distances and gradients made for few, while those are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.graphs.errors import ConfigError

__all__ = ["LOSSES", "Distance", "HeadRows", "LossMix", "compare_rows", "distance", "taught", "with_its_gradients"]

LOSSES = ("kl", "tv", "lk")
"""Distances of two distributions."""
_CHUNK_NUMBERS = 1 << 24
"""Logits at a time, 64 MiB in single precision: with a quarter of them the heads are read too often, a tenth slower."""
_CACHED_NUMBERS = 1 << 19
"""Logits at a time of what is done number by number, 2 MiB: of 64 MiB each step would fetch them from memory again,
which took two and a half times as long."""
_LEAST_SHARED = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMix:
    """How much of each distance a loss has: `kl`, total variation `tv` and `lk` to the target's distribution, `hard`.

    `hard` is the cross-entropy with the target's own best token: what greedy decoding asks for.
    """

    kl: float = 0.0
    tv: float = 0.0
    lk: float = 0.0
    hard: float = 0.0

    def __post_init__(self) -> None:
        if min(self.shares) < 0 or not sum(self.shares):
            given = ", ".join(f"{name}={value}" for name, value in zip((*LOSSES, "hard"), self.shares, strict=True))
            raise ConfigError(f"HeadTrainingConfig.loss is {given}; one must be above 0, none below")

    @property
    def shares(self) -> tuple[float, float, float, float]:
        """The numbers alone, as `compare_rows` takes them."""
        return self.kl, self.tv, self.lk, self.hard


class HeadRows(NamedTuple):
    """Rows behind the final norm `[..., H]`, the head `[V, H]` that reads them, and what happens to its logits."""

    rows: Tensor
    head: Tensor
    scale: LogitScale = LogitScale()


class Taught(NamedTuple):
    """What the target says of rows: `shares [n, V]`, its `best [n]` token, and its `entropy [n]` in nats."""

    shares: Tensor
    best: Tensor
    entropy: Tensor

    def rows(self, part: slice) -> Taught:
        """Some of them."""
        return Taught(self.shares[part], self.best[part], self.entropy[part])


class Distance(NamedTuple):
    """The weighted sum over all rows, which carries the gradients, and what each row `[...]` says.

    `soft` is the distance of the distributions by itself (KL and LK in nats, TV as a share), `is_best` whether both
    have the same best token (0 or 1).
    """

    total: Tensor
    soft: Tensor
    is_best: Tensor


def taught(logits: Tensor) -> Taught:
    """The target's distributions, by its logits `[n, V]` in single precision."""
    best = logits.max(-1).indices  # `argmax` alone takes three times as long on processors
    logs = torch.log_softmax(logits, -1)
    shares = logs.exp()
    return Taught(shares, best, -logs.mul_(shares).sum(-1))


def compare_rows(
    raw: Tensor, target: Taught, weights: Tensor, mix: tuple[float, float, float, float], scale: LogitScale
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare rows of logits with the target's distributions.

    Args:
        raw: `[n, V]`: logits before `scale`.
        target: What the target says of these rows.
        weights: `[n]`: how much each row counts.
        mix: Shares of KL, total variation, LK and the cross-entropy with the best token.
        scale: Divisor and cap.

    Returns:
        Losses `[n]` by the first three, and by the last; the gradient of the weighted sum of both by `raw` `[n, V]`;
        whether the best logit is the target's.
    """
    of_kl, of_tv, of_lk, of_hard = mix
    logits = scale(raw.float())
    logs = torch.log_softmax(logits, -1)
    share = logs.exp()
    soft, hard = torch.zeros_like(weights), torch.zeros_like(weights)
    gradient = share * (of_kl + of_hard)
    if of_kl:
        soft = soft - of_kl * ((target.shares * logs).sum(-1) + target.entropy)
        gradient.sub_(target.shares, alpha=of_kl)
    if of_tv or of_lk:
        is_below = share < target.shares
        below = torch.where(is_below, share, 0.0)
        accepted = torch.where(is_below, share, target.shares).sum(-1).clamp(min=_LEAST_SHARED)
        soft = soft + of_tv * (1 - accepted) - of_lk * accepted.log()
        slope = (of_tv + of_lk / accepted)[:, None]
        gradient.addcmul_(slope, share * below.sum(-1, keepdim=True) - below)
    if of_hard:
        places = target.best[:, None]
        hard = -of_hard * logs.gather(-1, places)[:, 0]
        gradient.scatter_add_(-1, places, torch.full_like(places, -of_hard, dtype=gradient.dtype))
    gradient.mul_(weights[:, None] / scale.divisor)
    if scale.cap is not None:
        gradient.mul_(1 - (logits / scale.cap).square())
    return soft, hard, gradient.to(raw.dtype), logs.max(-1).indices == target.best


Work = Callable[[Tensor, Tensor, bool], tuple[tuple[Tensor, ...], Tensor | None, Tensor | None]]
"""Takes rows, the head, and whether the head's gradient is wanted; gives sums, and the gradients of the first."""


def with_its_gradients(rows: Tensor, head: Tensor, work: Work) -> tuple[Tensor, ...]:
    """What `work` finds; the first of it has gradients to `rows` and `head`, made while the logits were there."""
    found: tuple[Tensor, ...] = cast(Any, _Made).apply(rows, head, work)
    return found


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, work: Work) -> tuple[Tensor, ...]:
        found, of_rows, of_head = work(rows.detach(), head.detach(), ctx.needs_input_grad[1])
        ctx.save_for_backward(of_rows, of_head)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_head = ctx.saved_tensors
        return given * of_rows, (None if of_head is None else given * of_head), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def distance(target: HeadRows, student: HeadRows, weights: Tensor, mix: LossMix) -> Distance:
    """Compare the student's rows with the target's, at temperature 1.

    Ids that only one of the heads has (padding at the end of a vocabulary) are left out. Gradients go to the student's
    rows and head.

    Args:
        target: `[..., H]` with its head; constant.
        student: As many rows, of another width perhaps.
        weights: How much each row counts, `[...]`; constant.
        mix: What is minimised.
    """
    size = min(len(target.head), len(student.head))
    rows, by_target = (given.rows.reshape(-1, given.rows.shape[-1]) for given in (student, target))
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    constant = HeadRows(by_target.detach().to(dtype), target.head[:size].detach().to(dtype), target.scale)
    with torch.autocast(kind, enabled=False):
        work = partial(_in_chunks, constant, weights.reshape(-1), mix, student.scale)
        total, soft, is_best = with_its_gradients(rows, student.head[:size], work)
    return Distance(total, soft.reshape(weights.shape), is_best.reshape(weights.shape))


def _in_chunks(
    target: HeadRows, weights: Tensor, mix: LossMix, scale: LogitScale, rows: Tensor, head: Tensor, wants_head: bool
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """A `Work` of whole rows.

    Products are in the target's type; those that give gradients are made once: to add up costs more.
    """
    dtypes, (by_target, its_head) = (rows.dtype, head.dtype), target[:2]
    rows, head = rows.to(by_target.dtype), head.to(by_target.dtype)
    slopes = rows.new_empty(len(rows), len(head))
    found = []
    for some in _ranges(len(rows), _CHUNK_NUMBERS // len(head)):
        told, raw = by_target[some] @ its_head.T, rows[some] @ head.T
        for few in _ranges(len(raw), (_CACHED_NUMBERS if raw.device.type == "cpu" else _CHUNK_NUMBERS) // len(head)):
            wanted = taught(target.scale(told[few].float()))
            soft, hard, slope, is_best = compare_rows(raw[few], wanted, weights[some][few], mix.shares, scale)
            slopes[some][few] = slope
            found.append((soft, hard, is_best.float()))
    soft, hard, is_best = (torch.cat(values) for values in zip(*found, strict=True))
    sums = ((soft + hard) * weights).sum(), soft / max(mix.kl + mix.tv + mix.lk, 1e-9), is_best
    return sums, (slopes @ head).to(dtypes[0]), ((slopes.T @ rows).to(dtypes[1]) if wants_head else None)


def _ranges(count: int, most: int) -> Iterator[slice]:
    """`count` places in ranges of at most `most`, and at least one."""
    step = max(1, most)
    return (slice(first, first + step) for first in range(0, count, step))
