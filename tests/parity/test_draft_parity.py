"""The draft's IR against the training code (chains) and a dense forward (trees), and its static shapes."""

import gc
import itertools
import weakref
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
import pytest
import torch
from transformers import AutoModelForCausalLM

from mirrorsd.device_maps import DraftPlacement
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.devices.draft_passes import host_arrays
from mirrorsd.devices.openvino import draft_graph, draft_pass
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.devices.openvino.draft_shapes import with_cache_of
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.options import DEFAULT_BUCKETS
from mirrorsd.export.verify.draft import DraftRun, Tree, dense_draft
from mirrorsd.families.stream_link import Guesses, follow_links
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import draft_contract
from mirrorsd.runtime.backends.openvino.draft import OpenVinoDraftModel
from mirrorsd.training.models.streaming_draft import StreamingDraft

TOLERANCE = 1e-4


def _chain(ids: list[int]) -> Tree:
    return Tree(tuple(ids), tuple(range(-1, len(ids) - 1)))


def _run(pair: Any) -> DraftRun:
    entry = pair.manifest.draft
    return DraftRun(pair.bundle / entry.file, entry.shape, pair.manifest.target.context)


class Linked(NamedTuple):
    """What the training code says at a tip: shortlists `[1+s, K]` of ids, log-probabilities, and those with noise."""

    ids: np.ndarray
    logprobs: np.ndarray
    scores: np.ndarray


def _by_training_code(draft: StreamingDraft, ids: list[int], tip: int, noise: torch.Tensor | None = None) -> Linked:
    """Follow the link from row `tip` of the text, with `noise [1+s, V]` if given."""
    assert draft.link is not None
    with torch.no_grad():
        hidden = draft(torch.tensor([ids]), torch.tensor([tip]))
        logits = draft.logits(torch.cat((hidden.main[0, tip][None], hidden.streams[0, 0])))
        guesses = Guesses(logits[None], None if noise is None else noise[None], lambda scores: scores)
        head, own = draft.base.get_output_embeddings().weight, torch.tensor([ids[tip]])
        ranked = follow_links(draft.link.weights(), hidden.streams[0], guesses, head, head[own])
    return Linked(*(part[0].numpy() for part in ranked))


def _check_same(found: tuple[np.ndarray, np.ndarray], expected: Linked) -> None:
    """The best of every list, in their order, and their log-probabilities."""
    found_ids, found_logprobs = found
    order = (-expected.scores).argsort(-1)[:, : found_ids.shape[1]]
    np.testing.assert_array_equal(found_ids[:, :4], np.take_along_axis(expected.ids, order, -1)[:, :4])
    wanted = np.take_along_axis(expected.logprobs, order, -1)
    np.testing.assert_allclose(found_logprobs, wanted, atol=TOLERANCE)


def test_streams_match_the_training_code(llama_pair: Any) -> None:
    draft = StreamingDraft.load(llama_pair.draft).eval()
    ids = np.random.default_rng(3).integers(0, 320, 60).tolist()
    run = _run(llama_pair)
    run.forward(_chain(ids[:40]), 0, np.array([0]))
    run.keep(40, 0)
    found_ids, found = run.forward(_chain(ids[40:]), 40, np.array([19, 0, 7]))
    for number, tip in enumerate((59, 40, 47)):
        _check_same((found_ids[number], found[number]), _by_training_code(draft, ids, tip))
    assert found_ids.shape == (3, 4, llama_pair.manifest.draft.shape.num_candidates)


