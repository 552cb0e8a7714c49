"""Heads beside a real target: exported, checked, run on ONNX Runtime, and each text exactly the target's."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mirrorsd import BundleError, Cancelled, ConfigError, GenerationConfig, MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import Pace, TargetPlacement
from mirrorsd.devices.onnxruntime import device
from mirrorsd.devices.onnxruntime.stage import Place, Tensor
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.machine.tuning.recorder import record_texts
from mirrorsd.machine.tuning.simulation import Scenario, replay
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTargetModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.texts.config import SpeculationConfig
from mirrorsd.texts.speculation import check_head

KINDS = ("medusa", "eagle3", "streaming")
METHODS = (*KINDS, "lookup", "auto")
PROMPTS = ("Once upon a time", "x", "Every morning the fox went to the river and asked. " * 4)
LENGTHS = {"max_new_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def pipe(headed_bundle: tuple[Path, list[int]]) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(headed_bundle[0], device_map="cpu", speculation={"prefill_rows": 24}) as loaded:
        yield loaded


@pytest.mark.parametrize("sampling", [{}, SAMPLED, {**SAMPLED, "top_k": 8}, {"repetition_penalty": 1.3}], ids=str)
def test_texts_are_those_of_plain_decoding(pipe: MirrorPipeline, sampling: dict[str, Any]) -> None:
    num_steps = dict.fromkeys(METHODS, 0)
    for prompt in PROMPTS:
        expected = pipe.generate(prompt, method="plain", **LENGTHS, **sampling).token_ids
        for method in METHODS:
            result = pipe.generate(prompt, method=method, **LENGTHS, **sampling)
            assert result.token_ids == expected, method
            assert result.method == method
            num_steps[method] += result.stats.steps
    if sampling == SAMPLED:
        assert all(num_steps[kind] < 40 * len(PROMPTS) for kind in KINDS), "some guess of each is right"


def test_heads_that_know_the_text_save_passes(pipe: MirrorPipeline, headed_bundle: tuple[Path, list[int]]) -> None:
    _, text = headed_bundle
    plain, medusa = (
        pipe.generate(token_ids=text[:-64], method=method, max_new_tokens=50, ignore_eos=True)
        for method in ("plain", "medusa")
    )
    assert medusa.token_ids == plain.token_ids == text[-64:-14]
    assert medusa.stats.tokens_per_step > 3
    assert medusa.stats.draft_exposed_ms > 0
    assert {span.name for span in medusa.spans if span.device == "target"} >= {"prefix", "suffix", "head"}


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_go_on_and_interrupted_ones_start_again(pipe: MirrorPipeline, kind: str) -> None:
    with pipe.session() as session:
        first = session.generate(PROMPTS[0], method=kind, **LENGTHS)
        stream = session.stream(PROMPTS[2], method=kind, **LENGTHS)
        next(stream)
        turn = [*first.prompt_ids, *first.token_ids, 9, 8]
        second = session.generate(token_ids=turn, method=kind, **LENGTHS, **SAMPLED)
        session.cancel()
        with pytest.raises(Cancelled):
            list(stream)
        third = session.generate(token_ids=[*turn, 7], method=kind, **LENGTHS)
    assert second.token_ids == pipe.generate(token_ids=turn, method="plain", **LENGTHS, **SAMPLED).token_ids
    assert third.token_ids == pipe.generate(token_ids=[*turn, 7], method="plain", **LENGTHS).token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_turns_with_another_is_the_same(pipe: MirrorPipeline, kind: str) -> None:
    with pipe.session() as session:
        streams = [session.stream(prompt, method=kind, **LENGTHS) for prompt in PROMPTS[::2]]
        texts: list[list[int]] = [[], []]
        for _ in range(12):
            for stream, ids in zip(streams, texts, strict=True):
                chunk = next(stream, None)
                ids += [token.id for token in chunk.tokens] if chunk else []
    for prompt, ids in zip(PROMPTS[::2], texts, strict=True):
        assert ids == pipe.generate(prompt, method="plain", **LENGTHS).token_ids[: len(ids)]
        assert len(ids) >= 12


def test_a_head_reads_the_same_of_a_prompt_in_chunks_as_of_one_in_steps(pipe: MirrorPipeline) -> None:
    """Windows say what a head has in its caches: they depend on every row."""
    prompt = pipe.encode(PROMPTS[2])
    for kind in KINDS:
        whole, stepped = pipe.session(), pipe.session()
        for stop in (*range(2, len(prompt), 5), len(prompt)):
            last = stepped.generate(token_ids=prompt[:stop], method=kind, max_new_tokens=3, ignore_eos=True, **SAMPLED)
        assert len(last.token_ids) == 3
        steps = [
            [(step.num_window, step.num_accepted) for step in result.steps]
            for session in (whole, stepped)
            for result in [session.generate(token_ids=prompt, method=kind, **LENGTHS, **SAMPLED)]
        ]
        assert steps[0] == steps[1], kind


def test_what_a_head_shares_with_its_target_is_on_disk_once(headed_bundle: tuple[Path, list[int]]) -> None:
    """The Medusa head reads the target's LM matrix, and EAGLE-3's its embedding: here the same, tied matrix."""
    places = {}
    for name in ("suffix", "head-medusa", "head-eagle3"):
        graph = ir.load(headed_bundle[0] / "target" / f"{name}.onnx").graph
        stored = [value.const_value for value in graph.initializers.values()]
        places[name] = {
            tensor.offset for tensor in stored if isinstance(tensor, ir.ExternalTensor) and 300 in tensor.shape
        }
    assert len(places["suffix"]) == 1
    assert places["head-medusa"] == places["head-eagle3"] == places["suffix"]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=str)
def test_a_replay_of_recorded_heads_takes_the_steps_of_the_real_run(
    pipe: MirrorPipeline, sampling: dict[str, Any]
) -> None:
    config = GenerationConfig(**LENGTHS, **sampling, use_defaults=False)
    recording = record_texts(pipe, [PROMPTS[2]], config, heads=KINDS)
    pace = Pace(target_ms=((1.0, 20.0),), draft_ms=((1.0, 5.0),))
    for kind in KINDS:
        real = pipe.generate(PROMPTS[2], method=kind, config=config).steps
        (request,) = replay(recording, Scenario(pace=pace, speculation=SpeculationConfig(window="full"), method=kind))
        steps = [[(step.num_window, step.num_accepted) for step in found] for found in (real, request.steps)]
        assert steps[0] == steps[1], kind


def test_a_manifest_says_what_runs_of_heads_read(headed_bundle: tuple[Path, list[int]]) -> None:
    """Medusa reads the LM head once for all guesses, EAGLE-3 once for each, and a layer."""
    manifest = read_bundle(headed_bundle[0])
    shares = {head.kind: head.read_share for head in manifest.heads}
    assert 0.1 < shares["medusa"] < 0.3 < shares["eagle3"] < 1
    assert 0.5 < manifest.target.read_bytes / manifest.files[manifest.target.weights_file].bytes < 0.9


def test_a_bundle_without_heads_names_what_to_export(tiny_bundle: Path) -> None:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        with pytest.raises(ConfigError, match=r"no such head \(it has: none\).*--head FOLDER"):
            pipe.generate("x", method="eagle3")
        assert pipe.generate("x", method="lookup", **LENGTHS).method == "lookup"


def test_a_damaged_head_is_named_and_other_methods_work(headed_bundle: tuple[Path, list[int]], tmp_path: Path) -> None:
    manifest = read_bundle(headed_bundle[0])
    entry = manifest.heads[0]
    longer = replace(entry, shape=replace(entry.shape, length=entry.shape.length + 1))
    session = OnnxTargetModel(headed_bundle[0], manifest.target, TargetPlacement(), heads=(longer,)).new_session()
    session.prefill(np.array([5, 6]), 0, ledger=Ledger())
    with pytest.raises(BundleError, match=r"head-medusa\.onnx is not the stage.*expected is"):
        session.guess("medusa", np.array([6, 7]), 0, ledger=Ledger())
    session.close()


def guesses_of(headed: Path) -> list[Any]:
    """A prompt in two chunks, a window of which two tokens are right, the row behind them, sampled and not."""
    manifest = read_bundle(headed)
    session = OnnxTargetModel(headed, manifest.target, TargetPlacement(), heads=manifest.heads).new_session()
    tokens, found = np.random.default_rng(0).integers(0, session.vocab_size, 40), []
    for kind in KINDS:
        length, random = session.heads[kind].shape.length, np.random.default_rng(1)
        for start, num_rows in ((0, 20), (20, 10)):
            session.prefill(tokens[start : start + num_rows], start, ledger=Ledger())
            following = tokens[start + 1 : start + num_rows + 1]
            found.append(session.guess(kind, following, start, ledger=Ledger()))
        for start, num_right in ((30, 3), (33, 1)):
            session.run(tokens[start : start + 6], start, with_logits=False, ledger=Ledger())
            noise = random.gumbel(size=(length, session.vocab_size)).astype(np.float32)
            following = tokens[start + 1 : start + num_right + 1]
            found.append(session.guess(kind, following, start, noise=noise, ledger=Ledger()))
    session.close()
    return found


def test_hidden_states_that_stay_on_a_device_give_the_same_guesses(
    headed_bundle: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's own memory stands for the device's: the host reads and writes it by copies only."""
    on_host = guesses_of(headed_bundle[0])
    monkeypatch.setattr(device, "place_of", lambda _: Place(kind="cpu", is_device=True))
    reads: list[object] = []
    own = Tensor.read
    monkeypatch.setattr(Tensor, "read", lambda tensor: reads.append(tensor) or own(tensor))
    on_device = guesses_of(headed_bundle[0])
    for left, right in zip(on_host, on_device, strict=True):
        np.testing.assert_array_equal(left.ids, right.ids)
        np.testing.assert_array_equal(left.logprobs, right.logprobs)
    assert len(reads) == 2 * 2 * len(KINDS), "of a pass nothing is read but its best tokens and their leads"


