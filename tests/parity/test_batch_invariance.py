"""A row of the target has the same bits in passes of any number of rows, so no method can part by rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from joint_rows import count_different

from mirrorsd.device_maps import TargetPlacement
from mirrorsd.export import ExportOptions
from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mirrorsd.export.checkpoints.loading import DTYPE_BY_PRECISION, target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.integer_choice import by_row
from mirrorsd.export.weights.block_formats import InputScaling
from mirrorsd.export.weights.gguf_tensors import FileBlocks
from mirrorsd.machine.doctor.row_invariance import largest_row_difference
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.ledger import Ledger, TargetPass

CONTEXT = 72
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
FORMATS = {
    "fp32": {"precision": "fp32"},
    "int8": {"precision": "int8"},
    "int8-blocks-of-128": {"precision": "int8", "block_size": 128},
    "int8-integers": {"precision": "int8", "is_integer": True},
    "int8-integers-of-rotated-rows": {"precision": "int8", "is_integer": True, "is_rotated": True},
    "int4": {"precision": "int4"},
    "int4-blocks-of-32": {"precision": "int4", "block_size": 32},
    "int4-scanned-head": {"precision": "int4", "is_scanned": True},
    "fp16": pytest.param({"precision": "fp16"}, marks=pytest.mark.slow),
    "int4-in-fp16": pytest.param({"precision": "int4", "compute": "fp16"}, marks=pytest.mark.slow),
}


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("wide") / "target"
    return open_checkpoint(make_checkpoint(folder, "qwen3", seed=5, head_dim=64, **WIDE), "target")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A GGUF file with every form that products of its blocks have."""
    from gguf_writer import write_file

    path = tmp_path_factory.mktemp("blocks") / "wide.gguf"
    kinds = {"mixed": "Q6_K", "head": "Q5_1", "output": "Q5_0", "down": "Q2_K"}
    return open_checkpoint(write_file(path, "Q4_K", **kinds), "target")


