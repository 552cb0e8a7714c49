"""`auto` changes no token; its promises are a table: kind of draft x costs -> what it keeps, in simulated time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import Pace
from mirrorsd.machine.tuning.recorder import record_text
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, replay, simulate, tokens_per_second
from mirrorsd.runtime.decoding.auto import AutoSource
from mirrorsd.runtime.draft.tree import RepeatedText
from mirrorsd.testing.fake import FakeDraft
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_TOKENS = 128
DRAFT_MS = ((4.0, 1.7), (32.0, 3.6))
PACES = {
    "int8 on a processor": Pace(target_ms=((1.0, 4.9), (4.0, 5.4), (8.0, 7.0), (17.0, 11.6)), draft_ms=DRAFT_MS),
    "fp32 on a processor": Pace(target_ms=((1.0, 12.2), (8.0, 16.5), (17.0, 20.1)), draft_ms=DRAFT_MS),
    "a GPU and an NPU": Pace(target_ms=((1.0, 26.0), (32.0, 31.0)), draft_ms=((4.0, 4.0), (32.0, 5.0))),
    "a draft as slow as the target": Pace(target_ms=((1.0, 5.0), (8.0, 7.0)), draft_ms=((4.0, 5.0), (32.0, 5.0))),
}
OF_PLAIN, OF_BEST = "plain", "best"
PROMISES = [
    (0.0, False, OF_PLAIN, 0.97),
    (0.1, False, OF_PLAIN, 0.97),
    (0.7, False, OF_BEST, 0.96),
    (1.0, False, OF_BEST, 0.86),
    (0.0, True, OF_PLAIN, 0.969),
    (0.1, True, OF_PLAIN, 0.969),
    (0.7, True, OF_BEST, 0.92),
    (1.0, True, OF_BEST, 0.88),
]
"""Chance of the draft's tokens to be right; whether both devices share their cores; and the least part of what speed
`auto` keeps, on the first text, which never says a thing twice.

The first text knows nothing, plain decoding's own speed included. A draft that is always right needs few steps for it:
the two plain ones that begin it are a tenth of its time."""


VOCAB = 512
LISTENING = SpeculationConfig(root_source="progressive")
"""The fake draft has no runners-up: roots are the exits'."""


def next_token(text: list[int]) -> int:
    """No token says what comes: only the place does."""
    return int(np.random.default_rng([3, len(text)]).integers(0, VOCAB))


def new_at_every_place(text: list[int]) -> np.ndarray:
    logits = np.random.default_rng([5, len(text)]).normal(size=VOCAB)
    logits[next_token(text)] += 12.0
    return logits


def draft_that_is_right_with(hit_rate: float) -> FakeDraft:
    def handler(text: list[int]) -> list[int]:
        text, guesses = list(text), []
        for _ in range(4):
            is_right = np.random.default_rng([7, *text[-5:], len(text)]).random() < hit_rate
            text.append((next_token(text) + (not is_right)) % VOCAB)
            guesses.append(text[-1])
        return guesses

    return FakeDraft(handler, vocab_size=VOCAB, num_streams=3, capacity=256)


@pytest.fixture(scope="module")
def recordings() -> dict[float, Recording]:
    return {}


def recorded(recordings: dict[float, Recording], make_bench: Make, hit_rate: float) -> Recording:
    if hit_rate not in recordings:
        draft = draft_that_is_right_with(hit_rate)
        bench = make_bench(target_handler=new_at_every_place, vocab=VOCAB, draft=draft)
        tokens = np.array(PROMPT + bench.decode(PROMPT, "plain", max_new_tokens=NUM_TOKENS))
        config = GenerationConfig(max_new_tokens=NUM_TOKENS)
        texts = (record_text(bench.engine, tokens, len(PROMPT), config, 8),)
        sizes = {"num_layers": 4, "vocab_size": VOCAB, "round_sizes": (8, 16, 32), "max_tips": 32}
        recordings[hit_rate] = Recording(texts=texts, temperature=0.0, layers=(0,), **sizes)
    return recordings[hit_rate]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize(("hit_rate", "takes_turns", "kept_of", "least"), PROMISES)
def test_what_auto_promises(
    recordings: dict[float, Recording],
    make_bench: Make,
    hit_rate: float,
    *,
    takes_turns: bool,
    kept_of: str,
    least: float,
    pace: str,
) -> None:
    recording = recorded(recordings, make_bench, hit_rate)
    rivals = (
        ("plain",) if kept_of == OF_PLAIN else ("plain", "serial") if takes_turns else ("plain", "serial", "mirror")
    )
    speeds = {
        method: tokens_per_second(
            simulate(
                recording,
                Scenario(pace=PACES[pace], speculation=LISTENING, method=method, takes_turns=takes_turns),
            )
        )
        for method in (*rivals, "auto")
    }
    assert speeds["auto"] >= least * max(speeds[method] for method in rivals)


def test_an_ordinary_draft_is_tried_by_few_of_its_rounds(recordings: dict[float, Recording], make_bench: Make) -> None:
    """A round of a third of a pass: a whole window would spend on one trial what the text may lose in all."""
    pace = Pace(target_ms=((1.0, 42.5), (8.0, 66.0)), draft_ms=((1.0, 15.0), (32.0, 30.0)))
    speculation = SpeculationConfig(root_source="progressive", passes=6, gamma=6)
    scenario = Scenario(pace=pace, speculation=speculation, method="auto", num_streams=0, takes_turns=True)
    (request,) = replay(recorded(recordings, make_bench, 0.0), scenario)
    tried = [step.num_window for step in request.steps if step.num_window]
    assert len(tried) > 1
    assert max(tried) <= 3


