"""Drafts of several conversations at once: whose jobs run beside one another, which passes become one, and failures."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pytest

from mirrorsd.devices.draft_memory import DraftPass, TipGuesses
from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.backends.joint_rounds import JointRounds
from mirrorsd.runtime.devices import draft_company
from mirrorsd.runtime.devices.company import Company, Entry
from mirrorsd.runtime.devices.draft_company import AskedJob, DraftCompany, DraftJob
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.ledger import Ledger, Overdue, TargetPass, Ticket
from mirrorsd.testing.fake import FakeBatch, FakeTarget


class Joint:
    """Notes who is in each pass, by the sessions' names; a name that is asked for fails."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.alone: list[bool] = []
        self.failing = ""

    def run(self, passes: Sequence[DraftPass], *, is_alone: bool) -> list[TipGuesses]:
        names = sorted(one.session for one in passes)
        self.passes.append(names)
        self.alone.append(is_alone)
        if self.failing in names:
            raise DeviceError("it broke")
        return [TipGuesses(np.array([[[ord(one.session)]]]), np.zeros((1, 1, 1), np.float32)) for one in passes]


class Table:
    """A worker, what its jobs' passes are run by, and jobs that wait together."""

    def __init__(self) -> None:
        self.worker, self.joint = DeviceWorker("draft"), Joint()
        self.rounds = JointRounds(self.joint, takes_any=True)
        self.share()

    def share(self, target: DeviceWorker | None = None) -> None:
        """Have jobs done side by side; in turn with those of `target`, if there is one."""
        self.company = DraftCompany(self.worker, self.rounds, target)
        self.company.open()

    def job(self, name: str, num_passes: int, drafter: object = None) -> AskedJob[list[int]]:
        """Asks for so many passes; its result is what they said."""

        def work() -> list[int]:
            found = [self.rounds.run(DraftPass(name, (), ())) for _ in range(num_passes)]
            return [int(guesses.ids[0, 0, 0]) for guesses in found]

        found = AskedJob(work)
        found.drafter = drafter
        return found

    def submit(self, jobs: Sequence[tuple[str, Callable[[], Any]]]) -> list[Ticket[Any]]:
        """Of these owners, all waiting when the device comes free."""
        release = threading.Event()
        self.worker.submit(lambda: release.wait(5), "somebody")
        tickets = [self.worker.submit(job, owner) for owner, job in jobs]
        release.set()
        for ticket in tickets:
            assert ticket.wait(5)
        return tickets


@pytest.fixture
def table() -> Iterator[Table]:
    found = Table()
    yield found
    assert found.worker.close()


def test_the_passes_of_jobs_that_wait_together_are_one(table: Table) -> None:
    tickets = table.submit([("a", table.job("A", 3)), ("b", table.job("B", 1)), ("c", table.job("C", 2))])
    assert table.joint.passes == [["A", "B", "C"], ["A", "C"], ["A"]], "who is done leaves the others"
    assert [ticket.result() for ticket in tickets] == [[65] * 3, [66], [67] * 2]
    assert all(ticket.queued_s > 0 for ticket in tickets)
    assert not table.worker.has_pending()


def test_jobs_of_one_owner_keep_their_order_and_nothing_else_is_overtaken(table: Table) -> None:
    def note(name: str) -> Callable[[], None]:
        return lambda: table.joint.passes.append([name])

    table.submit(
        [
            ("a", table.job("A", 1)),
            ("a", table.job("A", 1)),
            ("b", table.job("B", 1)),
            ("b's seat", note("forgotten")),
            ("c", table.job("C", 1)),
        ]
    )
    assert table.joint.passes == [["A"], ["A", "B"], ["forgotten"], ["C"]]


def test_a_job_that_asks_for_no_pass_holds_nobody_up(table: Table) -> None:
    tickets = table.submit([("a", table.job("A", 2)), ("b", AskedJob(lambda: "tidied"))])
    assert (table.joint.passes, tickets[1].result()) == ([["A"], ["A"]], "tidied")


def test_a_pass_that_fails_is_run_for_each_and_fails_for_who_is_at_fault(table: Table) -> None:
    def fail() -> None:
        raise ValueError("its own")

    table.joint.failing = "B"
    tickets = table.submit(
        [
            ("a", table.job("A", 1)),
            ("b", table.job("B", 1)),
            ("c", AskedJob(fail)),
            ("d", AskedJob(lambda: "done")),
        ]
    )
    errors = [type(ticket.error) for ticket in tickets]
    assert errors == [type(None), DeviceError, ValueError, type(None)]
    assert (table.joint.passes[0], sorted(table.joint.passes[1:])) == (["A", "B"], [["A"], ["B"]])
    (ticket,) = table.submit([("a", table.job("A", 1))])
    assert ticket.result() == [65], "the next ones are run as ever"


