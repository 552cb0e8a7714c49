"""Recording scripted models, replaying them in simulated time, and fitting root scores to them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import Pace
from mirrorsd.devices.draft_memory import TipGuesses
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import ConfigError, ContextLengthError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.machine.tuning.recorder import likeliest, record_text, record_texts
from mirrorsd.machine.tuning.recording import RecordedText, Recording
from mirrorsd.machine.tuning.score_fitting import coverage, fit_scores
from mirrorsd.machine.tuning.simulation import (
    HEAD_HOST_MS,
    ReplayChooser,
    Scenario,
    mean_of,
    replay,
    shares_of,
    simulate,
    tokens_per_second,
)
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.runtime.policy.roots import RootScores
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.runtime.sampling.noise import NOISE
from mirrorsd.testing.fake import FakeDraft
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KINDS = {"medusa": 0, "eagle3": 1}
"""Layers that keep a cache."""
PACE = Pace(target_ms=((1.0, 20.0), (8.0, 24.0)), draft_ms=((1.0, 6.0), (32.0, 6.0)), exit_ms=0.5, transfer_ms=0.2)


def record(make_bench: Make, temperature: float = 0.0, **settings: Any) -> Recording:
    """One scripted text of 60 tokens, recorded ten tokens deep."""
    bench = make_bench(hit_rate=0.7, **settings)
    sampling = {"max_new_tokens": 60, "temperature": temperature or None, "seed": 5}
    tokens = np.array(PROMPT + bench.decode(PROMPT, "plain", **sampling))
    text = record_text(bench.engine, tokens, len(PROMPT), GenerationConfig(**sampling), 10)
    return recording_of(text, temperature=temperature)


def head_of(kind: str, read_share: float = 0.1) -> Head:
    layers = KINDS[kind]
    shape = HeadShape(taps=(2,), length=4, num_candidates=1, num_layers=layers, num_kv_heads=layers, head_dim=8)
    source = SourceModel(name="fake", family=kind, licence="unknown", num_parameters=1)
    sizes = {"vocabulary": "own", "num_tokens": 16, "read_share": read_share}
    return Head(kind=kind, file="", source=source, shape=shape, **sizes)


def headed(make_bench: Make, draft_handler: Make, **settings: Any) -> Any:
    """A bench whose target has a head of each kind, often right."""
    bench = make_bench(**settings)
    for kind in KINDS:
        bench.target.add_head(head_of(kind), draft_handler(0.7, 3))
    return bench


def record_heads(bench: Any, sampling: dict[str, Any], prompt: list[int]) -> Recording:
    """What heads say along one text of 60 tokens."""
    tokens = np.array(prompt + bench.decode(prompt, "plain", **sampling))
    text = record_text(bench.engine, tokens, len(prompt), GenerationConfig(**sampling), 10, heads=tuple(KINDS))
    recording = recording_of(text, temperature=sampling["temperature"] or 0.0)
    return replace(recording, heads=tuple(map(head_of, KINDS)))


def recording_of(*texts: RecordedText, temperature: float = 0.0) -> Recording:
    sizes = {"num_layers": 4, "vocab_size": 16, "round_sizes": (8, 16, 32), "max_tips": 32}
    return Recording(texts=texts, temperature=temperature, layers=(0,), **sizes)


def test_recording_says_what_the_models_say(make_bench: Make, scripted: Make, draft_handler: Make) -> None:
    text = record(make_bench).texts[0]
    handler = draft_handler(0.7, 3)
    for head in (0, 7, 59):
        so_far = text.tokens[: len(PROMPT) + head].tolist()
        for depth in range(11):
            along = so_far + text.windows[head, :depth].tolist()
            assert text.draft_ids[head, depth, :, 0].tolist() == list(handler(along))
            assert text.exit_ids[0, head, depth, 0] == scripted(along).argmax()


def test_a_sampled_recording_ranks_with_the_noise_of_its_text(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's graph adds it, so that what is recorded is what a sampled run would have seen."""
    heard: list[Any] = []
    monkeypatch.setattr(FakeDraft, "use_noise", lambda _, source: heard.append(source))
    bench = make_bench()
    tokens = np.array(PROMPT + bench.decode(PROMPT, "plain"))
    sampled = GenerationConfig(temperature=1.0, seed=5)
    for config in (sampled, GenerationConfig()):
        record_text(bench.engine, tokens, len(PROMPT), config, 4)
    assert heard[-1] is None
    expected = TokenChooser(sampled).noise_source()
    assert expected is not None
    assert np.array_equal(heard[-2](11, 16), expected(11, 16))


def test_a_text_that_fills_the_context_cannot_be_recorded(make_bench: Make) -> None:
    bench = make_bench(context=24)
    tokens = np.array(PROMPT + bench.decode(PROMPT, "plain", max_new_tokens=16))
    with pytest.raises(ContextLengthError, match=r"A text of 24 tokens fills the context.*--context"):
        record_text(bench.engine, tokens, len(PROMPT), GenerationConfig(), 10)