def open_session(
    checkpoint: Checkpoint,
    bundle: Path,
    *,
    is_scanned: bool = False,
    is_integer: bool = False,
    is_rotated: bool = False,
    finer: tuple[str, ...] = (),
    threads: int = 2,
    **settings: Any,
) -> OnnxTarget:
    options = ExportOptions(**settings)
    bundle.mkdir(exist_ok=True)
    model = open_model(checkpoint, DTYPE_BY_PRECISION[options.computes_in])
    shape = target_shape(model.network, options.computes_in)
    formats = options.formats(shape.hidden_size)
    formats = replace(formats, scan=formats.layers) if is_scanned else formats
    rotated = [name for name in checkpoint.tensors if is_rotated and "down_proj" in name]
    inputs = dict.fromkeys(rotated, InputScaling(None, is_rotated=True))
    formats = by_row(formats, inputs, is_tied=False) if is_integer else formats
    formats = formats.with_finer(finer)
    formats = replace(formats, carried=FileBlocks(checkpoint.tensors)) if checkpoint.gguf else formats
    how = {"formats": formats, "is_batch_invariant": options.is_batch_invariant}
    plan = TargetPlan(shape=shape, context=CONTEXT, num_candidates=8, adapters={shape.num_layers // 2: None}, **how)
    write_target(model, plan, bundle, lambda stage, share: None, Journal(bundle, ""))
    entry = plan.entry(checkpoint.source, options.precision)
    return OnnxTargetModel(bundle, entry, TargetPlacement(threads=threads)).new_session()


@pytest.mark.parametrize("settings", FORMATS.values(), ids=list(FORMATS))
def test_every_bit_is_the_same_whatever_the_number_of_rows(
    checkpoint: Checkpoint, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Up to the last position of the context, where only the caches' spare rows are left."""
    session = open_session(checkpoint, tmp_path, **settings)
    sizes = (2, 3, 5, 6, 7, 8, 13, 16, 33)
    assert largest_row_difference(session, num_rows=session.context, pass_sizes=sizes) == 0.0


@pytest.mark.parametrize("settings", FORMATS.values(), ids=list(FORMATS))
def test_every_bit_is_the_same_whoever_is_beside_it(
    checkpoint: Checkpoint, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Rows of several conversations in one pass, more of them than there are slots, some of which only read."""
    model = open_session(checkpoint, tmp_path, threads=1, **settings)._model
    if model.entry.shape.dtype != "float32":
        assert model.open_batch(2) is None
        return
    for num_slots in (2, 4, 8):
        batch = model.open_batch(num_slots)
        assert batch is not None
        different, compared = count_different(model, batch)
        assert (different, compared >= 12) == (0, True)


def test_rows_of_several_make_whole_groups_together(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Three with a row each, one that reads and two with logits: four rows, two of them with logits."""
    session = open_session(checkpoint, tmp_path, threads=1, precision="int8", block_size=128)
    assert session.row_group == 2
    batch = session._model.open_batch(4)
    assert batch is not None
    sessions, tokens = [session, *(session._model.new_session() for _ in range(2))], np.arange(1)
    ways = (None, True, True)
    passes = [
        TargetPass(session=own, tokens=tokens, start=0, ledger=Ledger(), with_logits=way)
        for own, way in zip(sessions, ways, strict=True)
    ]
    outputs = batch.run(passes)
    assert [batch._bound.results[name].value.shape()[1] for name in ("logits", "argmax_ids")] == [2, 2]
    assert batch._bound._sizes == (4, 2)
    alone = session.logits(tokens, 0)
    assert all(np.array_equal(output.logits, alone) for output in outputs[1:])


def test_a_whole_group_fits_behind_a_window_at_the_contexts_end_whoever_is_beside_it(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Of eight and nine rows the shorter pass has one more, beyond the context."""
    session = open_session(checkpoint, tmp_path, threads=1, precision="int8", block_size=128)
    batch, reader, start = session._model.open_batch(2), session._model.new_session(), session.context - 8
    assert batch is not None
    text = np.arange(session.context) % 50
    session.prefill(text[:start], 0, ledger=Ledger())
    last = TargetPass(session=session, tokens=text[start:], start=start, ledger=Ledger(), with_logits=True)
    read = TargetPass(session=reader, tokens=text[:9], start=0, ledger=Ledger(), with_logits=None)
    logits = batch.run([last, read])[0].logits
    assert logits is not None
    assert np.array_equal(logits, session.logits(text[start:], start))
    assert np.array_equal(reader.logits(text[9:12], 9), session.logits(text[:12], 0)[9:])


def test_every_bit_of_heads_that_are_added_up_in_parts_is_the_same_whoever_is_beside_it(
    make_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that are long enough sit at tables; shorter ones, as the first, are guests or wait."""
    monkeypatch.setitem(globals(), "CONTEXT", 132)
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "target", "qwen3", seed=5, head_dim=256, **WIDE), "target")
    model = open_session(checkpoint, tmp_path / "bundle", threads=1, precision="fp32")._model
    batch = model.open_batch(4)
    assert batch is not None
    different, compared = count_different(model, batch, first=batch.fewest_tokens)
    assert (different, compared >= 12) == (0, True)


def test_every_bit_is_the_same_with_the_blocks_of_a_file(file: Checkpoint, tmp_path: Path) -> None:
    """In 4 and 8 bits, blocks of 16 and 32, with and without offsets."""
    session = open_session(file, tmp_path, precision="file")
    assert largest_row_difference(session, num_rows=session.context, pass_sizes=tuple(range(2, 17))) == 0.0


def test_a_processor_that_gives_a_single_row_other_bits_computes_pairs(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has a token less of room, as the last row may have company."""
    own = OnnxTarget.logits
    monkeypatch.setattr(OnnxTarget, "logits", lambda target, tokens, start: own(target, tokens, start) + len(tokens))
    session = open_session(checkpoint, tmp_path, precision="int4", block_size=32)
    assert (session.row_group, session.context) == (2, CONTEXT - 1)
    assert open_session(checkpoint, tmp_path / "loose", precision="int4", is_batch_invariant=False).row_group == 1
    assert open_session(checkpoint, tmp_path / "fp32", precision="fp32").row_group == 1


def test_without_it_one_row_differs_in_its_last_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What the spare row is for; if this fails, ONNX Runtime has become batch-invariant, and it may go."""
    session = open_session(checkpoint, tmp_path, precision="fp32", is_batch_invariant=False)
    assert 0.0 < largest_row_difference(session) < 1e-3


def test_every_bit_is_the_same_where_some_products_have_more_bits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Four bits in blocks of 128, whose rows come in pairs, beside eight bits: of one kind, and of one layer alone."""
    kinds = [f"model.layers.{layer}.self_attn.{name}_proj.weight" for layer in (0, 1) for name in "qkv"]
    settings: dict[str, Any] = {"precision": "int4", "block_size": 128}
    finer = (*kinds, "model.layers.1.mlp.down_proj.weight")
    session = open_session(checkpoint, tmp_path, finer=finer, **settings)
    bits = [
        node.attributes["bits"].as_int()
        for name in ("prefix", "suffix")
        for node in ir.load(tmp_path / "target" / f"{name}.onnx").graph
        if node.op_type == "MatMulNBits"
    ]
    assert bits == [8, 4, 4, 4, 8, 4, 4, 8, 8]
    assert (session._model.entry.row_group, session._model.entry.spare_rows) == (2, 1)
    assert largest_row_difference(session, num_rows=session.context, pass_sizes=tuple(range(1, 65))) == 0.0
