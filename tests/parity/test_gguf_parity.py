from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from gguf_writer import write_file

from mirrorsd.cli.commands.inspect import precision_line
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.weights.block_quantisation import restore_rows
from mirrorsd.graphs.errors import ConfigError

Array = npt.NDArray[Any]
WriteGguf = Callable[..., Path]
SMALL = {
    "context": 384,
    "num_exit_candidates": 4,
    "num_draft_candidates": 4,
    "buckets": ((8, 8),),
    "capacities": (384,),
}


FILES = {
    "Q4_0": pytest.param({"kind": "Q4_0"}, ("Q4_0",), marks=pytest.mark.long),
    "Q4_1": pytest.param({"kind": "Q4_1"}, ("Q4_1",), marks=pytest.mark.long),
    "Q8_0": pytest.param({"kind": "Q8_0"}, ("Q8_0",), marks=pytest.mark.long),
    "as in Q4_K_M": ({"kind": "Q4_K", "mixed": "Q6_K", "head": "Q6_K"}, ("Q4_K", "Q6_K")),
    "tied, with offsets and Llama 3's divisors of positions": (
        {"kind": "Q5_1", "mixed": "Q5_0", "floats": {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}},
        ("Q5_0", "Q5_1"),
    ),
    "tied, in 4 bits": pytest.param({"kind": "Q4_K", "mixed": "Q5_K"}, ("Q4_K", "Q5_K"), marks=pytest.mark.long),
    "blocks of 16": pytest.param({"kind": "Q2_K", "mixed": "Q3_K"}, ("Q2_K", "Q3_K"), marks=pytest.mark.long),
    "floats among them": ({"kind": "F16", "mixed": "Q5_0", "head": "BF16"}, ("BF16", "F16", "Q5_0")),
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all targets: it is traced once."""
    return write_file(tmp_path_factory.mktemp("draft") / "draft.gguf", "Q8_0")


@pytest.mark.parametrize(("parts", "kinds"), FILES.values(), ids=list(FILES))
def test_a_bundle_holds_the_numbers_of_its_file(
    write_gguf: WriteGguf, draft: Path, tmp_path: Path, parts: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    """To the bit; the export itself compares what the graphs compute with Hugging Face's reading of the file."""
    file = write_gguf(**parts)
    manifest = export_pair(file, draft, tmp_path / "bundle", ExportOptions(precision="file", **SMALL))
    storage = manifest.target.storage
    assert storage is not None and manifest.quality is not None
    assert (storage.carried, storage.dequantised) == (kinds, ())
    assert manifest.quality.perplexity == pytest.approx(manifest.quality.reference_perplexity, rel=0.02)
    wanted = {
        name: tensor.read(torch.float32).numpy()
        for name, tensor in open_checkpoint(file, "target").tensors.items()
        if len(tensor.shape) == 2
    }
    stored = [matrix for stage in ("prefix", "suffix") for matrix in stored_matrices(tmp_path / "bundle", stage)]
    for name, matrix in wanted.items():
        assert any(has_rows(whole, matrix) for whole in stored), name


def stored_matrices(bundle: Path, stage: str) -> list[Array]:
    """Every matrix `[N, K]` of a stage as the floats that its operators make of it."""
    graph = ir.load(bundle / "target" / f"{stage}.onnx").graph
    constants = {name: value.const_value.numpy() for name, value in graph.initializers.items() if value.const_value}
    found = []
    for node in graph:
        names = [value.name if value is not None else None for value in node.inputs]
        if node.op_type == "MatMulNBits":
            levels, scales, *others = (constants[name] for name in names[1:4] if name in constants)
            width, key = node.attributes["K"].as_int(), names[1]
        elif node.op_type == "GatherBlockQuantized":
            levels, scales, zero_points = (constants[names[place]] for place in (0, 2, 3))
            others, key = [zero_points], names[0]
            width = scales.shape[1] * node.attributes["block_size"].as_int()
        elif node.op_type in ("MatMul", "Gemm", "Gather") and (name := matrix_of(node, constants)) is not None:
            found.append(constants[name] if node.op_type != "MatMul" else constants[name].T)
            continue
        else:
            continue
        assert key is not None
        found.append(as_floats(node, (levels, scales, *others), width, offsets_of(constants, key)))
    return found


def matrix_of(node: ir.Node, constants: dict[str | None, Array]) -> str | None:
    """The matrix of floats that a node reads, unless it is what the blocks of another one are offset by."""
    name = next((v.name for v in node.inputs if v is not None and v.name in constants), None)
    return None if name is None or constants[name].ndim != 2 or " of the file." in name else name


def offsets_of(constants: dict[str | None, Array], key: str) -> Array | None:
    """The offsets `[N, B]` of the weight whose levels are called `key`."""
    place = f"{key.split('.of the file.')[0]} of the file."
    name = next((name for name in constants if name is not None and name.startswith(place)), None)
    if name is None:
        return None
    return constants[name].T if name.endswith(" transposed") else constants[name]


def as_floats(node: ir.Node, packed: tuple[Array, ...], width: int, offsets: Array | None) -> Array:
    bits, size = (node.attributes[name].as_int() for name in ("bits", "block_size"))
    num_blocks = width // size
    levels = packed[0].reshape(-1, num_blocks, size * bits // 8)
    small = [part.reshape(len(levels), -1) for part in packed[1:]]
    rows = restore_rows((levels, *small), width, bits)
    return rows if offsets is None else rows + np.repeat(offsets, size, axis=1)


def has_rows(whole: Array, rows: Array) -> bool:
    """Whether `rows` are consecutive ones of `whole`, to the bit."""
    if whole.shape[1] != rows.shape[1]:
        return False
    starts = np.flatnonzero((whole[: len(whole) - len(rows) + 1] == rows[0]).all(axis=1))
    return any(np.array_equal(whole[start : start + len(rows)], rows) for start in starts)


def test_blocks_that_products_cannot_hold_are_rounded_to_8_bits_and_named(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    """Values in other blocks than queries and keys are not joined with them."""
    file = write_gguf("Q4_0", mixed="MXFP4")
    manifest = export_pair(file, file, tmp_path / "bundle", ExportOptions(precision="file", **SMALL))
    storage = manifest.target.storage
    assert storage is not None
    assert (storage.carried, storage.dequantised) == (("Q4_0",), ("MXFP4",))
    assert precision_line(manifest.target) == "file (Q4_0 as it is, MXFP4 rounded to 8 bits in blocks of 32)"
    graph = ir.load(tmp_path / "bundle" / "target" / "suffix.onnx").graph
    bits = [node.attributes["bits"].as_int() for node in graph if node.op_type == "MatMulNBits"]
    assert sorted(bits) == [4] * 5 + [8]


def test_another_precision_dequantises_a_file(write_gguf: WriteGguf, tmp_path: Path) -> None:
    file = write_gguf("Q4_1")
    manifest = export_pair(file, file, tmp_path / "bundle", ExportOptions(precision="fp32", **SMALL))
    storage = manifest.target.storage
    assert storage is not None
    assert (storage.layers, storage.carried, storage.dequantised) == ("fp32", (), ("Q4_1",))


def test_a_folder_has_no_blocks_to_carry(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="precision is 'file', for the blocks of a GGUF file"):
        export_pair(*tiny_pair, tmp_path / "bundle", ExportOptions(precision="file"))


def test_blocks_of_a_file_have_their_own_size() -> None:
    with pytest.raises(ConfigError, match="blocks and zero points are those of the GGUF file"):
        ExportOptions(precision="file", block_size=64)