def test_of_a_text_that_fills_the_context_all_but_the_last_token_is_recorded(make_bench: Make) -> None:
    bench = make_bench(context=24)
    new = bench.decode(PROMPT, "plain", max_new_tokens=16)

    def generate(*, config: GenerationConfig, prompt: str) -> Any:
        return SimpleNamespace(prompt_ids=PROMPT, token_ids=new, stop_reason="eos", num_tokens=len(new))

    target = SimpleNamespace(context=24, exits=(), shape=SimpleNamespace(num_layers=4, vocab_size=16))
    draft = SimpleNamespace(buckets=(SimpleNamespace(rows=8, tips=8),))
    manifest = SimpleNamespace(target=target, draft=draft, heads=())
    pipe: Any = SimpleNamespace(generate=generate, engine=bench.engine, manifest=manifest)
    (text,) = record_texts(pipe, ["once"], GenerationConfig()).texts
    assert (text.tokens.tolist(), text.ends) == ((PROMPT + new)[:23], False)


def test_outcome_is_the_leading_agreement() -> None:
    shape = {"num_prompt": 2, "seed": 0, "draft_ids": np.zeros(0), "draft_logprobs": np.zeros(0)}
    windows = np.array([[7, 8, 1], [8, 9, 2], [9, 3, 3]])
    text = RecordedText(
        tokens=np.array([5, 6, 7, 8, 9]), windows=windows, exit_ids=np.zeros(0), exit_logprobs=np.zeros(0), **shape
    )
    assert [text.outcome(head, 3) for head in range(3)] == [(2, 9), (1, 9), (0, 9)]
    assert text.outcome(0, 1) == (1, 8)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replay_takes_the_steps_of_the_real_run(make_bench: Make, temperature: float) -> None:
    settings = {"gamma": 6, "passes": 3, "roots": 12, "window": "full"}
    recording = record(make_bench, temperature)
    for method in ("plain", "serial"):
        bench = make_bench(hit_rate=0.7, **settings)
        bench.decode(PROMPT, method, max_new_tokens=60, temperature=temperature or None, seed=5)
        real = [(step.num_window, step.num_accepted) for step in bench.last_request.steps]
        stats = simulate(recording, Scenario(pace=PACE, speculation=SpeculationConfig(**settings), method=method))[0]
        assert stats.steps == len(real)
        assert stats.mean_accepted == pytest.approx(np.mean([accepted for _, accepted in real]))


def test_a_replay_begins_with_what_the_scheduler_is_told(make_bench: Make) -> None:
    recording, begun = record(make_bench), list[bool]()

    def begin(known: Knowledge) -> None:
        begun.append(known.target_ms == PACE.target_ms)
        known.target_ms = ((1.0, 20.0), (8.0, 2000.0))  # where every further row costs so much, none is drafted

    scenario = Scenario(pace=PACE, speculation=SpeculationConfig(window="worthwhile"), method="serial")
    (right,), (wrong,) = simulate(recording, scenario), simulate(recording, replace(scenario, begin=begin))
    assert begun == [True], "once, before the first text"
    assert right.steps < wrong.steps


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_replay_ranks_candidates_as_the_real_run_does(temperature: float | None) -> None:
    """Only the target's own choices are known; at a temperature the draft's compete with the noise."""
    config = GenerationConfig(temperature=temperature, seed=5)
    ids, positions = np.tile(np.arange(8), (50, 1)), np.arange(50)
    logprobs = np.sort(np.random.default_rng(3).normal(size=(50, 8)))[:, ::-1]
    guesses = [likeliest(chooser(config), ids, logprobs, positions) for chooser in (ReplayChooser, TokenChooser)]
    assert np.array_equal(*guesses)
    assert np.any(guesses[0]) == (temperature is not None)


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("prompt", [PROMPT, [7]])
def test_replayed_heads_and_lookups_take_the_steps_of_the_real_run(
    make_bench: Make, draft_handler: Make, temperature: float | None, prompt: list[int]
) -> None:
    settings = {"gamma": 6, "window": "full"}
    sampling = {"max_new_tokens": 60, "temperature": temperature, "seed": 5}
    bench = headed(make_bench, draft_handler, **settings)
    recording = record_heads(bench, sampling, prompt)
    for method in (*KINDS, "lookup"):
        bench.decode(prompt, method, **sampling)
        real = [(step.num_window, step.num_accepted) for step in bench.last_request.steps]
        scenario = Scenario(pace=PACE, speculation=SpeculationConfig(**settings), method=method)
        (request,) = replay(recording, scenario)
        assert [(step.num_window, step.num_accepted) for step in request.steps] == real, method
        assert max(accepted for _, accepted in real) > (method != "lookup")


