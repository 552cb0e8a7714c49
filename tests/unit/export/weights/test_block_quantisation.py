import logging

import numpy as np
import pytest

from mirrorsd.export.weights.block_formats import BlockChoice, BlockFormat, WeightFormats, choose_formats
from mirrorsd.export.weights.block_quantisation import pack_levels, quantise_rows, restore_rows
from mirrorsd.graphs.errors import ConfigError

FORMATS = [
    BlockFormat(bits=bits, block_size=block_size, is_symmetric=is_symmetric)
    for bits in (4, 8)
    for block_size in (32, 64, 128)
    for is_symmetric in (True, False)
]


def test_the_example_of_the_docstring() -> None:
    packed, scales = quantise_rows(np.array([[0.7, -0.32]], np.float32), BlockFormat(bits=4))
    assert scales[0, 0] == pytest.approx(-0.0875)
    assert packed[0, 0, 0] == 0 | (12 << 4)


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.recipe)
def test_weights_come_back_within_half_a_level(chosen: BlockFormat) -> None:
    """A width of 160 is no whole number of blocks of 64 or 128; the second row has a block of zeros."""
    rows = np.random.default_rng(3).standard_normal((2, 160), np.float32)
    rows[1, :128] = 0
    packed = quantise_rows(rows, chosen)
    assert len(packed) == (2 if chosen.is_symmetric else 3)
    levels = 1 << chosen.bits
    largest_step = (np.abs(rows).max() / (levels // 2)) if chosen.is_symmetric else np.ptp(rows) / (levels - 1)
    errors = np.abs(restore_rows(packed, 160, chosen.bits) - rows)
    assert errors.max() <= largest_step * (1.01 if chosen.is_symmetric else 0.51)
    assert (errors[1, :128] == 0).all()


def test_levels_packed_by_hand_read_back() -> None:
    levels = np.arange(6).reshape(1, 3, 2)
    for bits in (4, 8):
        packed = pack_levels(levels, np.full((1, 3), 0.5), np.array([[1, 2, 3]]), bits)
        assert restore_rows(packed, 6, bits).tolist() == [[-0.5, 0.0, 0.0, 0.5, 0.5, 1.0]]


def test_rounding_leaves_the_logging_of_the_process_alone() -> None:
    before = list(logging.getLogger().handlers), logging.getLogger().level
    quantise_rows(np.ones((1, 64), np.float32), BlockFormat(bits=4, block_size=64))
    assert (logging.getLogger().handlers, logging.getLogger().level) == before


SETTINGS = {"head": "auto", "embedding": "auto", "block_size": 32, "is_symmetric": False, "embedding_width": 64}


def test_head_and_embedding_are_8_bits_unless_asked_otherwise() -> None:
    int8, int4 = BlockChoice(bits=8, block_size=32), BlockChoice(bits=4, block_size=32, is_symmetric=False)
    assert choose_formats("int4", **SETTINGS) == WeightFormats(layers=int4, head=int8, embedding=int8)
    assert choose_formats("fp16", **SETTINGS) == WeightFormats()
    asked = choose_formats("int4", **SETTINGS | {"head": "fp32", "embedding": "int4"})
    assert asked == WeightFormats(layers=int4, embedding=BlockChoice(bits=4, block_size=32))
    assert choose_formats("int4", **SETTINGS | {"embedding_width": 40}).embedding is None
    free = choose_formats("int4", **SETTINGS | {"block_size": None, "embedding_width": 192}).embedding
    assert free is not None
    assert free.for_width(192).block_size == 64


def test_by_default_a_deep_narrow_model_needs_no_pairs_of_rows() -> None:
    """Blocks of 8 bits are nowhere larger than the embedding's width takes; 4 bits have 32 weights and zero points."""
    free = SETTINGS | {"block_size": None, "is_symmetric": None, "embedding_width": 576}
    int8, int4 = (choose_formats(precision, **free).layers for precision in ("int8", "int4"))
    assert int8 is not None and int4 is not None
    assert (int8.for_width(1536).block_size, int8.is_symmetric, int8.row_group) == (64, True, 1)
    assert (int4.for_width(1536).block_size, int4.is_symmetric, int4.row_group) == (32, False, 1)
    wide = choose_formats("int8", **free | {"embedding_width": 1152}).layers
    assert wide is not None and (wide.for_width(3072).block_size, wide.row_group) == (128, 2)


def test_formats_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="its 40 columns are no whole number of blocks of 32"):
        choose_formats("int8", **SETTINGS | {"embedding": "int8", "embedding_width": 40})