def test_a_target_on_openvino_refuses_heads_and_runs_all_else(headed_bundle: tuple[Path, list[int]]) -> None:
    manifest = read_bundle(headed_bundle[0])
    placement = TargetPlacement(runtime="openvino", device="CPU")
    session = OpenVinoTargetModel(headed_bundle[0], manifest.target, placement, heads=manifest.heads).new_session()
    expected = OnnxTargetModel(headed_bundle[0], manifest.target, TargetPlacement()).new_session()
    tokens = np.random.default_rng(0).integers(0, session.vocab_size, 12)
    found = [one.run(tokens, 0, with_logits=False, ledger=Ledger()).argmax_ids for one in (session, expected)]
    np.testing.assert_array_equal(*found)
    with pytest.raises(ConfigError, match="its head runs on ONNX Runtime"):
        check_head("eagle3", manifest, session.heads)


def test_inspect_shows_heads(headed_bundle: tuple[Path, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(headed_bundle[0])]) == 0
    page = capsys.readouterr().out
    assert "head-eagle3" in page
    assert "reduced vocabulary of 200" in " ".join(page.split())
    assert run(["inspect", str(headed_bundle[0]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [head["kind"] for head in document["heads"]] == list(KINDS)
    assert {tap for segment in document["target"]["segments"] for tap in segment["taps"]} == {1, 2, 3, 5}
    stages = {result["stage"]: result for result in document["verify"]}
    for name in ("tap.1", "tap.5", *(f"head-{kind}" for kind in KINDS)):
        assert stages[name]["max_relative_error"] < 1e-3
        assert stages[name]["positions"] > 50
