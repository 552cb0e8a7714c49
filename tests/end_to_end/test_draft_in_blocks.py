"""A draft in blocks of four bits, which ONNX Runtime runs: exact texts, the same guesses, and what is refused."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mirrorsd import MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import DraftPlacement, load_device_map
from mirrorsd.devices.inventory import cannot_run
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.export.compression_plan import DraftCompression
from mirrorsd.export.recompress import recompress_bundle
from mirrorsd.export.verify.draft import DraftRun, Tree
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import ConfigError, DeviceError
from mirrorsd.runtime.backends.onnxruntime.draft import OnnxDraftModel
from mirrorsd.runtime.backends.protocol import RowBlock
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


@pytest.fixture(scope="module")
def bundles(
    tiny_pair: tuple[Path, Path], tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The target as a draft of its own, in blocks; and a bundle whose draft is in fp32."""
    folder = tmp_path_factory.mktemp("blocks") / "blocks.mirror"
    export_pair(tiny_pair[0], tiny_pair[0], folder, BLOCKS)
    return folder, tiny_bundle


def test_the_manifest_says_what_it_is_and_what_it_costs(bundles: tuple[Path, Path]) -> None:
    manifest = read_bundle(bundles[0])
    assert (manifest.draft.precision, manifest.draft.file) == ("int4-blocks", "draft/draft.onnx")
    assert {name for name in manifest.files if name.startswith("draft/")} == {"draft/draft.onnx", "draft/draft.bin"}
    assert manifest.draft_accuracy is not None
    assert manifest.draft_accuracy.scheme == "int4-blocks-g32"


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["serial", "mirror", "auto"])
def test_texts_are_those_of_plain_decoding(bundles: tuple[Path, Path], method: str, settings: dict[str, float]) -> None:
    with MirrorPipeline.load(bundles[0], device_map="cpu", use_tuned=False) as pipe:
        assert any("draft: onnxruntime CPU, int4-blocks" in line for line in pipe.placement)
        options = {"max_new_tokens": 300, "ignore_eos": True, **settings}  # past the first capacity of the cache
        with pipe.session(SpeculationConfig(window="full")) as session:  # whatever rows cost here
            plain, found = (session.generate(PROMPT, method=name, **options) for name in ("plain", method))
    assert found.token_ids == plain.token_ids
    # beside the target's pass a draft may come too late, on a machine that has other work
    assert method != "serial" or found.stats.tokens_per_step > 1.0


def test_its_graph_has_few_small_nodes(bundles: tuple[Path, Path]) -> None:
    """Rotations and sums before norms are one node each: small nodes are what a round costs besides its bytes."""
    layers = read_bundle(bundles[0]).draft.shape.num_layers
    count = Counter(node.op_type for node in ir.load(bundles[0] / "draft" / "draft.onnx").graph)
    assert count["RotaryEmbedding"] == 2 * layers
    assert count["SkipSimplifiedLayerNormalization"] == 2 * layers - 1
    assert not count["Neg"]
    assert not count["RMSNormalization"]


def test_guesses_are_those_of_the_same_weights_in_openvino(bundles: tuple[Path, Path]) -> None:
    """But for activations, which ONNX Runtime rounds to eight bits."""
    entry = read_bundle(bundles[0]).draft
    own = OnnxDraftModel(bundles[0], entry, DraftPlacement()).new_session()
    other = DraftRun(bundles[0] / entry.file, entry.shape, 512)
    text, same = np.arange(1, 250) * 7 % 299, []
    for start in range(0, 240, 16):
        rows = text[start : start + 16].tolist()
        found = own.run([RowBlock(rows, start, start)], range(16)).ids[:, 0, 0].copy()
        own.keep_rows(range(16), range(start, start + 16))
        expected, _ = other.forward(Tree(tuple(rows), tuple(range(-1, 15))), start, np.arange(16))
        other.keep(16, start)
        same.append(np.mean(found == expected[:, 0, 0]))
    assert np.mean(same) > 0.8


@pytest.mark.parametrize("name", ["npu-emulated", "lunar-lake"])
def test_another_device_is_refused_with_what_to_do(bundles: tuple[Path, Path], name: str) -> None:
    reason = cannot_run(load_device_map(name), read_bundle(bundles[0]))
    assert "int4-blocks, which are for a processor" in reason
    assert "--draft-precision int8" in reason
    assert not cannot_run(load_device_map("cpu"), read_bundle(bundles[0]))
    assert not cannot_run(load_device_map(name), read_bundle(bundles[1]))


def test_a_map_for_another_device_does_not_load_it(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    card = tmp_path / "gpu.toml"
    card.write_text('[draft]\ndevice = "NPU"\nemulated = true\n')
    with pytest.raises(DeviceError, match="int4-blocks, which are for a processor"):
        MirrorPipeline.load(bundles[0], device_map=str(card))


def test_a_streaming_draft_is_refused_and_leaves_nothing(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="int4-blocks are for ordinary drafts; this one has streams"):
        export_pair(*tiny_pair, tmp_path / "pair.mirror", BLOCKS)
    assert not list(tmp_path.iterdir())


def test_a_bundles_draft_is_not_turned_into_blocks(bundles: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="written from its checkpoint"):
        recompress_bundle(bundles[1], DraftCompression(weights="int4-blocks"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["compile"], "there is nothing to compile"),
        (["compile", "--npu", "4000"], "no NPU takes"),
        (["inspect"], ""),
    ],
)
def test_commands_know_what_it_is(
    bundles: tuple[Path, Path], words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run([words[0], str(bundles[0]), *words[1:]])
    said = capsys.readouterr()
    assert (problem in said.err and status == 2) if problem else "int4-blocks" in said.out, said


def test_the_doctor_tries_it_where_it_can_run(bundles: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--all", str(bundles[0])]) == 0
    said = capsys.readouterr().out
    assert "are for a processor" in " ".join(said.split())
    assert "Not ready" not in said


def test_a_card_to_compile_for_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["export", "target", "--draft", "draft", "--device-map", "npu-emulated"]
    assert run([*words, "--draft-precision", "int4-blocks", "-o", str(tmp_path / "pair.mirror")]) == 2
    assert "one in int4-blocks is not compiled" in " ".join(capsys.readouterr().err.split())
