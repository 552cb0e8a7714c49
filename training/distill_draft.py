"""Distil a streaming draft from the target on text that the target wrote.

Owns: the distillation loss and one training run.
Does not own: the text (`self_text.py`), the loop (`timed_run.py`), measuring acceptance (`draft_report.py`).

Loss: the distance of target and draft (KL, or another of `divergence.LOSSES`) at the main rows, plus `stream_weight`
times that of the target at row `r + j` and stream `j` of row `r` for every stream (if there is a link: given the true
tokens before its own, and half as much without them), plus a share of plain cross-entropy with the target's argmax
(that is what greedy decoding asks for).
Tokens that the target did not write (prompts, documents) may count less: there is nothing to draft in a prompt.
Streams sit on a random part of the rows, fresh in each step, so that they cost about as much as the main rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.families import parts_of
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.divergence import LOSSES, HeadRows, LossMix, distance
from mirrorsd.training.models.streaming_draft import StreamingDraft
from mirrorsd.training.run.device import autocast, matrices, narrowed
from mirrorsd.training.run.optimizers import descend, make_optimizers, set_rate
from mirrorsd.training.run.timed_run import RunConfig, RunProgress, TimedRun, print_progress
from mirrorsd.training.target_rows import TargetRows, target_rows
from mirrorsd.training.text.held_back import print_held_back
from mirrorsd.training.text.token_stream import MixedStream, TokenStream

__all__ = ["DistillConfig", "DistillLosses", "MarkedText", "distill_draft", "distill_losses", "embed_like_target"]


_BARE_SHARE = 0.5
"""Weight of what streams say without their link, over what they say with it: it makes the link's shortlist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """How the draft is distilled.

    Attributes:
        stream_weight: Weight of each stream's loss (the main row has 1).
        streams_from: Share of the training after which the streams join; before it only main rows are trained. With
            `streams_only` they are there from the start.
        argmax_weight: Share of cross-entropy with the target's argmax; the rest is `loss`.
        loss: "kl", "tv" or "lk": see `divergence`.
        prompt_weight: Weight of tokens that the target did not write itself, which have 1.
        sequences: Sequences per step.
        length: Tokens per sequence.
        tip_share: Share of the rows that carry streams in a step.
        is_compiled: Compile the loss (a minute at the start, a quarter faster after).
        rate: Peak learning rates as a share of the usual ones; less for a draft that is already good.
        streams_only: Train what only the streams have; the main rows stay as they are, bit for bit.
        trains_embedding: Train a token embedding that the draft shares with its target, too; then it has its own.
        remembered_bytes: Memory for what the target has said of text that is read again.
    """

    stream_weight: float = 0.05
    streams_from: float = 0.33
    argmax_weight: float = 0.2
    prompt_weight: float = 1.0
    sequences: int = 6
    length: int = 1024
    tip_share: float = 0.2
    is_compiled: bool = True
    rate: float = 1.0
    streams_only: bool = False
    loss: str = "kl"
    trains_embedding: bool = False
    remembered_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("stream_weight", "streams_from", "argmax_weight", "prompt_weight", "tip_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"DistillConfig.{name} is {getattr(self, name)}; allowed is 0..1")
        if self.loss not in LOSSES:
            raise ConfigError(f"DistillConfig.loss is {self.loss!r}; allowed: {', '.join(LOSSES)}")
        if self.rate <= 0:
            raise ConfigError(f"DistillConfig.rate is {self.rate}; it must be above 0, 1 is usual")


class DistillLosses(NamedTuple):
    """Loss to minimise, distances of main row and streams `[s]` (NaN without tips), share of rows with its argmax."""

    total: Tensor
    main: Tensor
    streams: Tensor
    agreement: Tensor


class MarkedText(NamedTuple):
    """Rows to compare: `ids [B,S]`, and `own [B,S]`: the target wrote the token that the row predicts (bool)."""

    ids: Tensor
    own: Tensor

    @classmethod
    def of(cls, taken: tuple[Tensor, Tensor]) -> MarkedText:
        """Cut what a stream gave, `[B,S+1]` each: a row predicts the token after its own."""
        ids, own = taken
        return cls(ids[:, :-1], own[:, 1:])

    def weights(self, of_prompt: float) -> Tensor:
        """How much each row counts, `[B,S]`."""
        return torch.where(self.own, 1.0, of_prompt)


def distill_losses(
    target: PreTrainedModel,
    draft: StreamingDraft,
    text: MarkedText,
    tip_rows: Tensor,
    config: DistillConfig,
    known: Tensor | None = None,
) -> DistillLosses:
    """Compare draft and target on a text with streams at `tip_rows [T]` (all below `S - s`; none: main rows only).

    Ids that only one of them has (padding at the end of a vocabulary) are left out. `known` is what the target's head
    reads along this text, where that was computed before.
    """
    ids, weights = text.ids, text.weights(config.prompt_weight)
    soft = {config.loss: 1 - config.argmax_weight}
    mix = LossMix(**soft, hard=config.argmax_weight)
    parts = parts_of(target)
    by_target = HeadRows(target_rows(target, ids) if known is None else known, parts.lm_head.weight, parts.logit_scale)
    hidden = draft(ids, tip_rows)
    main = distance(by_target, draft.head_rows(hidden.main), _shares(weights), mix)
    total, stream_means = main.total, torch.full((draft.num_streams,), torch.nan, device=ids.device)
    if len(tip_rows) and draft.num_streams:
        ahead = tip_rows[:, None] + torch.arange(1, draft.num_streams + 1, device=ids.device)
        linked = draft.linked(hidden.streams, ids[:, ahead], ids[:, ahead - 1])
        shares = _shares(weights[:, ahead]) * (config.stream_weight * draft.num_streams)
        ahead_by_target = by_target._replace(rows=by_target.rows[:, ahead])
        streams = distance(ahead_by_target, draft.head_rows(linked), shares, mix)
        total, stream_means = total + streams.total, streams.soft.mean((0, 1))
        if draft.link is not None and config.argmax_weight < 1:
            bare = distance(ahead_by_target, draft.head_rows(hidden.streams), _BARE_SHARE * shares, LossMix(**soft))
            total = total + bare.total
    return DistillLosses(total, main.soft.mean(), stream_means, main.is_best.mean())


def _shares(weights: Tensor) -> Tensor:
    """What rows of these weights count in a mean."""
    return weights / weights.sum().clamp(min=1)


@torch.no_grad()
def embed_like_target(draft: StreamingDraft, target: PreTrainedModel) -> None:
    """Start the draft's token embeddings from the main directions of the target's (same vocabulary, smaller width).

    The projection keeps inner products as well as a matrix of that rank can, so similar tokens start out similar.
    """
    weight = cast(nn.Embedding, target.get_input_embeddings()).weight.float()
    own = cast(nn.Embedding, draft.base.get_input_embeddings()).weight
    centred = weight - weight.mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[: own.shape[1]]
    projected = centred @ directions.T
    own.copy_(projected * (draft.base.config.initializer_range / projected.std()))


def distill_draft(
    target: PreTrainedModel,
    draft: StreamingDraft,
    streams: tuple[TokenStream | MixedStream, TokenStream],
    run: RunConfig,
    config: DistillConfig,
    show: Callable[[RunProgress], None] = print_progress,
) -> TimedRun:
    """Train `draft` in place.

    Args:
        target: The teacher; it is frozen.
        draft: The student.
        streams: Training text (by the target, or mixed with documents) and held-back text by the target.
        run: Where, and for how many seconds; a killed run goes on where it was.
        config: Loss and batch.
        show: Told how far it is.
    """
    text, held_back = streams
    target.requires_grad_(False)
    draft.base.requires_grad_(not config.streams_only)
    if draft.shares_embedding:
        draft.settle_embedding(is_trained=config.trains_embedding)
    optimizers = make_optimizers(draft)
    timed = TimedRun(run, {"draft": draft, "text": text, **optimizers}, show)
    losses_of = torch.compile(distill_losses, dynamic=False) if config.is_compiled else distill_losses
    rows_of = TargetRows(target, config.remembered_bytes, is_compiled=config.is_compiled)

    def tips() -> Tensor:
        if not config.streams_only and timed.done_share() < config.streams_from:
            return torch.empty(0, dtype=torch.long)
        return draw_tip_rows(config, draft.num_streams, timed.step)

    def step(share: float) -> tuple[int, dict[str, float]]:
        set_rate(optimizers.values(), config.rate * share)
        taken = MarkedText.of(text.take_marked(config.sequences, config.length))
        with autocast():
            known = rows_of(taken.ids) if config.remembered_bytes else None
            losses = losses_of(target, draft, taken, tips(), config, known)
        descend(losses.total, draft.parameters(), optimizers.values())
        return taken.ids.numel(), describe(losses)

    with narrowed(matrices(parts_of(target).layers)):
        timed.run(step, _make_check(target, draft, held_back, config, losses_of))
    return timed


def draw_tip_rows(config: DistillConfig, num_streams: int, seed: int) -> Tensor:
    """Draw the rows that carry streams in this step, in ascending order."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randperm(config.length - num_streams, generator=generator, device="cpu")
    drawn = rows[: max(1, int(config.tip_share * config.length))].sort().values
    return drawn.to(torch.get_default_device())


def describe(losses: DistillLosses) -> dict[str, float]:
    """Name the losses for the table."""
    streams = {f"stream_{j}": loss for j, loss in enumerate(losses.streams.tolist(), start=1)}
    return {"main": losses.main.item(), **streams, "agreement": losses.agreement.item()}


def _make_check(
    target: PreTrainedModel,
    draft: StreamingDraft,
    held_back: TokenStream,
    config: DistillConfig,
    losses_of: Callable[..., DistillLosses],
) -> Callable[[], None]:
    """Return a function that prints the losses on the first batches of the held-back text."""

    def describe_batch(taken: tuple[Tensor, Tensor], batch: int) -> dict[str, float]:
        tip_rows = draw_tip_rows(config, draft.num_streams, batch)
        return describe(losses_of(target, draft, MarkedText.of(taken), tip_rows, config))

    return partial(print_held_back, held_back, (config.sequences, config.length), describe_batch)
