"""Passes of several conversations at once: who is together, for whom is waited, and what a failure does."""

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.devices import company as company_module
from mirrorsd.runtime.devices.company import Company, Entry
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.ledger import Joint, Ledger, TargetPass, Ticket
from mirrorsd.testing.fake import FakeBatch, FakeTarget

VOCAB = 8


@pytest.fixture
def worker() -> Iterator[DeviceWorker]:
    found = DeviceWorker("target")
    yield found
    assert found.close()


def new_pass(session: FakeTarget | None = None, **options: Any) -> TargetPass:
    session = session or FakeTarget(lambda text: np.eye(VOCAB)[sum(text) % VOCAB], vocab_size=VOCAB)
    tokens = np.array([options.pop("token", 3)])
    return TargetPass(session=session, tokens=tokens, ledger=Ledger(), **{"start": 0, "with_logits": False} | options)


def submit_behind_another(worker: DeviceWorker, jobs: Sequence[Any]) -> list[Any]:
    """All of them wait when the device comes free; each has an owner of its own."""
    release = threading.Event()
    worker.submit(lambda: release.wait(5), "somebody")
    tickets = [worker.submit(job, number) for number, job in enumerate(jobs)]
    release.set()
    for ticket in tickets:
        assert ticket.wait(5)
    return tickets


def sizes(batch: FakeBatch) -> list[int]:
    return [len(passes) for passes in batch.passes]


def test_passes_that_wait_are_run_together_in_their_order(worker: DeviceWorker) -> None:
    batch = FakeBatch(4)
    worker.company = Company(batch)
    jobs = [new_pass(token=number) for number in range(6)]
    tickets = submit_behind_another(worker, jobs)
    assert [ticket.result().argmax_ids.tolist() for ticket in tickets] == [[number] for number in range(6)]
    assert batch.passes == [jobs[:4], jobs[4:]], "who came first is served first"
    assert [ticket.joint.num_beside for ticket in tickets] == [3, 3, 3, 3, 1, 1]
    assert all(ticket.queued_s > 0 for ticket in tickets)
    assert not worker.has_pending()


def test_without_company_each_is_run_by_itself(worker: DeviceWorker) -> None:
    asked: list[int] = []
    worker.on_company = lambda: asked.append(1)
    tickets = submit_behind_another(worker, [new_pass(), new_pass()])
    assert [ticket.joint.num_beside for ticket in tickets] == [0, 0]
    assert asked, "somebody is told that there might be some"


def test_a_job_that_is_no_text_s_is_no_company(worker: DeviceWorker) -> None:
    """As when passes are measured, or a session that was dropped releases its caches."""
    asked: list[int] = []
    worker.on_company = lambda: asked.append(1)
    release = threading.Event()
    worker.submit(lambda: release.wait(5))
    ticket = worker.submit(new_pass(), "text")
    release.set()
    assert ticket.result() is not None
    assert not asked


def test_who_listens_to_the_exits_and_what_is_no_pass_have_their_own_turn(worker: DeviceWorker) -> None:
    batch = FakeBatch()
    worker.company = Company(batch)
    heard: list[int] = []
    jobs = [new_pass(), new_pass(on_exit=lambda guesses: heard.append(guesses.layer)), lambda: "read", new_pass()]
    tickets = submit_behind_another(worker, jobs)
    assert batch.passes == [[jobs[0], jobs[3]]]
    assert (heard, tickets[2].result()) == ([1], "read")


def test_two_passes_of_one_session_are_never_together(worker: DeviceWorker) -> None:
    """As when a text was cancelled that had a pass in the queue, and the next one of its session begins."""
    batch, session = FakeBatch(), FakeTarget(lambda text: np.eye(VOCAB)[0], vocab_size=VOCAB)
    worker.company = Company(batch)
    submit_behind_another(worker, [new_pass(session), new_pass(session), new_pass()])
    assert sizes(batch) == [2]
    assert session.num_passes == 2


def test_rows_that_are_only_read_ride_along(worker: DeviceWorker) -> None:
    batch = FakeBatch()
    worker.company = Company(batch)
    prompt = new_pass(with_logits=None)
    tickets = submit_behind_another(worker, [prompt, new_pass()])
    assert (sizes(batch), tickets[0].result().logits) == ([2], None)


