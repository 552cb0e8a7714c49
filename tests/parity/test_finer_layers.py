"""Layers in four bits, and in eight the kind of product that these hurt most: which that is, what a bundle holds."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorsd.cli.commands.inspect import precision_line
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.verify.sensitive_layers import finer_weights, kind_names

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


def test_of_a_kind_that_is_too_large_some_layers_get_eight_bits(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The products back from the feed-forward network are a third of all weights: one layer's have room."""
    folder = make_checkpoint(
        tmp_path / "target", "llama", seed=3, num_hidden_layers=4, hidden_size=64, intermediate_size=640
    )
    kinds = (NAMES, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    layers = [f"model.layers.{layer}." for layer in range(4)]
    groups = [tuple(f"{layer}{name}.weight" for name in kind) for layer in layers for kind in kinds]
    formats = ExportOptions(precision="int4").formats(64)
    windows = np.random.default_rng(2).integers(1, 90, (1, 48))
    finer = finer_weights(open_checkpoint(folder, "target"), formats, torch.float32, groups, windows)

    (apart,) = (name for name in finer if "mlp" in name)
    assert apart.endswith("mlp.down_proj.weight")
    told = kind_names(finer, [name for group in groups for name in group])
    assert told[-1] == apart
    assert set(told[:-1]) == {f"model.layers.*.{name}.weight" for kind in kinds[:2] for name in kind}
