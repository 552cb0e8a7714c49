"""Drafts cut from a GGUF target, with a smaller head and the target's embedding: exported, and decoded with."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import openvino as ov
import pytest
import torch
from gguf_writer import write_file

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import static_shapes
from mirrorsd.devices.openvino.npu_graph import cut_for_npu
from mirrorsd.devices.openvino.npu_request import CutRequest, HostParts
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.verify.draft import DraftRun, Tree
from mirrorsd.graphs.contract import draft_contract
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.graphs.manifest import Manifest
from mirrorsd.graphs.token_rows import TokenRows
from mirrorsd.machine.npu.conformance import check_conformance
from mirrorsd.training.draft_shape import DraftHead, draft_from_layers
from mirrorsd.training.models.model_folder import copy_tokenizer
from mirrorsd.training.models.streaming_draft import StreamingDraft, StreamShape
from mirrorsd.training.models.whole_model import load_whole

WriteGguf = Callable[..., Path]
OPTIONS = ExportOptions(precision="file", context=384, buckets=((8, 8), (16, 16), (64, 1)), capacities=(384,))

HEADS = ((DraftHead(16), "low rank"), (DraftHead(num_tokens=200), "first ids"))
LOW_RANK, FIRST_IDS = (pytest.param(head, id=name) for head, name in HEADS)


class Pair(NamedTuple):
    """The target's file, the draft, and its folder; nobody may change them."""

    file: Path
    draft: StreamingDraft
    folder: Path


class Exported(NamedTuple):
    """A bundle and its manifest."""

    bundle: Path
    manifest: Manifest


@pytest.fixture(scope="module", params=[LOW_RANK, FIRST_IDS])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """What starts without effect is trained by a throw of dice."""
    folder = tmp_path_factory.mktemp("low_rank")
    file = write_file(folder / "tiny.gguf", "Q4_0")
    draft = draft_from_layers(load_whole(file), StreamShape(2, 1, 4, 8), (0, 1), request.param).eval()
    torch.manual_seed(9)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if "link" in name or "adapters" in name or name == "stream_embeddings":
                weight.normal_(std=0.2)
    draft.save(folder / "draft", dtype=torch.float32)
    copy_tokenizer(open_checkpoint(file, "target").folder, folder / "draft")
    return Pair(file, draft, folder / "draft")


@pytest.fixture(scope="module")
def exported(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The target as its file has it."""
    bundle = tmp_path_factory.mktemp("exported") / "pair.mirror"
    return Exported(bundle, export_pair(pair.file, pair.folder, bundle, OPTIONS))


def test_it_decodes_what_the_target_says(pair: Pair, exported: Exported) -> None:
    _, draft, _ = pair
    bundle, manifest = exported
    assert manifest.draft.source.num_parameters < sum(weight.numel() for weight in draft.base.parameters())
    assert manifest.draft.embedding is not None
    look_up = TokenRows(bundle, manifest.draft.embedding)
    run = DraftRun(bundle / manifest.draft.file, manifest.draft.shape, 384, look_up)
    ids = np.random.default_rng(3).integers(0, 250, 20).tolist()
    found, _ = run.forward(Tree(tuple(ids), tuple(range(-1, len(ids) - 1))), 0, np.array([19]))
    with torch.no_grad():
        hidden = draft(torch.tensor([ids]), torch.tensor([19]))
    assert found[0, :, 0].tolist() == draft.follow(hidden.main[0, 19], hidden.streams[0, 0], ids[19])
    with MirrorPipeline.load(bundle) as pipe:
        for temperature in (0.0, 0.8):
            texts = [
                pipe.generate(
                    "abba ab", GenerationConfig(method=method, max_new_tokens=24, temperature=temperature, seed=5)
                )
                for method in ("plain", "serial", "mirror", "auto")
            ]
            assert all(one.token_ids == other.token_ids for one, other in itertools.pairwise(texts))


@pytest.mark.parametrize("pair", [LOW_RANK, FIRST_IDS], indirect=True)
def test_on_a_processor_it_has_products_of_integers(pair: Pair, exported: Exported, tmp_path: Path) -> None:
    """Head and look-ups are of the tokens that it names, the streams' small matrices floats; texts are the same."""
    options = replace(OPTIONS, draft_precision="int8-rows", allow_draft_loss=True, accept_error=1.0)
    rows = Exported(tmp_path / "rows.mirror", export_pair(pair.file, pair.folder, tmp_path / "rows.mirror", options))
    ids, said = np.random.default_rng(3).integers(0, 200, 60), []
    for bundle, manifest in (rows, exported):
        assert manifest.draft.embedding is not None
        look_up = TokenRows(bundle, manifest.draft.embedding)
        run = DraftRun(bundle / manifest.draft.file, manifest.draft.shape, 384, look_up)
        said.append(run.forward(Tree(tuple(ids.tolist()), tuple(range(-1, 59))), 0, np.arange(60))[0][:, :, 0])
    assert np.mean(said[0] == said[1]) > 0.8
    shape = rows.manifest.draft.shape
    graph = ir.load(rows.bundle / rows.manifest.draft.file).graph
    whole = pair.draft.base.get_input_embeddings().weight.shape[0]
    tables = [value.shape[0] for value in graph.initializers.values() if value.shape is not None and value.shape.rank()]
    assert shape.vocab_size in tables
    assert shape.vocab_size == whole or whole not in tables
    products = [node for node in graph if node.op_type in ("MatMul", "Gemm")]
    floats = [weight.shape.numpy() for node in products if (weight := node.inputs[1]).const_value is not None]
    assert {min(sizes) for sizes in floats} == {4, 8}, "adapters and links alone"
    with MirrorPipeline.load(rows.bundle, device_map="cpu") as pipe:
        texts = [
            pipe.generate("abba ab", GenerationConfig(method=method, max_new_tokens=24))
            for method in ("plain", "serial", "auto")
        ]
        assert all(one.token_ids == other.token_ids for one, other in itertools.pairwise(texts))


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(name, marks=pytest.mark.long) for name in ("fp16", "bf16")), "int8", "int4"]
)
@pytest.mark.parametrize("pair", [FIRST_IDS], indirect=True)
def test_the_embedding_is_stored_once(pair: Pair, tmp_path: Path, precision: Any) -> None:
    """The host looks tokens up where the target does; the draft's own file has no table of all tokens.

    How a head of low rank is stored is nothing that depends on the target's precision: one of those is below.
    """
    bundle, options = tmp_path / "pair.mirror", replace(OPTIONS, precision=precision, accept_error=1.0)
    check_embedding(pair, Exported(bundle, export_pair(pair.file, pair.folder, bundle, options)), precision)


