"""Branches beside the target's pass: which roots get one, and when no further round begins."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from mirrorsd.runtime.backends.fake import FakeDraft
from mirrorsd.runtime.backends.protocol import ExitGuesses, RowBlock, TipGuesses
from mirrorsd.runtime.config import GenerationConfig, SpeculationConfig
from mirrorsd.runtime.decoding.draft_link import DraftLink
from mirrorsd.runtime.decoding.expansion import Expansion, Occasion
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.draft.drafter import Drafter
from mirrorsd.runtime.draft.tree import BranchTable
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.runtime.policy.root_scores import RootScores
from mirrorsd.runtime.policy.roots import RootPlanner
from mirrorsd.runtime.policy.windows import WindowOrder
from mirrorsd.runtime.sampling.chooser import TokenChooser

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
        self.draft, self.table = CountingDraft(streams), BranchTable()
        drafter, ledger, chooser = Drafter(self.draft), Ledger(now=lambda: 0.0), TokenChooser(GenerationConfig())
        for size in self.draft.round_sizes:
            drafter.clock.observe(size, 1.0)
        drafter.prefill(np.array([3, 4, 5]), chooser, ledger)
        window = drafter.fresh(WindowOrder(limit=4, passes=4))
        assert window.tolist() == [6, 7, 8, 9]
        self.link = DraftLink(drafter, worker, 5.0, ledger)
        planner = RootPlanner(SpeculationConfig(**{"roots": 16, **speculation}), chooser, RootScores())
        self.expansion = Expansion(self.link, planner, Occasion(2, window, 4, ready_by), self.table)
        self.draft.num_passes = 0

    def prepared(self, row: int, token: int) -> tuple[list[int], str] | None:
        found = self.table.get(row, token)
        return found and (found.tokens.tolist(), found.source)


@pytest.fixture
def worker() -> Iterator[DeviceWorker]:
    worker = DeviceWorker("draft")
    yield worker
    worker.close()


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
