"""Trees: guesses beside a window are verified in its pass, and change no text."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.runtime.decoding.request import Acceptance, accept_tree
from mirrorsd.runtime.ledger import ALONE, Joint
from mirrorsd.runtime.policy.siblings import NO_SIBLINGS, Known, SiblingChooser, Siblings
from mirrorsd.runtime.policy.windows import LearnedLengths
from mirrorsd.runtime.sampling.chooser import Choice, TokenChooser
from mirrorsd.testing.fake import FakeDraft
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
VOCAB = 16
FLAT = ((1.0, 10.0), (32.0, 10.2))
STEEP = ((1.0, 10.0), (32.0, 600.0))


class UnsureDraft(FakeDraft):
    """Its second and third thoughts are the two tokens behind its first, which a wrong one of `make_bench` is too."""

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        first = super().run(blocks, tip_rows).ids
        ids = (first + np.array([0, VOCAB - 1, 1])) % VOCAB
        logprobs = np.broadcast_to(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)), ids.shape)
        return TipGuesses(ids, logprobs.copy())


@pytest.fixture
def make_tree_bench(make_bench: Callable[..., Any], draft_handler: Callable[..., Any]) -> Callable[..., Any]:
    """A bench whose draft has runners-up, on a target whose rows cost what `target_ms` says."""

    def make(hit_rate: float = 0.6, target_ms: Any = FLAT, streams: int = 3, **settings: Any) -> Any:
        handler = draft_handler(hit_rate, streams)
        draft = UnsureDraft(handler, vocab_size=VOCAB, num_streams=streams, num_candidates=3)
        bench = make_bench(draft=draft, streams=streams, is_steady=True, **{"siblings": 8, **settings})
        bench.engine.known.target_ms = target_ms
        return bench

    return make


def unsure(handler: Callable[[list[int]], Sequence[int]]) -> Callable[[list[int]], NDArray[np.int64]]:
    """A head whose second and third candidates are those of `UnsureDraft`."""
    return lambda text: (np.array(handler(text))[:, None] + np.array([0, VOCAB - 1, 1])) % VOCAB


HEADS = {"medusa": 0, "eagle3": 1, "block": 2, "mtp": 1}
"""Layers that keep a cache."""


def add_heads(bench: Any, handler: Callable[[list[int]], Sequence[int]], kinds: Sequence[str] = tuple(HEADS)) -> None:
    for kind in kinds:
        layers = HEADS[kind]
        shape = HeadShape(
            taps=(2,), length=4, num_candidates=3, num_layers=layers, num_kv_heads=min(layers, 1), head_dim=8
        )
        source = SourceModel(name="fake", family=kind, licence="unknown", num_parameters=1)
        head = Head(kind=kind, file="", source=source, shape=shape, vocabulary="own", num_tokens=16)
        bench.target.add_head(head, unsure(handler))


@pytest.fixture
def make_headed_bench(make_tree_bench: Callable[..., Any], draft_handler: Callable[..., Any]) -> Callable[..., Any]:
    """As `make_tree_bench`, with heads that are right so often and have runners-up."""

    def make(hit_rate: float = 0.6, **settings: Any) -> Any:
        bench = make_tree_bench(hit_rate, **settings)
        add_heads(bench, draft_handler(hit_rate, 3))
        return bench

    return make


def num_aside(bench: Any) -> int:
    return sum(step.num_aside for step in bench.last_request.steps)


@pytest.mark.parametrize("method", ["serial", "mirror", "auto", "medusa", "eagle3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "seed": 5, "top_k": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.5, "logprobs": True},
    ],
)
def test_texts_are_those_of_plain_decoding(
    make_headed_bench: Callable[..., Any], method: str, settings: dict[str, Any]
) -> None:
    bench = make_headed_bench()
    expected = bench.decode(PROMPT, "plain", max_new_tokens=60, **settings)
    for _ in range(2):  # the second text begins with what the first has taught
        assert bench.decode(PROMPT, method, max_new_tokens=60, **settings) == expected
    assert num_aside(bench), "siblings are right now and then"
    steps = bench.last_request.steps
    assert all(step.num_aside <= step.num_accepted and step.num_aside <= 1 for step in steps)
    assert sum(1 + step.num_accepted for step in steps) >= 60


@pytest.mark.parametrize("method", ["serial", "mirror", "auto", *HEADS])
def test_what_is_cached_behind_a_sibling_is_the_text(make_headed_bench: Callable[..., Any], method: str) -> None:
    bench = make_headed_bench(0.4)
    first = bench.decode(PROMPT, method, max_new_tokens=60)
    assert num_aside(bench) > 3
    text = [*PROMPT, *first]
    cached = bench.seat.target.cached.tolist()
    assert cached == text[: len(cached)]
    assert len(cached) >= len(text) - 14
    for cut in (len(text) - 1, 40, len(PROMPT) + 1):  # on, back, and back to the beginning
        prompt = [*text[:cut], 7]
        assert bench.decode(prompt, method) == bench.decode(prompt, "plain")


@pytest.mark.parametrize("method", ["serial", *HEADS])
def test_a_right_sibling_saves_a_pass(make_headed_bench: Callable[..., Any], method: str) -> None:
    counts = {}
    for siblings in (0, 8):
        bench = make_headed_bench(0.3, siblings=siblings)
        for _ in range(3):
            bench.decode(PROMPT, method, max_new_tokens=100)
        counts[siblings] = len(bench.last_request.steps)
    assert counts[8] < 0.9 * counts[0]


@pytest.mark.parametrize("method", ["serial", "eagle3"])
def test_rows_that_cost_time_are_left_out(make_headed_bench: Callable[..., Any], method: str) -> None:
    bench = make_headed_bench(target_ms=STEEP)
    bench.decode(PROMPT, method, max_new_tokens=60)
    assert sum(step.num_siblings for step in bench.last_request.steps) == 0


@pytest.mark.parametrize("method", ["mirror", "medusa"])
def test_a_target_without_a_mask_gets_none(make_headed_bench: Callable[..., Any], method: str) -> None:
    bench = make_headed_bench()
    bench.seat.target.takes_trees = False
    bench.decode(PROMPT, method, max_new_tokens=60)
    assert sum(step.num_siblings for step in bench.last_request.steps) == 0


@pytest.mark.parametrize("method", ["serial", "medusa", "eagle3"])
def test_the_end_of_the_context_has_room_for_all_rows(make_headed_bench: Callable[..., Any], method: str) -> None:
    bench = make_headed_bench(context=64)
    expected = bench.decode(PROMPT, "plain", max_new_tokens=500)
    assert bench.decode(PROMPT, method, max_new_tokens=500) == expected
    assert len(expected) == 64 - len(PROMPT)


def test_auto_has_a_head_go_on_behind_siblings(
    make_bench: Callable[..., Any], draft_handler: Callable[..., Any]
) -> None:
    """It reads what it needs of a pass whose rows are not all the text; a row that is not the text's fails loudly."""

    def useless(_: list[int]) -> list[int]:
        bench.target.seconds += 0.5
        return [VOCAB - 1, 0, 0, 0]

    draft = FakeDraft(useless, vocab_size=VOCAB, num_streams=3)
    bench = make_bench(draft=draft, is_steady=True, takes_turns=True, siblings=8)
    bench.engine.known.target_ms = ((1.0, 1000.0), (33.0, 1000.0))
    add_heads(bench, draft_handler(0.5, 3), ("eagle3",))
    right = 0
    for number in range(4):
        prompt = [number, *PROMPT]
        found = bench.decode(prompt, "auto", max_new_tokens=60)
        assert found == make_bench().decode(prompt, "plain", max_new_tokens=60)
        steps = bench.last_request.steps
        right += sum(step.num_aside and step.method == later.method == "eagle3" for step, later in pairwise(steps))
    assert right > 3


