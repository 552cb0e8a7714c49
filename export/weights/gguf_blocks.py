"""What a block of a GGUF file says, by kind: integers, a scale, and where the kind has one a minimum.

Owns: the layout of the bytes, and what an operator takes for them. Does not own: which kinds exist beside these; the
`gguf` package turns every one into floats (`gguf_tensors.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("F64", "F32", "F16", "BF16")


class Blocks(NamedTuple):
    """A weight is `number * scale + minimum`, in float32.

    Attributes:
        numbers: Integers `[n, B, size]`: 0.. where there are minima, around 0 without.
        scales: Float32 `[n, B]`.
        minima: Float32 `[n, B]`, or None.
    """

    numbers: Array
    scales: Array
    minima: Array | None = None


class Levels(NamedTuple):
    """What operators take: a weight is `(level - zero point) * scale + offset`, in float32.

    Attributes:
        levels: Uint8 `[n, B, size]`.
        scales: Float32 `[n, B]`.
        zero_points: Uint8 `[n, B]`; None for the middle level.
        offsets: Float32 `[n, B]`, or None.
    """

    levels: Array
    scales: Array
    zero_points: Array | None = None
    offsets: Array | None = None


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One kind of blocks: what an operator needs for its numbers, and `read`, for bytes uint8 `[n, S, bytes]`."""

    bits: int
    size: int
    has_minima: bool
    read: Callable[[Array], Blocks]

    @property
    def has_zero_points(self) -> bool:
        """Whether the operator is told zero points: 8 bits have room for numbers less theirs instead."""
        return self.has_minima and self.bits == 4

    @property
    def bits_per_weight(self) -> float:
        """What a weight takes in a bundle, with its share of scale, zero point and offset.

        >>> KINDS["Q4_K"].bits_per_weight, KINDS["Q6_K"].bits_per_weight
        (6.125, 10.0)
        """
        of_zero_point = self.bits if self.has_zero_points else 0
        return self.bits + (32 * (1 + self.has_minima) + of_zero_point) / self.size

    def levels(self, rows: Array) -> Levels:
        """Read bytes `[n, S, bytes]` as what an operator takes.

        A block's zero point is its number nearest to a weight of 0, so that the offset is what is left of the minimum:
        with the scale 0.5 and the minimum -3.75 it is 8 and the offset 8 * 0.5 - 3.75 = 0.25. Two numbers that differ
        by at most a factor of two have an exact difference; where 0 is outside the block, the zero point is 0 and the
        offset the minimum.
        """
        numbers, scales, minima = self.read(rows)
        middle = 1 << (self.bits - 1)
        if minima is None:
            return Levels((numbers + middle).astype(np.uint8), scales)
        zeros, offsets = _zero_points(scales, minima, most=15 if self.bits == 4 else 31)
        if self.has_zero_points:
            return Levels(numbers.astype(np.uint8), scales, zeros.astype(np.uint8), offsets)
        return Levels((numbers + middle - zeros[..., None]).astype(np.uint8), scales, None, offsets)


def _zero_points(scales: Array, minima: Array, most: int) -> tuple[Array, Array]:
    """Zero points int16 and offsets float32 `[n, B]`."""
    wide = np.where(scales == 0, 1, scales).astype(np.float64)
    nearest = np.rint(-minima.astype(np.float64) / wide)
    is_inside = (scales != 0) & (nearest >= 0) & (nearest <= most)
    zeros = np.where(is_inside, nearest, 0)
    return zeros.astype(np.int16), zeros.astype(np.float32) * scales + minima


def _half(raw: Array) -> Array:
    """Bytes `[n, S, 2]` as float32 `[n, S, 1]`."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _fields(raw: Array, bits: int, run: int) -> Array:
    """Fields of `bits` bits of bytes `[n, S, b]`: the lowest of `run` bytes, then the next of the same ones, ..."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (raw.reshape(*raw.shape[:2], -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return fields.reshape(*raw.shape[:2], -1)


def _numbers(fields: Array, size: int, zero: int = 0) -> Array:
    """Fields `[n, S, m]` in blocks of `size`, int16 `[n, B, size]`, less `zero`."""
    return fields.reshape(len(fields), -1, size).astype(np.int16) - np.int16(zero)


def _by_block(numbers: Array) -> Array:
    """Scales or minima `[n, S, b]` of super-blocks, float32 `[n, B]`."""
    return numbers.reshape(len(numbers), -1).astype(np.float32)


def _q4_0(raw: Array) -> Blocks:
    return Blocks(_numbers(_fields(raw[..., 2:], 4, 16), 32, 8), _by_block(_half(raw[..., :2])))


def _q4_1(raw: Array) -> Blocks:
    scales, minima = (_by_block(_half(part)) for part in (raw[..., :2], raw[..., 2:4]))
    return Blocks(_numbers(_fields(raw[..., 4:], 4, 16), 32), scales, minima)


