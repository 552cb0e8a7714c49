"""Drafts that ONNX Runtime runs, in blocks or in products of integers: exact texts, the same guesses, refusals."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import pytest
import torch

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import DraftPlacement, load_device_map
from mirrorsd.devices.draft_memory import DraftPass, RowBlock
from mirrorsd.devices.draft_passes import Shape
from mirrorsd.devices.inventory import cannot_run
from mirrorsd.devices.openvino.core import new_core
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.recompress import recompress_bundle
from mirrorsd.export.verify.draft import DraftRun, Tree
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, DeviceError, ExportError
from mirrorsd.runtime.backends.draft_room import DraftRoom, Found
from mirrorsd.runtime.backends.onnxruntime.draft import OnnxDraftModel
from mirrorsd.runtime.loading import open_draft
from mirrorsd.runtime.sampling.noise import gumbel
from mirrorsd.texts.config import SpeculationConfig

PROMPT = "the quick brown fox"
BLOCKS = ExportOptions(
    precision="fp32",
    context=512,
    draft_precision="int4-blocks",
    draft_group=32,
    allow_draft_loss=True,
    buckets=((4, 4), (16, 16), (64, 1)),
    capacities=(256, 512),
)
ROWS = replace(BLOCKS, draft_precision="int8-rows", draft_group=128)


@pytest.fixture(scope="module")
def bundles(
    tiny_pair: tuple[Path, Path], tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """The target as a draft of its own, in blocks; a bundle whose draft is in fp32; and its streaming draft in rows."""
    folder = tmp_path_factory.mktemp("blocks")
    export_pair(tiny_pair[0], tiny_pair[0], folder / "blocks.mirror", BLOCKS)
    export_pair(*tiny_pair, folder / "rows.mirror", ROWS)
    return folder / "blocks.mirror", tiny_bundle, folder / "rows.mirror"


@pytest.mark.parametrize(("which", "scheme"), [(0, "int4-blocks-g32"), (2, "int8-rows")])
def test_the_manifest_says_what_it_is_and_what_it_costs(bundles: tuple[Path, ...], which: int, scheme: str) -> None:
    manifest = read_bundle(bundles[which])
    assert (manifest.draft.precision, manifest.draft.file) == (scheme.removesuffix("-g32"), "draft/draft.onnx")
    assert {name for name in manifest.files if name.startswith("draft/")} == {"draft/draft.onnx", "draft/draft.bin"}
    assert manifest.draft_accuracy is not None
    assert manifest.draft_accuracy.scheme == scheme


def test_no_float_is_left_of_the_head_even_where_it_has_its_own_weights(
    bundles: tuple[Path, ...], tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """The exporter has turned them already, as nothing else reads them. The head is a small draft's largest product."""
    from transformers import LlamaForCausalLM

    network = LlamaForCausalLM.from_pretrained(tiny_pair[0])
    network.config.tie_word_embeddings = False
    network.lm_head.weight = torch.nn.Parameter(1.5 * network.lm_head.weight.detach())
    shutil.copytree(tiny_pair[0], tmp_path / "untied")
    network.save_pretrained(tmp_path / "untied")
    export_pair(tiny_pair[0], tmp_path / "untied", tmp_path / "untied.mirror", ROWS)
    for bundle in (bundles[0], bundles[2], tmp_path / "untied.mirror"):
        entry = read_bundle(bundle).draft
        weights = ir.load(bundle / entry.file).graph.initializers.values()
        floats = [weight.shape.numpy() for weight in weights if weight.dtype == ir.DataType.FLOAT and weight.shape]
        assert not [sizes for sizes in floats if len(sizes) == 2 and entry.shape.vocab_size in sizes and min(sizes) > 1]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["serial", "mirror", "auto"])
@pytest.mark.parametrize(("which", "precision"), [(0, "int4-blocks"), (2, "int8-rows")])
def test_texts_are_those_of_plain_decoding(
    bundles: tuple[Path, ...], which: int, precision: str, method: str, settings: dict[str, float]
) -> None:
    with MirrorPipeline.load(bundles[which], device_map="cpu", use_tuned=False) as pipe:
        assert any(f"draft: onnxruntime CPU, {precision}" in line for line in pipe.placement)
        options = {"max_new_tokens": 300, "ignore_eos": True, **settings}  # past the first capacity of the cache
        with pipe.session(SpeculationConfig(window="full")) as session:  # whatever rows cost here
            plain, found = (session.generate(PROMPT, method=name, **options) for name in ("plain", method))
    assert found.token_ids == plain.token_ids
    # beside the target's pass a draft may come too late, on a machine that has other work
    assert method != "serial" or found.stats.tokens_per_step > 1.0


