"""Targets with short convolutions: the rows that these read are their states, and texts are plain decoding's."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from family_cases import CASES
from safetensors.torch import load_file, save_file
from same_texts import check_conversations, check_methods, check_several_answers
from state_reader import Reader

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import TargetPlacement
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.pair_job import plan_job
from mirrorsd.graphs import names
from mirrorsd.graphs.errors import ConfigError, DeviceError, ExportError
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel

METHODS = ("serial", "mirror", "auto", "lookup")
SIZES = {case.family: case.sizes for case in CASES}
KERNEL = {"lfm2": 3, "lfm3": 7}


class Pair:
    """A random model of the family with a draft that has linked streams, and their bundle; its exit is behind a layer
    with a convolution."""

    def __init__(self, folder: Path, make_checkpoint: Callable[..., Path], family: str) -> None:
        self.family, self.target, self.draft = family, folder / "target", folder / "draft"
        self.bundle = folder / "pair.mirror"
        make_checkpoint(self.target, family, seed=5, tie_word_embeddings=True, **SIZES[family])
        streams = {"num_streams": 3, "stream_rank": 8, "link_rank": 8}
        make_checkpoint(self.draft, "llama", seed=2, num_hidden_layers=3, tie_word_embeddings=True, **streams)
        small: dict[str, Any] = {"context": 384, "num_exit_candidates": 4, "num_draft_candidates": 4}
        options = ExportOptions(precision="int8", exit_layers=(1,), buckets=((8, 8),), capacities=(384,), **small)
        self.manifest = export_pair(self.target, self.draft, self.bundle, options)


@pytest.fixture(scope="module", params=["lfm2", "lfm3"])
def pair(request: pytest.FixtureRequest, make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp(request.param), make_checkpoint, request.param)


@pytest.fixture
def pipe(pair: Pair) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(pair.bundle, device_map="cpu") as pipe:
        yield pipe


def test_stages_are_what_transformers_computes(pair: Pair) -> None:
    """Prefill, single rows and windows with rejected rows, in the export's own comparison."""
    by_stage = {result.stage: result for result in pair.manifest.verify}
    assert {"prefix", "exit1", "suffix", names.RECURRENCE} < by_stage.keys()
    assert max(result.max_relative_error for result in by_stage.values()) <= 1e-4
    assert min(result.top1_agreement for result in by_stage.values()) == 1.0
    assert by_stage[names.RECURRENCE].max_abs_error == 0.0


def test_its_state_is_the_rows_that_its_convolutions_read(pair: Pair) -> None:
    shape = pair.manifest.target.shape
    assert shape.recurrent_layers == (0, 2)
    assert shape.state_bytes == 2 * (KERNEL[pair.family] - 1) * 64 * 4
    graph = onnx.load(pair.bundle / "target" / "suffix.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert "CausalConvWithState" in kinds
    assert "LinearAttention" not in kinds
    again = onnx.load(pair.bundle / names.stage_file(names.RECURRENCE), load_external_data=False).graph
    assert {node.op_type for node in again.node} <= {"Concat", "Slice"}


def test_a_state_is_where_a_pass_begins_whatever_was_rejected(pair: Pair, knows_integer_kernels: bool) -> None:
    if not knows_integer_kernels:
        pytest.skip("this processor's integer kernels compute rows in pairs")
    model = OnnxTargetModel(pair.bundle, pair.manifest.target, TargetPlacement(threads=1))
    Reader(model, seed=1).walk(120)
    outgrowing = Reader(model, seed=3)
    for num_rows in (4, 40, 4, 70, 5, 40, 4, 4):
        outgrowing.verify(num_rows)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_methods_write_plain_text(pipe: MirrorPipeline, temperature: float) -> None:
    check_methods(pipe, METHODS, temperature)


def test_a_conversation_that_is_taken_back_or_saved_goes_on_as_if_it_were_new(
    pipe: MirrorPipeline, tmp_path: Path
) -> None:
    check_conversations(pipe, METHODS, tmp_path / "cache")
    check_several_answers(pipe)


def test_what_does_not_fit_is_refused(pair: Pair) -> None:
    target, draft = open_checkpoint(pair.target, "target"), open_checkpoint(pair.draft, "draft")
    with pytest.raises(ConfigError, match="compute in fp32: choose fp32, int8 or int4"):
        plan_job(target, draft, ExportOptions(precision="fp16"))
    with pytest.raises(ExportError, match="hold one state for one text: a draft follows several"):
        open_checkpoint(pair.target, "draft")
    with pytest.raises(DeviceError, match="recurrent layers, which run on ONNX Runtime only"):
        OpenVinoTargetModel(pair.bundle, pair.manifest.target, TargetPlacement(runtime="openvino"))


def test_a_published_config_is_read(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """As Liquid writes them: the layers of attention by number, older names of a width and of the tie."""
    folder = make_checkpoint(tmp_path / "saved", "lfm2", seed=5, tie_word_embeddings=True, **SIZES["lfm2"])
    config = json.loads((folder / "config.json").read_text())
    older = {"full_attn_idxs": [1], "block_ff_dim": config.pop("intermediate_size"), "conv_dim": 64}
    older["tie_embedding"] = config.pop("tie_word_embeddings", True)
    del config["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    ids = np.arange(20)[None]
    found, expected = (open_model(open_checkpoint(place, "target")).logits(ids) for place in (tmp_path, folder))
    assert np.isfinite(expected).all()
    assert np.array_equal(found, expected)
