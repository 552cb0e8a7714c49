"""What a head is worth on text that its target wrote: agreement by guess, and tokens per step of a chain.

Owns: the measurements, at temperature 0 and, with noise that target and head share, at temperature 1.
Does not own: speed; the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mirrorsd.families import parts_of
from mirrorsd.families.heads import HeadNetwork
from mirrorsd.families.heads.attending import FeatureRows
from mirrorsd.families.heads.choice import Choice
from mirrorsd.training.heads.features import Features, Teacher
from mirrorsd.training.heads.head_training import Taught
from mirrorsd.training.text.self_text import SelfText

__all__ = ["posterior_noise", "report_head", "walk"]

_TIPS = 64
_SEED = 20


def posterior_noise(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the Gumbel noise with which `chosen [n]` won over `logits [n, V]`, as it is distributed given that it won.

    So text that was sampled at temperature 1 without keeping its noise can be replayed: text and noise together are
    distributed as if the noise had come first (top-down sampling of Gumbels).
    """
    whole = torch.logsumexp(logits, -1, keepdim=True)
    best = whole + _gumbel(whole, generator)
    free = logits + _gumbel(logits, generator)
    below = -torch.logaddexp(-best, -free)
    return below.scatter(-1, chosen[:, None], best) - logits


def _gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    return -torch.empty_like(like).exponential_(generator=generator).clamp(min=1e-30).log()


def walk(accepted: Sequence[int], room: int) -> list[int]:
    """Take the steps of a decoding where `accepted[i]` guesses behind place `i` are right; return what each accepts.

    >>> walk([2, 0, 0, 1, 5, 0], room=6)  # from 0 to 3, to 5, and past the end
    [2, 1, 0]
    """
    taken, place = [], 0
    while place < room:
        taken.append(accepted[place])
        place += accepted[place] + 1
    return taken


@torch.no_grad()
def report_head(
    target: PreTrainedModel, network: HeadNetwork, greedy: Sequence[SelfText], sampled: Sequence[SelfText]
) -> dict[str, Any]:
    """Measure a head on texts by its target.

    Args:
        target: The target.
        network: The head, with what it borrows.
        greedy: Written greedily.
        sampled: Written at temperature 1, without any other rule.

    Returns:
        `agreement [K]`: shares of guesses that are right, the text before them being the target's; for `greedy` and
        `sampled` text the steps of a chain, `tokens_per_step` (the target's own token counted), and `reaches [K]`: the
        share of places where guess `k` and all before it are right.
    """
    parts: Any = parts_of(target)
    teacher = Teacher(target, parts.lm_head.weight)
    generator = torch.Generator(target.device).manual_seed(_SEED)
    found: dict[str, Any] = {}
    agreement = _Shares(network.config.length)
    for name, texts in (("greedy", greedy), ("sampled", sampled)):
        reaches, steps = _Shares(network.config.length), list[int]()
        for text in texts:
            if len(text.tokens) - text.prompt_length < 2:
                continue
            features = teacher.read(torch.tensor([text.tokens[:-1]]), network.config.taps)
            noise = None if name == "greedy" else _noise_of(teacher, features, text, generator)
            right = _chain(network, features, text, noise)
            if name == "greedy":
                agreement.add(_told(network, features, text))
            leading = right.int().cumprod(-1).bool()
            reaches.add(leading)
            steps += walk(leading.sum(-1).tolist(), len(leading))
        mean = sum(steps) / max(len(steps), 1)
        found[name] = {
            "texts": len(texts),
            "steps": len(steps),
            "tokens_per_step": round(1 + mean, 4),
            "reaches": reaches.means(),
        }
    return {"agreement": agreement.means(), **found}


class _Shares:
    """Shares by guess of rows that are right; guesses past a text's end are wrong for chains, uncounted here."""

    def __init__(self, num_guesses: int) -> None:
        self._hits, self._rows = torch.zeros(num_guesses), torch.zeros(num_guesses)

    def add(self, right: Tensor) -> None:
        """Count `right [T, K]`, whose row `i` has `T - i` tokens of text left."""
        left = torch.arange(len(right), 0, -1, device=right.device)[:, None]
        is_inside = left > torch.arange(right.shape[1], device=right.device)
        self._hits += (right & is_inside).sum(0).cpu()
        self._rows += is_inside.sum(0).cpu()

    def means(self) -> list[float]:
        """The shares."""
        return [round(share, 4) for share in (self._hits / self._rows.clamp(min=1)).tolist()]


def _tips(text: SelfText) -> Tensor:
    """Rows behind which something is left to guess: with the next token known, at least one more follows."""
    return torch.arange(text.prompt_length - 1, len(text.tokens) - 2)


def _truth(text: SelfText, tips: Tensor, num_guesses: int) -> Tensor:
    """The tokens `[T, K]` that the guesses should be, -1 past the end."""
    padded = torch.tensor([*text.tokens, *[-1] * num_guesses])
    return padded[tips[:, None] + 2 + torch.arange(num_guesses)]


def _rows(features: Features, text: SelfText, tips: Tensor) -> FeatureRows:
    return FeatureRows(features.taps, torch.tensor([text.tokens[1:]]), tips, torch.zeros(1, dtype=torch.long))


def _chain(network: HeadNetwork, features: Features, text: SelfText, noise: Tensor | None) -> Tensor:
    """Whether each guess is right `[T, K]` (bool), the head being told its own guesses."""
    right = []
    for tips in _tips(text).split(_TIPS):
        truth = _truth(text, tips, network.config.length)
        shared = None
        if noise is not None:
            places = (tips[:, None] + 1 + torch.arange(network.config.length)).clamp(max=len(noise) - 1)
            tokens = network.lm_head.map
            shared = (noise if tokens is None else noise[:, tokens])[places].transpose(0, 1)
        choice = Choice(network.lm_head, shared)
        network.unroll(_rows(features, text, tips), choice)
        right.append(choice.ids[:, :, 0] == truth)
    return torch.cat(right)


def _told(network: HeadNetwork, features: Features, text: SelfText) -> Tensor:
    """Whether each guess is right `[T, K]` (bool), the head being told the true tokens."""
    right = []
    for tips in _tips(text).split(_TIPS):
        truth = _truth(text, tips, network.config.length)
        taught = Taught(truth[None].clamp(min=0))
        network.unroll(_rows(features, text, tips), taught)
        states = taught.states[0].unbind(1)
        best = [network.lm_head.logits(state, guess).argmax(-1) for guess, state in enumerate(states)]
        right.append(network.lm_head.tokens(torch.stack(best, dim=1)) == truth)
    return torch.cat(right)


def _noise_of(teacher: Teacher, features: Features, text: SelfText, generator: torch.Generator) -> Tensor:
    """The noise `[rows, V]` that the text was chosen with; row `r` chose the token behind it. Zeros in the prompt."""
    first = text.prompt_length - 1
    logits = teacher.logits(features.final[0, first:])
    drawn = posterior_noise(logits, torch.tensor(text.tokens[first + 1 :]), generator)
    return torch.cat((drawn.new_zeros(first, drawn.shape[1]), drawn))
