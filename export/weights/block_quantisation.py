"""Rows of weights in blocks of integers, as `MatMulNBits` and `GatherBlockQuantized` read them: pure functions.

Owns: rounding to nearest (ONNX Runtime's own quantiser) and what the packed tensors look like. Does not own: which
weights are packed (`quantise.py`), rounding that looks at activations (`aware_quantisation.py`).
"""

import logging
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mirrorsd.export.weights.block_formats import BlockFormat

Array = npt.NDArray[Any]

TOP_LEVEL = 127
"""Of eight bits with a sign; -128 is left out, so that a number and its negative have the same magnitude."""


def quantise_rows(rows: Array, chosen: BlockFormat) -> tuple[Array, ...]:
    """Round float `rows` `[n, K]` to the nearest level, each row on its own.

    Symmetric blocks give their largest magnitude the level -8 (4 bits), so the scale may be negative: 0.7 is stored
    with the scale 0.7 / -8 = -0.0875, and -0.32 in the same block as round(3.66) = 4, which is 4 + 8 = 12 in the file.
    Two neighbours share a byte, the first in the low half.

    Returns:
        Packed uint8 `[n, B, block_size * bits / 8]` for B blocks, K padded to whole ones; float32 scales `[n, B]`; and,
        unless symmetric, zero points uint8 `[n, ceil(B * bits / 8)]`. Of a format by row: int8 `[n, K]` and scales
        `[n, 1]`.
    """
    if chosen.is_by_row:
        return _round_by_row(rows)
    by_input = np.ascontiguousarray(rows.T, np.float32)
    packed, scales, zero_points = _rounder(chosen).qbits_block_quant(by_input)
    num_rows, num_blocks = len(rows), -(-rows.shape[1] // chosen.block_size)
    packed = packed.reshape(num_rows, num_blocks, -1)
    scales = scales.reshape(num_rows, num_blocks)
    return (packed, scales) if chosen.is_symmetric else (packed, scales, zero_points.reshape(num_rows, -1))


def pack_levels(levels: Array, scales: Array, zero_points: Array | None, bits: int) -> tuple[Array, ...]:
    """Pack unsigned `levels` `[n, B, block_size]` like `quantise_rows`, with scales and zero points `[n, B]`."""
    levels = levels.astype(np.uint8)
    packed = levels if bits == 8 else levels[..., 0::2] | (levels[..., 1::2] << 4)
    if zero_points is None:
        return packed, scales.astype(np.float32)
    zero_points = zero_points.astype(np.uint8)
    if bits == 4:
        padded = np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2)))
        zero_points = padded[:, 0::2] | (padded[:, 1::2] << 4)
    return packed, scales.astype(np.float32), zero_points


def restore_rows(packed: tuple[Array, ...], width: int, bits: int) -> Array:
    """Float32 rows `[n, width]` of what `quantise_rows` or `pack_levels` gave: `(level - zero point) * scale`."""
    levels, scales = packed[0], packed[1]
    if levels.dtype == np.int8:
        by_row: Array = levels.astype(np.float32) * scales.reshape(-1, 1)
        return by_row
    num_rows, num_blocks = scales.shape
    zero_points: Array = np.full((num_rows, num_blocks), 1 << (bits - 1), np.uint8)
    if len(packed) == 3:
        zero_points = packed[2] if bits == 8 else _nibbles(packed[2])[:, :num_blocks]
    levels = levels if bits == 8 else _nibbles(levels)
    restored = (levels.astype(np.float32) - zero_points[..., None].astype(np.float32)) * scales[..., None]
    whole: Array = restored.reshape(num_rows, -1)[:, :width]
    return whole


def _round_by_row(rows: Array) -> tuple[Array, ...]:
    """Levels -127 to 127 of one scale a row; a row of zeros has the scale 0."""
    rows = rows.astype(np.float32, copy=False)
    scales = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True)) / np.float32(TOP_LEVEL)
    levels = rows / np.where(scales > 0, scales, np.float32(1))
    np.rint(levels, out=levels)
    np.clip(levels, -TOP_LEVEL, TOP_LEVEL, out=levels)
    return levels.astype(np.int8), scales


def _nibbles(packed: Array) -> Array:
    """The two 4-bit numbers of every byte, low half first, along the last axis."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)


@cache
def _rounder(chosen: BlockFormat) -> Any:
    """ONNX Runtime's quantiser. Importing it sets up logging for the whole process, which is undone."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    root.handlers[:] = handlers
    root.setLevel(level)
    config = DefaultWeightOnlyQuantConfig(
        block_size=chosen.block_size, is_symmetric=chosen.is_symmetric, bits=chosen.bits
    )
    return DefaultWeightOnlyQuantizer(config)
