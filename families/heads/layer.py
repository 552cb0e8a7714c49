"""A decoder layer whose attention is given from outside, so that training and graphs share it.

Owns: norms, rotary positions, projections, the gated feed-forward part (Llama's, or Qwen3's with normed heads).
Does not own: who sees whom (`attending.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .config import HeadConfig

KeyValue = tuple[Tensor, Tensor]


class Angles(NamedTuple):
    """`cos` and `sin` of rows, `[1 or B, 1, rows, hd]`."""

    cos: Tensor
    sin: Tensor


class Norm(nn.Module):
    """RMSNorm, computed in single precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm the last axis."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(hidden.dtype)


class Rotary(nn.Module):
    """Rotary positions of a head; Hugging Face computes the frequencies, so every kind of scaling is right."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        sizes: Any = {"hidden_size": config.num_heads * config.head_dim, "num_attention_heads": config.num_heads}
        rope = dict(config.rope)
        width = int(config.head_dim * rope.pop("partial_rotary_factor", 1.0))
        sizes |= {"head_dim": width, "max_position_embeddings": config.max_positions}
        with torch.device("cpu"):
            made: Any = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))
        self.factor = float(made.attention_scaling)
        self.register_buffer("frequencies", made.inv_freq.float(), persistent=False)

    def forward(self, positions: Tensor) -> Angles:
        """Angles at `positions [rows]`, single precision."""
        frequencies: Any = self.frequencies
        turned = positions[:, None].float() * frequencies[None]
        both = torch.cat((turned, turned), dim=-1)[None, None]
        return Angles(both.cos() * self.factor, both.sin() * self.factor)


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn `heads [B, h, rows, hd]` by their positions; of wider heads than the angles are, the first part."""
    width = angles.cos.shape[-1]
    part = heads[..., :width]
    first, second = part.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    rotated = (part * angles.cos + turned * angles.sin).to(heads.dtype)
    return rotated if heads.shape[-1] == width else torch.cat((rotated, heads[..., width:]), dim=-1)


class HeadLayer(nn.Module):
    """Projections, feed-forward part and norms of one layer; its names are Hugging Face's."""

    def __init__(self, config: HeadConfig, *, num_inputs: int = 1) -> None:
        """Make a layer whose attention reads `num_inputs * H` wide rows."""
        super().__init__()
        hidden, width = config.hidden_size, config.head_dim
        self.num_kv_heads, self.head_dim, self.has_gate = config.num_kv_heads, width, config.attention_gate
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        bias, inner = config.attention_bias, config.intermediate_size
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(num_inputs * hidden, config.num_heads * width * (1 + self.has_gate), bias=bias),
                "k_proj": nn.Linear(num_inputs * hidden, config.num_kv_heads * width, bias=bias),
                "v_proj": nn.Linear(num_inputs * hidden, config.num_kv_heads * width, bias=bias),
                "o_proj": nn.Linear(config.num_heads * width, hidden, bias=bias),
            }
        )
        if config.qk_norm:
            self.self_attn.update({f"{name}_norm": Norm(width, config.rms_norm_eps) for name in ("q", "k")})
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, inner, bias=False),
                "up_proj": nn.Linear(hidden, inner, bias=False),
                "down_proj": nn.Linear(inner, hidden, bias=False),
            }
        )

    def queries(self, rows: Tensor, angles: Angles) -> Tensor:
        """Rotated queries `[B, h, n, hd]` of normed rows `[B, n, inputs]`."""
        split = self._queries_and_gates(rows)[0] if self.has_gate else self._split(self.self_attn["q_proj"](rows))
        return rotate(self._normed("q", split), angles)

    def keys_and_values(self, rows: Tensor, angles: Angles) -> KeyValue:
        """Rotated keys, and values, `[B, kvh, n, hd]` each, of normed rows."""
        keys = self._normed("k", self._split(self.self_attn["k_proj"](rows)))
        return rotate(keys, angles), self._split(self.self_attn["v_proj"](rows))

    def finish(self, residual: Tensor, attended: Tensor, rows: Tensor | None = None) -> Tensor:
        """Add what was attended to, `[B, h, n, hd]`, and the feed-forward part to `residual [B, n, H]`.

        `rows` are those that gave the queries; a layer with gates reads them again.
        """
        if self.has_gate:
            assert rows is not None
            attended = attended * torch.sigmoid(self._queries_and_gates(rows)[1])
        joined = attended.transpose(1, 2).flatten(2)
        hidden = residual + self.self_attn["o_proj"](joined)
        normed = self.post_attention_layernorm(hidden)
        added: Tensor = self.mlp["down_proj"](silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))
        whole: Tensor = hidden + added
        return whole

    def _queries_and_gates(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Both `[B, h, n, hd]`, of a layer with gates: a head's query stands before its gate."""
        heads = (*rows.shape[:2], -1, 2 * self.head_dim)
        query, gate = self.self_attn["q_proj"](rows).reshape(heads).transpose(1, 2).chunk(2, dim=-1)
        return query, gate

    def _split(self, rows: Tensor) -> Tensor:
        return rows.reshape(rows.shape[0], rows.shape[1], -1, self.head_dim).transpose(1, 2)

    def _normed(self, name: str, heads: Tensor) -> Tensor:
        normed: Tensor = self.self_attn[f"{name}_norm"](heads) if f"{name}_norm" in self.self_attn else heads
        return normed


def layers_in(modules: nn.ModuleList) -> list[HeadLayer]:
    """The layers of a head, in order."""
    return [cast(HeadLayer, module) for module in modules]
