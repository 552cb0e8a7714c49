"""Every supported family with products of integers: parity, the bits of rows, and one text by all methods."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from family_cases import CASES, CONTEXT, Case

from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.integer_choice import by_row
from mirrorsd.export.pair_job import for_family
from mirrorsd.export.passes.aware_quantisation import collect_inputs
from mirrorsd.export.passes.input_scaling import scale_inputs
from mirrorsd.export.verify.target import TargetRun, compare_target, stored_reference, target_reference
from mirrorsd.tests.parity.test_families import (
    FORMATS,
    check,
    check_int8,
    check_text,
    make,
    marked,
)


@pytest.mark.parametrize("case", marked(CASES, ("opt",)))
def test_a_family_with_products_of_integers(
    case: Case,
    make_checkpoint: Callable[..., Path],
    llama_pair: Any,
    tmp_path: Path,
    knows_integer_kernels: bool,
) -> None:
    """Its weights by row, its rows scaled by what a text gives them: parity, the bits of rows, and one text."""
    prove(case, make_checkpoint, llama_pair, tmp_path, is_invariant=knows_integer_kernels, is_scan=False)


def test_a_head_whose_best_logits_are_computed_again(
    make_checkpoint: Callable[..., Path], llama_pair: Any, tmp_path: Path, knows_integer_kernels: bool
) -> None:
    """The head's product is of integers by row, its best tokens' are of floats with the embedding's blocks."""
    case = next(case for case in CASES if case.is_tied)
    nodes = prove(case, make_checkpoint, llama_pair, tmp_path, is_invariant=knows_integer_kernels, is_scan=True)
    assert {"QGemm", "GatherBlockQuantized", "ScatterElements"} <= nodes


@pytest.mark.parametrize(("rotated", "width"), [("down_proj", 64), ("o_proj", 64), ("_proj", 128)])
def test_rows_that_are_rotated_before_a_product(
    make_checkpoint: Callable[..., Path],
    llama_pair: Any,
    tmp_path: Path,
    knows_integer_kernels: bool,
    rotated: str,
    width: int,
) -> None:
    """Of one kind of product, or of all, those that share their rows included."""
    sizes = CASES[0].sizes | {"hidden_size": width, "head_dim": 32, "intermediate_size": 192}
    case = replace(CASES[0], sizes=sizes, largest_error=0.6, least_agreement=0.85)
    parts = (make_checkpoint, llama_pair, tmp_path)
    nodes = prove(case, *parts, is_invariant=knows_integer_kernels, is_scan=False, rotated=rotated)
    assert "FusedMatMul" in nodes


def prove(
    case: Case,
    make_checkpoint: Callable[..., Path],
    llama_pair: Any,
    tmp_path: Path,
    *,
    is_invariant: bool,
    is_scan: bool,
    rotated: str = "none",
) -> set[str]:
    """All that is to be proved of a family; returns the operators of its last stage."""
    checkpoint = open_checkpoint(make(case, tmp_path / "target", make_checkpoint), "target")
    model = open_model(checkpoint)
    shape = target_shape(model.network, "fp32")
    windows = np.random.default_rng(5).integers(0, shape.vocab_size, (2, 64))
    blocks = for_family(checkpoint, FORMATS["int8"])
    inputs, _ = scale_inputs(model, collect_inputs(model, windows, tmp_path, with_head=True), blocks.finer)
    inputs |= {name: replace(scaling, is_rotated=True) for name, scaling in inputs.items() if rotated in name}
    network = model.network
    is_tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    formats = by_row(blocks, inputs, is_tied=is_tied, is_scan=is_scan)
    plan = TargetPlan(shape=shape, context=CONTEXT, num_candidates=8, adapters={1: None}, formats=formats)
    ids = np.random.default_rng(7).integers(0, shape.vocab_size, 200).tolist()
    reference = target_reference(model, plan, ids)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write_target(model, plan, bundle, lambda stage, share: None, Journal(bundle, ""))
    check(compare_target(TargetRun(bundle, plan, in_float32=True), stored_reference(checkpoint, plan, ids), "random"))
    results = compare_target(TargetRun(bundle, plan), reference, "random")
    check_int8(results, float(reference.logits.std()), case)
    nodes = onnx.load(bundle / "target" / "suffix.onnx", load_external_data=False).graph.node
    operators = {node.op_type for node in nodes}
    assert "MatMulIntegerToFloat" in operators
    check_text(bundle, plan, checkpoint, llama_pair, is_invariant=is_invariant)
    return operators
