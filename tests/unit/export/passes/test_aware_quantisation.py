"""GPTQ against rounding to nearest, on inputs whose columns are not alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mirrorsd.export.passes import aware_quantisation
from mirrorsd.export.passes.aware_quantisation import ProductInputs, gptq_rows
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


def test_a_matrix_that_comes_in_parts_has_its_inputs_worked_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next matrix has other inputs, whatever was kept of the first ones."""
    rng = np.random.default_rng(3)
    chosen, worked_out = BlockFormat(bits=4, is_symmetric=False), []
    files = {name: tmp_path / f"{name}.npy" for name in ("up", "down")}
    given = {name: rng.standard_normal((40, 64)).astype(np.float16) for name in files}
    for name, path in files.items():
        np.save(path, given[name])
    moments = aware_quantisation._moments

    def counted(inputs: Any, form: BlockFormat) -> Any:
        worked_out.append(inputs.shape)
        return moments(inputs, form)

    monkeypatch.setattr(aware_quantisation, "_moments", counted)
    rows, inputs = rng.standard_normal((12, 64), np.float32), ProductInputs(files)
    for number, name in enumerate(files, start=1):
        _, pack = inputs.choose_pack(name, chosen)
        parts = [pack(rows[:5]), pack(rows[5:])]
        assert len(worked_out) == number
        together = gptq_rows(rows, given[name], chosen)
        worked_out.pop()
        apart = tuple(np.concatenate(cut) for cut in zip(*parts, strict=True))
        assert np.allclose(restore_rows(apart, 64, 4), restore_rows(together, 64, 4), atol=1e-5)