@pytest.mark.parametrize("hit_rate", [0.0, 1.0])
def test_what_the_draft_lacks_of_a_text_is_counted_once_and_goes_on(
    recordings: dict[float, Recording], make_bench: Make, monkeypatch: pytest.MonkeyPatch, hit_rate: float
) -> None:
    counted, found = AutoSource._num_missing.fget, list[int]()  # type: ignore[attr-defined]

    def checked(source: AutoSource) -> int:
        missing: int = counted(source)
        assert missing == (0 if source._is_in_step else source._draft.num_unread(source._request.tokens))
        found.append(missing)
        return missing

    monkeypatch.setattr(AutoSource, "_num_missing", property(checked))
    pace = Pace(target_ms=((1.0, 42.5), (8.0, 66.0)), draft_ms=((1.0, 15.0), (32.0, 30.0)))
    scenario = Scenario(pace=pace, speculation=LISTENING, method="auto", takes_turns=True)
    replay(recorded(recordings, make_bench, hit_rate), scenario)
    assert max(found) > 0


def test_while_nobody_looks_a_text_is_decoded_plainly_and_nothing_is_forgotten(
    make_bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking takes time, which counts where steps are short. Tokens go on counting."""
    choose, looked = AutoSource._choose, list[int]()
    follow, is_watched = RepeatedText.follow, list[bool]()

    def counted(source: AutoSource, done: Any) -> Any:
        looked.append(source._request.num_tokens)
        return choose(source, done)

    def followed(text: RepeatedText, new: Sequence[int]) -> None:
        is_watched.extend([text.is_watched] * len(new))
        follow(text, new)

    monkeypatch.setattr(RepeatedText, "follow", followed)
    monkeypatch.setattr(AutoSource, "_choose", counted)
    bench = make_bench(hit_rate=0.0, is_steady=True, takes_turns=True)
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=60)
    known = bench.engine.known.pairs[False]
    known.start_plain(0.002)
    known.attention.left, since = 20, known.since
    assert bench.decode(PROMPT, "auto", max_new_tokens=60) == expected
    gaps = np.diff([len(PROMPT), *looked])
    assert 20 <= max(gaps) <= 21 + bench.last_request.speculation.gamma
    assert known.attention.left <= 0
    assert known.since >= since + 20
    assert is_watched.count(False) in range(15, 22), "nor is the text followed meanwhile"
    assert is_watched[-1]


def test_a_slow_useless_draft_leaves_plain_decoding(make_bench: Make) -> None:
    def useless(text: list[int]) -> list[int]:
        bench.target.seconds += 0.5
        return [99 % 16, 0, 0, 0]

    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=120)
    bench = make_bench(draft=FakeDraft(useless, vocab_size=16, num_streams=3), is_steady=True)
    assert bench.decode(PROMPT, "auto", max_new_tokens=120) == expected
    methods = [step.method for step in bench.last_request.steps]
    assert methods[-60:].count("plain") >= 54


def test_a_good_draft_beside_a_slow_target_is_used(make_bench: Make) -> None:
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=150)
    bench = make_bench(hit_rate=1.0, is_steady=True)
    assert bench.decode(PROMPT, "auto", max_new_tokens=150) == expected
    methods = [step.method for step in bench.last_request.steps]
    assert methods[-5:].count("plain") == 0


@pytest.mark.parametrize("takes_turns", [True, False])
def test_on_shared_cores_the_target_never_works_beside_the_draft(make_bench: Make, *, takes_turns: bool) -> None:
    """Windows on the side: beside passes of the target both would be slow. With devices of their own nobody waits."""
    bench = make_bench(hit_rate=0.1, takes_turns=takes_turns, gamma=4, suffix_seconds=0.002)
    started, pass_of = [], bench.target.run

    def run(*arguments: Any, **options: Any) -> Any:
        started.append(bench.engine.draft_worker.has_pending())
        return pass_of(*arguments, **options)

    def slowly(text: list[int]) -> list[int]:
        time.sleep(0.002)
        return [0] * 4

    bench.target.run = run
    bench.draft._handler = slowly
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=60)
    assert bench.decode(PROMPT, "auto", max_new_tokens=60) == expected
    assert bench.draft.num_passes > 0
    assert any(started) is not takes_turns


def test_a_draft_that_is_never_right_costs_its_trials_alone(make_bench: Make) -> None:
    bench = make_bench(draft=SlowLiar(), is_steady=True, takes_turns=True)
    bench.draft.target = bench.target
    expected = make_bench().decode(PROMPT, "plain", max_new_tokens=120)
    bench.target.seconds = 0.0
    assert bench.decode(PROMPT, "auto", max_new_tokens=120) == expected
    assert bench.draft.num_passes > 2
    assert bench.target.seconds <= 1.04 * 120


def test_the_window_before_the_first_step_is_paid_for_too(make_bench: Make) -> None:
    """Two passes' time for a window: with the first step, that is all that the text may lose."""
    bench = make_bench(draft=SlowLiar(2.0), is_steady=True, takes_turns=True)
    bench.draft.target = bench.target
    known = bench.engine.known.pairs[False]
    known.start_from({"plain": 1.0, "serial": 1.05}, {"plain": 1.0, "serial": 3.3}, ((1.0, 1000.0), (8.0, 1000.0)))
    bench.decode(PROMPT, "auto", max_new_tokens=120)
    drafted = [step.num_window for step in bench.last_request.steps[:20] if step.method != "plain"]
    assert len(drafted) == 1


class SlowLiar(FakeDraft):
    """Never right; a round takes so many passes' time."""

    def __init__(self, seconds: float = 0.5) -> None:
        super().__init__(lambda text: [99 % 16, 0, 0, 0], vocab_size=16, num_streams=3)
        self._seconds = seconds

    def run(self, *arguments: Any) -> Any:
        self.target.seconds += self._seconds
        return super().run(*arguments)
