"""Targets that are mixtures of experts: a row has its bits beside any others, and texts are plain decoding's."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from family_cases import CASES
from gguf_writer import write_file
from mxfp4_files import round_experts
from safetensors.torch import load_file, save_file
from same_texts import check_conversations, check_methods, check_several_answers

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.devices.onnxruntime.packed_graph import Sizes, packed
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.read_bytes import read_bytes
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.loading import target_shape
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.pair_job import plan_job
from mirrorsd.export.verify.target import TargetRun
from mirrorsd.export.verify.text_passes import Pass
from mirrorsd.graphs.errors import ConfigError, DeviceError, ExportError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel
from mirrorsd.training.models.whole_model import load_whole

METHODS = ("serial", "mirror", "auto", "lookup")
CONTEXT, ROWS = 384, 64
SIZES = {case.family: case.sizes for case in CASES}
SMALL: dict[str, Any] = {
    "context": CONTEXT,
    "num_exit_candidates": 4,
    "num_draft_candidates": 4,
    "buckets": ((8, 8),),
    "capacities": (CONTEXT,),
}


class Pair:
    """A random mixture with a dense draft that has linked streams, and their bundle."""

    def __init__(self, folder: Path, make_checkpoint: Callable[..., Path], family: str) -> None:
        self.target, self.draft, self.bundle = folder / "target", folder / "draft", folder / "pair.mirror"
        given = {"num_hidden_layers": 3, "tie_word_embeddings": True} | SIZES[family]
        if family == "gpt_oss":
            given["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
        make_checkpoint(self.target, family, seed=5, **given)
        if family == "gpt_oss":
            round_experts(self.target)
        streams = {"num_streams": 3, "stream_rank": 8, "link_rank": 8}
        make_checkpoint(self.draft, "llama", seed=2, num_hidden_layers=3, tie_word_embeddings=True, **streams)
        options = ExportOptions(precision="int8", exit_layers=(1,), products="blocks", **SMALL)
        self.manifest: Manifest = export_pair(self.target, self.draft, self.bundle, options)


@pytest.fixture(scope="module")
def pair(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("mixture"), make_checkpoint, "qwen3_moe")


@pytest.fixture(scope="module")
def gpt_oss_pair(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Its experts are MXFP4 blocks, as published."""
    return Pair(tmp_path_factory.mktemp("gpt_oss"), make_checkpoint, "gpt_oss")


@pytest.fixture(params=["pair", "gpt_oss_pair"])
def each_pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def pipe(each_pair: Pair) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(each_pair.bundle, device_map="cpu") as pipe:
        yield pipe


def test_stages_are_what_transformers_computes(each_pair: Pair) -> None:
    by_stage = {result.stage: result for result in each_pair.manifest.verify}
    assert {"prefix", "exit1", "suffix"} < by_stage.keys()
    assert max(result.max_relative_error for result in by_stage.values()) <= 1e-4
    assert min(result.top1_agreement for result in by_stage.values()) == 1.0
    assert each_pair.manifest.target.source.compared == "logits"
    shape = each_pair.manifest.target.shape
    assert (shape.num_experts, shape.num_active) in ((16, 8), (12, 4))


