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
