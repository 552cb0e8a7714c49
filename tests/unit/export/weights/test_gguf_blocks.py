import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from gguf_writer import SCALE_PLACES, random_blocks

from mirrorsd.export.weights.block_quantisation import pack_levels, restore_rows
from mirrorsd.export.weights.gguf_blocks import KINDS, BlockKind


def restored(blocks: BlockKind, raw: np.ndarray) -> np.ndarray:
    """What operators make of packed blocks: levels less zero points, times scales, and offsets behind that."""
    levels, scales, zero_points, offsets = blocks.levels(raw)
    packed = pack_levels(levels, scales, zero_points, blocks.bits)
    rows = restore_rows(packed, levels.shape[1] * levels.shape[2], blocks.bits)
    return rows if offsets is None else rows + np.repeat(offsets, blocks.size, axis=1)


def test_every_kind_has_an_example() -> None:
    assert SCALE_PLACES.keys() == KINDS.keys()


@pytest.mark.parametrize("spread", [0.0, 12.0], ids=["like scales", "scales far apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_blocks_stand_for_the_packages_floats_to_the_bit(kind: str, spread: float) -> None:
    """Scales and minima that differ by up to 2 ** 24, scales of zero and negative ones among them."""
    rng, blocks = np.random.default_rng(5), KINDS[kind]
    raw = random_blocks((24, 768), kind, rng, spread)
    first = next(iter(SCALE_PLACES[kind]))
    raw[:3, ..., first : first + 2] = 0
    raw[3:6, ..., first + 1] ^= 0x80
    wanted = dequantize(raw.reshape(len(raw), -1), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(restored(blocks, raw), wanted)


@pytest.mark.parametrize("kind", [kind for kind, blocks in KINDS.items() if blocks.has_minima])
def test_an_offset_is_what_is_left_of_the_minimum(kind: str) -> None:
    """So what a product rounds activations for is the weight itself: less than a scale is left beside its levels."""
    blocks = KINDS[kind]
    raw = random_blocks((8, 256), kind, np.random.default_rng(5))
    _, scales, minima = blocks.read(raw)
    assert minima is not None
    offsets = blocks.levels(raw).offsets
    assert offsets is not None
    most = 15 if blocks.bits == 4 else 31
    is_inside = (-minima > 0) & (-minima < most * scales)
    assert is_inside.mean() > 0.3
    assert (np.abs(offsets) <= 0.5 * scales)[is_inside].all()
    assert np.array_equal(offsets[-minima > (most + 0.5) * scales], minima[-minima > (most + 0.5) * scales])
