"""Train a head of any kind: its guesses behind some rows of a text, compared with what its target says there.

Owns: which rows, how much each guess counts, and one training run. Does not own: the loss over the vocabulary
(`vocabulary_loss.py`), the loop (`timed_run.py`), the networks.

Guesses are made behind spans of neighbouring rows, fresh in each step: the losses over the vocabulary cost more than
the head, and a span's rows share the target's. The head is told the true tokens between its guesses, its own states
are its own (EAGLE-3's training-time test). Every third step a block learns without its link: that makes the shortlist
that the link chooses from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.families.heads import HeadNetwork
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.config import LM_HEAD
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.training.distill_draft import MarkedText
from mirrorsd.training.divergence import LossMix, compare_rows
from mirrorsd.training.heads.features import Teacher, teaching
from mirrorsd.training.heads.head_folder import OwnWeights
from mirrorsd.training.heads.vocabulary_loss import SpanTeacher, VocabularyLosses, vocabulary_loss
from mirrorsd.training.run.device import autocast
from mirrorsd.training.run.optimizers import descend, make_optimizers, set_rate
from mirrorsd.training.run.timed_run import RunConfig, RunProgress, TimedRun, print_progress
from mirrorsd.training.text.held_back import print_held_back
from mirrorsd.training.text.token_stream import MixedStream, TokenStream

__all__ = ["HeadTrainingConfig", "draw_spans", "head_losses", "train_head"]

_WITHOUT_LINK_EVERY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTrainingConfig:
    """How a head is trained.

    Attributes:
        mix: What is minimised.
        decay: Guess `k` (from 0) counts `decay ** k`.
        prompt_weight: Weight of tokens that the target did not write itself, which have 1.
        sequences: Sequences per step.
        length: Tokens per sequence.
        row_share: Share of the rows behind which tokens are guessed in a step.
        span: Neighbouring rows that are compared at once.
        rate: Peak learning rates as a share of the usual ones.
        is_compiled: Compile the comparison over the vocabulary (seconds at the start, twice as fast after).
    """

    mix: LossMix
    decay: float = 0.8
    prompt_weight: float = 1.0
    sequences: int = 4
    length: int = 512
    row_share: float = 0.25
    span: int = 64
    rate: float = 1.0
    is_compiled: bool = True

    def __post_init__(self) -> None:
        for name in ("prompt_weight", "decay", "row_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"HeadTrainingConfig.{name} is {getattr(self, name)}; allowed is 0..1")
        for name in ("sequences", "length", "span"):
            if getattr(self, name) < 1:
                raise ConfigError(f"HeadTrainingConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if self.rate <= 0:
            raise ConfigError(f"HeadTrainingConfig.rate is {self.rate}; it must be above 0, 1 is usual")

    def spans(self, num_guesses: int) -> tuple[int, int]:
        """How many spans a sequence has, and how many rows each.

        Raises:
            ConfigError: Sequences too short for the guesses.
        """
        usable = self.length - num_guesses
        if usable < 1:
            raise ConfigError(
                f"HeadTrainingConfig.length is {self.length}: such a text has no row with {num_guesses} more behind "
                "it; give more tokens, or a head of fewer guesses"
            )
        span = min(self.span, usable)
        return max(1, min(round(self.row_share * self.length / span), usable // span)), span


class Taught:
    """Listens to a head's states while it is told the true tokens."""

    def __init__(self, truth: Tensor, *, follows_link: bool = True) -> None:
        """Tell `truth [B, T, K]`: the token that each guess should be."""
        self._truth, self._follows_link = truth, follows_link
        self._states: list[Tensor] = []
        self._bare: Tensor | None = None

    @property
    def states(self) -> Tensor:
        """The states of all guesses, `[B, T, K, w]`."""
        return torch.stack(self._states, dim=2) if self._bare is None else self._bare

    def all_at_once(self, states: Tensor) -> None:
        """Keep the states."""
        self._bare = states

    def prepare(self, states: Tensor) -> None:
        """Keep them where the link is left out."""
        if not self._follows_link:
            self._bare = states

    def one(self, guess: int, state: Tensor) -> Tensor:
        """Keep a state; return the true token."""
        self._states.append(state)
        return self._truth[:, :, guess]


def draw_spans(config: HeadTrainingConfig, num_guesses: int, seed: int) -> Tensor:
    """Draw the first rows of a step's spans, `[n]`: in each of `n` equal parts of a sequence one."""
    count, span = config.spans(num_guesses)
    part = (config.length - num_guesses) // count
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randint(0, part - span + 1, (count,), generator=generator, device="cpu")
    return (torch.arange(count, device="cpu") * part + drawn).to(torch.get_default_device())


