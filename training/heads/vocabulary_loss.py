"""The loss of guesses over a large vocabulary, its gradient made on the way forward, a few rows at a time.

With 50,000 tokens the passes over the logits cost more than the products that make them. So the logits of a span of
neighbouring rows are made, compared and turned into gradients while they are small enough for the processor's caches;
the target's are made once for all guesses of a span: guess `k` behind row `r` is compared with the target's row
`r + 1 + k`.

Owns: spans. Does not own: distances and their gradients (`divergence.py`), which rows, how much each counts
(`head_training.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mirrorsd.families.decoder_parts import LogitScale
from mirrorsd.training.divergence import LossMix, Taught, compare_rows, taught, with_its_gradients

__all__ = ["SpanTeacher", "VocabularyLosses", "vocabulary_loss"]


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


@dataclass(slots=True)
class _Job:
    """One call: everything but the tensors that have gradients."""

    teacher: SpanTeacher
    counts: Tensor
    mix: LossMix
    scale: LogitScale
    compare: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    dtype: torch.dtype

    def run(
        self, states: Tensor, weight: Tensor, wants_weight: bool
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """The total, and by guess the weighted sums of losses and of agreement."""
        of_states = torch.empty_like(states)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        matrices = weight.to(self.dtype)
        matrices = matrices if matrices.ndim == 3 else matrices[None]
        sums = torch.zeros(2, states.shape[2], device=states.device)
        for span, rows in enumerate(states.to(self.dtype).transpose(1, 2)):
            # One product for all guesses that share a matrix: reading it costs more than the few rows.
            hidden = rows.reshape(len(matrices), -1, rows.shape[-1])
            logits = _product(hidden, matrices.transpose(1, 2))
            gradient = self._compare_span(span, logits.reshape(*rows.shape[:2], -1), sums).reshape(logits.shape)
            of_states[span] = _product(gradient, matrices).reshape(rows.shape).transpose(0, 1)
            if of_weight is not None:
                of_weight.add_(_product(gradient.transpose(1, 2), hidden).reshape(of_weight.shape).float())
        return (sums[0].sum(), sums[0], sums[1]), of_states, of_weight

    def _compare_span(self, span: int, logits: Tensor, sums: Tensor) -> Tensor:
        """Return the gradient by `logits [K, L, V_d]`, in its place; add to the `sums [2, K]`."""
        wanted, is_known = self._teach(span)
        for guess, raw in enumerate(logits):
            rows = slice(guess, guess + len(raw))
            counts = self.counts[span, :, guess] * is_known[rows]
            soft, hard, gradient, hits = self.compare(raw, wanted.rows(rows), counts, self.mix.shares, self.scale)
            logits[guess] = gradient
            sums[0, guess] += ((soft + hard) * counts).sum()
            sums[1, guess] += (hits * counts).sum()
        return logits

    def _teach(self, span: int) -> tuple[Taught, Tensor]:
        """What the target says over the tokens that count, and whether its best of them is its best."""
        hidden, head = self.teacher.hidden[span].to(self.dtype), self.teacher.head
        logits = self.teacher.scale((hidden @ head.T).float())
        if self.teacher.tokens is None:
            return taught(logits), torch.ones(len(logits), device=logits.device)
        wanted = taught(logits.index_select(-1, self.teacher.tokens))
        return wanted, (self.teacher.tokens[wanted.best] == logits.argmax(-1)).float()


def _product(first: Tensor, second: Tensor) -> Tensor:
    """`first @ second` of stacks of matrices; of a single one as such, which a stack's kernel would copy."""
    return (first[0] @ second[0])[None] if len(first) == 1 else first @ second


def vocabulary_loss(
    states: Tensor,
    weight: Tensor,
    teacher: SpanTeacher,
    counts: Tensor,
    mix: LossMix,
    *,
    scale: LogitScale,
    compare: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = compare_rows,
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
    job = _Job(teacher, counts, mix, scale, compare, dtype)
    total, by_guess, hits = with_its_gradients(states, weight, job.run)
    whole = counts.sum((0, 1)).clamp(min=1e-9)
    return VocabularyLosses(total, by_guess / whole, hits / whole)
