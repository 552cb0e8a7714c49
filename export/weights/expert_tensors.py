"""Experts in a checkpoint's files: each matrix of one, wherever all of a layer's lie in one tensor.

Owns: which bytes are an expert's, and the floats that MXFP4 blocks stand for. Does not own: headers of files
(`stored_tensors.py`), experts as modules (`families/experts.py`), blocks of GGUF files (`gguf_blocks.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mirrorsd.export.weights.stored_tensors import BITS, CHUNK_BYTES, StoredTensor
from mirrorsd.graphs.errors import ExportError

_SEPARATE = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4 = "MXFP4"
_IN_BLOCK, _IN_BYTE, _BIAS = 32, 2, 127
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of four bits, without the sign: two bits of exponent and one of mantissa (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedTensor(StoredTensor):
    """A matrix `[N, K]` that lies in its file as `[K, N]`."""

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read the whole matrix, turned, as `dtype`."""
        lying = StoredTensor(
            path=self.path, name=self.name, dtype=self.dtype, shape=self.shape[::-1], offset=self.offset
        )
        yield lying.read(dtype).T.contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Tensor(StoredTensor):
    """A matrix `[N, K]` in blocks of 32 numbers of four bits, two in a byte, the lower half first.

    Attributes:
        scales: uint8 `[N, K / 32]`: 127 more than the power of two that a block's numbers are multiplied with.
    """

    scales: StoredTensor

    def check_readable(self) -> None:
        """Accept it: what it lies in was looked at when it was found."""

    def chunks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """Read the floats that the blocks stand for, some rows `[n, K]` at a time, as `dtype`."""
        num_rows, width = self.shape
        levels = torch.tensor([*_LEVELS, *(-level for level in _LEVELS)])
        step = max(1, CHUNK_BYTES // (4 * width))
        with self.path.open("rb") as blocks, self.scales.path.open("rb") as scales:
            blocks.seek(self.offset)
            scales.seek(self.scales.offset)
            for start in range(0, num_rows, step):
                count = min(step, num_rows - start)
                packed = self._next(blocks, count * width // _IN_BYTE, torch.uint8).reshape(count, -1, 1)
                powers = self._next(scales, count * width // _IN_BLOCK, torch.uint8).to(torch.int32) - _BIAS
                pairs = torch.cat((packed & 15, packed >> 4), dim=-1).to(torch.int64)
                floats = levels[pairs].reshape(-1, _IN_BLOCK)
                yield torch.ldexp(floats, powers[:, None]).reshape(count, width).to(dtype)


def with_separate_experts(tensors: Mapping[str, StoredTensor], *, is_turned: bool = False) -> dict[str, StoredTensor]:
    """The same tensors, but of each that holds all experts of a layer, `[E, N, K]`, its matrices one by one.

    `mlp.experts.gate_up_proj` of `[2, 6, 4]` is `mlp.experts.0.gate_proj.weight` of `[3, 4]` and three more. Where
    matrices are turned, one of `[2, 4, 6]` is `mlp.experts.0.gate_up_proj.weight` of `[6, 4]` and one more; so are
    MXFP4 blocks `mlp.experts.gate_up_proj_blocks` with their `..._scales`.

    Raises:
        ExportError: blocks are of another form, or have no scales that fit.
    """
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        owner, _, last = name.rpartition(".")
        kind = last.removesuffix(_BLOCKS).removesuffix(_SCALES)
        if not owner.endswith(".experts") or kind not in _SEPARATE:
            found[name] = stored
        elif last.endswith(_BLOCKS):
            found.update(_in_blocks(stored, tensors.get(f"{owner}.{kind}{_SCALES}"), f"{owner}.{{}}.{kind}.weight"))
        elif not last.endswith(_SCALES):
            found.update(_matrices(stored, kind, is_turned=is_turned))
    return found


def _matrices(stored: StoredTensor, kind: str, *, is_turned: bool) -> dict[str, StoredTensor]:
    parts = (kind,) if is_turned else _SEPARATE[kind]
    if len(stored.shape) != 3 or stored.shape[1] % len(parts):
        return {stored.name: stored}
    owner = stored.name.rpartition(".")[0]
    num_experts, num_rows, width = stored.shape[0], stored.shape[1] // len(parts), stored.shape[2]
    num_bytes = num_rows * width * BITS[stored.dtype] // 8
    found: dict[str, StoredTensor] = {}
    for place in range(num_experts * len(parts)):
        expert, part = divmod(place, len(parts))
        name, offset = f"{owner}.{expert}.{parts[part]}.weight", stored.offset + place * num_bytes
        if is_turned:
            shape = (width, num_rows)
            found[name] = TurnedTensor(path=stored.path, name=name, dtype=stored.dtype, shape=shape, offset=offset)
        else:
            found[name] = replace(stored, name=name, shape=(num_rows, width), offset=offset)
    return found


def _in_blocks(blocks: StoredTensor, scales: StoredTensor | None, name: str) -> dict[str, StoredTensor]:
    """The matrices of one tensor of MXFP4 blocks `[E, N, K / 32, 16]`; `name` has a place for the expert's number."""
    given = [(part.dtype, part.shape) for part in (blocks, scales) if part is not None]
    wanted = [("U8", blocks.shape), ("U8", blocks.shape[:-1])]
    if scales is None or given != wanted or blocks.shape[3:] != (_IN_BLOCK // _IN_BYTE,):
        described = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in given)
        raise ExportError(
            f"{blocks.path}: {blocks.name!r} and its scales are {described}; expected of MXFP4 are U8 [experts, rows, "
            "blocks, 16] and U8 [experts, rows, blocks]. Download it again"
        )
    num_experts, num_rows, num_blocks, _ = blocks.shape
    size = num_rows * num_blocks
    return {
        name.format(expert): Mxfp4Tensor(
            path=blocks.path,
            name=name.format(expert),
            dtype=_MXFP4,
            shape=(num_rows, num_blocks * _IN_BLOCK),
            offset=blocks.offset + expert * size * _IN_BLOCK // _IN_BYTE,
            scales=replace(scales, shape=(num_rows, num_blocks), offset=scales.offset + expert * size),
        )
        for expert in range(num_experts)
    }
