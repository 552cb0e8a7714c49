"""Short convolutions in place of attention (LFM2, LFM3): what their rows give to one, and what becomes of its answer.

Owns: Hugging Face's module of such a layer, seen as two steps: before and behind the convolution.
Does not own: the convolution itself, which a graph has as one operator (`export/stages/recurrence.py`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from mirrorsd.graphs.contract import RecurrentShape


class Gated(NamedTuple):
    """What a layer makes of rows `[1, S, H]`: what the convolution reads, and the `gate` of its answer."""

    conv: Tensor
    gate: Tensor


@dataclass(frozen=True, slots=True)
class ShortConv:
    """One layer's module, of Hugging Face's `Lfm2ShortConv` form."""

    module: Any

    @property
    def kernel(self) -> Tensor:
        """The convolution's weight `[H, 1, K]`."""
        weight: Tensor = self.module.conv.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The convolution's bias `[H]`; None where it has none."""
        bias: Tensor | None = self.module.conv.bias
        return bias

    @property
    def fused_activation(self) -> str:
        """What the convolution's operator applies itself: nothing."""
        return "none"

    def feed(self, hidden: Tensor) -> Gated:
        """Return what rows `[1, S, H]` give."""
        before, behind, rows = self.module.in_proj(hidden).chunk(3, dim=-1)
        return Gated(before * rows, behind)

    def finish(self, answer: Tensor, gate: Tensor) -> Tensor:
        """Turn the convolution's answer `[1, S, H]` into the layer's."""
        finished: Tensor = self.module.out_proj(gate * answer)
        return finished


def short_conv_shape(config: Any) -> RecurrentShape | None:
    """Sizes of the layers with a convolution, by a config of HF's; None where it has none."""
    layers = tuple(layer for layer, kind in enumerate(config.layer_types) if kind == "conv")
    if not layers:
        return None
    return RecurrentShape(layers=layers, channels=config.hidden_size, conv_rows=config.conv_L_cache - 1)
