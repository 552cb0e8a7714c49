"""The head over the vocabulary: the target's own, one of its own size, of low rank, or over fewer tokens.

Owns: from a guess's hidden state to logits, and from a logit to the target's token.
Does not own: choosing (`choice.py`), weights that are the target's (its config names them as borrowed).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mirrorsd.families.decoder_parts import LogitScale

from .config import HeadConfig


class Vocabulary(nn.Module):
    """`weight [V_d, w]`, or `[K, V_d, w]` where each guess has its own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        shape = (config.num_logits, config.state_width)
        count = config.num_vocabularies
        self.weight = nn.Parameter(torch.empty((count, *shape) if count > 1 else shape))
        nn.init.normal_(self.weight, std=0.02)
        self.down = nn.Linear(config.hidden_size, config.head_rank, bias=False) if config.head_rank else None
        self.map: Tensor | None
        names_fewer = config.vocabulary == "reduced"
        self.register_buffer("map", torch.arange(config.num_logits) if names_fewer else None)
        self.scale = LogitScale(divisor=config.logit_divisor, cap=config.logit_cap)

    def states(self, hidden: Tensor) -> Tensor:
        """What `logits` reads of normed hidden states `[..., H]`."""
        return hidden if self.down is None else self.down(hidden)

    def matrix(self, guess: int) -> Tensor:
        """The weight of a guess, `[V_d, w]`."""
        return self.weight[guess] if self.weight.ndim == 3 else self.weight

    def table(self) -> Tensor:
        """What a few tokens' logits are read from, `[V_d, w]`; it may be stored in another form."""
        return self.matrix(0)

    def logits(self, states: Tensor, guess: int) -> Tensor:
        """Logits `[..., V_d]` in single precision; states that lack what a Markov link adds count without it."""
        matrix = self.matrix(guess)
        if states.shape[-1] < matrix.shape[-1]:
            matrix = matrix[:, : states.shape[-1]]
        return self.scale(self.product(states, matrix).float())

    def product(self, states: Tensor, matrix: Tensor) -> Tensor:
        """States `[..., w]` times a matrix `[V_d, w]`."""
        return linear(states, matrix)

    def logits_of(self, ids: Tensor, states: Tensor) -> Tensor:
        """Logits `[n, count]` of some `ids [n, count]` at `states [n, w]`."""
        rows = self.table().index_select(0, ids.flatten()).reshape(*ids.shape, -1)
        return self.scale((rows @ states[:, :, None])[:, :, 0].float())

    def tokens(self, ids: Tensor) -> Tensor:
        """The target's tokens of logits' numbers, any shape."""
        if self.map is None:
            return ids
        return self.map.index_select(0, ids.flatten()).reshape(ids.shape)