def test_each_expert_is_a_product_of_its_own_and_the_router_is_of_floats(pair: Pair) -> None:
    graph = onnx.load(pair.bundle / "target" / "suffix.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("MatMulNBits") >= 2 * 16
    entry, stages = pair.manifest.target, [pair.bundle / segment.file for segment in pair.manifest.target.segments]
    assert entry.read_bytes < 0.8 * sum(map(read_bytes, stages))  # half of the experts' weights count
    routers = {tensor.name: tensor.data_type for tensor in graph.initializer if "mlp.gate.weight" in tensor.name}
    assert len(routers) == 1  # of the two layers of the suffix, one is dense
    assert set(routers.values()) == {onnx.TensorProto.FLOAT}


def test_several_conversations_can_share_its_passes(pair: Pair) -> None:
    """Nothing but attention asks where in its text a row stands; a mixture counts its rows."""
    sizes = Sizes(num_tables=1, num_slots=2, num_guests=0, spare_rows=pair.manifest.target.spare_rows)
    for segment in pair.manifest.target.segments:
        assert packed((pair.bundle / segment.file).read_bytes(), sizes).model


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3_moe", "fp32"), ("qwen3_moe", "int4"), ("gpt_oss", "fp32"), ("gpt_oss", "int8"), ("gpt_oss", "int4")],
)
def test_a_row_has_its_bits_beside_any_other_rows(
    family: str, precision: str, make_checkpoint: Callable[..., Path], tmp_path: Path, knows_integer_kernels: bool
) -> None:
    if precision != "fp32" and not knows_integer_kernels:
        pytest.skip("this processor's integer kernels compute rows in pairs")
    folder = make_checkpoint(tmp_path / "target", family, seed=9, num_hidden_layers=2, **SIZES[family])
    target, draft = open_checkpoint(folder, "target"), open_checkpoint(make_draft(tmp_path, make_checkpoint), "draft")
    formats = plan_job(target, draft, ExportOptions(precision=precision)).formats
    model = open_model(target)
    shape = target_shape(model.network, "fp32")
    plan = TargetPlan(shape=shape, context=CONTEXT, num_candidates=4, adapters={}, formats=formats)
    assert plan.row_group == 1
    write_target(model, plan, tmp_path, lambda stage, share: None, Journal(tmp_path, ""))
    run, dice = TargetRun(tmp_path, plan), np.random.default_rng(1)
    ids = tuple(dice.integers(0, shape.vocab_size, ROWS).tolist())
    truth = np.concatenate([run.forward(Pass(row, ids[row : row + 1], 1))[1] for row in range(ROWS)])
    for num_rows in (2, 3, 5, 8, 13, 33, 64):
        for start in range(0, ROWS, num_rows):
            rows = ids[start : start + num_rows]
            num_right = int(dice.integers(1, len(rows) + 1))  # those behind are wrong, at every place in the end
            found = run.forward(Pass(start, (*rows[:num_right], *rows[:0:-1])[: len(rows)], num_right))[1]
            assert np.array_equal(found[:num_right], truth[start : start + num_right]), (num_rows, start)
            run.forward(Pass(start, rows, len(rows)))