def test_a_text_that_ends_by_itself_is_drafted_on_to_its_end(make_bench: Make, draft_handler: Make) -> None:
    """Nobody knows that its last token is the last: windows stay long, and one more is wanted behind it."""
    sampling = {"max_new_tokens": 60, "temperature": None, "seed": 5}
    recording = record_heads(headed(make_bench, draft_handler, window="full"), sampling, PROMPT)
    ended = replace(recording, texts=tuple(replace(text, ends=True) for text in recording.texts))
    for method in (*KINDS, "serial", "mirror", "auto", "lookup"):
        scenario = Scenario(pace=PACE, speculation=SpeculationConfig(window="full"), method=method)
        (known,), (unknown,) = replay(recording, scenario), replay(ended, scenario)
        assert unknown.num_new == known.num_new == 60
        assert unknown.tokens.tolist() == known.tokens.tolist() == recording.texts[0].tokens.tolist()
        if method in (*KINDS, "serial"):
            assert known.steps[-1].next_source == "none" != unknown.steps[-1].next_source
            assert unknown.steps[-1].num_window > known.steps[-1].num_window


def test_a_replayed_head_takes_its_share_of_a_pass(make_bench: Make, draft_handler: Make) -> None:
    """Per step a pass of five rows, 22.3 ms, a tenth of the pass of the rows that are read, and the host's parts."""
    sampling = {"max_new_tokens": 60, "temperature": None, "seed": 5}
    recording = record_heads(headed(make_bench, draft_handler, window="full"), sampling, PROMPT)
    full = SpeculationConfig(window="full")
    (request,) = replay(recording, Scenario(pace=PACE, speculation=full, method="medusa", host_ms=0.5))
    ledger = request.ledger
    heads = [span.seconds for span in ledger.spans if span.name == "head" and span.start >= ledger.prefilled]
    assert len(heads) == len(request.steps) - 1
    for step, seconds in zip(request.steps, heads, strict=False):
        rows = 1 + step.num_accepted
        assert seconds == pytest.approx((0.1 * (20 + (rows - 1) * 4 / 7) + HEAD_HOST_MS) / 1e3)
        pass_ms = 20 + step.num_window * 4 / 7
        assert step.ended - step.started == pytest.approx(seconds + (pass_ms + 0.5) / 1e3)


@pytest.mark.parametrize("heads", [(), (head_of("medusa", read_share=0.0),)])
def test_a_head_that_was_not_recorded_or_has_no_cost_is_refused(make_bench: Make, heads: tuple[Head, ...]) -> None:
    recording = replace(record(make_bench), heads=heads)
    scenario = Scenario(pace=PACE, speculation=SpeculationConfig(), method="medusa")
    with pytest.raises(ConfigError, match=r"no medusa head of known cost \(it has: none\).*simulate BUNDLE --record"):
        simulate(recording, scenario)


def test_simulated_time_is_the_pace(make_bench: Make) -> None:
    plain = Scenario(pace=PACE, speculation=SpeculationConfig(), method="plain", host_ms=0.5)
    assert tokens_per_second(simulate(record(make_bench), plain)) == pytest.approx(1e3 / 20.5)


def test_mirror_hides_the_draft_and_serial_does_not(make_bench: Make, confident_exit: Make) -> None:
    recording = record(make_bench, exit_handler=confident_exit)
    speculation = SpeculationConfig(gamma=4, roots=16, root_source="progressive")
    found = {
        m: simulate(recording, Scenario(pace=PACE, speculation=speculation, method=m)) for m in ("serial", "mirror")
    }
    assert mean_of(found["mirror"], "reuse_rate") > 0.9
    assert mean_of(found["mirror"], "draft_exposed_ms") < 1
    assert sum(shares_of(found["mirror"], "reuse_by_source").values()) == pytest.approx(
        mean_of(found["mirror"], "reuse_rate"), abs=1e-3
    )
    assert shares_of(found["serial"], "reuse_by_source") == {}
    assert mean_of(found["serial"], "draft_exposed_ms") > 6
    assert tokens_per_second(found["mirror"]) > 1.15 * tokens_per_second(found["serial"])


def test_a_slow_draft_makes_auto_decode_plainly(make_bench: Make) -> None:
    slow = Pace(target_ms=((1.0, 1.0), (8.0, 8.0)), draft_ms=((1.0, 20.0),))
    recording = record(make_bench)
    auto = simulate(recording, Scenario(pace=slow, speculation=SpeculationConfig(), method="auto"))[0]
    assert auto.steps_by_method["plain"] > 0.5 * auto.steps


