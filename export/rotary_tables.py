"""Rotary position tables, computed by Hugging Face's own module so that every kind of rope scaling is right.

Owns: the tables as buffers of a stage. Does not own: how they are applied (HF's attention modules do that).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding


class RotaryTables(nn.Module):
    """`cos` and `sin` of positions `0 .. num_positions - 1`, each `[num_positions, hd]`, looked up by position."""

    cos_table: Tensor
    sin_table: Tensor

    def __init__(self, rotary_emb: nn.Module, num_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.no_grad():
            cos, sin = rotary_emb(torch.zeros(1, dtype=dtype), torch.arange(num_positions)[None])
        self.register_buffer("cos_table", cos[0].contiguous())
        self.register_buffer("sin_table", sin[0].contiguous())

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[1, rows, hd]` for int64 `positions` `[1, rows]`."""
        return embedding(positions, self.cos_table), embedding(positions, self.sin_table)
