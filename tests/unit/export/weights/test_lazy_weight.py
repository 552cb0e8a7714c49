import io
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from mirrorsd.export.weights import lazy_weight, stored_tensors
from mirrorsd.export.weights.lazy_weight import LazyWeight, pack_rows, stored_weight
from mirrorsd.export.weights.rotation import rotate
from mirrorsd.export.weights.stored_tensors import read_header
from mirrorsd.graphs.errors import ExportError


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 8 numbers per chunk, two columns of 40 per strip."""
    monkeypatch.setattr(stored_tensors, "CHUNK_BYTES", 3 * 8 * 4)
    monkeypatch.setattr(lazy_weight, "STRIP_BYTES", 2 * 40 * 4)


def _written(weight: LazyWeight) -> bytes:
    stream = io.BytesIO()
    weight.tofile(stream)
    return stream.getvalue()


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(40, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stored_as", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_a_stored_tensor_is_read_and_converted(
    tmp_path: Path, matrix: torch.Tensor, stored_as: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {"before": torch.ones(3), "matrix": matrix.to(stored_as), "scalar": torch.tensor(2.5, dtype=stored_as)}
    save_file(tensors, tmp_path / "model.safetensors")
    header = read_header(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        expected = tensor.to(wanted)
        torch.testing.assert_close(header[name].read(wanted), expected, rtol=0, atol=0)
        weight = stored_weight(header[name], wanted)
        assert weight.shape.numpy() == tuple(tensor.shape)
        assert _written(weight) == expected.reshape(-1).view(torch.uint8).numpy().tobytes()
        np.testing.assert_array_equal(weight.numpy().astype(np.float64), expected.double().numpy())
    assert len(list(header["matrix"].chunks(wanted))) == 14
    bfloat16 = stored_weight(header["matrix"], torch.bfloat16)
    assert (bfloat16.dtype, bfloat16.numpy().dtype) == (ir.DataType.BFLOAT16, ml_dtypes.bfloat16)


def test_transposing_reads_strips_and_undoes_itself(tmp_path: Path, matrix: torch.Tensor) -> None:
    save_file({"matrix": matrix}, tmp_path / "model.safetensors")
    weight = stored_weight(read_header(tmp_path / "model.safetensors")["matrix"], torch.float32)
    turned = weight.transposed()
    assert turned.key != weight.key
    assert turned.transposed() is weight
    np.testing.assert_array_equal(turned.numpy(), matrix.T.numpy())
    assert _written(turned) == np.ascontiguousarray(matrix.T.numpy()).tobytes()
    assert [chunk.shape for chunk in turned.chunks()] == [(2, 40)] * 4


def test_packing_runs_once_and_in_rows() -> None:
    calls: list[int] = []

    def pack(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        calls.append(len(rows))
        return np.rint(rows).astype(np.uint8), rows.max(axis=1, keepdims=True)

    rows = np.arange(24, dtype=np.float32).reshape(6, 4)
    source = LazyWeight("rows", ir.DataType.FLOAT, (6, 4), lambda: iter((rows[:4], rows[4:])))
    levels, largest = pack_rows(source, "example", pack, ((6, 4), (6,)))
    assert (levels.dtype, largest.dtype) == (ir.DataType.UINT8, ir.DataType.FLOAT)
    calls.clear()
    assert _written(levels) == bytes(range(24))
    np.testing.assert_array_equal(largest.numpy(), rows[:, 3])
    assert calls == [4, 2], "the second tensor was known once the first had been written"
    np.testing.assert_array_equal(largest.numpy(), rows[:, 3])
    assert calls == [4, 2, 4, 2], "nothing is held for longer"


def test_a_file_that_shrinks_or_holds_integers_is_refused(tmp_path: Path, matrix: torch.Tensor) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"matrix": matrix, "numbers": torch.arange(3)}, path)
    header = read_header(path)
    with pytest.raises(ExportError, match="'numbers' has dtype I64; supported are F64, F32"):
        header["numbers"].read(torch.float32)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)
    with pytest.raises(ExportError, match="'matrix' was read: it was changed during the export"):
        header["matrix"].read(torch.float32)


def test_columns_that_are_rotated_twice_are_as_they_were() -> None:
    numbers = np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32)
    weight = LazyWeight("w", ir.DataType.FLOAT, numbers.shape, lambda: iter((numbers[:3], numbers[3:])))
    rotated = weight.rotated()
    assert rotated.key != weight.key and rotated.shape == weight.shape
    assert np.abs(rotated.numpy() - numbers).max() > 1
    np.testing.assert_allclose(rotated.rotated().numpy(), numbers, atol=1e-5)
    rows = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)
    np.testing.assert_allclose(rotate(rows) @ rotated.numpy().T, rows @ numbers.T, atol=1e-4)


def test_the_first_rows_are_read_and_no_others() -> None:
    """Across chunks; as a weight of another name, unless they are all."""
    chunks = [np.full((2, 3), number, np.float32) for number in range(4)]
    whole = LazyWeight("w", ir.DataType.FLOAT, (8, 3), lambda: iter(chunks))
    first = whole.first_rows(5)
    np.testing.assert_array_equal(first.numpy(), np.concatenate(chunks)[:5])
    assert first.key != whole.key
    assert len(list(first.chunks())) == 3
    assert whole.first_rows(8) is whole
