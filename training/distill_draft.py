"""Distil a streaming draft from the target on text that the target wrote.

Owns: the distillation loss and one training run.
Does not own: the text (`self_text.py`), the loop (`timed_run.py`), measuring acceptance (`draft_report.py`).

Loss: `KL(target || draft)` at the main rows, plus `stream_weight * KL(target at row r + j || stream j of row r)` for
every stream, plus a share of plain cross-entropy with the target's argmax (that is what greedy decoding asks for).
Streams sit on a random part of the rows, fresh in each step, so that they cost about as much as the main rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mirrorsd.graphs.errors import ConfigError

from .divergence import divergence
from .optimizers import descend, make_optimizers, set_rate
from .streaming_draft import StreamingDraft
from .timed_run import RunConfig, RunProgress, TimedRun, print_progress
from .token_stream import MixedStream, TokenStream

__all__ = ["DistillConfig", "DistillLosses", "distill_draft", "distill_losses", "embed_like_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """How the draft is distilled.

    Attributes:
        stream_weight: Weight of each stream's loss (the main row has 1).
        streams_from: Share of the training after which the streams join; before it only main rows are trained.
        argmax_weight: Share of cross-entropy with the target's argmax; the rest is KL.
        sequences: Sequences per step.
        length: Tokens per sequence.
        tip_share: Share of the rows that carry streams in a step.
        is_compiled: Compile the loss (a minute at the start, a quarter faster after).
        matrix_rate: Peak rate of Muon.
        other_rate: Peak rate of AdamW.
    """

    stream_weight: float = 0.2
    streams_from: float = 0.0
    argmax_weight: float = 0.2
    sequences: int = 6
    length: int = 1024
    tip_share: float = 0.2
    is_compiled: bool = True
    matrix_rate: float = 0.008
    other_rate: float = 2.5e-3

    def __post_init__(self) -> None:
        for name in ("stream_weight", "streams_from", "argmax_weight", "tip_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed is 0..1")


class DistillLosses(NamedTuple):
    """Loss to minimise, KL of the main row, KL per stream `[s]` (NaN without tips), share of rows with its argmax."""

    total: Tensor
    main: Tensor
    streams: Tensor
    agreement: Tensor


def distill_losses(
    target: PreTrainedModel, draft: StreamingDraft, ids: Tensor, tip_rows: Tensor, config: DistillConfig
) -> DistillLosses:
    """Compare draft and target on `ids [B,S]` with streams at `tip_rows [T]` (all below `S - s`; none: main rows only).

    Ids that only one of them has (padding at the end of a vocabulary) are left out.
    """
    shared = min(target.config.vocab_size, draft.base.config.vocab_size)
    with torch.no_grad():
        logits_by_target = target(ids, use_cache=False).logits[..., :shared].float()
    hidden = draft(ids, tip_rows)
    logits_by_draft = draft.logits(hidden.main)[..., :shared].float()
    main_kl, main_hard = divergence(logits_by_target, logits_by_draft)
    soft, hard = main_kl.mean(), main_hard.mean()
    stream_kl = torch.full((draft.num_streams,), torch.nan)
    if len(tip_rows):
        ahead = tip_rows[:, None] + torch.arange(1, draft.num_streams + 1)
        stream_logits = draft.logits(hidden.streams)[..., :shared].float()
        stream_kl, stream_hard = (part.mean((0, 1)) for part in divergence(logits_by_target[:, ahead], stream_logits))
        soft = soft + config.stream_weight * stream_kl.sum()
        hard = hard + config.stream_weight * stream_hard.sum()
    total = (1 - config.argmax_weight) * soft + config.argmax_weight * hard
    agreement = (logits_by_draft.argmax(-1) == logits_by_target.argmax(-1)).float().mean()
    return DistillLosses(total, main_kl.mean().detach(), stream_kl.detach(), agreement)


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
    optimizers = make_optimizers(draft, matrix_rate=config.matrix_rate, other_rate=config.other_rate)
    timed = TimedRun(run, {"draft": draft, "text": text, **optimizers}, show)
    losses_of = torch.compile(distill_losses, dynamic=False) if config.is_compiled else distill_losses

    def tips() -> Tensor:
        if timed.done_share() < config.streams_from:
            return torch.empty(0, dtype=torch.long)
        return draw_tip_rows(config, draft.num_streams, timed.step)

    def step(share: float) -> tuple[int, dict[str, float]]:
        set_rate(optimizers.values(), share)
        ids = text.take(config.sequences, config.length)[:, :-1]
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(target, draft, ids, tips(), config)
        descend(losses.total, draft.parameters(), optimizers.values())
        return ids.numel(), describe(losses)

    timed.run(step, _make_check(target, draft, held_back, config, losses_of))
    return timed


def draw_tip_rows(config: DistillConfig, num_streams: int, seed: int) -> Tensor:
    """Draw the rows that carry streams in this step, in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(config.length - num_streams, generator=generator)
    return rows[: max(1, int(config.tip_share * config.length))].sort().values


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

    def check() -> None:
        held_back.place = 0
        found: list[dict[str, float]] = []
        for batch in range(min(4, len(held_back) // (config.sequences * config.length))):
            ids = held_back.take(config.sequences, config.length)[:, :-1]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                tip_rows = draw_tip_rows(config, draft.num_streams, batch)
                found.append(describe(losses_of(target, draft, ids, tip_rows, config)))
        if found:
            means = {name: sum(row[name] for row in found) / len(found) for name in found[0]}
            shown = " ".join(f"{name} {mean:.3f}" for name, mean in means.items())
            print(f"held back: {shown}", file=sys.stderr, flush=True)

    return check