def head_losses(
    teacher: Teacher,
    network: HeadNetwork,
    taken: tuple[Tensor, Tensor],
    firsts: Tensor,
    config: HeadTrainingConfig,
    *,
    follows_link: bool = True,
    compare: Callable[..., Any] = compare_rows,
) -> VocabularyLosses:
    """Compare guesses behind spans of rows with the target.

    Args:
        teacher: The target.
        network: The head.
        taken: Token ids `[B, S + 1]`, and which of them the target wrote itself.
        firsts: `[n]`: the first row of every span.
        config: Spans and weights.
        follows_link: Whether a block's link takes part.
        compare: `compare_rows`, or the same compiled.
    """
    ids, own = taken
    length, num_guesses = config.spans(network.config.length)[1], network.config.length
    features = teacher.read(ids[:, :-1], network.config.taps)
    tips = firsts[:, None] + torch.arange(length, device=ids.device)
    ahead = tips.flatten()[:, None] + 2 + torch.arange(num_guesses, device=ids.device)
    taught = Taught(ids[:, ahead.clamp(max=ids.shape[1] - 1)], follows_link=follows_link)
    start = torch.zeros(1, dtype=torch.long, device=ids.device)
    network.unroll(FeatureRows(features.taps, ids[:, 1:], tips.flatten(), start), taught)
    states = taught.states.reshape(-1, length, *taught.states.shape[2:])
    weights = MarkedText(ids, own).weights(config.prompt_weight)
    counts = weights[:, ahead.clamp(max=ids.shape[1] - 1)].reshape(-1, length, num_guesses)
    counts = counts / counts.sum((0, 1)).clamp(min=1) * config.decay ** torch.arange(num_guesses, device=ids.device)
    behind = torch.arange(1, length + num_guesses, device=ids.device)
    wanted = features.final[:, firsts[:, None] + behind].flatten(0, 1)
    given = SpanTeacher(wanted, teacher.head, teacher.logit_scale, network.lm_head.map)
    weight = teacher.head if LM_HEAD in network.config.borrowed else network.lm_head.weight
    weight = weight[..., : states.shape[-1]]
    return vocabulary_loss(states, weight, given, counts, config.mix, scale=network.lm_head.scale, compare=compare)


def train_head(
    target: PreTrainedModel,
    network: HeadNetwork,
    streams: tuple[TokenStream | MixedStream, TokenStream],
    run: RunConfig,
    config: HeadTrainingConfig,
    show: Callable[[RunProgress], None] = print_progress,
) -> TimedRun:
    """Train `network` in place.

    Args:
        target: The teacher; it is frozen.
        network: The head.
        streams: Training text (by the target, or mixed with documents) and held-back text by the target.
        run: Where, and for how many seconds; a killed run goes on where it was.
        config: Loss and batch.
        show: Told how far it is.
    """
    text, held_back = streams
    target.requires_grad_(False)
    usual = network.config.kind.training
    assert usual is not None, "such heads come with their checkpoints"
    optimizers = make_optimizers(network, matrix_rate=usual.matrix_rate)
    timed = TimedRun(run, {"head": OwnWeights(network), "text": text, **optimizers}, show)
    compare = torch.compile(compare_rows, dynamic=False) if config.is_compiled else compare_rows
    has_link = network.config.link != "none"
    with teaching(target) as teacher:
        losses_of = partial(head_losses, teacher, network, config=config, compare=compare)

        def step(share: float) -> tuple[int, dict[str, float]]:
            set_rate(optimizers.values(), config.rate * share)
            taken = text.take_marked(config.sequences, config.length)
            firsts = draw_spans(config, network.config.length, timed.step)
            follows = not has_link or timed.step % _WITHOUT_LINK_EVERY != 0
            with autocast():
                losses = losses_of(taken, firsts, follows_link=follows)
            descend(losses.total, network.parameters(), optimizers.values())
            return taken[0][:, 1:].numel(), describe(losses)

        timed.run(step, _make_check(network, held_back, config, losses_of))
    return timed


def describe(losses: VocabularyLosses) -> dict[str, float]:
    """Name the losses for the table."""
    agreement = {f"agrees_{k}": share for k, share in enumerate(losses.agreement.tolist(), start=1)}
    return {"loss": losses.total.item(), **agreement}


def _make_check(
    network: HeadNetwork, held_back: TokenStream, config: HeadTrainingConfig, losses_of: Callable[..., VocabularyLosses]
) -> Callable[[], None]:
    """Return a function that prints the losses on the first batches of the held-back text."""

    def describe_batch(taken: tuple[Tensor, Tensor], batch: int) -> dict[str, float]:
        return describe(losses_of(taken, draw_spans(config, network.config.length, batch)))

    return partial(print_held_back, held_back, (config.sequences, config.length), describe_batch)