def test_its_graph_has_few_small_nodes(bundles: tuple[Path, ...]) -> None:
    """Rotations and sums before norms are one node each: small nodes are what a round costs besides its bytes."""
    layers = read_bundle(bundles[0]).draft.shape.num_layers
    count = Counter(node.op_type for node in ir.load(bundles[0] / "draft" / "draft.onnx").graph)
    assert count["RotaryEmbedding"] == 2 * layers
    assert count["SkipSimplifiedLayerNormalization"] == 2 * layers - 1
    assert not count["Neg"]
    assert not count["RMSNormalization"]


def test_guesses_are_those_of_the_same_weights_in_openvino(bundles: tuple[Path, ...]) -> None:
    """But for activations, which ONNX Runtime rounds to eight bits."""
    entry = read_bundle(bundles[0]).draft
    own = OnnxDraftModel(bundles[0], entry, DraftPlacement()).new_session()
    other = DraftRun(new_core().read_model(bundles[0] / entry.file), entry.shape, 512)
    text, same = np.arange(1, 250) * 7 % 299, []
    for start in range(0, 240, 16):
        rows = text[start : start + 16].tolist()
        found = own.run([RowBlock(rows, start, start)], range(16)).ids[:, 0, 0].copy()
        own.keep_rows(range(16), range(start, start + 16))
        expected, _ = other.forward(Tree(tuple(rows), tuple(range(-1, 15))), start, np.arange(16))
        other.keep(16, start)
        same.append(np.mean(found == expected[:, 0, 0]))
    assert np.mean(same) > 0.8


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_a_joint_round_says_what_rounds_of_single_texts_say(
    bundles: tuple[Path, ...], runtime: str, *, is_sampled: bool
) -> None:
    """Main row and streams, and what is cached: texts of other lengths look at other slots of one cache."""
    bundle = bundles[2] if runtime == "onnxruntime" else bundles[1]
    placement = replace(load_device_map("cpu").draft, precision="f32")  # bf16 turns near ties of a random model round
    model = open_draft(bundle, read_bundle(bundle).draft, placement)
    room, passes = DraftRoom(model.entry, model.shapes), Counter[int]()
    together = room._run_together

    def counted(group: Sequence[DraftPass], shape: Shape) -> Found:
        passes[len(group)] += 1
        return together(group, shape)

    sessions = [model.new_session() for _ in range(6)]
    lengths, text = (40, 7, 90), np.arange(1, 250) * 7 % 299
    for number, session in enumerate(sessions):
        session.prepare(512)
        session.use_noise(gumbel_of(number % 3) if is_sampled else None)
        for start in range(0, lengths[number % 3], 4):
            session.run([RowBlock(text[start : start + 4].tolist(), start, start)], [3])
            session.keep_rows(range(4), range(start, start + 4))
    with patch.object(room, "_run_together", counted):
        for step in range(5):
            starts = [length // 4 * 4 + 4 * (length % 4 > 0) + step for length in lengths]
            asked = [[RowBlock([int(text[start])], start, start)] for start in starts]
            alone = [session.run(blocks, [0]) for session, blocks in zip(sessions[:3], asked, strict=True)]
            joint = [DraftPass(session, blocks, [0]) for session, blocks in zip(sessions[3:], asked, strict=True)]
            found = room.run(joint, is_alone=False)
            for one, other in zip(alone, found, strict=True):
                assert one.ids[..., 0].tolist() == other.ids[..., 0].tolist()
                np.testing.assert_allclose(one.logprobs[..., 0], other.logprobs[..., 0], atol=1e-3)
            for session, start in zip(sessions, starts * 2, strict=True):
                session.keep_rows([0], [start])
    assert passes == {2: 5}, "the largest cache has room for two; the third has rounds of its own"


def gumbel_of(seed: int) -> Callable[[int, int], np.ndarray]:
    return lambda position, size: gumbel(seed, np.array([position]), np.arange(size))[0]


@pytest.mark.parametrize("name", ["npu-emulated", "lunar-lake"])
def test_another_device_is_refused_with_what_to_do(bundles: tuple[Path, ...], name: str) -> None:
    reason = cannot_run(load_device_map(name), read_bundle(bundles[0]))
    assert "int4-blocks, which are for a processor" in reason
    assert "--draft-precision int8" in reason
    assert not cannot_run(load_device_map("cpu"), read_bundle(bundles[0]))
    assert not cannot_run(load_device_map(name), read_bundle(bundles[1]))


def test_a_map_for_another_device_does_not_load_it(bundles: tuple[Path, ...], tmp_path: Path) -> None:
    card = tmp_path / "gpu.toml"
    card.write_text('[draft]\ndevice = "NPU"\nemulated = true\n')
    with pytest.raises(DeviceError, match="int4-blocks, which are for a processor"):
        MirrorPipeline.load(bundles[0], device_map=str(card))


def test_what_rows_say_is_what_the_floats_say(bundles: tuple[Path, ...]) -> None:
    """Main row and streams, ids and log-probabilities: rounded to eight bits, not to other tokens."""
    entry = read_bundle(bundles[2]).draft
    rounded, floats = (DraftRun(folder / read_bundle(folder).draft.file, entry.shape, 64) for folder in bundles[2:0:-1])
    rows = Tree(tuple((np.arange(1, 49) * 7 % 299).tolist()), tuple(range(-1, 47)))
    (ids, logprobs), (expected_ids, expected) = (run.forward(rows, 0, np.arange(48)) for run in (rounded, floats))
    for place in range(ids.shape[1]):
        assert np.mean(ids[:, place, 0] == expected_ids[:, place, 0]) > 0.8
    same = ids[:, :, 0] == expected_ids[:, :, 0]
    assert np.abs(logprobs - expected)[same][:, 0].max() < 0.5


def test_all_of_a_rows_products_are_of_integers(bundles: tuple[Path, ...]) -> None:
    """And sums over all tokens have the fast kernel."""
    count = Counter(node.op_type for node in ir.load(bundles[2] / "draft" / "draft.onnx").graph)
    assert count["MatMulIntegerToFloat"] == 4 * read_bundle(bundles[2]).draft.shape.num_layers
    assert count["QGemm"] == 1, "the head"
    assert (count["LogSoftmax"], count["ReduceLogSumExp"]) == (1, 0)


def test_an_export_that_goes_on_in_another_form_leaves_nothing_of_the_first(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    def refuse_the_target(stage: str, share: float) -> None:
        if stage == "load target":
            raise ExportError("no such target")

    with pytest.raises(ExportError, match="no such target"):
        export_pair(*tiny_pair, tmp_path / "pair.mirror", ROWS, refuse_the_target)
    manifest = export_pair(*tiny_pair, tmp_path / "pair.mirror", replace(ROWS, draft_precision="fp32"))
    assert {name for name in manifest.files if name.startswith("draft/")} == {"draft/draft.xml", "draft/draft.bin"}


@pytest.mark.parametrize("precision", ["int4-blocks", "int8-rows"])
def test_a_bundles_draft_is_not_written_anew(bundles: tuple[Path, ...], precision: str) -> None:
    with pytest.raises(
        ConfigError, match=f"written from its checkpoint: mirrorsd export --draft-precision {precision}"
    ):
        recompress_bundle(bundles[1], DraftCompression(weights=precision))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compile"], "there is nothing to compile"),
        (["compile", "--npu", "4000"], "no NPU takes"),
        (["inspect"], ""),
    ],
)
def test_commands_know_what_it_is(
    bundles: tuple[Path, ...], words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run([words[0], str(bundles[0]), *words[1:]])
    said = capsys.readouterr()
    assert (problem in said.err and status == 2) if problem else "int4-blocks" in said.out, said


def test_the_doctor_tries_it_where_it_can_run(bundles: tuple[Path, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--all", str(bundles[0])]) == 0
    said = capsys.readouterr().out
    assert "are for a processor" in " ".join(said.split())
    assert "Not ready" not in said


def test_a_card_to_compile_for_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "target", "--draft", "draft", "--device-map", "npu-emulated"]
    assert run([*words, "--draft-precision", "int4-blocks", "-o", str(tmp_path / "pair.mirror")]) == 2
    assert "has the draft on NPU, and one in int4-blocks is for a processor" in " ".join(
        capsys.readouterr().err.split()
    )
