"""Targets with recurrent layers: states that cannot be cut, and texts that are plain decoding's all the same."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from same_texts import PROMPTS, check_methods
from state_reader import Reader

from mirrorsd import GenerationConfig, MirrorPipeline
from mirrorsd.cli.application import run
from mirrorsd.device_maps import Pace, TargetPlacement
from mirrorsd.devices.cache_bytes import target_cache_bytes
from mirrorsd.export import ExportOptions
from mirrorsd.export.checkpoints.checkpoint import open_checkpoint
from mirrorsd.export.checkpoints.weightless import open_model
from mirrorsd.export.pair_job import plan_job
from mirrorsd.graphs import names
from mirrorsd.graphs.contract import MOST_STATES
from mirrorsd.graphs.errors import ConfigError, DeviceError, ExportError
from mirrorsd.machine.tuning.recorder import record_texts
from mirrorsd.machine.tuning.simulation import Scenario, replay, simulate
from mirrorsd.runtime.backends.onnxruntime.states import RecurrentStates
from mirrorsd.runtime.backends.onnxruntime.target import OnnxTarget, OnnxTargetModel
from mirrorsd.runtime.backends.openvino.target import OpenVinoTargetModel
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.texts.config import SpeculationConfig

METHODS = ("serial", "mirror", "auto", "lookup", "mtp")
VOCABULARY, CONTEXT = 320, 384


@pytest.fixture(scope="module")
def model(hybrid_pair: Any) -> OnnxTargetModel:
    return OnnxTargetModel(hybrid_pair.bundle, hybrid_pair.manifest.target, TargetPlacement(threads=1))


@pytest.fixture
def pipe(hybrid_pair: Any) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(hybrid_pair.bundle, device_map="cpu") as pipe:
        yield pipe


def states_of(session: OnnxTarget) -> RecurrentStates:
    states = session._states
    assert states is not None
    return states


def test_a_state_is_where_a_pass_begins_whatever_was_rejected(model: OnnxTargetModel) -> None:
    """Windows with wrong rows at every place, prompts, rewinds and moves between sessions."""
    Reader(model, seed=1).walk(260)


def test_windows_that_outgrow_what_was_bound_go_back_exactly(model: OnnxTargetModel) -> None:
    """Rows of a longer window stand elsewhere, and those of a short one after it where they did before."""
    reader = Reader(model, seed=3)
    for num_rows in (4, 40, 4, 70, 5, 40, 4, 4):
        reader.verify(num_rows)


def test_every_accepted_number_of_a_window_gives_the_state_of_single_rows(model: OnnxTargetModel) -> None:
    reader = Reader(model, seed=2)
    for num_accepted in range(1, 9):
        session = model.new_session()
        session.run(reader.text[:8], 0, with_logits=False, ledger=Ledger())
        found = session.logits(reader.text[num_accepted : num_accepted + 1], num_accepted)
        assert np.array_equal(found[0], reader.truth[num_accepted])


def test_a_pass_cannot_begin_where_no_state_is(model: OnnxTargetModel) -> None:
    session, tokens = model.new_session(), np.arange(20)
    session.prefill(tokens, 0, ledger=Ledger())
    assert [session.resumable(place) for place in (0, 1, 19, 20)] == [0, 0, 0, 20]
    with pytest.raises(DeviceError, match="no state after 7 tokens; a pass can begin after 0"):
        session.run(tokens[:1], 7, with_logits=False, ledger=Ledger())
    session.run(tokens[:4], 20, with_logits=False, ledger=Ledger())
    assert [session.resumable(place) for place in (19, 21, 22, 24)] == [0, 21, 22, 24]
    session.run(tokens[:1], 24, with_logits=False, ledger=Ledger())
    assert session.resumable(23) == 20  # the prompt's end


def test_a_recurrence_that_fails_leaves_no_state_that_seems_to_be_one(
    model: OnnxTargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in place: what it has half written is taken for nothing, and the text is read again."""
    reader = Reader(model, seed=5)
    states = states_of(reader.session)
    reader.session.logits(reader.text[:8], 0)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            for tensor in states._sets[states.side]:
                tensor.write(np.full((), 7.0, dtype=np.float32))
            raise DeviceError("gone")

        patch.setattr(states._accepted._stage, "run", fail)
        with pytest.raises(DeviceError, match="gone"):
            reader.session.logits(reader.text[5:6], 5)
    assert reader.session.resumable(5) == 0
    assert np.array_equal(reader.session.logits(reader.text[:6], 0), reader.truth[:6])