def test_noise_chooses_among_all_tokens_of_main_row_and_streams(llama_pair: Any) -> None:
    """Four rows of noise over the whole vocabulary; candidates are the best by log-probability plus their row."""
    draft = StreamingDraft.load(llama_pair.draft).eval()
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 320, 12).tolist()
    run = _run(llama_pair)
    feeds = run.feeds(_chain(ids), 0, np.array([11, 5]))
    noise = feeds[names.DRAFT_NOISE]
    noise[:4] = rng.gumbel(size=(4, noise.shape[1]))
    feeds[names.DRAFT_NOISE_ROWS][:] = [[0, 1, 2, 3], [3, 2, 1, 0]]
    found = run.infer(feeds)
    for number, tip in enumerate((11, 5)):
        of_tip = torch.from_numpy(noise[feeds[names.DRAFT_NOISE_ROWS][number]])
        result = (found[names.DRAFT_TIP_IDS][number], found[names.DRAFT_TIP_LOGPROBS][number])
        _check_same(result, _by_training_code(draft, ids, tip, of_tip))


def test_a_tree_matches_each_of_its_paths_as_a_chain(llama_pair: Any) -> None:
    """Every leaf of a tree must predict what it predicts at the end of its own path, streams included."""
    ids = np.random.default_rng(4).integers(0, 320, 20).tolist()
    tree = Tree((11, 12, 13, 14, 15), (-1, 0, 0, 2, -1))
    run = _run(llama_pair)
    run.forward(_chain(ids), 0, np.array([0]))
    run.keep(20, 0)
    of_tree = run.forward(tree, 20, np.arange(5))
    for leaf, path in ((1, [11, 12]), (3, [11, 13, 14]), (4, [15])):
        of_path = run.forward(_chain(path), 20, np.array([len(path) - 1]))
        np.testing.assert_array_equal(of_tree[0][leaf, :, :8], of_path[0][0, :, :8])
        np.testing.assert_allclose(of_tree[1][leaf], of_path[1][0], atol=TOLERANCE)


def test_an_ordinary_model_is_a_draft_without_streams(qwen3_pair: Any) -> None:
    """Its 64 ids of padding are never proposed and take no probability."""
    shape = qwen3_pair.manifest.draft.shape
    assert (shape.num_streams, shape.vocab_size) == (0, 320)
    model = AutoModelForCausalLM.from_pretrained(qwen3_pair.draft, dtype=torch.float32).eval()
    ids = np.random.default_rng(5).integers(0, 320, 50)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0, :, :320], dim=-1).numpy()
    found_ids, found = _run(qwen3_pair).forward(_chain(ids.tolist()), 0, np.arange(50))
    np.testing.assert_allclose(found[:, 0], np.take_along_axis(expected, found_ids[:, 0], -1), atol=TOLERANCE)
    assert found_ids.max() < 320


