"""Layers in four bits, the most sensitive kind of product in eight: which that is, and what the stages then hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.options import ExportOptions
from mirrorsd.export.passes.aware_quantisation import collect_inputs
from mirrorsd.export.verify.sensitive_layers import finer_weights
from mirrorsd.export.verify.target import TargetRun, compare_target, stored_reference

ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkv"]


@pytest.fixture
def target(make_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """Two layers whose values are the same for nearly all inputs, but for a few large weights that need more bits."""
    folder = make_checkpoint(tmp_path / "target", "llama", seed=3, num_hidden_layers=2, intermediate_size=320)
    weights = load_file(folder / "model.safetensors")
    for name in ATTENTION:
        if "v_proj" in name:
            weights[name] *= 20
            weights[name][:, ::8] *= 30
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_kind_that_rounding_hurts_most_gets_eight_bits(target: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(target, "target")
    model = open_model(checkpoint)
    shape = target_shape(model.network, "int4")
    formats = ExportOptions(precision="int4").formats(shape.hidden_size)
    windows = np.random.default_rng(5).integers(0, shape.vocab_size, (2, 64))
    inputs = collect_inputs(model, windows, tmp_path)
    assert ("model.layers.0.self_attn.q_proj.weight", *ATTENTION[1:3]) in inputs.groups
    finer = finer_weights(checkpoint, formats, torch.float32, inputs.groups, windows)
    assert set(ATTENTION) <= set(finer)

    plan = TargetPlan(shape=shape, formats=formats.with_finer(finer), context=256, num_candidates=8, adapters={1: None})
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write_target(open_model(checkpoint), plan, bundle, lambda stage, share: None, Journal(bundle, ""))
    bits = bits_of_products(bundle / plan.segments[0].file)
    assert 8 in bits
    assert 4 in bits
    reference = stored_reference(checkpoint, plan, list(range(100)))
    results = compare_target(TargetRun(bundle, plan, in_float32=True), reference, "random ids")
    assert max(result.max_relative_error for result in results) < 1e-4


def bits_of_products(stage: Path) -> list[int]:
    """Bits of each packed product of a stage."""
    nodes = onnx.load(stage, load_external_data=False).graph.node
    packed = [node for node in nodes if node.op_type == "MatMulNBits"]
    return [attribute.i for node in packed for attribute in node.attribute if attribute.name == "bits"]
