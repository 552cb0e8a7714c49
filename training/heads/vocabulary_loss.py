"""The loss of guesses over a large vocabulary, its gradient made on the way forward, a few rows at a time.

With 50,000 tokens the passes over the logits cost more than the products that make them. So the logits of a span of
neighbouring rows are made, compared and turned into gradients while they are small enough for the processor's caches;
the target's are made once for all guesses of a span: guess `k` behind row `r` is compared with the target's row
`r + 1 + k`.

Owns: distances and their gradients. Does not own: which rows, how much each counts (`head_training.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.graphs.errors import ConfigError

__all__ = ["LossMix", "SpanTeacher", "VocabularyLosses", "compare_rows", "vocabulary_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossMix:
    """How much of each distance a loss has: `kl` and total variation `tv` to the target's distribution, and `hard`.

    `hard` is the cross-entropy with the target's own best token: what greedy decoding asks for.
    """

    kl: float = 0.0
    tv: float = 0.0
    hard: float = 0.0

    def __post_init__(self) -> None:
        if min(self.kl, self.tv, self.hard) < 0 or not self.kl + self.tv + self.hard:
            raise ConfigError(
                f"a loss of kl={self.kl}, tv={self.tv}, hard={self.hard}; one must be above 0, none below"
            )


class SpanTeacher(NamedTuple):
    """What the target says: `hidden [n, L + K - 1, H]` behind its norm, its LM head `[V, H]`, what it does to logits.

    `tokens [V_d]` are those that the guesses can name; None: all. Row 0 of a span is the row after the first guess's.
    """

    hidden: Tensor
    head: Tensor
    scale: LogitScale
    tokens: Tensor | None = None


class VocabularyLosses(NamedTuple):
    """The loss to minimise; by guess `[K]`: its mean, and the share of rows where it is the target's best token."""

    total: Tensor
    by_guess: Tensor
    agreement: Tensor


def compare_rows(
    raw: Tensor, by_target: Tensor, best: Tensor, weights: Tensor, mix: tuple[float, float, float], scale: LogitScale
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare rows of logits with the target's distributions.

    Args:
        raw: `[n, V_d]`: logits before `scale`.
        by_target: `[n, V_d]`: the target's probabilities.
        best: `[n]`: its best token among them.
        weights: `[n]`: how much each row counts.
        mix: Shares of KL, total variation and `hard`; the KL lacks the target's entropy, which has no gradient.
        scale: Divisor and cap.

    Returns:
        Losses `[n]`; the gradient of their weighted sum by `raw` `[n, V_d]`; whether the best logit is the target's.
    """
    of_kl, of_tv, of_hard = mix
    logits = scale(raw.float())
    top, chosen = logits.max(-1, keepdim=True)
    shifted = logits - top
    grown = shifted.exp()
    mass = grown.sum(-1, keepdim=True)
    share = grown / mass
    log_mass = mass.log()
    losses = torch.zeros_like(weights)
    gradient = share * (of_kl + of_hard)
    if of_kl:
        losses = losses + of_kl * (log_mass[:, 0] - (by_target * shifted).sum(-1))
        gradient = gradient - of_kl * by_target
    if of_tv:
        is_below = share < by_target
        below = torch.where(is_below, share, 0.0)
        under = below.sum(-1, keepdim=True)
        losses = losses + of_tv * (1 - torch.where(is_below, share, by_target).sum(-1))
        gradient = gradient + of_tv * (share * under - below)
    if of_hard:
        losses = losses + of_hard * (log_mass - shifted.gather(-1, best[:, None]))[:, 0]
        places = torch.arange(logits.shape[-1], device=best.device)
        gradient = torch.where(places == best[:, None], gradient - of_hard, gradient)
    gradient = gradient * (weights[:, None] / scale.divisor)
    if scale.cap is not None:
        gradient = gradient * (1 - (logits / scale.cap).square())
    return losses, gradient.to(raw.dtype), chosen[:, 0] == best


class _Forward(torch.autograd.Function):
    """Sum of the weighted losses; its gradients are made with it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, Tensor, Tensor]:
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        sums = job.run(states, weight, of_states, of_weight)
        ctx.save_for_backward(of_states, *(() if of_weight is None else (of_weight,)))
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_states, *of_weight = ctx.saved_tensors
        return given * of_states, (given * of_weight[0] if of_weight else None), None


