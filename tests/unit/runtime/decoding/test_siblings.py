"""Trees: guesses beside a window are verified in its pass, and change no text."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import ConfigError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.runtime.backends.protocol import RowBlock, TipGuesses
from mirrorsd.runtime.decoding.request import Acceptance, accept_tree
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


def num_aside(bench: Any) -> int:
    return sum(step.num_aside for step in bench.last_request.steps)


@pytest.mark.parametrize("method", ["serial", "mirror", "auto"])
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
    make_tree_bench: Callable[..., Any], method: str, settings: dict[str, Any]
) -> None:
    bench = make_tree_bench()
    expected = bench.decode(PROMPT, "plain", max_new_tokens=60, **settings)
    for _ in range(2):  # the second text begins with what the first has taught
        assert bench.decode(PROMPT, method, max_new_tokens=60, **settings) == expected
    assert num_aside(bench), "siblings are right now and then"
    steps = bench.last_request.steps
    assert all(step.num_aside <= step.num_accepted and step.num_aside <= 1 for step in steps)
    assert sum(1 + step.num_accepted for step in steps) >= 60


@pytest.mark.parametrize("method", ["serial", "mirror", "auto"])
def test_what_is_cached_behind_a_sibling_is_the_text(make_tree_bench: Callable[..., Any], method: str) -> None:
    bench = make_tree_bench(0.4)
    first = bench.decode(PROMPT, method, max_new_tokens=60)
    assert num_aside(bench) > 3
    text = [*PROMPT, *first]
    cached = bench.seat.target.cached.tolist()
    assert cached == text[: len(cached)]
    assert len(cached) >= len(text) - 14
    for cut in (len(text) - 1, 40, len(PROMPT) + 1):  # on, back, and back to the beginning
        prompt = [*text[:cut], 7]
        assert bench.decode(prompt, method) == bench.decode(prompt, "plain")


def test_a_right_sibling_saves_a_pass(make_tree_bench: Callable[..., Any]) -> None:
    counts = {}
    for siblings in (0, 8):
        bench = make_tree_bench(0.3, siblings=siblings)
        for _ in range(3):
            bench.decode(PROMPT, "serial", max_new_tokens=100)
        counts[siblings] = len(bench.last_request.steps)
    assert counts[8] < 0.9 * counts[0]


def test_rows_that_cost_time_are_left_out(make_tree_bench: Callable[..., Any]) -> None:
    bench = make_tree_bench(target_ms=STEEP)
    bench.decode(PROMPT, "serial", max_new_tokens=60)
    assert sum(step.num_siblings for step in bench.last_request.steps) == 0


def test_a_target_without_a_mask_gets_none(make_tree_bench: Callable[..., Any]) -> None:
    bench = make_tree_bench()
    bench.seat.target.takes_trees = False
    bench.decode(PROMPT, "mirror", max_new_tokens=60)
    assert sum(step.num_siblings for step in bench.last_request.steps) == 0


def test_the_end_of_the_context_has_room_for_all_rows(make_tree_bench: Callable[..., Any]) -> None:
    bench = make_tree_bench(context=64)
    expected = bench.decode(PROMPT, "plain", max_new_tokens=500)
    assert bench.decode(PROMPT, "serial", max_new_tokens=500) == expected
    assert len(expected) == 64 - len(PROMPT)


def test_a_head_waits_where_the_rows_of_a_pass_have_gaps(
    make_tree_bench: Callable[..., Any], draft_handler: Callable[..., Any]
) -> None:
    bench = make_tree_bench(0.5)
    for kind, layers in (("medusa", 0), ("eagle3", 1)):
        shape = HeadShape(taps=(2,), length=4, num_candidates=1, num_layers=layers, num_kv_heads=layers, head_dim=8)
        source = SourceModel(name="fake", family=kind, licence="unknown", num_parameters=1)
        head = Head(kind=kind, file="", source=source, shape=shape, vocabulary="own", num_tokens=16)
        bench.target.add_head(head, draft_handler(0.5, 3))
    expected = bench.decode(PROMPT, "plain", max_new_tokens=150)
    methods = set()
    for _ in range(4):
        assert bench.decode(PROMPT, "auto", max_new_tokens=150) == expected
        methods |= {step.method for step in bench.last_request.steps}
    assert num_aside(bench) or methods & {"medusa", "eagle3"}


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
    assert accept_tree(window, siblings, choose([6, 0, 0, 0, 2])) == Acceptance(0, 2, (1.0, 1.0), (6,))
    assert accept_tree(window, siblings, choose([7, 8, 3, 0, 0])) == Acceptance(2, 3, (1.0, 1.0, 1.0))
    assert accept_tree(window, siblings, choose([9, 0, 0, 0, 0])) == Acceptance(0, 9, (1.0,))


class Lengths:
    """Stands for a `WindowLength`: windows are right with these chances, rows cost so much."""

    num_beside = 0

    def __init__(self, cost: float) -> None:
        self.cost = cost

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
    return SiblingChooser(chooser, Lengths(cost), learned or LearnedLengths(), most)  # type: ignore[arg-type]


def test_the_likeliest_tokens_stand_beside_the_window() -> None:
    window, known = np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6])
    # wrong at row 0: 0.2, of which 2 has three quarters; at row 1: 0.4. Half of that counts.
    found = chooser_of(0.0).choose(window, known, 10, 8)
    assert [*zip(found.tokens.tolist(), found.parents.tolist(), strict=True)] == [(5, 1), (2, 0), (6, 1), (3, 0)]
    assert chooser_of(0.06).choose(window, known, 10, 8).tokens.tolist() == [5, 2]
    assert chooser_of(0.0, most=1).choose(window, known, 10, 8).tokens.tolist() == [5]
    assert chooser_of(0.0).choose(window, known, 10, 1).tokens.tolist() == [5], "no room for more"
    assert chooser_of(0.2).choose(window, known, 10, 8).tokens.tolist() == []


def test_a_window_is_never_beside_itself() -> None:
    found = chooser_of(0.0).choose(np.array([2, 9]), known_of([1, 2, 3], [4, 5, 6]), 10, 8)
    assert set(zip(found.tokens.tolist(), found.parents.tolist(), strict=True)) == {
        *((1, 0), (3, 0)),
        *((4, 1), (5, 1), (6, 1)),
    }


def test_there_are_none_in_company_nor_without_a_window() -> None:
    chooser = chooser_of(0.0)
    assert chooser.choose(np.array([], dtype=np.int64), known_of([1, 2, 3]), 10, 8) is NO_SIBLINGS
    chooser._length.num_beside = 1
    assert chooser.choose(np.array([1]), known_of([1, 2, 3]), 10, 8) is NO_SIBLINGS


def test_siblings_that_are_never_right_are_given_up() -> None:
    learned = LearnedLengths()
    for _ in range(60):
        chooser = chooser_of(0.02, learned)
        num_found = len(chooser.choose(np.array([1, 4]), known_of([1, 2, 3], [4, 5, 6]), 10, 8).tokens)
        chooser.observe(was_right=False)
    assert num_found == 0


def test_passes_of_equal_rows_have_none() -> None:
    with pytest.raises(ConfigError, match="siblings is 4; allowed: 0 where pad_rows_to"):
        SpeculationConfig(siblings=4, pad_rows_to=12)