def test_prompts_are_read_in_small_parts_only_beside_others(worker: DeviceWorker) -> None:
    release = threading.Event()
    assert worker.chunk_rows("one", 0, 128) == 128
    worker.company = Company(FakeBatch())
    assert worker.chunk_rows("one", 0, 128) == 128
    worker.submit(lambda: release.wait(5), "another")
    assert (worker.chunk_rows("one", 0, 128), worker.chunk_rows("one", 0, 4)) == (8, 4)
    release.set()


def test_prompts_beside_prompts_are_read_in_long_parts(worker: DeviceWorker) -> None:
    """Nobody's text stands still then, until one of them is written."""
    release = threading.Event()
    worker.company = Company(FakeBatch())
    worker.company.ends(["another"], 0.0, ["another"])
    worker.submit(lambda: release.wait(5), "another")
    assert worker.chunk_rows("one", 0, 128) == 128
    worker.company.ends(["another"], 0.01)
    assert worker.chunk_rows("one", 0, 128) == 8
    release.set()


def test_what_a_batch_does_not_take_waits_for_the_next_pass(worker: DeviceWorker) -> None:
    class OneGuest(FakeBatch):
        def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
            return sum(len(found.tokens) > 1 for found in (one, *others)) <= 1

    batch = OneGuest()
    worker.company = Company(batch)
    jobs = [new_pass(), *(new_pass() for _ in range(4))]
    for job in jobs[1:3]:
        job.tokens = np.arange(3)
    submit_behind_another(worker, jobs)
    assert batch.passes == [[jobs[0], jobs[1], jobs[3], jobs[4]]], "the second guest has a pass of its own"
    assert jobs[2].session.num_passes == 1


@pytest.mark.parametrize("num_owners", [5, 8, 9, 16])
def test_nobody_gets_less_than_half_of_its_share(num_owners: int) -> None:
    """Of passes of four, by whoever comes back at once: owners that write a row, and two that read prompts."""

    class OneGuest(FakeBatch):
        def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
            is_guest = sum(len(found.tokens) > 1 for found in (one, *others)) <= 1
            return is_guest and super().takes(one, others)

    company, backlog, jobs = Company(OneGuest(4)), deque[Entry | None](), SimpleQueue[Entry | None]()
    entries = [Entry(new_pass(), Ticket(), number, None) for number in range(num_owners)]
    for entry in entries[:2]:
        entry.job.tokens = np.arange(8)
    counts = Counter[object]()
    for entry in entries:
        jobs.put(entry)
    for _ in range(25 * num_owners):
        first = backlog.popleft() if backlog else jobs.get_nowait()
        assert first is not None
        taken = company.gather(first, backlog, jobs)
        counts.update(entry.owner for entry in taken)
        for entry in taken:
            jobs.put(entry)
    assert min(counts.values()) >= sum(counts.values()) / num_owners / 2


def test_a_pass_that_fails_is_run_again_for_each_alone_and_nobody_joins_any_more(worker: DeviceWorker) -> None:
    def fail(_: Any) -> None:
        raise DeviceError("no room")

    class Broken(FakeTarget):
        def run(self, *_: Any, **__: Any) -> Any:
            raise DeviceError("broken cache")

    worker.company = Company(FakeBatch(fail=fail))
    broken = Broken(lambda text: np.eye(VOCAB)[0], vocab_size=VOCAB)
    with pytest.warns(RuntimeWarning, match="take turns from here on, as a pass of 3 of them failed: no room"):
        tickets = submit_behind_another(worker, [new_pass(token=5), new_pass(broken), new_pass(token=6)])
    assert tickets[0].result().argmax_ids.tolist() == [5]
    assert tickets[2].result().argmax_ids.tolist() == [6]
    with pytest.raises(DeviceError, match="broken cache"):
        tickets[1].result()
    assert worker.company is None
    assert not worker.has_pending()


def test_a_warning_that_is_made_an_error_does_not_end_the_devices_thread(worker: DeviceWorker) -> None:
    def fail(_: Any) -> None:
        raise DeviceError("no room")

    worker.company = Company(FakeBatch(fail=fail))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tickets = submit_behind_another(worker, [new_pass(token=5), new_pass(token=6)])
    assert [ticket.result().argmax_ids.tolist() for ticket in tickets] == [[5], [6]]


def test_a_pass_that_nobody_wants_any_more_is_not_run_again(worker: DeviceWorker) -> None:
    def give_up(_: Any) -> None:
        batch.is_given_up = True
        raise DeviceError("ended early")

    batch = FakeBatch(fail=give_up)
    worker.company = Company(batch)
    tickets = submit_behind_another(worker, [new_pass(), new_pass()])
    assert [str(ticket.error) for ticket in tickets] == ["ended early"] * 2
    assert worker.company is not None