def test_who_drafted_together_is_waited_for_but_not_for_long(table: Table) -> None:
    table.submit([("a", table.job("A", 1)), ("b", table.job("B", 1))])
    begun, release = threading.Event(), threading.Event()
    busy = table.worker.submit(lambda: (begun.set(), release.wait(5)), "somebody")
    assert begun.wait(5), "from then on its thread takes nothing"
    first, second = (Entry(table.job(name.upper(), 1), Ticket(), name, None) for name in "ab")
    table.rounds.seconds = 3600.0  # the process was stopped in a pass
    threading.Timer(0.01, table.worker.jobs.queue.put, [second]).start()
    assert table.company.with_others(first) == [first, second]
    started = perf_counter()
    assert table.company.with_others(first) == [first]
    assert 0.03 < perf_counter() - started < 2.0
    started = perf_counter()
    assert table.company.with_others(first) == [first]
    assert perf_counter() - started < 0.03, "nobody waits twice for one that has gone"
    release.set()
    busy.result()


def test_a_session_is_alone_once_nobody_has_shared_its_last_jobs(table: Table) -> None:
    table.submit([("a", table.job("A", 1)), ("b", table.job("B", 1))])
    for _ in range(3):
        table.submit([("a", table.job("A", 1))])
    assert table.joint.passes == [["A", "B"], *([["A"]] * 3)]
    assert table.joint.alone == [False, False, True, True]


@pytest.fixture
def target(table: Table) -> Iterator[DeviceWorker]:
    """The target's worker, on the cores of the draft's."""
    found = DeviceWorker("target")
    table.share(found)
    yield found
    assert found.close()


def test_on_the_same_cores_a_draft_that_is_waited_for_waits_for_the_target(table: Table, target: DeviceWorker) -> None:
    release = threading.Event()
    running = target.submit(lambda: release.wait(5), "a")
    while not target.turn.locked():
        sleep(0.001)
    waiting = table.worker.submit(table.job("A", 1), "b")
    assert not waiting.wait(0.05)
    release.set()
    assert (running.result(), waiting.result()) == (True, [65])
    release.clear()
    running = target.submit(lambda: release.wait(5), "a")
    beside = table.worker.submit(DraftJob(lambda: "beside"), "a")
    assert beside.wait(5), "what the mirror prepares is prepared beside the target"
    release.set()
    assert (running.result(), beside.result()) == (True, "beside")


def test_a_pass_that_waits_for_drafts_takes_those_along_who_have_drafted(table: Table, target: DeviceWorker) -> None:
    batch, release = FakeBatch(4), threading.Event()
    target.company = company = Company(batch)
    company._seconds = 4.0
    drafting = table.worker.submit(AskedJob(lambda: release.wait(5)), "a")
    while not target.turn.locked():
        sleep(0.001)
    sessions = [FakeTarget(lambda text: np.eye(8)[sum(text) % 8], vocab_size=8) for _ in range(2)]
    passes = [
        TargetPass(session=session, tokens=np.array([3]), start=0, with_logits=False, ledger=Ledger())
        for session in sessions
    ]
    first = target.submit(passes[1], "b")
    assert not first.wait(0.05)
    release.set()
    assert drafting.result() is True
    sleep(0.02)
    second = target.submit(passes[0], "a")
    assert first.wait(5)
    assert second.wait(5)
    assert [len(one) for one in batch.passes] == [2]


def test_nobody_waits_for_a_draft_that_hangs(
    table: Table, target: DeviceWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_company, "TURN_S", 0.1)
    release = threading.Event()
    hung = table.worker.submit(AskedJob(lambda: release.wait(5)), "a")
    while not target.turn.locked():
        sleep(0.001)
    assert target.submit(lambda: "over", "b").wait(2)
    started = perf_counter()
    assert target.submit(lambda: "over", "b").wait(2)
    assert perf_counter() - started < 0.08, "only the first pass waits"
    release.set()
    assert hung.result() is True


