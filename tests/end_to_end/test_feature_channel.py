"""A draft that reads the target's hidden states: trained, exported, and never a token of another text."""

import shutil
from pathlib import Path

import pytest
import torch

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.export import ExportOptions, export_pair
from mirrorsd.graphs.errors import ConfigError, ExportError
from mirrorsd.runtime.backends.protocol import RowBlock
from mirrorsd.runtime.config import SpeculationConfig
from mirrorsd.runtime.engine import Engine
from mirrorsd.training.models.streaming_draft import StreamingDraft

LAYER = 2
SIZES = {"context": 512, "buckets": ((8, 8), (16, 16), (64, 1)), "capacities": (256, 512)}
PROMPTS = ("Once upon a time", "The old heron", "x")
SOURCES = ("features", "proxy", "progressive", "early")


@pytest.fixture(scope="module")
def reading_pair(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny pair, its draft with a channel of random weights: what it reads changes all that it says."""
    target, draft = tiny_pair
    folder = tmp_path_factory.mktemp("reading") / "draft"
    shutil.copytree(draft, folder)
    reading = StreamingDraft.load(draft)
    torch.manual_seed(3)
    reading.add_channel(LAYER, 64)
    assert reading.channel is not None
    torch.nn.init.normal_(reading.channel.up.weight)
    reading.save(folder)
    return target, folder


@pytest.fixture(scope="module")
def reading_bundle(reading_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundle") / "reading.mirror"
    manifest = export_pair(*reading_pair, output, ExportOptions(precision="fp32", exit_layers=(1, LAYER), **SIZES))
    assert (manifest.draft.shape.num_features, manifest.draft.shape.feature_layer) == (64, LAYER)
    return output


def said(engine: Engine, *features: torch.Tensor | None) -> list[list[int]]:
    """What a draft says after the same row, with and without hidden states."""
    session = engine.draft_worker.run(engine.draft_model.new_session)
    rows = [RowBlock([7], 0, 0, feature=None if feature is None else feature.numpy()) for feature in features]
    return [session.run([row], [0]).ids[0, :, 0].tolist() for row in rows]


def test_a_row_without_a_hidden_state_is_as_without_a_channel(tiny_bundle: Path, reading_bundle: Path) -> None:
    feature = torch.randn(64)
    with MirrorPipeline.load(reading_bundle, device_map="cpu") as pipe:
        before, given, after = said(pipe.engine, None, feature, None)
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        (plain,) = said(pipe.engine, None)
    assert before == after == plain != given


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_all_methods_give_the_same_ids(reading_bundle: Path, source: str, settings: dict[str, float]) -> None:
    config = GenerationConfig(max_new_tokens=32, ignore_eos=True).with_overrides(dict(settings))
    with MirrorPipeline.load(reading_bundle, device_map="cpu", speculation={"root_source": source}) as pipe:
        for prompt in PROMPTS:
            texts = [pipe.generate(prompt, config, method=method) for method in ("plain", "serial", "mirror", "auto")]
            assert len({tuple(result.token_ids) for result in texts}) == 1


def test_conversations_and_chunks_give_the_same_ids(reading_bundle: Path) -> None:
    config = GenerationConfig(max_new_tokens=12, ignore_eos=True)
    turns = ("Once upon a time", "Once upon a time and then", "Once upon", "The old heron")
    speculation = SpeculationConfig(root_source="features", prefill_rows=3)
    with MirrorPipeline.load(reading_bundle, device_map="cpu") as pipe:
        plain = [pipe.generate(turn, config, method="plain").token_ids for turn in turns]
        with pipe.session(speculation) as session:
            for method in ("mirror", "serial"):
                assert [session.generate(turn, config, method=method).token_ids for turn in turns] == plain


def test_a_text_goes_on_after_an_interrupted_one(reading_bundle: Path) -> None:
    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    with MirrorPipeline.load(reading_bundle, device_map="cpu", speculation={"root_source": "features"}) as pipe:
        plain = pipe.generate(PROMPTS[0], config, method="plain").token_ids
        with pipe.session() as session:
            stream = session.stream(PROMPTS[0], config, method="mirror")
            next(stream)
            session.cancel()
            assert session.generate(PROMPTS[0], config, method="mirror").token_ids == plain


def test_an_exit_elsewhere_is_refused_at_export(reading_pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads the target's hidden states after layer 2, and the exits asked for"):
        export_pair(*reading_pair, tmp_path / "no.mirror", ExportOptions(precision="fp32", exit_layers=(1,), **SIZES))


def test_auto_takes_the_exit_that_the_draft_reads(reading_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = reading_pair
    other = tmp_path / "draft"
    shutil.copytree(draft, other)
    reading = StreamingDraft.load(draft)
    assert reading.channel is not None
    reading.channel.layer = 3
    reading.save(other)
    manifest = export_pair(target, other, tmp_path / "other.mirror", ExportOptions(precision="fp32", **SIZES))
    assert [point.layer for point in manifest.target.exits] == [3]


def test_a_channel_of_another_target_is_refused(reading_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = reading_pair
    other = tmp_path / "draft"
    shutil.copytree(draft, other)
    reading = StreamingDraft.load(draft)
    reading.add_channel(LAYER, 48)
    reading.save(other)
    with pytest.raises(ExportError, match="hidden states of 48 numbers after layer 2; this target has 64 numbers"):
        export_pair(target, other, tmp_path / "no.mirror", ExportOptions(precision="fp32", **SIZES))


def test_features_are_refused_where_the_draft_reads_none(tiny_bundle: Path) -> None:
    with pytest.raises(ConfigError, match="this bundle's draft reads no hidden states"):
        MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"root_source": "features"})
