"""What of a head becomes a graph: one pass that reads the rows accepted last and guesses behind the last of them.

Owns: inputs and outputs, in torch. Does not own: conversion, names of tensors in files.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attending import FeatureRows
from .choice import Choice, Shortlist
from .layer import KeyValue
from .network import HeadNetwork


class HeadChain(nn.Module):
    """A head with explicit caches, its guesses unrolled."""

    def __init__(self, network: HeadNetwork, *, num_candidates: int = 1, shortlist: Shortlist = torch.topk) -> None:
        """Wrap `network`; `shortlist` gives the best `count` values and their places of rows `[n, V_d]`."""
        super().__init__()
        self.network = network
        self.num_candidates, self.shortlist = num_candidates, shortlist

    def forward(
        self, features: Tensor, tokens: Tensor, start: Tensor, last_row: Tensor, noise: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        """Guess `K` tokens behind row `last_row`.

        With rows at positions 7, 8, 9 (`start` 7, `last_row` 2) and `tokens` those at 8, 9, 10, the guesses are for
        positions 11, 12, ...

        Args:
            features: `[1, R, F]`: the taps of rows at `start .. start + R - 1`.
            tokens: `[1, R]` int64: the token that follows each row.
            start: `[1]` int64: position of row 0.
            last_row: `[1]` int64: the last real row; those behind it are padding.
            noise: `[K, V_d]` float32, added to the logits before choosing.
            *caches: Keys, values of each layer in turn, `[1, kvh, C, hd]`; slots from `start` on do not count.

        Returns:
            The target's token ids `[K, m]`, best first, and their log-probabilities without noise `[K, m]`; then the
            rows' keys and values of each layer in turn, `[1, kvh, R, hd]`.
        """
        rows = FeatureRows(self._cast(features), tokens, last_row, start, _pairs(caches))
        choice = Choice(self.network.lm_head, noise, num_candidates=self.num_candidates, shortlist=self.shortlist)
        self.network.unroll(rows, choice)
        return choice.ids[0], choice.logprobs[0], *_flat(rows.new)

    def fill(self, features: Tensor, tokens: Tensor, start: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Read rows without guessing, as a prompt's; return their keys and values like `forward`."""
        rows = FeatureRows(self._cast(features), tokens, start - start, start, _pairs(caches))
        self.network.read(rows)
        return _flat(rows.new)

    def _cast(self, features: Tensor) -> Tensor:
        return features.to(self.network.lm_head.weight.dtype)


def _pairs(caches: tuple[Tensor, ...]) -> tuple[KeyValue, ...]:
    return tuple(zip(caches[::2], caches[1::2], strict=True))


def _flat(pairs: list[KeyValue]) -> tuple[Tensor, ...]:
    return tuple(part for pair in pairs for part in pair)