def test_snapshots_are_bounded_and_ends_of_prompts_go_last(model: OnnxTargetModel) -> None:
    session, tokens = model.new_session(), np.arange(CONTEXT) % VOCABULARY
    for start in range(0, 240, 12):
        session.prefill(tokens[start : start + 10], start, ledger=Ledger())
        session.run(tokens[start + 10 : start + 12], start + 10, with_logits=False, ledger=Ledger())
    kept = states_of(session)._snapshots
    assert len(kept) == MOST_STATES - 2
    assert kept[-1].position == 238
    assert all(snapshot.ends_prompt for snapshot in kept)
    gaps = np.diff([0, *(snapshot.position for snapshot in kept)])
    assert gaps.max() <= 4 * gaps.min()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_methods_write_plain_text(pipe: MirrorPipeline, temperature: float) -> None:
    check_methods(pipe, METHODS, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_own_head_is_recorded_and_replayed(pipe: MirrorPipeline, temperature: float) -> None:
    seed = 7 if temperature else None
    config = GenerationConfig(
        max_new_tokens=24, ignore_eos=True, temperature=temperature, seed=seed, use_defaults=False
    )
    recording = record_texts(pipe, PROMPTS[:1], config, heads=("mtp",))
    pace = Pace(target_ms=((1.0, 20.0),), draft_ms=((1.0, 5.0),))
    with pipe.session(SpeculationConfig(window="full")) as session:
        real = session.generate(PROMPTS[0], config, method="mtp")
    (request,) = replay(recording, Scenario(pace=pace, speculation=SpeculationConfig(window="full"), method="mtp"))
    steps = [[(step.num_window, step.num_accepted) for step in found] for found in (real.steps, request.steps)]
    assert steps[0] == steps[1]
    for method in ("mtp", "auto"):
        (stats,) = simulate(recording, Scenario(pace=pace, speculation=SpeculationConfig(), method=method))
        assert stats.tokens_per_step * stats.steps == pytest.approx(24)


def test_its_own_head_is_benched_and_simulated_by_name(
    hybrid_pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out"
    line = {"question_id": 1, "category": "rag", "turns": [PROMPTS[0]]}
    questions.write_text(json.dumps(line) + "\n", encoding="utf-8")
    words = [str(hybrid_pair.bundle), "--methods", "plain,mtp"]
    given = ["--raw", "--runs", "1", "--max-tokens", "8", "--device-map", "cpu"]
    assert run(["bench", words[0], str(questions), *words[1:], "--out", str(out), *given]) == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert {row["method"] for row in summary["rows"]} == {"plain", "mtp"}
    assert summary["identical"]
    capsys.readouterr()
    assert run(["simulate", *words, "--prompts", str(questions), "--max-new-tokens", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["method"] for row in rows] == ["plain", "mtp"]


def test_a_conversation_that_is_taken_back_goes_on_as_if_it_were_new(pipe: MirrorPipeline) -> None:
    """Longer, changed in the middle of an answer, and the first prompt again; what is reused is said truly."""
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0}
    with pipe.session() as session:
        first = session.generate(PROMPTS[0], **options)
        text = [*first.prompt_ids, *first.token_ids]
        for ids in ([*text, 70, 71], [*text[:-9], 70], first.prompt_ids, [*text, 70, 71]):
            for method in ("mirror", "plain"):
                found = session.generate(token_ids=ids, method=method, **options)
                with pipe.session() as other:
                    expected = other.generate(token_ids=ids, method="plain", **options)
                assert found.token_ids == expected.token_ids
        again = session.generate(token_ids=first.prompt_ids, **options)
        assert again.stats.num_reused_tokens == len(first.prompt_ids) - 1  # from the prompt's own snapshot
        assert again.token_ids == first.token_ids


def test_several_answers_read_their_prompt_once(pipe: MirrorPipeline) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.9, "seed": 3}
    with pipe.session() as session:
        several = session.generate_several(3, PROMPTS[0], **options)
    reused = [result.stats.num_reused_tokens for result in several]
    assert reused == [0, *[len(several[0].prompt_ids) - 1] * 2]
    for result in several:
        with pipe.session() as session:
            alone = session.generate(PROMPTS[0], **(options | {"seed": result.seed}), method="plain")
        assert alone.token_ids == result.token_ids


def test_a_saved_conversation_holds_its_states(pipe: MirrorPipeline, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.8, "seed": 4}
    with pipe.session() as session:
        first = session.generate(PROMPTS[0], method="mirror", **options)
        num_saved = session.save_cache(tmp_path / "cache")
        text = [*first.prompt_ids, *first.token_ids]
        expected = session.generate(token_ids=text, **options)
    for method in ("plain", *METHODS):
        with pipe.session() as session:
            session.generate(PROMPTS[1], **options)
            assert session.load_cache(tmp_path / "cache") == num_saved
            found = session.generate(token_ids=text, method=method, **options)
            assert found.token_ids == expected.token_ids
            reused = 0 if method == "mtp" else min(num_saved, len(text) - 1)  # a head reads the text along
            assert found.stats.num_reused_tokens == reused


def test_stages_are_what_transformers_computes(hybrid_pair: Any) -> None:
    """Prefill, single rows and windows with rejected rows, in the export's own comparison."""
    by_stage = {result.stage: result for result in hybrid_pair.manifest.verify}
    assert {"prefix", "exit2", "suffix", names.RECURRENCE} < by_stage.keys()
    assert "head-mtp" in by_stage
    assert max(result.max_relative_error for result in by_stage.values()) <= 1e-4
    assert min(result.top1_agreement for result in by_stage.values()) == 1.0
    assert by_stage[names.RECURRENCE].max_abs_error == 0.0


def test_what_states_take_is_counted(hybrid_pair: Any) -> None:
    target = hybrid_pair.manifest.target
    assert target.shape.attention_layers == (1,)
    conv, state = 3 * (2 * 32 + 96), 4 * 16 * 24
    assert target.shape.state_bytes == 3 * (conv + state) * 4
    assert target_cache_bytes(target) == 2 * 2 * target.capacity * 64 * 4 + MOST_STATES * target.shape.state_bytes
    assert hybrid_pair.manifest.used_files().count(names.stage_file(names.RECURRENCE)) == 1


def test_devices_without_the_recurrence_are_refused(hybrid_pair: Any) -> None:
    target = hybrid_pair.manifest.target
    with pytest.raises(DeviceError, match="recurrent layers, which run on ONNX Runtime only"):
        OpenVinoTargetModel(hybrid_pair.bundle, target, TargetPlacement(runtime="openvino"))


def test_as_a_draft_it_is_refused(hybrid_pair: Any) -> None:
    with pytest.raises(ExportError, match="hold one state for one text: a draft follows several"):
        open_checkpoint(hybrid_pair.target, "draft")


def test_sixteen_bits_are_refused(hybrid_pair: Any) -> None:
    target, draft = open_checkpoint(hybrid_pair.target, "target"), open_checkpoint(hybrid_pair.draft, "draft")
    with pytest.raises(ConfigError, match="compute in fp32: choose fp32, int8 or int4"):
        plan_job(target, draft, ExportOptions(precision="fp16"))


def test_the_text_of_a_model_that_takes_images_is_read(hybrid_pair: Any, tmp_path: Path) -> None:
    """As Qwen publishes them: text under `language_model`, what sees images and what predicts further on beside it."""
    config = json.loads((hybrid_pair.target / "config.json").read_text())
    tensors = load_file(hybrid_pair.target / "model.safetensors")
    assert "mtp.fc.weight" in tensors
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    extra = {"model.visual.norm.weight": tensors["model.norm.weight"].clone()}
    save_file(nested | extra, tmp_path / "model.safetensors", {"format": "pt"})
    whole = {"model_type": "qwen3_5", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    of_text, of_whole = (open_checkpoint(folder, "target") for folder in (hybrid_pair.target, tmp_path))
    assert of_whole.source.num_parameters == of_text.source.num_parameters
    assert of_whole.config["model_type"] == "qwen3_5_text"
    ids = np.arange(20)[None]
    found, expected = (open_model(checkpoint).logits(ids) for checkpoint in (of_whole, of_text))
    assert_same(found, expected)


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert np.isfinite(expected).all()
    assert np.array_equal(found, expected)
