"""Rows of a token embedding as they lie in a bundle: floats of three kinds, and blocks of integers."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mirrorsd.export.weights.block_formats import BlockFormat
from mirrorsd.export.weights.block_quantisation import quantise_rows, restore_rows
from mirrorsd.graphs.errors import BundleError
from mirrorsd.graphs.manifest import TokenTable
from mirrorsd.graphs.token_rows import TokenRows

FILE = "target/weights.bin"
BEFORE = 4096
"""Bytes in front of the table: of other weights."""


def write(bundle: Path, *parts: np.ndarray) -> list[int]:
    """Write parts behind each other; where each begins."""
    path = bundle / FILE
    path.parent.mkdir()
    content, offsets = b"\1" * BEFORE, []
    for part in parts:
        offsets.append(len(content))
        content += part.tobytes()
    path.write_bytes(content + b"\1" * 5)
    return offsets


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats_are_read_as_they_are(tmp_path: Path, dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    table = np.random.default_rng(1).standard_normal((40, 12)).astype(kind)
    (offset,) = write(tmp_path, table)
    rows = TokenRows(tmp_path, TokenTable(file=FILE, num_rows=40, width=12, dtype=dtype, offset=offset))
    found = rows([7, 0, 39, 7])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, table.astype(np.float32)[[7, 0, 39, 7]])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scales", ["float32", "float16", "bfloat16"])
def test_blocks_are_what_the_target_looks_up(tmp_path: Path, bits: int, scales: str) -> None:
    """Rows of 40 weights in blocks of 32: the second one is longer than the row."""
    kind = ml_dtypes.bfloat16 if scales == "bfloat16" else np.dtype(scales)
    weights = np.random.default_rng(2).standard_normal((50, 40)).astype(np.float32)
    packed = quantise_rows(weights, BlockFormat(bits=bits, block_size=32, is_symmetric=True))
    levels, of_blocks = packed[0], packed[1].astype(kind)
    first, second = write(tmp_path, levels, of_blocks)
    table = TokenTable(
        file=FILE,
        num_rows=50,
        width=40,
        dtype=scales,
        offset=first,
        bits=bits,
        block_size=32,
        scales_offset=second,
    )
    assert table.ends()["scales"] == (tmp_path / FILE).stat().st_size - 5
    expected = restore_rows((levels, of_blocks.astype(np.float32)), 40, bits)
    asked = np.array([49, 3, 3])
    np.testing.assert_array_equal(TokenRows(tmp_path, table)(asked), expected[asked])


def test_integers_by_row_have_a_sign_and_factors_of_the_columns(tmp_path: Path) -> None:
    """A tied embedding under an integer head: levels times the row's scale times the column's factor."""
    levels = np.random.default_rng(3).integers(-127, 128, (6, 8)).astype(np.int8)
    scales, factors = np.linspace(0.1, 0.6, 6, dtype=np.float32), np.linspace(1, 2, 8, dtype=np.float32)
    first, second, third = write(tmp_path, levels, scales, factors)
    table = TokenTable(
        file=FILE,
        num_rows=6,
        width=8,
        dtype="float32",
        offset=first,
        bits=8,
        block_size=8,
        scales_offset=second,
        factors_offset=third,
    )
    assert table.ends()["factors"] == third + 32
    np.testing.assert_array_equal(TokenRows(tmp_path, table)([5, 0]), levels[[5, 0]] * scales[[5, 0], None] * factors)


def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    table = TokenTable(file=FILE, num_rows=1, width=1, dtype="float32", offset=0)
    with pytest.raises(BundleError, match="cannot be read"):
        TokenRows(tmp_path, replace(table, file="target/gone.bin"))


def test_no_ids_are_no_rows(tmp_path: Path) -> None:
    """As a pass is cleared of what it was fed."""
    levels, scales = write(tmp_path, np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.float32))
    table = TokenTable(
        file=FILE,
        num_rows=4,
        width=32,
        dtype="float32",
        offset=levels,
        bits=4,
        block_size=32,
        scales_offset=scales,
    )
    assert TokenRows(tmp_path, table)([]).shape == (0, 32)