def make_draft(folder: Path, make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(folder / "draft", "llama", seed=2, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_methods_write_plain_text(pipe: MirrorPipeline, temperature: float) -> None:
    check_methods(pipe, METHODS, temperature)


def test_a_conversation_that_is_taken_back_or_saved_goes_on_as_if_it_were_new(
    pipe: MirrorPipeline, tmp_path: Path
) -> None:
    check_conversations(pipe, METHODS, tmp_path / "cache")


def test_several_answers_are_those_of_their_seeds(pipe: MirrorPipeline) -> None:
    check_several_answers(pipe)


def test_mxfp4_blocks_are_read_as_the_floats_that_they_stand_for(gpt_oss_pair: Pair) -> None:
    """The export has compared every parameter with transformers' own reading, bit by bit."""
    checkpoint = open_checkpoint(gpt_oss_pair.target, "target")
    expert = checkpoint.tensors["model.layers.1.mlp.experts.7.gate_up_proj.weight"]
    assert (expert.dtype, expert.shape) == ("MXFP4", (128, 64))
    floats = expert.read(torch.float32)
    assert len(floats.unique()) > 16  # blocks have scales of their own
    assert checkpoint.source.num_parameters == sum(stored.size for stored in checkpoint.tensors.values())


@pytest.mark.parametrize("flaw", ["no scales", "other blocks"])
def test_damaged_mxfp4_blocks_are_refused(flaw: str, gpt_oss_pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(gpt_oss_pair.target, tmp_path / "target")
    path = tmp_path / "target" / "model.safetensors"
    tensors, name = load_file(path), "model.layers.0.mlp.experts.down_proj"
    if flaw == "no scales":
        del tensors[f"{name}_scales"]
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"][..., :8].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ExportError, match=r"down_proj_blocks' and its scales are U8 .* expected of MXFP4"):
        open_checkpoint(tmp_path / "target", "target")


def test_other_rounded_experts_are_refused(gpt_oss_pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(gpt_oss_pair.target, tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}), encoding="utf-8")
    with pytest.raises(ExportError, match="is already quantised; export the unquantised checkpoint instead"):
        open_checkpoint(tmp_path / "target", "target")


def test_rounded_experts_are_loaded_whole_for_training(gpt_oss_pair: Pair) -> None:
    network = load_whole(gpt_oss_pair.target)
    assert network.model.layers[0].mlp.experts.down_proj.dtype == torch.float32
    ids = torch.arange(20)[None]
    ours = open_model(open_checkpoint(gpt_oss_pair.target, "target")).logits(ids.numpy())
    with torch.no_grad():
        theirs = network(ids).logits.numpy()
    assert float(np.abs(ours - theirs).max()) <= 1e-4 * float(theirs.std())


def test_a_gguf_file_of_gpt_oss_is_refused(gpt_oss_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    monkeypatch.setattr("mirrorsd.export.checkpoints.checkpoint.small_files", lambda path: gpt_oss_pair.target)
    with pytest.raises(ExportError, match="a GGUF file of gpt_oss, whose experts are not read from there"):
        open_checkpoint(file, "target")


@pytest.mark.parametrize("up", [None, "Q5_0"])
def test_a_gguf_file_keeps_its_blocks(up: str | None, tmp_path: Path) -> None:
    """The export compares what it reads with transformers' reading, and its graphs with that.

    An expert's gates and ups may be of two kinds; they are two products then.
    """
    kinds = {"mixed": "Q8_0", "down": "Q8_0", "up": up}
    target = write_file(tmp_path / "mixture.gguf", "Q4_1", architecture="qwen3moe", **kinds)
    draft = write_file(tmp_path / "draft.gguf", "Q8_0")
    manifest = export_pair(target, draft, tmp_path / "bundle", ExportOptions(precision="file", **SMALL))
    storage = manifest.target.storage
    assert storage is not None
    carried = ("F32", "Q4_1", *([up] if up else []), "Q8_0")  # routers are floats
    assert (storage.carried, storage.dequantised) == (carried, ())
    assert manifest.target.source.compared == "logits"


def test_other_runtimes_and_providers_are_refused(pair: Pair) -> None:
    target = pair.manifest.target
    with pytest.raises(DeviceError, match="mixtures of experts, which run on ONNX Runtime only"):
        OpenVinoTargetModel(pair.bundle, target, TargetPlacement(runtime="openvino"))
    with pytest.raises(DeviceError, match="mixtures of experts, which run on the processor only"):
        OnnxTargetModel(pair.bundle, target, TargetPlacement(provider="CUDAExecutionProvider"))


def test_as_a_draft_it_is_refused(pair: Pair) -> None:
    with pytest.raises(ExportError, match="a mixture of experts: each guess would read experts of its own"):
        open_checkpoint(pair.target, "draft")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, "the experts of qwen3_moe compute in fp32: choose fp32, int8 or int4"),
        ({"precision": "int8", "block_size": 128}, "block_size is 128, with which rows are computed in pairs"),
    ],
)
def test_what_would_not_be_exact_is_refused(pair: Pair, options: dict[str, Any], words: str) -> None:
    target, draft = open_checkpoint(pair.target, "target"), open_checkpoint(pair.draft, "draft")
    with pytest.raises(ConfigError, match=words):
        plan_job(target, draft, ExportOptions(**options))