def test_the_dense_reference_agrees_with_hugging_face(qwen3_pair: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen3_pair.draft, dtype=torch.float32).eval()
    ids = np.arange(30)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(ids)[None]).logits[0], dim=-1).numpy()
    weightless = open_model(open_checkpoint(qwen3_pair.draft, "draft"))
    found = dense_draft(weightless, None, ids, ids, np.tril(np.ones((30, 30), np.bool_)), 384)
    np.testing.assert_allclose(found.logprobs[:, 0], expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama_pair", "qwen3_pair"])
def test_ports_have_exactly_the_contract_s_names_and_types(name: str, request: pytest.FixtureRequest) -> None:
    pair = request.getfixturevalue(name)
    contract = draft_contract(pair.manifest.draft.shape)
    model = new_core().read_model(pair.bundle / pair.manifest.draft.file)
    for ports, specs in ((model.inputs, contract.inputs), (model.outputs, contract.outputs)):
        assert [port.get_names() for port in ports] == [{spec.name} for spec in specs]
        assert [np.dtype(port.element_type.to_dtype()).name for port in ports] == [spec.dtype for spec in specs]


def _static(pair: Any, rows: int, tips: int, capacity: int) -> ov.Model:
    model = new_core().read_model(pair.bundle / pair.manifest.draft.file)
    sizes = {"N": rows, "R": tips, "C": capacity, "C+N": capacity + rows}
    specs = draft_contract(pair.manifest.draft.shape).inputs
    model.reshape({s.name: [sizes[d] if isinstance(d, str) else d for d in s.shape] for s in specs})
    return model


EXTREMES = ((4, 1), (8, 8), (32, 32), (128, 1))
"""The smallest and the largest of each kind of bucket; those between them are `long`."""


@pytest.mark.parametrize(
    ("rows", "tips"),
    [pytest.param(*one, marks=() if one in EXTREMES else pytest.mark.long) for one in DEFAULT_BUCKETS],
)
def test_every_default_bucket_is_static_and_compiles(llama_pair: Any, rows: int, tips: int) -> None:
    """On the CPU plugin and through the NPU plugin's wrapper on the CPU; the wrapper computes in bf16 there."""
    model = _static(llama_pair, rows, tips, 256)
    assert all(port.partial_shape.is_static for node in model.get_ordered_ops() for port in node.outputs()), (
        "a dynamic shape is left inside"
    )
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    wrapped = {"NPU_USE_NPUW": "YES", "NPUW_DEVICES": "CPU"}
    rng, feeds = np.random.default_rng(6), {}
    for spec, port in zip(draft_contract(llama_pair.manifest.draft.shape).inputs, model.inputs, strict=True):
        size = tuple(port.shape)
        feeds[spec.name] = (rng.integers(0, tips, size) if spec.dtype == "int64" else rng.normal(size=size)).astype(
            spec.dtype
        )
    feeds[names.DRAFT_NOISE].fill(0.0)  # near ties that fall otherwise in bf16 would hide what is compared here
    on_cpu = new_core().compile_model(model, "CPU", exact)(feeds)
    through_wrapper = new_core().compile_model(_static(llama_pair, rows, tips, 256), "NPU", wrapped)(feeds)
    is_same = through_wrapper["tip_ids"][..., 0] == on_cpu["tip_ids"][..., 0]
    before = np.cumprod(np.insert(is_same[:, :-1], 0, values=True, axis=1), axis=1).astype(np.bool_)
    assert before.mean() > 0.7, "streams hear of the tokens before their own: other ones make another guess"
    same = through_wrapper["tip_ids"] == on_cpu["tip_ids"]  # others are candidates in another order
    of_main, of_streams = (same & where[..., None] for where in (np.arange(same.shape[1]) == 0, before))
    for name, where, most in (
        ("tip_logprobs", of_main, 0.03),
        ("tip_logprobs", of_streams, 0.06),
        ("new_key.2", ..., 0.02),
    ):
        difference = np.abs(through_wrapper[name][where] - on_cpu[name][where])
        assert difference.size
        assert difference.mean() < most
        assert np.quantile(difference, 0.99) < 0.5


def test_every_default_capacity_reshapes(llama_pair: Any) -> None:
    for (rows, tips), capacity in itertools.product(DEFAULT_BUCKETS, (256, 384)):
        assert not _static(llama_pair, rows, tips, capacity).is_dynamic()


def test_projections_of_the_same_rows_are_one_product(llama_pair: Any) -> None:
    """Query, key and value; output; gate and up; down: four products a layer, two an adapter, and the head.

    The link has one for all streams, and three for each.
    """
    entry = llama_pair.manifest.draft
    products = [op for op in new_core().read_model(llama_pair.bundle / entry.file).get_ops() if is_weighted(op)]
    of_link = 1 + 3 * entry.shape.num_streams
    assert len(products) == 4 * entry.shape.num_layers + 2 * (entry.num_stream_layers + 1) + 1 + of_link


def is_weighted(op: ov.Node) -> bool:
    """Whether this is a product with a weight."""
    weight = op.input_value(1).get_node() if op.get_type_name() == "MatMul" else op
    while weight.get_type_name() in ("Convert", "Transpose"):
        weight = weight.input_value(0).get_node()
    return op.get_type_name() == "MatMul" and weight.get_type_name() == "Constant"


def test_passes_of_a_window_share_their_weights_on_a_processor(llama_pair: Any) -> None:
    """Prompt's last tokens with one tip, then guesses with a tip each: one compiled shape, warm the second time."""
    model = OpenVinoDraftModel(llama_pair.bundle, llama_pair.manifest.draft, DraftPlacement(device="CPU"))
    new_request, shapes = model.shapes.new_request, []
    model.shapes.new_request = lambda shape, cache: shapes.append(shape) or new_request(shape, cache)
    session = model.new_session()
    session.run([RowBlock([5, 6], 0, 0)], [1])
    session.keep_rows([0, 1], [0, 1])
    session.run([RowBlock([7, 8, 9, 10], 2, 2)], [0, 1, 2, 3])
    assert shapes == [(4, 4, session.cache.capacity)]


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", ["llama_pair", "qwen3_pair"])
def test_attention_over_cache_and_rows_in_one_product_says_the_same(
    name: str, is_shared: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, num_products = request.getfixturevalue(name), []

    def compile_and_count(model: ov.Model, entry: Any, kind: ov.Type) -> ov.Model:
        num_products.append(sum(op.get_type_name() == "MatMul" for op in model.get_ops()))
        return with_cache_of(model, entry, kind)

    monkeypatch.setattr(draft_graph, "with_cache_of", compile_and_count)
    guesses = []
    for joins in (True, False):
        monkeypatch.setattr(draft_graph, "pays_to_join", lambda *_, joins=joins: joins)
        guesses.append(_guesses_behind_a_cache(pair, is_shared, precision="f32"))
    assert num_products[0] == num_products[-1] - 2 * pair.manifest.draft.shape.num_layers
    np.testing.assert_array_equal(guesses[0][0], guesses[1][0])
    np.testing.assert_allclose(guesses[0][1], guesses[1][1], atol=TOLERANCE)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_cache_in_bf16_changes_no_guess(llama_pair: Any, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """Where the processor computes in bf16, what a pass gives back was rounded to it already."""
    expected = _guesses_behind_a_cache(llama_pair, is_shared)
    monkeypatch.setattr(draft_graph, "cache_type", lambda core, entry, placement: ov.Type.f32)
    for found, wanted in zip(_guesses_behind_a_cache(llama_pair, is_shared), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_what_a_request_computes_on_lives_as_long_as_it(llama_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reads the host's memory and does not keep it: of noise that nobody fed, too, as in a warm-up."""
    made: dict[str, weakref.ref[np.ndarray]] = {}

    def watched(*given: Any) -> dict[str, np.ndarray]:
        arrays = host_arrays(*given)
        made.update({name: weakref.ref(array) for name, array in arrays.items()})
        return arrays

    monkeypatch.setattr(draft_pass, "host_arrays", watched)
    model = OpenVinoDraftModel(llama_pair.bundle, llama_pair.manifest.draft, DraftPlacement(device="CPU"))
    model.shapes.cache, model.shapes.is_shared = None, True
    capacity = llama_pair.manifest.draft.capacities[0]
    request = model.shapes.new_request((8, 8, capacity), model.shapes.new_cache(capacity))
    gc.collect()
    assert names.DRAFT_NOISE in made
    assert [name for name, array in made.items() if array() is None] == []
    request.infer()


def _guesses_behind_a_cache(pair: Any, is_shared: bool, precision: str = "auto") -> list[np.ndarray]:
    model = OpenVinoDraftModel(pair.bundle, pair.manifest.draft, DraftPlacement(device="CPU", precision=precision))
    model.shapes.cache, model.shapes.is_shared = None, is_shared
    session = model.new_session()
    session.run([RowBlock(list(range(5, 25)), 0, 0)], [19])
    session.keep_rows(range(20), range(20))
    session.run([RowBlock([7, 8], 20, 20), RowBlock([9], 22, 20, (), 2)], [2])
    session.keep_rows([0, 1, 2], [20, 21, 30])
    session.move_slots([30], [22])
    guesses = session.run([RowBlock([3, 4], 23, 23)], [0, 1])
    return [guesses.ids.copy(), guesses.logprobs.copy()]
