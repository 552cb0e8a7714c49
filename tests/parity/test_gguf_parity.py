from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.graphs.errors import ConfigError

WriteGguf = Callable[..., Path]
SMALL = {
    "context": 384,
    "num_exit_candidates": 4,
    "num_draft_candidates": 4,
    "buckets": ((8, 8),),
    "capacities": (384,),
}


@pytest.mark.parametrize("kind", [pytest.param("Q4_0", marks=pytest.mark.long), "Q4_1", "Q8_0"])
def test_a_bundle_holds_the_blocks_of_its_file(write_gguf: WriteGguf, tmp_path: Path, kind: str) -> None:
    """The export itself compares the graphs with Hugging Face's reading of the file; nothing is left to round."""
    file = write_gguf(kind)
    manifest = export_pair(file, file, tmp_path / "bundle", ExportOptions(precision="file", **SMALL))
    storage = manifest.target.storage
    assert storage is not None and manifest.quality is not None
    assert (storage.layers, storage.head) == ("file", "file")
    assert (storage.carried, storage.dequantised) == ((kind,), ())
    assert manifest.quality.perplexity == pytest.approx(manifest.quality.reference_perplexity, rel=0.02)
    graph = ir.load(tmp_path / "bundle" / "target" / "suffix.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert {node.attributes["block_size"].as_int() for node in products} == {32}
    has_offsets = kind == "Q4_1"
    assert sum(node.op_type == "ReduceSum" for node in graph) == has_offsets * len(products)


def test_blocks_that_products_cannot_hold_are_rounded_to_8_bits_and_named(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    """Values in other blocks than queries and keys are not joined with them."""
    file = write_gguf("Q4_0", mixed="Q5_0")
    manifest = export_pair(file, file, tmp_path / "bundle", ExportOptions(precision="file", **SMALL))
    storage = manifest.target.storage
    assert storage is not None
    assert (storage.carried, storage.dequantised) == (("Q4_0",), ("Q5_0",))
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