def test_a_pass_that_hangs_while_turns_begin_to_be_taken_ends_no_thread(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the turn that was given up behind it, and no other to give back."""
    monkeypatch.setattr(draft_company, "TURN_S", 0.1)
    target, release = DeviceWorker("target"), threading.Event()
    hung = target.submit(lambda: release.wait(5), "a")
    while not target.turn.locked():
        sleep(0.001)
    table.share(target)
    assert table.worker.submit(AskedJob(lambda: "over"), "b").wait(2)
    release.set()
    assert hung.result() is True
    assert target.submit(lambda: "over", "a").wait(2)
    assert target.close()


def test_a_lent_pass_that_hangs_is_ended_in_time_and_keeps_nobody(
    table: Table, target: DeviceWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though draft and target take turns: who waits for a turn has an eye on it, and does not ask again and again."""
    monkeypatch.setattr(draft_company, "WATCH_S", 0.05)
    lent, taken = DeviceWorker("lent", is_lent=True), 0
    company = DraftCompany(table.worker, table.rounds, lent)
    company.open()
    gather, release, asked = lent.with_others, threading.Event(), threading.Event()

    def counted(entry: Any) -> Any:
        nonlocal taken
        taken += 1
        return gather(entry)

    monkeypatch.setattr(lent, "with_others", counted)
    monkeypatch.setattr(draft_company, "TURN_S", 0.5)
    overdue = Overdue(0.8, asked.set)
    hung = threading.Thread(target=lambda: lent.perform(lambda: release.wait(20), "a", overdue))
    hung.start()
    while lent.loan is None:
        sleep(0.001)
    tickets = [lent.submit(lambda: "over", "b") for _ in range(3)]
    assert all(ticket.wait(10) for ticket in tickets), "nobody waits for it again"
    assert asked.wait(10), "it is ended, whoever has gone on beside it"
    assert taken < 20
    release.set()
    hung.join()
    assert lent.close()


def test_what_is_prepared_beside_the_target_is_no_part_of_what_waits_for_it(table: Table, target: DeviceWorker) -> None:
    """And who prepares, or tidies up, is not about to come to the target."""
    target.company = company = Company(FakeBatch(4))
    beside = DraftJob(lambda: table.rounds.run(DraftPass("B", (), ())))
    table.submit([("a", table.job("A", 1)), ("b", beside), ("seat", lambda: None)])
    assert table.joint.passes == [["A"], ["B"]]
    assert set(company._members) == {"a"}


def test_two_jobs_of_one_drafter_are_never_done_at_once(table: Table) -> None:
    """A text that was cancelled has left one behind, and the conversation's next text asks: two owners, one draft."""
    drafter = object()
    jobs = [("a", table.job("A", 2, drafter)), ("b", table.job("B", 2)), ("a's next", table.job("A", 1, drafter))]
    tickets = table.submit(jobs)
    assert table.joint.passes == [["A", "B"], ["A", "B"], ["A"]]
    assert [ticket.result() for ticket in tickets] == [[65] * 2, [66] * 2, [65]]


def test_where_the_system_has_no_more_threads_jobs_are_done_one_by_one(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = threading.Thread.start, list[threading.Thread]()

    def begin_one(thread: threading.Thread) -> None:
        begun.append(thread)
        if len(begun) > 1:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_one)
    tickets = table.submit([(name, table.job(name.upper(), 2)) for name in "abcd"])
    monkeypatch.undo()
    assert table.joint.passes == [["A", "B"], ["A", "B"], ["C"], ["C"], ["D"], ["D"]]
    assert [ticket.result() for ticket in tickets] == [[65] * 2, [66] * 2, [67] * 2, [68] * 2]
    (ticket,) = table.submit([("a", table.job("A", 1))])
    assert ticket.result() == [65]


def test_who_is_lent_the_target_does_not_wait_for_a_draft_that_hangs(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft comes between the loan and the turn."""
    target, release, over = DeviceWorker("target", is_lent=True), threading.Event(), threading.Event()
    table.share(target)
    arrives = target._arrives

    def arrive(job: object, owner: object) -> None:
        arrives(job, owner)
        table.worker.submit(AskedJob(lambda: release.wait(5)), "b")
        sleep(0.05)

    monkeypatch.setattr(target, "_arrives", arrive)
    threading.Thread(target=lambda: (target.perform(lambda: "over", "a"), over.set()), daemon=True).start()
    assert over.wait(2)
    release.set()
    assert target.close()


def test_a_draft_that_waits_for_its_turn_ends_though_the_target_is_gone(table: Table) -> None:
    target = DeviceWorker("target")
    table.share(target)
    with target.turn:
        ticket = table.worker.submit(AskedJob(lambda: "over"), "b")
        sleep(0.1)
        target.end()
        target._thread.join()
        del target
        gc.collect()
    assert ticket.wait(5)
    assert ticket.result() == "over"


def test_a_worker_that_is_closed_is_freed_at_once() -> None:
    table = Table()
    table.share(target := DeviceWorker("target"))
    kept = [weakref.ref(one) for one in (table.worker, target, table.rounds)]
    gc.disable()
    try:
        for worker in (table.worker, target):
            assert worker.close()
        del table, target, worker
        assert [found() for found in kept] == [None] * 3
    finally:
        gc.enable()