def test_the_embedding_of_a_file_is_stored_once(pair: Pair, exported: Exported) -> None:
    check_embedding(pair, exported, "file")


def check_embedding(pair: Pair, exported: Exported, precision: str) -> None:
    bundle, manifest = exported
    table = pair.draft.base.get_input_embeddings().weight.detach().numpy()
    model = new_core().read_model(bundle / manifest.draft.file)
    constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    assert not any(list(node.get_output_shape(0)) == list(table.shape) for node in constants)
    assert manifest.draft.embedding is not None
    found = TokenRows(bundle, manifest.draft.embedding)(np.arange(len(table)))
    step = {"int8": 1 / 127, "int4": 1 / 7, "bf16": 1 / 128, "fp16": 1 / 1024}.get(precision, 1e-6)
    np.testing.assert_allclose(found, table, atol=0.6 * step * np.abs(table).max())


def test_an_npu_gets_the_rows_that_the_host_has_looked_up(exported: Exported) -> None:
    bundle, manifest = exported
    core, shape = new_core(), manifest.draft.shape
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert manifest.draft.embedding is not None
    look_up = TokenRows(bundle, manifest.draft.embedding)

    def static() -> ov.Model:
        found = core.read_model(bundle / manifest.draft.file)
        found.reshape(static_shapes(manifest.draft, 8, 2, 32))
        return found

    parts = cut_for_npu(static(), shape, ov.Type.f32)
    assert check_conformance(parts.core).problems == ()
    tree = Tree(tuple(range(40, 48)), tuple(range(-1, 7)))
    feeds = DraftRun(static(), shape, 32, look_up).feeds(tree, 0, np.array([7, 2]))
    requests = (
        core.compile_model(static(), "CPU").create_infer_request(),
        CutRequest(core.compile_model(parts.core, "CPU"), HostParts(core, parts, 1)),
    )
    for request in requests:
        for name, values in feeds.items():
            request.get_tensor(name).data[:] = values
        request.start_async()
        assert request.wait_for(30_000)
    whole, cut = requests
    for spec in draft_contract(shape).outputs:
        expected, found = (request.get_tensor(spec.name).data for request in (whole, cut))
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=spec.name)


def test_a_head_of_too_few_tokens_for_the_candidates_is_refused(write_gguf: WriteGguf, tmp_path: Path) -> None:
    file = write_gguf("Q4_0")
    draft_from_layers(load_whole(file), StreamShape(2, 1, 4, 8), (0, 1), DraftHead(num_tokens=3)).save(
        tmp_path / "draft"
    )
    copy_tokenizer(open_checkpoint(file, "target").folder, tmp_path / "draft")
    with pytest.raises(ConfigError, match="this vocabulary has 3 tokens"):
        export_pair(file, tmp_path / "draft", tmp_path / "pair.mirror", OPTIONS)


def test_another_targets_draft_is_refused(pair: Pair, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Tokenizers are compared first; here they are made equal, and the embedding's shape gives it away."""
    folder = shutil.copytree(pair.folder, tmp_path / "draft")
    for source in (tiny_pair[0] / "tokenizer.json", tiny_pair[0] / "generation_config.json"):
        (folder / source.name).write_bytes(source.read_bytes())
    config = (folder / "config.json").read_text().replace('"bos_token_id": 1', '"bos_token_id": null')
    (folder / "config.json").write_text(config)
    with pytest.raises(ExportError, match=r"(shares its target's token embedding|do not fit together)"):
        export_pair(tiny_pair[0], folder, tmp_path / "pair.mirror", OPTIONS)