def _fifth_bits(raw: Array) -> Array:
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(raw: Array) -> Blocks:
    fields = _fields(raw[..., 6:], 4, 16) | _fifth_bits(raw[..., 2:6])
    return Blocks(_numbers(fields, 32, 16), _by_block(_half(raw[..., :2])))


def _q5_1(raw: Array) -> Blocks:
    fields = _fields(raw[..., 8:], 4, 16) | _fifth_bits(raw[..., 4:8])
    scales, minima = (_by_block(_half(part)) for part in (raw[..., :2], raw[..., 2:4]))
    return Blocks(_numbers(fields, 32), scales, minima)


def _q8_0(raw: Array) -> Blocks:
    return Blocks(_numbers(raw[..., 2:].view(np.int8), 32), _by_block(_half(raw[..., :2])))


def _q2_k(raw: Array) -> Blocks:
    packed = raw[..., :16]
    scales = _half(raw[..., 80:82]) * (packed & 15)
    minima = -_half(raw[..., 82:84]) * (packed >> 4)
    return Blocks(_numbers(_fields(raw[..., 16:80], 2, 32), 16), _by_block(scales), _by_block(minima))


def _q3_k(raw: Array) -> Blocks:
    high, low, packed = raw[..., :32], raw[..., 32:96], raw[..., 96:108]
    fields = _fields(low, 2, 32) | _fields(high, 1, 32) << np.uint8(2)
    factors = _fields(packed[..., :8], 4, 8) | _fields(packed[..., 8:], 2, 4) << np.uint8(4)
    scales = _half(raw[..., 108:110]) * (factors.astype(np.float32) - 32)
    return Blocks(_numbers(fields, 16, 4), _by_block(scales))


def _scales_and_minima(raw: Array) -> tuple[Array, Array]:
    """What the first 16 bytes of a Q4_K or Q5_K super-block say of its eight blocks: factors of 6 bits."""
    low_scales, low_minima, high = (raw[..., first : first + 4] for first in (4, 8, 12))
    factors = np.concatenate((low_scales & 63, high & 15 | low_scales >> 2 & 48), axis=-1)
    minima = np.concatenate((low_minima & 63, high >> 4 | low_minima >> 2 & 48), axis=-1)
    return _by_block(_half(raw[..., :2]) * factors), _by_block(-_half(raw[..., 2:4]) * minima)


def _q4_k(raw: Array) -> Blocks:
    return Blocks(_numbers(_fields(raw[..., 16:], 4, 32), 32), *_scales_and_minima(raw))


def _q5_k(raw: Array) -> Blocks:
    fields = _fields(raw[..., 48:], 4, 32) | _fields(raw[..., 16:48], 1, 32) << np.uint8(4)
    return Blocks(_numbers(fields, 32), *_scales_and_minima(raw))


def _q6_k(raw: Array) -> Blocks:
    fields = _fields(raw[..., :128], 4, 64) | _fields(raw[..., 128:192], 2, 32) << np.uint8(4)
    scales = _half(raw[..., 208:210]) * raw[..., 192:208].view(np.int8)
    return Blocks(_numbers(fields, 16, 32), _by_block(scales))


_LEVELS_OF_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def _iq4_nl(raw: Array) -> Blocks:
    return Blocks(_numbers(_LEVELS_OF_IQ4[_fields(raw[..., 2:], 4, 16)], 32), _by_block(_half(raw[..., :2])))


def _iq4_xs(raw: Array) -> Blocks:
    factors = _fields(raw[..., 4:8], 4, 1) | _fields(raw[..., 2:4], 2, 1) << np.uint8(4)
    scales = _half(raw[..., :2]) * (factors.astype(np.float32) - 32)
    return Blocks(_numbers(_LEVELS_OF_IQ4[_fields(raw[..., 8:], 4, 16)], 32), _by_block(scales))


KINDS = {
    "Q4_0": BlockKind(4, 32, has_minima=False, read=_q4_0),
    "Q4_1": BlockKind(4, 32, has_minima=True, read=_q4_1),
    "Q5_0": BlockKind(8, 32, has_minima=False, read=_q5_0),
    "Q5_1": BlockKind(8, 32, has_minima=True, read=_q5_1),
    "Q8_0": BlockKind(8, 32, has_minima=False, read=_q8_0),
    "Q2_K": BlockKind(4, 16, has_minima=True, read=_q2_k),
    "Q3_K": BlockKind(4, 16, has_minima=False, read=_q3_k),
    "Q4_K": BlockKind(4, 32, has_minima=True, read=_q4_k),
    "Q5_K": BlockKind(8, 32, has_minima=True, read=_q5_k),
    "Q6_K": BlockKind(8, 16, has_minima=False, read=_q6_k),
    "IQ4_NL": BlockKind(8, 32, has_minima=False, read=_iq4_nl),
    "IQ4_XS": BlockKind(8, 32, has_minima=False, read=_iq4_xs),
}
"""By the file's word. Products have 4 and 8 bits: two and three bits take four, and five and six bits take eight, as do
the kinds whose four bits number uneven levels."""
