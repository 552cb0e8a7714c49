"""Every supported family against Hugging Face, with each of its features on; makes the table of docs/models.md.

MIRRORSD_WRITE_PAGES=1 python -m pytest tests/parity/test_families.py    writes the table again
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import openvino as ov
import pytest
import torch
from family_cases import CASES, CONTEXT, Case
from joint_rows import count_different

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.npu_graph import cut_for_npu
from mirrorsd.devices.openvino.npu_request import CutRequest, HostParts
from mirrorsd.export.bundle.draft_ir import write_draft
from mirrorsd.export.bundle.journal import Journal
from mirrorsd.export.bundle.target_graphs import TargetPlan, write_target
from mirrorsd.export.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mirrorsd.export.checkpoints.loading import draft_shape, target_shape
from mirrorsd.export.checkpoints.weightless import WeightlessModel, open_model
from mirrorsd.export.pair_job import for_family
from mirrorsd.export.passes.graph_passes import optimise_draft
from mirrorsd.export.passes.torch_to_onnx import Weights, export_stage
from mirrorsd.export.stages.attention import TREE_ATTENTION
from mirrorsd.export.stages.draft import DraftStage
from mirrorsd.export.verify.target import TargetRun, compare_target, stored_reference, target_reference
from mirrorsd.export.weights.block_formats import FLOAT_WEIGHTS, BlockChoice, WeightFormats
from mirrorsd.families.registry import FAMILIES, find_obstacle, parts_of
from mirrorsd.graphs import names
from mirrorsd.graphs.bundle_files import describe_file
from mirrorsd.graphs.contract import MASKED, draft_contract
from mirrorsd.graphs.manifest import DraftBucket, VerifyResult
from mirrorsd.machine.doctor.row_invariance import largest_row_difference
from mirrorsd.machine.npu.conformance import check_conformance

TOLERANCE = 1e-4
PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEADER = (
    "| `model_type` | models | beyond Llama | proved with | fp32 | int8 | draft | text | checkpoints |",
    "|---|---|---|---|---|---|---|---|---|",
)
FIXTURES = {"llama": "llama_pair", "qwen3": "qwen3_pair"}
SHARDED = {"gpt2", "olmo2"}
PUBLISHED = {"llama": ("SmolLM2-135M-Instruct",)}
"""Checkpoints that were exported by hand, and whose texts were compared with Hugging Face's."""
ALONE = {"gpt2", "opt", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm3"}
"""Families whose conversations take turns: more than attention asks where a row is, there are sinks, or states."""
_INT8 = BlockChoice(bits=8)
FORMATS = {"fp32": FLOAT_WEIGHTS, "int8": WeightFormats(layers=_INT8, head=_INT8, embedding=_INT8)}
PROVED: dict[str, str] = {}
DRAFTS = tuple(case for case in CASES if find_obstacle({"model_type": case.family}, is_draft=True) is None)


def marked(cases: Iterable[Case], always: Collection[str] = ("phi3", "opt")) -> list[Any]:
    """Families that are least alike run always, the others with the long tests."""
    return [
        pytest.param(case, id=case.family, marks=() if case.family in always else pytest.mark.long) for case in cases
    ]


def row_of(case: Case) -> str:
    family = FAMILIES[case.family]
    extra = "; checkpoint in shards" if case.family in SHARDED else ""
    ties = "tied, untied"
    tried = "; ".join(["random", *(f"published: {name}" for name in PUBLISHED.get(case.family, ()))])
    proved = (case.proved_with + extra, ties, ties, "yes" if case in DRAFTS else "no", "yes", tried)
    cells = (f"`{case.family}`", family.models, family.beyond, *proved)
    return f"| {' | '.join(cells)} |"


def check(results: tuple[VerifyResult, ...]) -> None:
    for result in results:
        assert result.max_relative_error <= TOLERANCE, result
        assert result.top1_agreement == 1.0, result


def make(case: Case, folder: Path, make_checkpoint: Callable[..., Path], **sizes: Any) -> Path:
    given = {"num_hidden_layers": 2, "tie_word_embeddings": case.is_tied} | case.sizes | sizes
    return make_checkpoint(folder, case.family, seed=11, **given)


class Tried(NamedTuple):
    """What the tests of a family are given."""

    make_checkpoint: Callable[..., Path]
    llama_pair: Any
    folder: Path
    knows_integer_kernels: bool


@pytest.fixture
def tried(
    make_checkpoint: Callable[..., Path], llama_pair: Any, tmp_path: Path, *, knows_integer_kernels: bool
) -> Tried:
    return Tried(make_checkpoint, llama_pair, tmp_path, knows_integer_kernels)


@pytest.mark.parametrize("case", marked(CASES))
def test_a_family(case: Case, tried: Tried) -> None:
    """In fp32 and int8: prefill, single rows, windows with rollback; as a draft; the same text.

    The model as its family has it (tied or not) is cut by an exit; its counterpart is exported as one graph.
    """
    check_family(case, tried, {1: None}, is_tied=case.is_tied)


@pytest.mark.parametrize("case", marked(CASES, ("phi3",)))
def test_its_counterpart(case: Case, tried: Tried) -> None:
    """What ties an embedding to a head is no family's own, so the quick tests try it with one."""
    check_family(case, tried, {}, is_tied=not case.is_tied)
    PROVED[case.family] = row_of(case)


def check_family(case: Case, tried: Tried, adapters: dict[int, Any], *, is_tied: bool) -> None:
    folder = make(case, tried.folder / "target", tried.make_checkpoint, tie_word_embeddings=is_tied)
    if case.family in SHARDED:
        shard(folder)
    checkpoint = open_checkpoint(folder, "target")
    model = open_model(checkpoint)
    shape = target_shape(model.network, "fp32")
    plan = TargetPlan(shape=shape, context=CONTEXT, num_candidates=8, adapters=adapters)
    ids = np.random.default_rng(7).integers(0, shape.vocab_size, 200).tolist()
    reference = target_reference(model, plan, ids)
    assert reference.logits.std() > 0.3
    for precision in FORMATS:
        bundle = tried.folder / precision
        bundle.mkdir()
        chosen = replace(plan, formats=for_family(checkpoint, FORMATS[precision]))
        write_target(model, chosen, bundle, lambda stage, share: None, Journal(bundle, ""))
        exact = TargetRun(bundle, chosen, in_float32=True)
        check(compare_target(exact, stored_reference(checkpoint, chosen, ids), "random ids"))
        if precision == "int8":
            results = compare_target(TargetRun(bundle, chosen), reference, "random ids")
            check_int8(results, float(reference.logits.std()), case)
        graph = onnx.load(bundle / "target" / "prefix.onnx", load_external_data=False).graph
        assert "Neg" not in {node.op_type for node in graph.node}, "rotary positions are left outside of attention"
        if adapters:
            is_invariant = precision == "fp32" or tried.knows_integer_kernels
            check_text(bundle, chosen, checkpoint, tried.llama_pair, is_invariant=is_invariant)
    if adapters and case in DRAFTS:
        check_as_draft(model)


def check_int8(results: tuple[VerifyResult, ...], spread: float, case: Case) -> None:
    for result in results:
        if result.stage == "prefix":
            continue  # hidden states have no fixed scale; the exit behind them is compared
        assert result.max_abs_error <= case.largest_error * max(spread, 1.0), (result, spread)
        assert result.top1_agreement >= case.least_agreement, result


def check_text(bundle: Path, plan: TargetPlan, checkpoint: Checkpoint, llama_pair: Any, *, is_invariant: bool) -> None:
    """The stages with another pair's draft and tokenizer: one row has the bits of many, all methods give one text."""
    for part in ("draft", "tokenizer"):
        shutil.copytree(llama_pair.bundle / part, bundle / part)
    entry = plan.entry(checkpoint.source, "fp32")
    buckets = (DraftBucket(rows=8, tips=8), DraftBucket(rows=64, tips=1))
    draft = replace(llama_pair.manifest.draft, buckets=buckets, capacities=(CONTEXT,))
    files = {path.relative_to(bundle).as_posix(): describe_file(path) for path in bundle.rglob("*") if path.is_file()}
    manifest = replace(llama_pair.manifest, target=entry, draft=draft, files=files, quality=None, generation={})
    (bundle / names.MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    padding = {"pad_rows_to": 0 if is_invariant else 8}
    with MirrorPipeline.load(bundle, device_map="cpu", speculation=padding) as pipe:
        if is_invariant:
            session = pipe.engine.target_worker.run(pipe.engine.target_model.new_session)
            assert pipe.engine.target_worker.run(partial(largest_row_difference, session)) == 0.0
            batch = pipe.engine.target_model.open_batch(2)
            assert (batch is None) == (checkpoint.source.family in ALONE)
            if batch is not None:
                assert pipe.engine.target_worker.run(partial(count_different, pipe.engine.target_model, batch))[0] == 0
        plain, mirror, auto = (
            pipe.generate("The lighthouse keeper", config, method=method).token_ids
            for method in ("plain", "mirror", "auto")
        )
    assert len(plain) == 40
    assert mirror == plain
    assert auto == plain


@pytest.mark.parametrize("case", [case for case in CASES if case.family in FIXTURES], ids=lambda case: case.family)
def test_a_pair_of_the_other_parity_tests(case: Case, request: pytest.FixtureRequest) -> None:
    manifest = request.getfixturevalue(FIXTURES[case.family]).manifest
    assert (manifest.target.source.family, manifest.draft.source.family) == (case.family, case.family)
    assert {"prefix", "suffix", "draft"} < {result.stage for result in manifest.verify}
    check(manifest.verify)


@pytest.mark.parametrize("case", marked(DRAFTS))
def test_a_draft_cut_for_an_npu_says_what_the_whole_one_says(
    case: Case, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = open_model(open_checkpoint(make(case, tmp_path / "draft", make_checkpoint), "draft"))
    shape = draft_shape(model.network, None, target_vocab_size=320, num_candidates=16, has_noise=False)
    contract = draft_contract(shape)
    model.network.set_attn_implementation(TREE_ATTENTION)
    stage = DraftStage(parts_of(model.network), contract, shape, streams=None, context=64, num_input_ids=320)
    graph = optimise_draft(export_stage(stage, contract, Weights(model.lazy_weights)))
    write_draft(graph, contract, tmp_path / "draft.xml", "fp32")
    core = new_core()
    core.set_property("CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def static() -> ov.Model:
        found = core.read_model(tmp_path / "draft.xml")
        numbers = {"N": 8, "R": 2, "C": 32, "C+N": 40}
        found.reshape({spec.name: [numbers.get(dim, dim) for dim in spec.shape] for spec in contract.inputs})
        return found

    whole = core.compile_model(static(), "CPU").create_infer_request()
    parts = cut_for_npu(static(), shape, ov.Type.f32)
    assert check_conformance(parts.core).problems == ()
    cut = CutRequest(core.compile_model(parts.core, "CPU"), HostParts(core, parts, 1))
    rng = np.random.default_rng(3)
    for spec, port in zip(contract.inputs, whole.model_inputs, strict=True):
        values = rng.standard_normal(port.shape).astype(spec.dtype)
        if spec.name == names.DRAFT_IDS:
            values = rng.integers(0, 320, port.shape)
        elif spec.name == names.DRAFT_POSITIONS:
            values = np.arange(20, 28)[None]
        elif spec.name == names.DRAFT_TIP_ROWS:
            values = np.array([7, 2])
        elif spec.name == names.DRAFT_MASK:
            values = np.where(rng.random(port.shape) < 0.7, 0.0, MASKED).astype(np.float32)
        for request in (whole, cut):
            request.get_tensor(spec.name).data[:] = values
    whole.infer()
    cut.start_async()
    assert cut.wait_for(30_000)
    for spec in contract.outputs:
        expected, found = (request.get_tensor(spec.name).data for request in (whole, cut))
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, err_msg=spec.name)


def shard(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def check_as_draft(model: WeightlessModel) -> None:
    """The draft's pass in PyTorch, 20 rows and then 10 behind them, against Hugging Face's whole model."""
    network = model.network
    shape = draft_shape(network, None, target_vocab_size=320, num_candidates=320, has_noise=False)
    ids = torch.from_numpy(np.random.default_rng(8).integers(0, 320, (1, 30)))
    with torch.no_grad(), model.loaded(network):
        network.set_attn_implementation("eager")
        expected = torch.log_softmax(network(ids).logits[0], dim=-1)
        network.set_attn_implementation(TREE_ATTENTION)
        contract = draft_contract(shape)
        stage = DraftStage(parts_of(network), contract, shape, streams=None, context=64, num_input_ids=320)
        empty = torch.zeros(1, shape.num_kv_heads, 0, shape.head_dim)
        first = stage(*feeds(ids, 0, 20, [empty] * 2 * shape.num_layers))
        second = stage(*feeds(ids, 20, 30, list(first[2:])))
    for (found_ids, found, *_), wanted in ((first, expected[:20]), (second, expected[20:])):
        torch.testing.assert_close(found[:, 0], wanted.gather(1, found_ids[:, 0]), atol=TOLERANCE, rtol=0)


def feeds(ids: torch.Tensor, start: int, end: int, caches: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = torch.arange(end - start)
    seen = torch.cat((torch.ones(end - start, start), torch.tril(torch.ones(end - start, end - start))), dim=1)
    mask = torch.where(seen > 0, 0.0, MASKED)[None, None]
    return [ids[:, start:end], (start + rows)[None], mask, rows, *caches]


def test_every_family_has_a_case() -> None:
    assert [case.family for case in CASES] == list(FAMILIES)


def test_the_page_says_what_was_proved() -> None:
    """Runs last: the rows of the families that were proved in this run are those of the page."""
    if os.environ.get("MIRRORSD_WRITE_PAGES") and len(PROVED) == len(FAMILIES):
        write_page()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(HEADER[1]) + 1 : lines.index("<!-- end of table -->")]
    assert [line.split("`")[1] for line in table] == list(FAMILIES)
    assert not [row for row in PROVED.values() if row not in table]


def write_page() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    table = slice(lines.index("<!-- table -->") + 1, lines.index("<!-- end of table -->"))
    lines[table] = [*HEADER, *(PROVED[family] for family in FAMILIES)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
