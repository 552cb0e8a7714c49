"""Three ways in which a graph can be wrong, in four precisions: each is refused, and what is right is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mirrorsd.export.checkpoints.loading import DTYPE_BY_PRECISION, load_adapter, target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.options import ExportOptions
from mirrorsd.export.passes import aware_quantisation
from mirrorsd.export.verify.target import TargetReference, TargetRun, compare_target, stored_reference
from mirrorsd.export.verify.tolerances import TOLERANCES, check_parity
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ParityError
from mirrorsd.graphs.manifest import VerifyResult

CONTEXT = 256
SUFFIX = names.stage_file("suffix")
LAYERS = (2, 3)


class Exported:
    """A target of four layers with one exit and an adapter, and what PyTorch makes of its rounded weights."""

    def __init__(self, checkpoint: Checkpoint, bundle: Path, precision: str) -> None:
        model = open_model(checkpoint, DTYPE_BY_PRECISION[precision])
        shape = target_shape(model.network, precision)
        self.bundle = bundle
        self.plan = TargetPlan(
            shape=shape,
            formats=ExportOptions(precision=precision).formats(shape.hidden_size),
            context=CONTEXT,
            num_candidates=8,
            adapters={LAYERS[0]: load_adapter(checkpoint.folder, LAYERS[0], shape.hidden_size)},
        )
        write_target(model, self.plan, bundle, lambda stage, share: None, Journal(bundle, ""))
        ids = np.random.default_rng(7).integers(0, shape.vocab_size, 160).tolist()
        self.reference: TargetReference = stored_reference(checkpoint, self.plan, ids)

    def compare(self) -> tuple[VerifyResult, ...]:
        return compare_target(TargetRun(self.bundle, self.plan, in_float32=True), self.reference, "random ids")

    def check(self) -> None:
        check_parity(self.compare(), TOLERANCES[self.plan.shape.dtype])


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"num_hidden_layers": 4, "tie_word_embeddings": True, "adapter_layers": LAYERS[:1]}
    return open_checkpoint(make_checkpoint(folder, "llama", seed=21, **sizes), "target")


@pytest.fixture(scope="module", params=["fp32", "fp16", "int8", "int4"])
def exported(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory, request: Any) -> Exported:
    return Exported(checkpoint, tmp_path_factory.mktemp(request.param), request.param)


def product_behind(node: ir.Node) -> ir.Node:
    """The product that a node's first input comes from."""
    while not node.op_type.startswith("MatMul"):
        assert node.inputs[0] is not None
        before = node.inputs[0].producer()
        assert before is not None
        node = before
    return node


def swap_queries_of_two_layers(graph: ir.Graph) -> None:
    """Two layers' joined projections of queries, keys and values change places, with their scales."""
    first, second = (product_behind(node) for node in graph if node.op_type == "GroupQueryAttention")
    for place, (ours, others) in enumerate(zip(first.inputs, second.inputs, strict=True)):
        if place and ours is not None:
            first.replace_input_with(place, others)
            second.replace_input_with(place, ours)


def change_the_rotary_base(graph: ir.Graph) -> None:
    """The tables of cosines and sines that a base of 10,500 gives instead of 10,000."""
    tables = {node.inputs[place] for node in graph if node.op_type == "GroupQueryAttention" for place in (7, 8)}
    assert len(tables) == 2
    for table in tables:
        assert table is not None
        assert table.const_value is not None
        old = table.const_value.numpy()
        frequencies = 10_500.0 ** (-np.arange(old.shape[1]) / old.shape[1])
        angles = np.arange(old.shape[0])[:, None] * frequencies
        new = (np.cos if old[0, 0] == 1 else np.sin)(angles).astype(old.dtype)
        assert not np.array_equal(new, old)
        assert np.abs(new[1] - old[1]).max() < 0.05, "the same order of dimensions"
        table.const_value = ir.Tensor(new, table.dtype, name=table.name)