def test_a_closing_worker_runs_what_waits(worker: DeviceWorker) -> None:
    batch, release = FakeBatch(), threading.Event()
    worker.company = Company(batch)
    worker.submit(lambda: release.wait(5), "somebody")
    tickets = [worker.submit(new_pass(), number) for number in range(3)]
    worker.end()
    release.set()
    assert worker.close()
    assert [ticket.done() for ticket in tickets] == [True] * 3


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [0.0]
    monkeypatch.setattr(company_module, "perf_counter", lambda: now[0])

    def set_clock(seconds: float) -> None:
        now[0] = seconds

    return set_clock


def test_who_comes_back_at_once_is_waited_for_and_who_does_not_is_not(at: Callable[[float], None]) -> None:
    company = Company(FakeBatch())
    company.ends(["quick", "slow", "new"], 0.010)
    assert company.seconds_to_wait(()) == 0, "nobody has come back yet"
    at(0.001)
    company.arrives("quick")
    at(0.006)
    company.arrives("slow")
    company.ends(["quick", "slow"], 0.010)
    at(0.007)
    assert company.seconds_to_wait(("slow",)) == pytest.approx(0.004), "half a pass, from its end on"
    assert company.seconds_to_wait(("quick",)) == 0
    at(0.012)
    assert company.seconds_to_wait(("slow",)) == 0, "it has gone, and was waited for once"
    company.arrives("quick")
    company.ends(["quick"], 0.010)
    assert company.seconds_to_wait(()) == 0, "until it comes back quickly again"


def test_the_others_wait_for_one_that_is_about_to_come(worker: DeviceWorker) -> None:
    batch = FakeBatch()
    worker.company = Company(batch)
    first, second = new_pass(), new_pass()
    worker.company.ends(["second"], 20.0)
    worker.company.arrives("second")
    worker.company.ends(["second"], 20.0)
    one = worker.submit(first, "first")
    assert not one.wait(0.02)
    worker.submit(second, "second").result()
    assert one.wait(5)
    assert batch.passes == [[first, second]]


def test_a_guest_that_has_to_wait_does_not_send_the_others_off_before_all_are_there(worker: DeviceWorker) -> None:
    """Two prompts and a text: a pass has one part of a prompt, and the text's row rides along in each."""

    class OneGuest(FakeBatch):
        def takes(self, one: TargetPass, others: Sequence[TargetPass]) -> bool:
            return sum(len(found.tokens) > 1 for found in (one, *others)) <= 1

    batch = OneGuest()
    worker.company = Company(batch)
    prompts, row = [new_pass(with_logits=None) for _ in range(2)], new_pass()
    for prompt in prompts:
        prompt.tokens = np.arange(3)
    worker.company.ends(["writer"], 20.0)
    worker.company.arrives("writer")
    worker.company.ends(["writer"], 20.0)
    tickets = [worker.submit(prompt, number) for number, prompt in enumerate(prompts)]
    assert not tickets[0].wait(0.02)
    rows = [worker.submit(row, "writer"), worker.submit(new_pass(row.session), "writer")]
    for ticket in (*tickets, *rows):
        assert ticket.wait(5)
    assert [passes[0] for passes in batch.passes] == prompts
    assert sizes(batch) == [2, 2]


def test_parts_of_prompts_take_as_long_as_the_pass(at: Callable[[float], None]) -> None:
    """Its time here: 4 ms, and 1 ms for every 16 rows."""
    now = [0.0]

    def take_time(passes: Sequence[TargetPass]) -> None:
        now[0] += 0.004 + 0.001 / 16 * sum(len(one.tokens) for one in passes)
        at(now[0])

    company = Company(FakeBatch(fail=take_time))

    def run(*num_rows: int) -> None:
        jobs = [new_pass(with_logits=None if rows > 1 else False) for rows in num_rows]
        for job, rows in zip(jobs, num_rows, strict=True):
            job.tokens = np.zeros(rows, np.int64)
        company.run([Entry(job, Ticket(), number, None) for number, job in enumerate(jobs)])

    assert company.chunk_rows(0) == 8, "nothing is known"
    run(company.chunk_rows(0), 1)
    assert company.chunk_rows(0) in (30, 31), "the longest window takes as long as a pass, until others were seen"
    for _ in range(20):
        run(company.chunk_rows(0), 1)
    most = company.chunk_rows(0)
    assert 60 <= most <= 66, "with so many it takes twice as long"
    run(300, 300)
    assert most - 1 <= company.chunk_rows(0) <= most + 1, "nobody stood still beside them"
    run(1, 1, 25, 25)
    assert 60 <= company.chunk_rows(0) <= 68
    assert company.chunk_rows(0, 2) == company.chunk_rows(0, 5) == 128, "where prompts take turns, two passes' time"


