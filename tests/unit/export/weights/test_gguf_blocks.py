import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from gguf_writer import SCALE_PLACES, random_blocks

from mirrorsd.export.weights.block_quantisation import restore_rows
from mirrorsd.export.weights.gguf_blocks import KINDS, BlockKind


def restored(blocks: BlockKind, parts: tuple[np.ndarray, ...], width: int) -> np.ndarray:
    """What the operators make of packed blocks: levels less zero points, times scales, and offsets behind that."""
    levels = parts[:-1] if blocks.has_minima else parts
    rows = restore_rows(levels, width, blocks.bits)
    return rows + np.repeat(parts[-1], blocks.size, axis=1) if blocks.has_minima else rows


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
    assert np.array_equal(restored(blocks, blocks.pack(raw), wanted.shape[1]), wanted)


@pytest.mark.parametrize("kind", [kind for kind, blocks in KINDS.items() if blocks.has_minima])
def test_an_offset_is_what_is_left_of_the_minimum(kind: str) -> None:
    """So what a product rounds activations for is the weight itself: less than a scale is left beside its levels."""
    blocks = KINDS[kind]
    raw = random_blocks((8, 256), kind, np.random.default_rng(5))
    _, scales, minima = blocks.read(raw)
    assert minima is not None
    offsets = blocks.pack(raw)[-1]
    most = 15 if blocks.bits == 4 else 31
    is_inside = (-minima > 0) & (-minima < most * scales)
    assert is_inside.mean() > 0.3
    assert (np.abs(offsets) <= 0.5 * scales)[is_inside].all()
    assert np.array_equal(offsets[-minima > (most + 0.5) * scales], minima[-minima > (most + 0.5) * scales])