def leave_out_a_norm(graph: ir.Graph) -> None:
    """A layer's norm keeps its scaling by the rows' size and loses its weights."""
    norm = [node for node in graph if node.op_type.endswith("SimplifiedLayerNormalization")][1]
    place = len([value for value in norm.inputs if value is not None]) - 1
    weight = norm.inputs[place]
    assert weight is not None
    assert weight.const_value is not None
    ones = np.ones_like(weight.const_value.numpy())
    replacement = ir.Value(name="ones", type=weight.type, shape=weight.shape, const_value=ir.Tensor(ones, name="ones"))
    graph.register_initializer(replacement)
    norm.replace_input_with(place, replacement)


BREAKS = (swap_queries_of_two_layers, change_the_rotary_base, leave_out_a_norm)


def test_a_right_graph_is_accepted(exported: Exported) -> None:
    """At every precision what is left is the arithmetic of float32: a hundredth of what is allowed."""
    exported.check()
    assert max(result.max_relative_error for result in exported.compare()) < 1e-4


@pytest.mark.parametrize("break_graph", BREAKS, ids=lambda function: function.__name__)
def test_a_broken_graph_is_refused(exported: Exported, break_graph: Callable[[ir.Graph], None]) -> None:
    path = exported.bundle / SUFFIX
    right = path.read_bytes()
    model = ir.load(path)
    break_graph(model.graph)
    ir.save(model, path)
    try:
        with pytest.raises(ParityError, match=r"stage 'suffix' is not what PyTorch computes with the same weights"):
            exported.check()
    finally:
        path.write_bytes(right)


def test_weights_in_the_wrong_place_of_the_file_are_refused(exported: Exported) -> None:
    """The graph is right, and 4 kB of the shared file are another tensor's."""
    path = exported.bundle / names.WEIGHTS_FILE
    right = path.read_bytes()
    half = len(right) // 2 // 4096 * 4096
    path.write_bytes(right[:half] + right[half + 4096 : half + 8192] + right[half + 4096 :])
    try:
        with pytest.raises(ParityError, match="is not what PyTorch computes"):
            exported.check()
    finally:
        path.write_bytes(right)


def test_no_number_is_no_agreement(exported: Exported) -> None:
    reference = exported.reference
    exported.reference = reference._replace(logits=np.full_like(reference.logits, np.nan))
    try:
        with pytest.raises(ParityError, match="largest error inf standard deviations"):
            exported.check()
    finally:
        exported.reference = reference


@pytest.mark.slow
def test_gptq_is_held_to_the_same_bound_and_rounds_each_matrix_once(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rounded for the graphs is what PyTorch is given, without rounding it again."""
    target = make_checkpoint(tmp_path / "target", "llama", seed=3, num_hidden_layers=2, tie_word_embeddings=True)
    checkpoint = open_checkpoint(target, "target")
    model = open_model(checkpoint)
    shape = target_shape(model.network, "int4")
    inputs, bundle = tmp_path / "inputs", tmp_path / "bundle"
    inputs.mkdir()
    bundle.mkdir()
    rounded: list[tuple[int, ...]] = []

    round_by = aware_quantisation._round_by

    def counted(rows: Any, *given: Any) -> Any:
        rounded.append(rows.shape)
        return round_by(rows, *given)

    monkeypatch.setattr(aware_quantisation, "_round_by", counted)
    windows = np.random.default_rng(5).integers(0, shape.vocab_size, (2, 64))
    plan = TargetPlan(
        shape=shape,
        formats=ExportOptions(precision="int4").formats(shape.hidden_size),
        context=CONTEXT,
        num_candidates=8,
        adapters={1: None},
        choose_pack=aware_quantisation.collect_inputs(model, windows, inputs).choose_pack,
    )
    write_target(open_model(checkpoint), plan, bundle, lambda stage, share: None, Journal(bundle, ""))
    assert len(rounded) == 2 * 7
    reference = stored_reference(checkpoint, plan, list(range(100)))
    assert len(rounded) == 2 * 7
    results = compare_target(TargetRun(bundle, plan, in_float32=True), reference, "random ids")
    assert max(result.max_relative_error for result in results) < 1e-4
