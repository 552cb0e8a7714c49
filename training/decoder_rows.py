"""The two halves of a Hugging Face decoder layer, with the attention between them left open.

Owns: projecting rows to rotated queries, keys and values, and finishing a layer once attention has been applied. The
streaming draft and the batched text generation put different attentions in between.
Does not own: weights; everything is read from the layer itself (Llama, and families with the same parts such as Qwen3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Rotary", "Rows", "finish_layer", "project_rows"]

Rotary = tuple[Tensor, Tensor]


class Rows(NamedTuple):
    """What attention needs of some rows: `queries [B,h,S,d]`, `keys` and `values [B,kvh,S,d]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor


def project_rows(layer: Any, hidden: Tensor, rotary: Rotary) -> Rows:
    """Normalise `hidden [B,S,H]`, project it, and rotate queries and keys (`rotary`: cos and sin `[1 or B,S,d]`)."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*normed.shape[:-1], -1, attention.head_dim)
    queries = attention.q_proj(normed).view(shape)
    keys = attention.k_proj(normed).view(shape)
    values = attention.v_proj(normed).view(shape).transpose(1, 2)
    if hasattr(attention, "q_norm"):
        queries, keys = attention.q_norm(queries), attention.k_norm(keys)
    queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
    return Rows(_rotate(queries, rotary), _rotate(keys, rotary), values)


def finish_layer(layer: Any, hidden: Tensor, attended: Tensor) -> Tensor:
    """Apply what follows attention: output projection, residual, feed-forward (`attended [B,h,S,d]`)."""
    merged = attended.transpose(1, 2).reshape(*hidden.shape[:-1], -1)
    hidden = hidden + layer.self_attn.o_proj(merged)
    forwarded: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return forwarded


def _rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (part.unsqueeze(1).to(heads.dtype) for part in rotary)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