def test_siblings_that_nobody_verified_teach_nothing(
    make_headed_bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, taught = make_headed_bench(), []
    observe = SiblingChooser.observe
    monkeypatch.setattr(SiblingChooser, "observe", lambda *one, **of: (taught.append(1), observe(*one, **of)))
    for method in ("auto", "medusa"):
        taught.clear()
        bench.decode(PROMPT, method, max_new_tokens=60)
        assert len(taught) == sum(step.num_siblings > 0 for step in bench.last_request.steps)


def test_the_walk_follows_the_targets_choices() -> None:
    siblings = Siblings(np.array([5, 6]), np.array([1, 0]))
    rows: list[tuple[int, list[int]]] = []

    def choose(choices: list[int]) -> Callable[[int, Sequence[int]], Choice]:
        def of(row: int, path: Sequence[int]) -> Choice:
            rows.append((row, list(path)))
            return Choice(choices[row], 1.0)

        return of

    window = np.array([7, 8])
    assert accept_tree(window, siblings, choose([7, 5, 0, 4, 0]))[:2] == (1, 4)
    assert rows == [(0, []), (1, [7]), (3, [7, 5])]
    assert accept_tree(window, siblings, choose([6, 0, 0, 0, 2])) == Acceptance(0, 2, (1.0, 1.0), (6,), (4,))
    assert accept_tree(window, siblings, choose([7, 8, 3, 0, 0])) == Acceptance(2, 3, (1.0, 1.0, 1.0))
    assert accept_tree(window, siblings, choose([9, 0, 0, 0, 0])) == Acceptance(0, 9, (1.0,))


class Lengths:
    """Stands for a `WindowLength`: windows are right with these chances, rows cost so much."""

    joint = ALONE

    def __init__(self, cost: float, learned: LearnedLengths | None) -> None:
        self.cost, self.worth, self.learned = cost, 1.0, learned or LearnedLengths()

    def reach(self, shares: Any, num_main: int) -> list[float]:
        return [0.8, 0.4][: len(shares)]

    def row_costs(self, first: int, count: int) -> list[float]:
        return [self.cost] * count


def known_of(*ids: list[int]) -> Known:
    shares = [[-0.2, -2.0]] * len(ids)
    logprobs: list[NDArray[np.float32]] = [np.log(np.array([0.6, 0.3, 0.1], dtype=np.float32))] * len(ids)
    return Known(shares, len(ids), [np.array(row) for row in ids], logprobs)


def chooser_of(cost: float, learned: LearnedLengths | None = None, most: int = 8) -> SiblingChooser:
    chooser = TokenChooser(GenerationConfig().resolve())
    return SiblingChooser(chooser, Lengths(cost, learned), most)  # type: ignore[arg-type]


def test_the_likeliest_tokens_stand_beside_the_window() -> None:
    window, known = np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6])
    # wrong at row 0: 0.2, of which 2 has three quarters; at row 1: 0.4. Half of that counts.
    found = chooser_of(0.0).choose(window, known, 10, 8)
    assert [*zip(found.tokens.tolist(), found.parents.tolist(), strict=True)] == [(5, 1), (2, 0), (6, 1), (3, 0)]
    assert chooser_of(0.06).choose(window, known, 10, 8).tokens.tolist() == [5, 2]
    assert chooser_of(0.0, most=1).choose(window, known, 10, 8).tokens.tolist() == [5]
    assert chooser_of(0.0).choose(window, known, 10, 1).tokens.tolist() == [5], "no room for more"
    assert chooser_of(0.2).choose(window, known, 10, 8).tokens.tolist() == []