def test_recording_survives_its_file(make_bench: Make, draft_handler: Make, tmp_path: Path) -> None:
    bench = headed(make_bench, draft_handler)
    recording = record_heads(bench, {"max_new_tokens": 60, "temperature": 0.7, "seed": 5}, PROMPT)
    recording = replace(recording, texts=(replace(recording.texts[0], ends=True),))
    recording.write(tmp_path / "texts")
    again = Recording.read(tmp_path / "texts")
    for name in ("tokens", "windows", "draft_ids", "exit_ids"):
        np.testing.assert_array_equal(getattr(again.texts[0], name), getattr(recording.texts[0], name))
    for kind in KINDS:
        np.testing.assert_array_equal(again.texts[0].head_ids[kind], recording.texts[0].head_ids[kind])
    assert (again.layers, again.round_sizes, again.max_tips) == ((0,), (8, 16, 32), 32)
    assert again.heads == recording.heads
    assert again.texts[0].ends
    whole = (tmp_path / "texts").read_bytes()
    flipped = whole[:300] + bytes(byte ^ 255 for byte in whole[300:310]) + whole[310:]
    for content in (b"PK nothing", b"", whole[:10], whole[: len(whole) // 2], whole[:-1], flipped):
        (tmp_path / "texts").write_bytes(content)
        with pytest.raises(ConfigError, match=r"texts is not a recording, or a damaged one.*simulate"):
            Recording.read(tmp_path / "texts")


@pytest.mark.parametrize("noise", [None, "other-noise-1"])
def test_a_sampled_recording_of_other_noise_is_refused(make_bench: Make, tmp_path: Path, noise: str | None) -> None:
    """Versions before said nothing of their noise. A greedy text has none."""
    for temperature in (0.0, 1.0):
        path = tmp_path / f"{temperature:g}.npz"
        record(make_bench, temperature).write(path)
        assert Recording.read(path).temperature == temperature
        with np.load(path) as arrays:
            kept = dict(arrays)
        header = json.loads(str(kept["header"]))
        assert header.pop("noise") == NOISE
        kept["header"] = np.array(json.dumps(header | ({"noise": noise} if noise else {})))
        np.savez_compressed(path, **kept)
    assert Recording.read(tmp_path / "0.npz").temperature == 0.0
    with pytest.raises(ConfigError, match=rf"sampled with other noise \({noise or 'that of an older'}.*--record FILE"):
        Recording.read(tmp_path / "1.npz")


def test_fitted_scores_find_more_roots_than_defaults(make_bench: Make, confident_exit: Make) -> None:
    """The scripted draft names one candidate and is sure of it; only the exit knows better, and fitting finds out."""
    recording = record(make_bench, exit_handler=lambda text: 0.05 * confident_exit(text))
    fitted = fit_scores([recording], gamma=6)
    before, after = (coverage(recording, scores, "both", 6, (1, 2)) for scores in (RootScores(), fitted))
    assert after[0] > before[0] + 0.1
    assert after[1] >= before[1]


class UnsureDraft(FakeDraft):
    """Its second and third thoughts are the neighbours of its first."""

    def run(self, *asked: Any) -> TipGuesses:
        first = super().run(*asked).ids
        ids = (first + np.array([0, 15, 1])) % 16
        logprobs = np.broadcast_to(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)), ids.shape)
        return TipGuesses(ids, logprobs.copy())


@pytest.mark.parametrize("method", ["serial", *KINDS])
def test_a_replay_verifies_the_siblings_of_a_real_run(make_bench: Make, draft_handler: Make, method: str) -> None:
    handler = draft_handler(0.5, 3)
    draft = UnsureDraft(handler, vocab_size=16, num_streams=3, num_candidates=3)
    flat = ((1.0, 10.0), (32.0, 10.0))
    speculation = {"siblings": 6, "passes": 1, "repeats": False}
    bench = make_bench(draft=draft, is_steady=True, **speculation)
    bench.engine.known.target_ms = flat
    heads = {} if method == "serial" else {method: head_of(method)}
    for head in heads.values():
        wider = replace(head, shape=replace(head.shape, num_candidates=3))
        bench.target.add_head(wider, lambda text: (np.array(handler(text))[:, None] + np.array([0, 15, 1])) % 16)
    tokens = np.array(PROMPT + bench.decode(PROMPT, method, max_new_tokens=60))
    of_real = [(step.num_window, step.num_siblings, step.num_aside) for step in bench.last_request.steps]
    text = record_text(bench.engine, tokens, len(PROMPT), GenerationConfig(), 10, heads=tuple(heads))
    recording = replace(recording_of(text), heads=tuple(heads.values()))
    pace = replace(PACE, target_ms=flat)
    (request,) = replay(recording, Scenario(pace=pace, speculation=SpeculationConfig(**speculation), method=method))
    found = [(step.num_window, step.num_siblings, step.num_aside) for step in request.steps]
    assert found[1:-3] == of_real[1:-3]
    assert sum(aside for _, _, aside in found) > 3
