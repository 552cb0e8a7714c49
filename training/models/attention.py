"""The attention that Hugging Face's layers call while they are trained here, or write text in batches.

Owns: causal attention, attention over a cache, and attention of streams, each with a family's scale, window, cap and
sinks.
Does not own: layers and rotary positions (`mirrorsd.families`), or attention in exported graphs (`mirrorsd.export`).

`use_training_attention(model)` switches a model over. Called as Hugging Face does, a layer then attends causally; with
`rows=` it attends as that object says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from mirrorsd.graphs.errors import ConfigError

__all__ = ["AttentionRule", "CachedRows", "StreamRows", "training_attention_in", "use_training_attention"]

TRAINING_ATTENTION = "mirrorsd_training"
_WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)
"""What families pass besides, and what changes nothing here: dropout is left out."""


class AttentionRule:
    """What a family does with attention scores: a factor, a window (rows seen, the own one included), a cap, sinks.

    A sink is a score of a head that takes its share of the weights and gives nothing: `sinks [h]`.
    """

    __slots__ = ("scaling", "sinks", "softcap", "window")

    def __init__(self, scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None = None) -> None:
        self.scaling, self.window, self.softcap, self.sinks = scaling, window, softcap, sinks

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of the scores alone."""
        return self.softcap is None and self.sinks is None

    def weigh(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        """Turn scaled `scores [B,kvh,heads of a group,...,K]` into weights; `hidden` marks what may not be seen."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.to(scores.dtype).reshape(scores.shape[1], -1, *(1,) * (scores.dim() - 3))
        return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1).softmax(-1)[..., :-1]

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend causally with the last `S` of `K` rows: `queries [B,h,S,d]`, `keys`, `values [B,kvh,K,d]`."""
        size, num_keys = queries.shape[2], keys.shape[2]
        if size == 1:
            return self.last_row(queries, keys, values)
        if self.is_plain and size == num_keys and (self.window is None or self.window >= size):
            return F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scaling, enable_gqa=True
            )
        places = torch.arange(num_keys, device=queries.device)
        distance = places[num_keys - size :, None] - places
        hidden = distance < 0
        if self.window is not None:
            hidden = hidden | (distance >= self.window)
        grouped = _split(queries, 1, keys.shape[1]) * self.scaling
        weights = self.weigh(grouped @ keys.unsqueeze(2).transpose(-1, -2), hidden)
        return (weights.to(values.dtype) @ values.unsqueeze(2)).flatten(1, 2)

    def last_row(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend with one row that sees all keys: `queries [B,h,1,d]`; returns `[B,h,1,d]`."""
        if self.window is not None:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
        # The heads of one group stand where the rows would, so that nothing is repeated.
        grouped = queries.reshape(len(keys), keys.shape[1], -1, keys.shape[3])
        if self.is_plain:
            attended = F.scaled_dot_product_attention(grouped, keys, values, scale=self.scaling)
        else:
            attended = self.weigh(grouped * self.scaling @ keys.transpose(-1, -2), None).to(values.dtype) @ values
        return attended.reshape(queries.shape)


class RowsInFlight(Protocol):
    """How some rows attend."""

    def attend(self, layer: int, heads: tuple[Tensor, Tensor, Tensor], rule: AttentionRule) -> Tensor:
        """Attend with rotated queries, keys and values `[B,heads,S,d]` of a layer; return `[B,h,S,d]`."""


class CachedRows:
    """Rows behind a cache of keys and values, for texts that are all at the same position."""

    def __init__(self, capacity: int) -> None:
        """Start empty; `capacity` is the longest text in tokens."""
        self.capacity = capacity
        self.position = 0
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, heads: tuple[Tensor, Tensor, Tensor], rule: AttentionRule) -> Tensor:
        """Store the rows' keys and values, and attend; several rows only into an empty cache."""
        queries, new_keys, new_values = heads
        if layer not in self._caches:
            batch, kv_heads, _, width = new_keys.shape
            shape = (batch, kv_heads, self.capacity, width)
            self._caches[layer] = (new_keys.new_empty(shape), new_values.new_empty(shape))
        keys, values = self._caches[layer]
        end = self.position + queries.shape[2]
        keys[:, :, self.position : end] = new_keys
        values[:, :, self.position : end] = new_values
        if queries.shape[2] > 1:
            return rule.causal(queries, new_keys, new_values)
        return rule.last_row(queries, keys[:, :, :end], values[:, :, :end])

    def keep(self, texts: Tensor) -> None:
        """Forget all texts but these."""
        self._caches = {
            layer: (self._of(keys, texts), self._of(values, texts)) for layer, (keys, values) in self._caches.items()
        }

    def _of(self, rows: Tensor, texts: Tensor) -> Tensor:
        """The part of a cache that these texts have written; the rest stays unwritten."""
        kept = rows.new_empty((len(texts), *rows.shape[1:]))
        kept[:, :, : self.position] = rows[texts, :, : self.position]
        return kept


class StreamRows:
    """`num_rows` main rows, then `s` streams for each of `T` tip rows.

    Main rows are causal and never see streams. Stream `j` of row `r` sees rows `0..r` and streams `1..j` of row `r`.
    With 4 rows, tips 1 and 3 and two streams there are 8 rows in flight: 0 1 2 3, 1.1 1.2, 3.1 3.2; row 1.2 sees
    0, 1, 1.1 and itself.
    """

    def __init__(self, num_rows: int, tip_rows: Tensor, num_streams: int) -> None:
        """Lay out the rows; `tip_rows [T]`."""
        self._num_rows, self._num_streams = num_rows, num_streams
        rows = torch.arange(num_rows, device=tip_rows.device)
        hidden_rows = rows[None, :] > tip_rows.repeat_interleave(num_streams)[:, None]
        later = torch.ones(num_streams, num_streams, dtype=torch.bool, device=tip_rows.device).triu(1)
        self._hidden = torch.cat((hidden_rows, later.repeat(len(tip_rows), 1)), dim=1)

    def attend(self, layer: int, heads: tuple[Tensor, Tensor, Tensor], rule: AttentionRule) -> Tensor:
        """Attend with main rows and streams, in that order."""
        main = tuple(part[:, :, : self._num_rows] for part in heads)
        streams = tuple(part[:, :, self._num_rows :] for part in heads)
        return torch.cat((rule.causal(*main), self._attend_streams(streams, main, rule)), dim=2)

    def _attend_streams(self, streams: tuple[Tensor, ...], main: tuple[Tensor, ...], rule: AttentionRule) -> Tensor:
        queries, own_keys, own_values = streams
        kv_heads, per_tip = own_keys.shape[1], self._num_streams
        num_tips = queries.shape[2] // per_tip
        grouped = _split(queries, 1, kv_heads) * rule.scaling
        to_main = grouped @ main[1].unsqueeze(2).transpose(-1, -2)
        blocks = [_split(part, 2, num_tips).unsqueeze(2) for part in (own_keys, own_values)]
        to_own = _split(grouped, 3, num_tips) @ blocks[0].transpose(-1, -2)
        scores = torch.cat((to_main, to_own.flatten(3, 4)), dim=-1)
        weights = rule.weigh(scores, self._hidden).to(main[2].dtype)
        of_main, of_own = weights[..., :-per_tip], weights[..., -per_tip:]
        attended = of_main @ main[2].unsqueeze(2)
        attended = attended + (_split(of_own, 3, num_tips) @ blocks[1]).flatten(3, 4)
        joined: Tensor = attended.flatten(1, 2)
        return joined


def _split(rows: Tensor, axis: int, parts: int) -> Tensor:
    """View one axis as `[parts, the rest]`."""
    return rows.reshape(*rows.shape[:axis], parts, -1, *rows.shape[axis + 1 :])


def training_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    rows: RowsInFlight | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for one of Hugging Face's attention modules.

    Args:
        module: HF's attention module; its `layer_idx` is the layer's number.
        query: `[B,h,S,d]`, already rotated.
        key: `[B,kvh,S,d]`, already rotated.
        value: `[B,kvh,S,d]`.
        attention_mask: Unused; texts here are never padded, their last rows are the ones at hand.
        scaling: Factor on the scores; None for `d ** -0.5`.
        rows: How the rows attend; None for causal attention among them.
        sliding_window: Rows that a row sees, itself included; None for all before it.
        softcap: Scores become `softcap * tanh(scores / softcap)`; None leaves them.
        s_aux: Sinks `[h]`; None for none.
        others: What changes nothing here.

    Returns:
        `[B,S,h,d]` and None (HF's place for attention weights).

    Raises:
        ConfigError: A family passes something that nobody here knows, and that may change what rows see.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown or others.get("is_causal") is False:
        raise ConfigError(
            f"{type(module).__name__} asks for attention with {', '.join(unknown) or 'is_causal=False'}, which "
            "training does not know: texts and losses would be wrong; take a model of another family (docs/models.md)"
        )
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(factor, sliding_window, softcap, s_aux)
    if rows is None:
        attended = rule.causal(query, key, value)
    else:
        attended = rows.attend(int(module.layer_idx), (query, key, value), rule)  # type: ignore[arg-type]
    return attended.transpose(1, 2), None


def use_training_attention(model: PreTrainedModel) -> None:
    """Let every layer of `model` attend by the rules of this file."""
    model.set_attn_implementation(TRAINING_ATTENTION)


@contextmanager
def training_attention_in(model: PreTrainedModel) -> Iterator[None]:
    """Do so within the block only."""
    usual = model.config._attn_implementation
    use_training_attention(model)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


AttentionInterface.register(TRAINING_ATTENTION, training_attention)
