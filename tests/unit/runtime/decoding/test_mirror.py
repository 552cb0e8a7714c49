"""Mirror decoding: the next window is ready when the pass ends, and what is not prepared is drafted as in serial.

Beside the pass: which roots get a branch, and when no further round begins.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from mirrorsd.devices.draft_memory import RowBlock, TipGuesses
from mirrorsd.runtime.decoding.links import DraftLink
from mirrorsd.runtime.decoding.mirror import BranchTable, Expansion, Occasion
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.draft.tree import Branch
from mirrorsd.runtime.ledger import ExitGuesses, Ledger
from mirrorsd.runtime.policy.roots import Root, RootPlanner, RootScores
from mirrorsd.runtime.policy.windows import WindowOrder
from mirrorsd.runtime.sampling.chooser import TokenChooser
from mirrorsd.testing.fake import FakeDraft
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

Make = Callable[..., Any]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEXT = np.array([[6, 1], [7, 2], [11, 8], [9, 3], [10, 4]])
EXIT = ExitGuesses(1, NEXT, np.log(np.full(NEXT.shape, [0.9, 0.1])).astype(np.float32))
"""After the head and each token of the window 6 7 8 9: that 11 comes instead of 8, else that all is right."""


class CountingDraft(FakeDraft):
    """Counts up; the runner-up of each token is six more, and nine times less likely."""

    def __init__(self, num_streams: int) -> None:
        super().__init__(
            lambda text: [(text[-1] + 1 + i) % 16 for i in range(1 + num_streams)],
            vocab_size=16,
            num_streams=num_streams,
        )
        self.shape = replace(self.shape, num_candidates=2)
        self.beside: Callable[[], None] = lambda: None

    def run(self, blocks: Sequence[RowBlock], tip_rows: Sequence[int]) -> TipGuesses:
        self.beside()
        ids = super().run(blocks, tip_rows).ids
        both = np.concatenate([ids, (ids + 6) % 16], axis=-1)
        return TipGuesses(both, np.log(np.full(both.shape, [0.9, 0.1])).astype(np.float32))


class Scene:
    """The text 3 4 5 with the window 6 7 8 9 in flight. A round takes a second by what was learned, and none here."""

    def __init__(self, worker: DeviceWorker, *, streams: int = 3, ready_by: float = inf, **speculation: Any) -> None:
        self.draft, self.table = CountingDraft(streams), BranchTable(Ledger())
        drafter, ledger, chooser = Drafter(self.draft), Ledger(now=lambda: 0.0), TokenChooser(GenerationConfig())
        for size in self.draft.round_sizes:
            drafter.clock.observe(size, 1.0)
        drafter.prefill(np.array([3, 4, 5]), chooser, ledger)
        window = drafter.fresh(WindowOrder(limit=4, passes=4))
        assert window.tolist() == [6, 7, 8, 9]
        self.link = DraftLink(drafter, worker, 5.0, ledger)
        self.planner = RootPlanner(SpeculationConfig(**{"roots": 16, **speculation}), chooser, RootScores())
        self.expansion = Expansion(self.link, self.planner, Occasion(2, window, 4, ready_by), self.table)
        self.draft.num_passes = 0

    def adopt(self, window: list[int]) -> None:
        """All was right, and 10 came next; a window follows it that is not the draft's."""
        drafter = self.link.drafter
        drafter.adopt(2, 4, 10, np.array(window, dtype=np.int64))
        occasion = Occasion(7, np.array(window, dtype=np.int64), 4, self.expansion._occasion.ready_by)
        self.expansion = Expansion(self.link, self.planner, occasion, self.table)

    def prepared(self, row: int, token: int) -> tuple[list[int], str] | None:
        found = self.table.get(row, token)
        return found and (found.tokens.tolist(), found.source)


@pytest.fixture
def worker() -> Iterator[DeviceWorker]:
    worker = DeviceWorker("draft")
    yield worker
    worker.close()


