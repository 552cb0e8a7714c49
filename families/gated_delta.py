"""Gated DeltaNet layers (arXiv 2412.06464): what their rows give to a recurrence, and what becomes of its answer.

Owns: Hugging Face's module of such a layer, seen as three steps: before, around and behind the recurrence.
Does not own: the recurrence itself, which a graph has as one operator (`export/stages/recurrence.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from mirrorsd.graphs.contract import RecurrentShape

_LEAST_NORM = 1e-6
_FUSED = ("silu", "swish")


class Fed(NamedTuple):
    """What moves the state of a layer: of rows `[1, S, ...]`.

    Attributes:
        conv: what the convolution reads, `channels` wide.
        key: keys of length 1, all heads' side by side.
        value: values, all heads' side by side.
        decay: by head, the log of what the state is multiplied with.
        rate: by head, how far the state follows the row.
    """

    conv: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rate: Tensor


class Given(NamedTuple):
    """What a layer makes of rows before its convolution: see `Fed`, and the `gate` of its answer."""

    conv: Tensor
    decay: Tensor
    rate: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """One layer's module, of Hugging Face's `Qwen3_5GatedDeltaNet` form, or of the older `Qwen3NextGatedDeltaNet`'s.

    The latter has two projections for all, in which the parts of each key head stand together.
    """

    module: Any

    @property
    def num_key_heads(self) -> int:
        """Heads of queries and of keys; each serves several heads of values."""
        return int(self.module.num_k_heads)

    @property
    def num_value_heads(self) -> int:
        """Heads of values: as many as there are states."""
        return int(self.module.num_v_heads)

    @property
    def kernel(self) -> Tensor:
        """The convolution's weight `[channels, 1, K]`."""
        weight: Tensor = self.module.conv1d.weight
        return weight

    @property
    def bias(self) -> None:
        """The convolution has none."""
        return

    @property
    def fused_activation(self) -> str:
        """What the convolution's operator applies itself: "silu", or "none"."""
        return "silu" if self.module.activation in _FUSED else "none"

    def feed(self, hidden: Tensor) -> Given:
        """Return what rows `[1, S, H]` give."""
        module = self.module
        if hasattr(module, "in_proj_qkvz"):
            both = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            *heads, gate, rates, steps = module.fix_query_key_value_ordering(*both)
            conv = torch.cat([part.reshape(1, hidden.shape[1], -1) for part in heads], dim=-1)
        else:
            conv, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
            rates, steps = module.in_proj_b(hidden), module.in_proj_a(hidden)
        rate = rates.sigmoid()
        decay = -module.A_log.float().exp() * softplus(steps.float() + module.dt_bias[None, None])
        return Given(conv, decay.to(hidden.dtype), rate, gate)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn the convolution's answer `[1, S, channels]` into queries, keys of length 1, and values."""
        module = self.module
        if self.fused_activation == "none":
            rows = ACT2FN[module.activation](rows)
        query, key, value = torch.split(rows, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
        return self._unit(query), self._unit(key), value

    def finish(self, answer: Tensor, gate: Tensor) -> Tensor:
        """Turn the recurrence's answer `[1, S, value width]` into the layer's `[1, S, H]`."""
        module = self.module
        heads = (1, -1, self.num_value_heads, module.head_v_dim)
        normed = module.norm(answer.reshape(heads), gate.reshape(heads))
        finished: Tensor = module.out_proj(normed.reshape(1, -1, module.value_dim))
        return finished

    def _unit(self, rows: Tensor) -> Tensor:
        heads = rows.reshape(1, -1, self.num_key_heads, self.module.head_k_dim)
        units = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _LEAST_NORM)
        return units.reshape(1, -1, self.module.key_dim)


def gated_delta_shape(config: Any) -> RecurrentShape | None:
    """Sizes of the recurrent layers, by a config of HF's; None where it has none."""
    layers = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention")
    if not layers:
        return None
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    return RecurrentShape(
        layers=layers,
        channels=2 * key_width + config.linear_num_value_heads * config.linear_value_head_dim,
        conv_rows=config.linear_conv_kernel_dim - 1,
        num_heads=config.linear_num_value_heads,
        num_key_heads=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
    )
