"""Layers in four bits, and in eight the kind of product that these hurt most: which that is, what a bundle holds."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from mirrorsd.cli.commands.inspect import precision_line
from mirrorsd.export import ExportOptions, export_pair

NAMES = tuple(f"self_attn.{name}_proj" for name in "qkv")


@pytest.mark.slow
def test_the_kind_that_rounding_hurts_most_gets_eight_bits(
    make_checkpoint: Callable[..., Path], gptq_options: ExportOptions, tmp_path: Path
) -> None:
    """A few of the values' weights are 30 times as large as the others in their blocks: 4 bits leave these nothing."""
    target = make_checkpoint(tmp_path / "target", "llama", seed=3, num_hidden_layers=2, intermediate_size=320)
    weights = load_file(target / "model.safetensors")
    for layer in (0, 1):
        values = weights[f"model.layers.{layer}.{NAMES[2]}.weight"]
        values *= 20
        values[:, ::8] *= 30
    save_file(weights, target / "model.safetensors", {"format": "pt"})

    draft = make_checkpoint(tmp_path / "draft", "llama", seed=8, num_hidden_layers=2, tie_word_embeddings=True)
    manifest = export_pair(target, draft, tmp_path / "bundle", gptq_options)

    storage = manifest.target.storage
    assert storage is not None
    assert set(storage.finer) >= {f"model.layers.*.{name}.weight" for name in NAMES}
    assert all(f"{name} int8" in precision_line(manifest.target) for name in NAMES)
    graph = ir.load(tmp_path / "bundle" / "target" / "suffix.onnx").graph
    products = {node.inputs[1].name: node for node in graph if node.op_type == "MatMulNBits" and node.inputs[1]}
    bits = {name: node.attributes["bits"].as_int() for name, node in products.items() if name}
    assert {count for name, count in bits.items() if "self_attn.q_proj" in name} == {8}
    assert {count for name, count in bits.items() if "mlp" in name} == {4}