def test_with_a_draft_that_is_always_right_no_pass_waits_for_a_window(make_bench: Make, confident_exit: Make) -> None:
    """Ten passes for seventy tokens, as in serial decoding; but only the first window was drafted while one waited."""
    bench = make_bench(hit_rate=1.0, gamma=6, passes=3, is_steady=True, exit_handler=confident_exit)
    bench.decode(PROMPT, "mirror", max_new_tokens=70)
    steps = bench.last_request.steps
    assert [step.num_accepted for step in steps] == [6] * 10
    assert {step.next_source for step in steps[:-1]} <= {"early", "exit"}


def test_an_outcome_that_nothing_was_prepared_for_is_drafted_afresh(make_bench: Make) -> None:
    bench = make_bench(roots=0)
    expected = bench.decode(PROMPT, "serial")
    assert bench.decode(PROMPT, "mirror") == expected
    assert {step.next_source for step in bench.last_request.steps} == {"fresh", "none"}


@pytest.mark.parametrize(("root_source", "is_heard"), [("early", False), ("progressive", True), ("proxy", True)])
def test_the_exit_is_asked_only_where_it_counts(make_bench: Make, root_source: str, is_heard: bool) -> None:
    bench = make_bench(root_source=root_source)
    run, heard = bench.target.run, []

    def noting(*arguments: Any, on_exit: Any = None, **options: Any) -> Any:
        heard.append(on_exit is not None)
        return run(*arguments, on_exit=on_exit, **options)

    bench.target.run = noting
    bench.decode(PROMPT, "mirror")
    assert any(heard) == is_heard


@pytest.mark.parametrize(("hit_rate", "least", "most"), [(1.0, 0.9, 1.0), (0.0, 0.0, 0.2)])
def test_passes_teach_how_often_the_draft_is_right(
    make_bench: Make, hit_rate: float, least: float, most: float
) -> None:
    bench = make_bench(hit_rate=hit_rate)
    bench.decode(PROMPT, "mirror")
    bench.engine.draft_worker.run(lambda: None)
    assert least <= bench.last_decoder.source.planner.acceptance_rate.value <= most


def test_a_last_token_needs_no_draft(make_bench: Make) -> None:
    bench = make_bench()
    expected = bench.decode(PROMPT, "plain", max_new_tokens=1)
    assert bench.decode(PROMPT, "mirror", max_new_tokens=1) == expected
    assert bench.draft.num_passes == 0


def test_a_text_that_was_left_in_the_middle_leaves_nothing_running(make_bench: Make) -> None:
    bench = make_bench(suffix_seconds=0.001)
    expected = bench.decode(PROMPT, "plain")
    bench.decode(PROMPT, "mirror", max_new_tokens=7)
    bench.engine.draft_worker.run(lambda: None)
    assert not bench.engine.draft_worker.has_pending()
    assert bench.decode(PROMPT, "mirror") == expected


@pytest.mark.parametrize("streams", [0, 3])
def test_a_root_that_comes_true_has_a_whole_window(worker: DeviceWorker, streams: int) -> None:
    scene = Scene(worker, streams=streams)
    scene.expansion.hear(EXIT)
    assert scene.prepared(2, 11) == ([12, 13, 14, 15], "exit")
    assert scene.prepared(4, 10) == ([11, 12, 13, 14], "exit")
    assert scene.prepared(2, 8) is None, "the window's own token corrects nothing"


def test_the_draft_s_own_runners_up_need_no_exit(worker: DeviceWorker) -> None:
    scene = Scene(worker)
    scene.expansion.begin()
    assert scene.prepared(0, 12) == ([13, 14, 15, 0], "early")
    assert scene.prepared(2, 11) is None
    scene.expansion.hear(EXIT)
    assert scene.prepared(2, 11) == ([12, 13, 14, 15], "exit")
    assert scene.prepared(0, 12) == ([13, 14, 15, 0], "early"), "what is there stays"


@pytest.mark.parametrize("window", [[], [11, 12], [11, 3, 4]])
def test_beside_a_window_that_is_not_its_own_the_draft_reads_it_first(worker: DeviceWorker, window: list[int]) -> None:
    """A head's, a repeat's or none, as in a step of plain decoding: then it knows what may come."""
    scene = Scene(worker)
    scene.adopt(window)
    scene.expansion.begin()
    first = window[0] if window else None
    assert scene.prepared(0, 1) == ([2, 3, 4, 5], "early"), "the runner-up behind 10"
    if first is None:
        assert scene.prepared(0, 11) == ([12, 13, 14, 15], "early")
    else:
        assert scene.prepared(0, first) is None
        assert scene.prepared(1, 12 if window[1] != 12 else 2) is not None
    assert scene.link.drafter.chain.num_fed == 8 + len(window)