def test_parts_are_longer_where_several_prompts_take_turns(at: Callable[[float], None]) -> None:
    """A pass takes 10 ms here, and half a millisecond for each row of a prompt."""
    now = [0.0]

    def take_time(passes: Sequence[TargetPass]) -> None:
        now[0] += 0.010 + 0.0005 * sum(len(one.tokens) for one in passes if one.with_logits is None)
        at(now[0])

    company = Company(FakeBatch(fail=take_time))
    for rows in (8, 16, 24):
        prompt = new_pass(with_logits=None)
        prompt.tokens = np.zeros(rows, np.int64)
        company.run([Entry(prompt, Ticket(), "reader", None), Entry(new_pass(), Ticket(), "writer", None)])
    alone = company.rows_of_prompt("new", ["new", "writer"], 0, 128)
    assert 18 <= alone <= 22
    assert company.rows_of_prompt("new", ["writer", "reader"], 0, 128) in (2 * alone, 2 * alone + 1)
    assert company.rows_of_prompt("new", ["reader"], 0, 128) == 128, "nobody is written"


def test_what_guesses_take_bounds_them(at: Callable[[float], None]) -> None:
    """A pass of four texts takes 20 ms here, and 1 ms for each guess."""
    now = [0.0]

    def take_time(passes: Sequence[TargetPass]) -> None:
        now[0] += 0.020 + 0.001 * sum(len(one.tokens) - 1 for one in passes)
        at(now[0])

    company = Company(FakeBatch(8, fail=take_time))

    def run(*num_guesses: int) -> Joint:
        jobs = [new_pass() for _ in num_guesses]
        for job, guesses in zip(jobs, num_guesses, strict=True):
            job.tokens = np.zeros(1 + guesses, np.int64)
        entries = [Entry(job, Ticket(), number, None) for number, job in enumerate(jobs)]
        company.run(entries)
        return entries[0].ticket.joint

    assert run(0, 0, 0, 0).num_beside == 3
    for number in range(60):
        found = run(3, 0, 1, 4 * (number % 2))
    assert found.guess_s == pytest.approx(0.001, rel=0.1)
    assert found.texts_s == pytest.approx(0.020, rel=0.05)
    assert found.most_guesses in (4, 5), "so many of each take as long as the pass without them"


def test_guesses_that_seem_to_be_free_are_not_bound(at: Callable[[float], None]) -> None:
    """Passes without them were held up."""
    now = [0.0]

    def take_time(passes: Sequence[TargetPass]) -> None:
        now[0] += 0.040 if all(len(one.tokens) == 1 for one in passes) else 0.010
        at(now[0])

    company = Company(FakeBatch(8, fail=take_time))
    for number in range(20):
        jobs = [new_pass(), new_pass()]
        jobs[0].tokens = np.zeros(1 + 4 * (number % 2), np.int64)
        entries = [Entry(job, Ticket(), owner, None) for owner, job in enumerate(jobs)]
        company.run(entries)
    joint = entries[0].ticket.joint
    assert (joint.guess_s, joint.most_guesses) == (0.0, Joint().most_guesses)


def test_a_window_of_one_alone_does_not_make_others_wait_for_longer(at: Callable[[float], None]) -> None:
    """A pass takes 10 ms here, a row 1 ms."""
    company = Company(FakeBatch(fail=lambda passes: at(0.010 + 0.001 * sum(len(one.tokens) for one in passes))))
    for _ in range(3):
        at(0.0)
        company.run([Entry(new_pass(), Ticket(), number, None) for number in range(2)])
    at(1.0)
    window = new_pass()
    window.tokens = np.zeros(24, np.int64)
    company.ended_alone(Entry(window, Ticket(), "one", None), 0.034)
    company.arrives("one")
    assert 0 < company.seconds_to_wait(()) < 0.007, "half of a pass of a row"
