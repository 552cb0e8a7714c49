"""The two attention functions that Hugging Face's layers call while a stage is exported.

Owns: how attention is written in the graphs, and the objects that carry a cache through an HF layer: as `stage_cache`,
a name that no layer of HF has.
Does not own: the layers, rotary positions, or which layers a stage has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

GQA_ATTENTION = "mirrorsd_gqa"
TREE_ATTENTION = "mirrorsd_tree"

KeyValue = tuple[Tensor, Tensor]

_BEFORE_SINK = 4
"""Inputs between the lengths and the sink: two tables of angles, positions and a bias of the scores."""


@dataclass(slots=True)
class SharedCache:
    """The share-buffer cache of a target's layer, before and after a pass; each tensor is `[1, kvh, C, hd]`.

    `context` is the most rows that it will ever hold.
    """

    past: KeyValue
    seqlens_k: Tensor
    total_length: Tensor
    context: int
    present: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class TreeCache:
    """What a draft's layer attends to: `past` `[1, kvh, C, hd]`, and the score bias for the rows at hand.

    `bias` is `[1, 1, T, C+T]` for `T` rows in flight, already repeated for the query heads of a group. `new` are the
    keys and values of all these rows.
    """

    past: KeyValue
    bias: Tensor
    new: tuple[Tensor, ...] = ()


def gqa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    stage_cache: SharedCache,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Emit one `com.microsoft::GroupQueryAttention` over share-buffer caches.

    Args:
        module: HF's attention module, unused.
        query: `[1, heads, S, hd]`, already rotated.
        key: `[1, kvh, S, hd]`, already rotated.
        value: `[1, kvh, S, hd]`.
        attention_mask: Unused, attention is causal behind `seqlens_k`.
        scaling: Factor on the scores.
        stage_cache: Where past keys and values come from and present ones go.
        sliding_window: Rows that a row sees, itself included; None for all before it.
        softcap: Scores become `softcap * tanh(scores / softcap)`; None leaves them.
        s_aux: A sink `[heads]`: a score of each head that takes its share and gives nothing; None for none.

    Returns:
        `[1, S, heads, hd]` and None (HF's place for attention weights).
    """
    num_heads, num_rows, head_dim = query.shape[1:]
    past_key, past_value = stage_cache.past
    attributes: dict[str, Any] = {
        "num_heads": num_heads,
        "kv_num_heads": key.shape[1],
        "scale": float(scaling),
        "do_rotary": 0,
    }
    if sliding_window is not None and sliding_window < stage_cache.context:
        attributes["local_window_size"] = sliding_window
    if softcap is not None:
        attributes["softcap"] = softcap
    rows = [_merge_heads(heads) for heads in (query, key, value)]
    sink = () if s_aux is None else (*(None,) * _BEFORE_SINK, s_aux)
    attended, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        (*rows, past_key, past_value, stage_cache.seqlens_k, stage_cache.total_length, *sink),
        attributes,
        dtypes=(query.dtype,) * 3,
        shapes=((1, num_rows, num_heads * head_dim), past_key.shape, past_value.shape),
        version=1,
    )
    stage_cache.present = (present_key, present_value)
    return attended.reshape(1, num_rows, num_heads, head_dim), None


def _merge_heads(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).reshape(1, heads.shape[2], heads.shape[1] * heads.shape[3])


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    stage_cache: TreeCache,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend to the cache and to the rows in flight, in standard operators with an explicit bias.

    Scores of both are joined, the cache itself is never copied. A draft's sliding window never ends within the
    context (`pair.py` sees to that), so it plays no part here.

    Args:
        module: HF's attention module, unused.
        query: `[1, heads, T, hd]`, already rotated.
        key: `[1, kvh, T, hd]`, already rotated.
        value: `[1, kvh, T, hd]`.
        attention_mask: Unused, `stage_cache.bias` says who sees whom.
        scaling: Factor on the scores.
        stage_cache: Past keys and values, and where this pass's own ones go.
        softcap: Scores become `softcap * tanh(scores / softcap)`; None leaves them.

    Returns:
        `[1, T, heads, hd]` and None.
    """
    past_key, past_value = stage_cache.past
    stage_cache.new = (key, value)
    kv_heads, num_rows, head_dim = key.shape[1:]
    num_heads, capacity = query.shape[1], past_key.shape[2]
    grouped = (query * scaling).reshape(1, kv_heads, num_heads // kv_heads * num_rows, head_dim)
    over_cache = grouped @ past_key.transpose(2, 3)
    over_rows = grouped @ key.transpose(2, 3)
    scores = torch.cat((over_cache, over_rows), dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + stage_cache.bias, dim=-1)
    attended = weights[..., :capacity] @ past_value + weights[..., capacity:] @ value
    return attended.reshape(1, num_heads, num_rows, head_dim).transpose(1, 2), None


AttentionInterface.register(GQA_ATTENTION, gqa_attention)
AttentionInterface.register(TREE_ATTENTION, tree_attention)