@dataclass(slots=True)
class _Job:
    """One call: everything but the tensors that have gradients."""

    teacher: SpanTeacher
    counts: Tensor
    mix: tuple[float, float, float]
    scale: LogitScale
    compare: Callable[..., tuple[Tensor, Tensor, Tensor]]
    dtype: torch.dtype

    def run(
        self, states: Tensor, weight: Tensor, of_states: Tensor, of_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the gradients; return the total, and by guess the weighted sum of losses and of agreement."""
        matrices = weight.detach().to(self.dtype)
        matrices = matrices if matrices.ndim == 3 else matrices[None]
        sums = torch.zeros(2, states.shape[2], device=states.device)
        for span, rows in enumerate(states.detach().to(self.dtype).transpose(1, 2)):
            # One product for all guesses that share a matrix: reading it costs more than the few rows.
            hidden = rows.reshape(len(matrices), -1, rows.shape[-1])
            logits = _product(hidden, matrices.transpose(1, 2))
            gradient = self._compare_span(span, logits.reshape(*rows.shape[:2], -1), sums).reshape(logits.shape)
            of_states[span] = _product(gradient, matrices).reshape(rows.shape).transpose(0, 1)
            if of_weight is not None:
                of_weight.add_(_product(gradient.transpose(1, 2), hidden).reshape(of_weight.shape).float())
        return sums[0].sum(), sums[0], sums[1]

    def _compare_span(self, span: int, logits: Tensor, sums: Tensor) -> Tensor:
        """Return the gradient by `logits [K, L, V_d]`, in its place; add to the `sums [2, K]`."""
        by_target, best, is_known = self._teach(span)
        for guess, raw in enumerate(logits):
            rows = slice(guess, guess + len(raw))
            counts = self.counts[span, :, guess] * is_known[rows]
            losses, gradient, hits = self.compare(raw, by_target[rows], best[rows], counts, self.mix, self.scale)
            logits[guess] = gradient
            sums[0, guess] += (losses * counts).sum()
            sums[1, guess] += (hits * counts).sum()
        return logits

    def _teach(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """The target's probabilities over the tokens that count, its best of them, and whether that is its best."""
        hidden, head = self.teacher.hidden[span].to(self.dtype), self.teacher.head
        logits = self.teacher.scale((hidden @ head.T).float())
        if self.teacher.tokens is None:
            best = logits.argmax(-1)
            return _shares(logits), best, torch.ones_like(best, dtype=torch.float32)
        whole_best = logits.argmax(-1)
        logits = logits.index_select(-1, self.teacher.tokens)
        best = logits.argmax(-1)
        return _shares(logits), best, (self.teacher.tokens[best] == whole_best).float()


def _product(first: Tensor, second: Tensor) -> Tensor:
    """`first @ second` of stacks of matrices; of a single one as such, which a stack's kernel would copy."""
    return (first[0] @ second[0])[None] if len(first) == 1 else first @ second


def _shares(logits: Tensor) -> Tensor:
    grown = (logits - logits.amax(-1, keepdim=True)).exp_()
    return grown.div_(grown.sum(-1, keepdim=True))


def vocabulary_loss(
    states: Tensor,
    weight: Tensor,
    teacher: SpanTeacher,
    counts: Tensor,
    mix: LossMix,
    *,
    scale: LogitScale,
    compare: Callable[..., tuple[Tensor, Tensor, Tensor]] = compare_rows,
) -> VocabularyLosses:
    """Compare guesses with the target, and make the gradients.

    Args:
        states: `[n, L, K, w]`: `n` spans of `L` neighbouring rows with `K` guesses each.
        weight: The guesses' head, `[V_d, w]` or one each `[K, V_d, w]`.
        teacher: The target at the same spans.
        counts: `[n, L, K]`: how much each guess counts; the loss is their weighted sum.
        mix: What is minimised.
        scale: What the guesses' head does to its logits.
        compare: `compare_rows`, or the same compiled.
    """
    is_cast = torch.is_autocast_enabled(states.device.type)
    dtype = torch.get_autocast_dtype(states.device.type) if is_cast else torch.float32
    teacher = teacher._replace(head=teacher.head.to(dtype))
    job = _Job(teacher, counts, (mix.kl, mix.tv, mix.hard), scale, compare, dtype)
    total, by_guess, hits = _Forward.apply(states, weight, job)  # type: ignore[no-untyped-call]
    whole = counts.sum((0, 1)).clamp(min=1e-9)
    return VocabularyLosses(total, by_guess / whole, hits / whole)
