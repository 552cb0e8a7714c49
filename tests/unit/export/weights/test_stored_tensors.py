"""Headers of safetensors files: what is read of good ones, and how each kind of bad one is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from mirrorsd.export.weights.expert_tensors import with_separate_experts
from mirrorsd.export.weights.stored_tensors import read_header
from mirrorsd.graphs.errors import ExportError

HUGE = 10**30


def entry(start: int = 0, end: int = 24, shape: Any = (2, 3), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: object, data: bytes = bytes(24)) -> Path:
    """A file of an 8-byte length, `header` (bytes as they are, all else as JSON) and `data`."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_every_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    given = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((0, 4), np.float16)}
    save_file(given | {"b": np.arange(4, dtype=np.float16)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert found["a"].read(torch.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].read(torch.float32).tolist() == [0, 1, 2, 3]
    assert found["none"].read(torch.float32).shape == (0, 4)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" + json.dumps({"a": entry()}).encode()[1:], "its header is not JSON"),
        (b"[]" + b" " * 20, "its header is no table of tensors"),
        (b"7", "its header is no table of tensors"),
        (b'{"\xff": 1}', "its header is not JSON"),
        (b"[" * 100_000, "its header is not JSON"),
        ({"a": 3}, "header's 'a' is of another form"),
        ({"a": None}, "header's 'a' is of another form"),
        ({"a": {}}, "header's 'a' has no 'dtype'"),
        ({"a": {"dtype": "F32", "shape": [2, 3]}}, "header's 'a' has no 'data_offsets'"),
        ({"a": entry(dtype=32)}, "'a' has 32 as 'dtype'; expected text"),
        ({"a": entry(dtype="F31")}, "'a' has 'F31' as 'dtype'; expected one of BOOL"),
        ({"a": entry(shape="6")}, "'a' has '6' as 'shape'; expected a list"),
        ({"a": entry(shape=[2.0, 3])}, r"'a' has 2.0 as 'shape\[0\]'; expected a whole number"),
        ({"a": entry(shape=[True, 6])}, r"'a' has True as 'shape\[0\]'; expected a whole number"),
        ({"a": entry(shape=[-2, -3])}, r"'a' has shape \[-2, -3\]"),
        ({"a": entry(shape=[HUGE])}, "'a'"),
        (
            {"a": entry(shape=[2, 4])},
            r"'a' has data_offsets \[0, 24\], 24 bytes; its shape \[2, 4\] of F32 asks for 32",
        ),
        ({"a": entry(shape=[])}, "asks for 4"),
        ({"a": {**entry(), "data_offsets": [0]}}, "'a'"),
        ({"a": {**entry(), "data_offsets": [0, 24, 48]}}, "'a'"),
        ({"a": {**entry(), "data_offsets": 24}}, "'a' has 24 as 'data_offsets'; expected a list"),
        ({"a": {**entry(), "data_offsets": [0, float("nan")]}}, "'a' has nan as"),
        ({"a": entry(-24, 0)}, r"'a' has shape .* data_offsets \[-24, 0\]"),
        ({"a": entry(24, 0)}, "expected no negative numbers"),
        ({"a": entry(0, HUGE)}, "x.safetensors is truncated|'a'"),
        ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, "'b' begins at byte 8 of the data and overlaps 'a'"),
        (
            {"a": entry(0, 8, [2]), "b": entry(16, 24, [2])},
            "'b' begins at byte 16 of the data and leaves a gap behind 'a'",
        ),
        ({"a": entry(8, 24, [4])}, "'a' begins at byte 8 of the data and leaves a gap behind the header"),
        ({"a": entry(0, 16, [4])}, "is damaged: .* bytes, its header says"),
        ({"a": entry(0, 32, [8])}, "is truncated: .* bytes, its header says"),
        (f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode(), "has 'a' twice"),
        ({"a": entry(), "__metadata__": 3}, "safetensors does not open it"),
        ({"a": entry(), "__metadata__": {"format": 3}}, "safetensors does not open it"),
    ],
)
def test_a_damaged_header_is_refused_with_file_and_tensor(tmp_path: Path, header: object, message: str) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(ExportError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [16, 2**40, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ExportError, match=f"10 bytes cannot hold its header of {length}"):
        read_header(path)


def test_a_file_that_cannot_be_opened_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"gone\.safetensors cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


def test_experts_in_one_tensor_are_matrices_of_it(tmp_path: Path) -> None:
    """Each is read from its own bytes: gates before ups in every expert."""
    fused = {
        "layers.0.mlp.experts.gate_up_proj": np.arange(2 * 6 * 4, dtype=np.float16).reshape(2, 6, 4),
        "layers.0.mlp.experts.down_proj": np.arange(2 * 4 * 3, dtype=np.float16).reshape(2, 4, 3),
        "layers.0.mlp.gate.weight": np.zeros((2, 4), np.float32),
    }
    save_file(fused, tmp_path / "m.safetensors")
    found = with_separate_experts(read_header(tmp_path / "m.safetensors"))
    parts = {name: tensor.read(torch.float32).numpy() for name, tensor in found.items()}
    assert len(parts) == 2 * 3 + 1
    for expert in range(2):
        of_expert = [parts[f"layers.0.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        gate_up, down = (fused[f"layers.0.mlp.experts.{name}_proj"][expert] for name in ("gate_up", "down"))
        assert np.array_equal(np.concatenate(of_expert[:2]), gate_up)
        assert np.array_equal(of_expert[2], down)


def test_turned_experts_are_read_turned(tmp_path: Path) -> None:
    """gpt-oss has `[experts, inputs, outputs]`, gates and ups by turns: one matrix of both, and one behind the gate."""
    fused = {
        "layers.0.mlp.experts.gate_up_proj": np.arange(2 * 4 * 6, dtype=np.float32).reshape(2, 4, 6),
        "layers.0.mlp.experts.gate_up_proj_bias": np.arange(12, dtype=np.float32).reshape(2, 6),
        "layers.0.mlp.experts.down_proj": np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4),
    }
    save_file(fused, tmp_path / "m.safetensors")
    found = with_separate_experts(read_header(tmp_path / "m.safetensors"), is_turned=True)
    assert len(found) == 2 * 2 + 1
    for name in ("gate_up_proj", "down_proj"):
        for expert in range(2):
            part = found[f"layers.0.mlp.experts.{expert}.{name}.weight"]
            whole = fused[f"layers.0.mlp.experts.{name}"][expert]
            assert part.shape == whole.T.shape
            assert np.array_equal(part.read(torch.float32).numpy(), whole.T)