@pytest.mark.parametrize(("ready_by", "root_source"), [(0.0, "early"), (inf, "proxy")])
def test_nothing_is_read_where_there_is_no_time_or_only_the_exit_counts(
    worker: DeviceWorker, ready_by: float, root_source: str
) -> None:
    scene = Scene(worker, ready_by=ready_by, root_source=root_source)
    scene.adopt([11])
    scene.expansion.begin()
    assert scene.draft.num_passes == 0


def test_where_only_the_exit_counts_nothing_is_done_before_it_speaks(worker: DeviceWorker) -> None:
    scene = Scene(worker, root_source="proxy")
    scene.expansion.begin()
    assert scene.draft.num_passes == 0
    scene.expansion.hear(EXIT)
    assert scene.prepared(2, 11) == ([12, 13, 14, 15], "exit")
    assert scene.prepared(0, 12) is None


def test_nothing_is_started_once_the_table_is_closed(worker: DeviceWorker) -> None:
    scene = Scene(worker)
    scene.table.close()
    scene.expansion.begin()
    scene.expansion.hear(EXIT)
    assert scene.draft.num_passes == 0


def test_a_table_that_is_closed_during_a_round_ends_the_work_with_it(worker: DeviceWorker) -> None:
    """A draft without streams needs four rounds for a branch."""
    scene = Scene(worker, streams=0)
    scene.draft.beside = scene.table.close
    scene.expansion.hear(EXIT)
    assert scene.draft.num_passes == 1


@pytest.mark.parametrize(("ready_by", "is_begun"), [(0.0, False), (5.0, True)])
def test_no_round_begins_that_would_end_after_the_pass(worker: DeviceWorker, ready_by: float, is_begun: bool) -> None:
    scene = Scene(worker, ready_by=ready_by)
    scene.expansion.hear(EXIT)
    assert (scene.draft.num_passes > 0) == is_begun


def test_another_job_of_the_device_waits_for_one_round_only(worker: DeviceWorker) -> None:
    scene, may_begin, waited = Scene(worker, streams=0, roots=2), threading.Event(), []
    scene.link.post(lambda: may_begin.wait(5.0))
    scene.link.post(partial(scene.expansion.hear, EXIT))
    scene.link.post(lambda: waited.append(scene.draft.num_passes))
    may_begin.set()
    for _ in range(20):
        scene.link.ask(lambda: None, None)
    assert waited == [1]
    assert scene.draft.num_passes > 1
    assert scene.prepared(2, 11) == ([12, 13, 14, 15], "exit")


def branch_with(*guesses: int) -> Branch:
    branch = Branch(Root(2, 5, 0.5, "exit"), 10)
    branch.guesses += guesses
    return branch


def test_the_table_shows_a_branch_as_it_was_published_last() -> None:
    table, branch = BranchTable(Ledger()), branch_with(6, 7, 8)
    assert table.get(2, 5) is None
    table.publish(branch, 8)
    branch.guesses[2:] = [4, 2, 3]
    assert table.get(2, 5).tokens.tolist() == [6, 7, 8]
    table.publish(branch, 3)
    assert table.get(2, 5).tokens.tolist() == [6, 4, 2]
    assert table.get(1, 5) is None


def test_what_is_published_behind_a_simulated_pass_comes_too_late() -> None:
    now = [0.0]
    ledger = Ledger(lambda: now[0])
    table = BranchTable(ledger)
    ledger.pass_ends = 2.0
    for now[0], is_over in ((2.0, True), (1.0, False)):
        table.publish(branch_with(6), 8)
        assert (table.is_closed, table.get(2, 5) is None) == (is_over, is_over)


def test_a_closed_table_can_still_be_read() -> None:
    table = BranchTable(Ledger())
    table.publish(branch_with(6, 7, 8), 8)
    assert not table.is_closed
    table.close()
    assert table.is_closed
    assert table.get(2, 5).tokens.tolist() == [6, 7, 8]
