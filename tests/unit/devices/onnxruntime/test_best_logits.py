"""The best logits of rows, found by a graph: here on the processor's provider, which takes the same one."""

import numpy as np
import onnxruntime as ort
import pytest

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.device_memory import NUM_BEST, BestLogits
from mirrorsd.runtime.sampling.logit_processors import ShortlistFilter
from mirrorsd.runtime.sampling.short_rows import ShortRow, short_rows

BY_RANK = ShortlistFilter(0.7, top_k=20, top_p=1.0, min_p=0.0)


def rows_of(logits: np.ndarray, filters: ShortlistFilter, num_rows: int = 2) -> list[ShortRow] | None:
    value = ort.OrtValue.ortvalue_from_numpy(logits)
    best = BestLogits(TargetPlacement()).read(value, str(logits.dtype), filters.temperature, num_rows)
    found = short_rows(best, filters)
    return None if found is None else list(found)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_each_row_s_best_come_with_the_mass_of_the_whole_row(dtype: type) -> None:
    logits = (3 * np.random.default_rng(0).standard_normal((1, 3, 2000))).astype(dtype)
    found = rows_of(logits, BY_RANK)
    assert found is not None
    assert len(found) == 2
    for row, whole in zip(found, logits[0].astype(np.float64), strict=False):
        order = np.lexsort((np.arange(2000), -whole))[:NUM_BEST]
        np.testing.assert_array_equal(row.ids, order)
        np.testing.assert_array_equal(row.logits, whole[order].astype(np.float32))
        assert row.mass == pytest.approx(np.exp((whole - whole.max()) / 0.7).sum(), rel=1e-5)


def test_rows_that_the_best_do_not_decide_are_read_whole() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 2, 2000)).astype(np.float32)
    assert rows_of(logits, ShortlistFilter(1.0, top_k=0, top_p=0.95, min_p=0.0)) is None, "a flat row"
    assert rows_of(logits, ShortlistFilter(1.0, top_k=NUM_BEST, top_p=1.0, min_p=0.0)) is None
    assert rows_of(logits[:, :, :500], BY_RANK) is None, "a vocabulary that is hardly larger"


def test_a_row_that_is_no_numbers_is_handed_on() -> None:
    logits = np.zeros((1, 1, 2000), np.float32)
    logits[0, 0, 7] = np.nan
    found = rows_of(logits, BY_RANK, num_rows=1)
    assert found is not None
    assert np.isnan(found[0].mass)
