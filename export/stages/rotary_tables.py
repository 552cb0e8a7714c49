"""Rotary position tables, computed by Hugging Face's own modules so that every kind of rope scaling is right.

Owns: the tables as buffers of a stage. Does not own: how they are applied (HF's attention modules do that).
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from mirrorsd.families.decoder_parts import Angles, DecoderParts


class RotaryTables(nn.Module):
    """`cos` and `sin` of positions `0 .. num_positions - 1` for a span of layers, looked up by position.

    Tables are `[num_positions, rotated part of a head]`, one pair per kind of rotary position among the layers.
    """

    def __init__(
        self, parts: DecoderParts, layers: range, num_positions: int, dtype: torch.dtype, spare_rows: int = 0
    ) -> None:
        """Compute the tables that `layers` need; `num_positions` is within what the model was made for.

        Spare rows behind the last position have its angles: nothing attends to them, but attention looks them up.
        """
        super().__init__()
        with torch.no_grad():
            by_layer = parts.angles(torch.zeros(1, dtype=dtype), torch.arange(num_positions)[None])
        kinds = parts.rotary_types or ("",) * len(by_layer)
        self.kinds = {layer: kinds[layer] for layer in layers}
        self.has_tables = parts.rotary is not None
        for layer in layers:
            angles = by_layer[layer]
            if angles is not None:
                cos, sin = (torch.cat((table[0], table[0][-1:].repeat(spare_rows, 1))) for table in angles)
                self.register_buffer(f"cos_table{kinds[layer]}", cos.contiguous())
                self.register_buffer(f"sin_table{kinds[layer]}", sin.contiguous())

    def width_of(self, layer: int) -> int:
        """Width of a layer's tables; 0 where it has none."""
        table = getattr(self, f"cos_table{self.kinds[layer]}", None)
        return 0 if table is None else int(table.shape[1])

    def forward(self, positions: Tensor) -> dict[int, Angles]:
        """Return cos and sin `[1, rows, hd]` by layer for int64 `positions` `[1, rows]`; None where there are none."""
        if not self.has_tables:
            return dict.fromkeys(self.kinds)
        by_kind = {
            kind: (self._rows("cos", kind, positions), self._rows("sin", kind, positions))
            for kind in set(self.kinds.values())
            if hasattr(self, f"cos_table{kind}")
        }
        return {layer: by_kind.get(kind) for layer, kind in self.kinds.items()}

    def _rows(self, function: str, kind: str, positions: Tensor) -> Tensor:
        table: Tensor = getattr(self, f"{function}_table{kind}")
        return embedding(positions, table)