def test_what_siblings_promise_counts_with_their_window() -> None:
    """`auto` weighs a draft by that, and heads by what has come, siblings included."""
    chooser = chooser_of(0.06)
    chooser.choose(np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6]), 10, 8)
    assert chooser._length.worth == pytest.approx(1.0 + (0.15 - 0.06) + (0.075 - 0.06))


def test_a_window_is_never_beside_itself() -> None:
    found = chooser_of(0.0).choose(np.array([2, 9]), known_of([1, 2, 3], [4, 5, 6]), 10, 8)
    assert set(zip(found.tokens.tolist(), found.parents.tolist(), strict=True)) == {
        *((1, 0), (3, 0)),
        *((4, 1), (5, 1), (6, 1)),
    }


def test_there_are_none_in_company_nor_without_a_window() -> None:
    chooser = chooser_of(0.0)
    assert chooser.choose(np.array([], dtype=np.int64), known_of([1, 2, 3]), 10, 8) is NO_SIBLINGS
    chooser._length.joint = Joint(1)
    assert chooser.choose(np.array([1]), known_of([1, 2, 3]), 10, 8) is NO_SIBLINGS


def test_siblings_that_are_never_right_are_given_up() -> None:
    learned = LearnedLengths()
    for _ in range(60):
        chooser = chooser_of(0.02, learned)
        num_found = len(chooser.choose(np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6]), 10, 8).tokens)
        chooser.begin()
        chooser.choose(np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6]), 12, 8)  # beside the next window
        chooser.observe(was_right=False)
    assert num_found == 0


def test_passes_of_equal_rows_have_none() -> None:
    with pytest.raises(ConfigError, match="siblings is 4; allowed: 0 where pad_rows_to"):
        SpeculationConfig(siblings=4, pad_rows_to=12)
