"""Rows of the target's features, the tips among them that guesses start from, and who sees whom.

Owns: positions, caches, and attention in standard operators, for training and graphs alike: training has many tips and
no caches, a graph has caches and one tip, the last accepted row. Does not own: layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mirrorsd.graphs.contract import MASKED

from .layer import KeyValue


@dataclass(slots=True)
class FeatureRows:
    """Rows that the target has passed, one behind the other.

    Attributes:
        features: `[B, S, F]`: the taps of each row.
        tokens: `[B, S]`: the token that follows each row.
        tips: `[T]`: the rows behind which tokens are guessed.
        start: `[1]`: position of row 0, and rows of the caches that count.
        past: By layer: keys and values of earlier rows `[B, kvh, C, hd]`; empty: there are none.
        new: By layer: what the rows themselves leave, `[B, kvh, S, hd]`.
    """

    features: Tensor
    tokens: Tensor
    tips: Tensor
    start: Tensor
    past: tuple[KeyValue, ...] = ()
    new: list[KeyValue] = field(default_factory=list)

    @property
    def positions(self) -> Tensor:
        """Positions `[S]` of the rows."""
        return self.start + torch.arange(self.features.shape[1], device=self.start.device)

    @property
    def places_of_tips(self) -> Tensor:
        """Positions `[T]` of the tips."""
        return self.start + self.tips

    def attend(self, layer: int, queries: Tensor) -> Tensor:
        """Let every row see the past, the rows before it and itself: `queries [B, h, S, hd]`, same shape back."""
        if not self.past:
            keys, values = self.new[layer]
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        rows = torch.arange(queries.shape[2], device=queries.device)
        return attend(queries[:, :, :, None], self._parts(layer, rows), None)[:, :, :, 0]

    def attend_at_tips(self, layer: int, queries: Tensor, own: KeyValue, *, is_causal: bool = False) -> Tensor:
        """Let `P` rows of every tip see what the tip sees, and all of the tip's `own` rows `[B, kvh, T, n, hd]`.

        `queries [B, h, T, P, hd]`, same shape back. `is_causal`: row `i` sees rows `0..i` of its own.
        """
        places = torch.arange(queries.shape[3], device=queries.device)
        among_own = _bias(places[None, :] <= places[:, None]) if is_causal else None
        return attend(queries, self._parts(layer, self.tips), own, among_own)

    def _parts(self, layer: int, tips: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and bias `[tips or 1, columns]`: the past as far as it counts, and the rows up to each tip."""
        keys, values = self.new[layer]
        rows = torch.arange(keys.shape[2], device=keys.device)
        parts = [(keys, values, _bias(rows[None, :] <= tips[:, None]))]
        if self.past:
            keys, values = self.past[layer]
            slots = torch.arange(keys.shape[2], device=keys.device)
            parts.insert(0, (keys, values, _bias(slots[None, :] < self.start)))
        return parts


def taps_in(features: Tensor, count: int) -> tuple[Tensor, ...]:
    """The taps `[..., H]` that lie side by side in features `[..., count * H]`; a graph has no cut into one part."""
    return features.chunk(count, dim=-1) if count > 1 else (features,)


def _bias(is_visible: Tensor) -> Tensor:
    return torch.where(is_visible, 0.0, MASKED)


def attend(
    queries: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    own: KeyValue | None,
    among_own: Tensor | None = None,
) -> Tensor:
    """Attend with `P` rows for each of `T` tips, `queries [B, h, T, P, hd]`, to several parts at once.

    A part is keys and values `[B, kvh, n, hd]` for all tips, and a bias `[T or 1, n]`; `own` are each tip's keys and
    values `[B, kvh, T, n, hd]`, with a bias `[P, n]` if not all see all. Scores are joined, keys and values are never
    copied.
    """
    batch, num_heads, num_tips, rows, width = queries.shape
    kv_heads = parts[0][0].shape[1]
    scaled = queries * width**-0.5
    flat = scaled.reshape(batch, kv_heads, -1, width)  # heads of a group, tips and rows, one behind the other
    grouped = (batch, kv_heads, num_heads // kv_heads, num_tips, rows, -1)
    scores = [(flat @ keys.transpose(2, 3)).reshape(grouped) + bias[:, None] for keys, _, bias in parts]
    if own is not None:
        of_own = scaled.reshape(grouped) @ own[0][:, :, None].transpose(4, 5)
        scores.append(of_own if among_own is None else of_own + among_own)
    weights = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(queries.dtype)
    attended = torch.zeros((), dtype=queries.dtype, device=queries.device)
    begin = 0
    for keys, values, _ in parts:
        of_part = weights[..., begin : begin + keys.shape[2]]
        begin += keys.shape[2]
        attended = attended + (of_part.reshape(batch, kv_heads, -1, keys.shape[2]) @ values).reshape(grouped)
    if own is not None:
        attended = attended + weights[..., begin:] @ own[1][:, :, None]
    return attended.reshape(batch, num_heads, num_tips, rows, width)
