"""GPTQ against rounding to nearest, on inputs whose columns are not alike."""

import numpy as np
import pytest

from mirrorsd.export.passes.aware_quantisation import gptq_rows
from mirrorsd.export.weights.block_formats import BlockFormat
from mirrorsd.export.weights.block_quantisation import quantise_rows, restore_rows


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_products_change_less_than_by_rounding_to_nearest(is_symmetric: bool) -> None:
    """48 columns are one and a half blocks; correlated inputs let later columns make up for earlier ones."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((24, 48), np.float32)
    inputs = rng.standard_normal((96, 8), np.float32) @ rng.standard_normal((8, 48), np.float32)
    inputs += 0.1 * rng.standard_normal((96, 48), np.float32)
    chosen = BlockFormat(bits=4, is_symmetric=is_symmetric)
    errors = [
        np.square(inputs @ (restore_rows(packed, 48, 4) - rows).T).mean()
        for packed in (gptq_rows(rows, inputs, chosen), quantise_rows(rows, chosen))
    ]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("loud", [0.0, 1e4])
def test_inputs_that_are_all_zero_or_have_one_loud_column_are_no_obstacle(loud: float) -> None:
    """Fewer inputs than columns, of which one is ten thousand times as loud: their squares are close to singular."""
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((8, 512), np.float32)
    inputs = (rng.standard_normal((40, 512), np.float32) if loud else np.zeros((40, 512))).astype(np.float32)
    inputs[:, 3] *= loud
    packed = gptq_rows(rows, inputs, BlockFormat(bits=4, is_symmetric=False))
    nearest = quantise_rows(rows, BlockFormat(bits=4, is_symmetric=False))
    errors = [np.square(inputs @ (restore_rows(found, 512, 4) - rows).T).mean() for found in (packed, nearest)]
    assert np.abs(restore_rows(packed, 512, 4) - rows).max() < 2
    assert errors[0] <= 0.3 * errors[1]
