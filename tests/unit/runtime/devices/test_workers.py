"""One thread per device: order, errors, a bounded queue, and an end that never blocks."""

import os
import threading
import time

import pytest

from mirrorsd.graphs.errors import DeviceError, GenerationError
from mirrorsd.runtime.devices.company import Entry
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.ledger import Overdue, Ticket


def test_jobs_run_in_order_on_one_thread() -> None:
    worker = DeviceWorker("test")
    futures = [worker.submit(lambda i=i: (i, threading.current_thread().name)) for i in range(8)]
    assert [future.result() for future in futures] == [(i, "mirrorsd-test") for i in range(8)]
    assert worker.close()


def test_an_error_reaches_the_caller_and_the_worker_goes_on() -> None:
    worker = DeviceWorker("test")
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda: 1 / 0)
    assert worker.run(lambda: 3) == 3
    assert worker.close()


def test_an_owner_of_many_jobs_waits_for_room_and_others_do_not() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    with pytest.raises(DeviceError, match=r"32 jobs of one text waiting for 0\.1 s: the device has stalled"):
        for _ in range(100):
            worker.submit(release.wait, "one", deadline_s=0.1)
    others = [worker.submit(lambda: 1, number) for number in range(100)]
    late = threading.Timer(0.1, release.set)
    late.start()
    assert worker.submit(lambda: 2, "one", deadline_s=5).result() == 2, "it waited until there was room"
    assert [ticket.result() for ticket in others] == [1] * 100
    assert worker.close()


def test_a_hung_device_is_left_behind_when_the_worker_closes() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    worker.submit(release.wait)
    assert not worker.close(timeout_s=0.05)
    release.set()
    assert worker.close()


def test_waiting_ends_when_a_job_takes_too_long_or_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 0.05)
    worker, release = DeviceWorker("test"), threading.Event()
    hung, behind = worker.submit(release.wait, "one"), worker.submit(lambda: 1, "two")
    assert not worker.wait(hung, 10.0, is_over=lambda: True)
    assert not worker.wait(behind, 0.1)
    with pytest.raises(DeviceError, match=r"has not answered for 0\.1 s"):
        worker.run(lambda: 2, deadline_s=0.1)
    release.set()
    assert worker.wait(behind, 60.0)
    assert worker.close()


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_process_that_was_stopped_finds_no_job_too_late(monkeypatch: pytest.MonkeyPatch, *, is_lent: bool) -> None:
    """As by Ctrl-Z and `fg`: all at once, the job has been running for an hour."""
    monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 0.6)  # one look, and no second one
    worker, begun, terminated = DeviceWorker("test", is_lent=is_lent), threading.Event(), threading.Event()

    def job() -> bool:
        if worker.loan is not None:
            worker.loan.started = time.perf_counter() - 3600
        else:
            worker._job_started = time.perf_counter() - 3600
        begun.set()
        return terminated.wait(0.7)

    if is_lent:
        assert not worker.perform(job, "one", Overdue(60.0, terminated.set)).result()
    else:
        ticket = worker.submit(job)
        assert begun.wait(5)
        monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 5.0)
        assert worker.wait(ticket, 60.0)
    assert worker.close()


def test_time_behind_others_does_not_count_as_long_as_each_job_ends_in_time() -> None:
    worker = DeviceWorker("test")
    tickets = [worker.submit(lambda: time.sleep(0.08), number) for number in range(8)]
    assert worker.wait(tickets[-1], 0.4), "eight jobs take 0.6 s, but each of them 0.08"
    assert worker.close()


def test_a_lent_job_that_takes_too_long_is_terminated_by_the_workers_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 0.05)
    worker, terminated = DeviceWorker("test", is_lent=True), threading.Event()
    ticket = worker.perform(lambda: terminated.wait(60), "one", Overdue(0.1, terminated.set))
    assert ticket.result()
    assert worker.perform(lambda: 3).result() == 3
    assert worker.close()


def test_a_lent_job_is_terminated_in_time_though_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own thread has another's job in its hands by then."""
    monkeypatch.setattr("mirrorsd.runtime.devices.workers.WATCH_S", 0.05)
    worker, terminated, others = DeviceWorker("test", is_lent=True), threading.Event(), list[Ticket[int]]()

    def job() -> bool:
        waiting = threading.Thread(target=lambda: others.append(worker.submit(lambda: 5, "two")))
        waiting.start()
        waiting.join(60)
        return terminated.wait(60)

    assert worker.perform(job, "one", Overdue(0.1, terminated.set)).result()
    assert others[0].wait(60) and others[0].result() == 5
    assert worker.close()


def test_an_interrupted_lent_job_leaves_the_device_free() -> None:
    """A Ctrl-C may fall anywhere between the count and the job."""

    class Interrupting:
        def locked(self) -> bool:
            return False

        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    worker = DeviceWorker("test", is_lent=True)
    device, worker.turn = worker.turn, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        worker.perform(lambda: 1)
    worker.turn = device
    assert not worker.has_pending()
    assert worker.perform(threading.get_ident).result() == threading.get_ident(), "it is still lent"
    assert worker.close()


@pytest.mark.parametrize("way", ["run", "perform"])
def test_a_handler_that_interrupts_who_gives_a_job_is_refused_at_once(way: str) -> None:
    """It holds what the worker's thread needs to end any job."""
    worker, refused = DeviceWorker("test"), list[BaseException]()
    put = worker.jobs.put

    def interrupted(entry: Entry) -> None:
        worker.jobs.put = put  # type: ignore[method-assign]
        with pytest.raises(GenerationError, match="on this very thread") as found:
            getattr(worker, way)(lambda: "of the handler")
        refused.append(found.value)
        put(entry)

    worker.jobs.put = interrupted  # type: ignore[method-assign]
    assert worker.submit(lambda: "over").result() == "over"
    assert len(refused) == 1
    assert worker.submit(lambda: "later").result() == "later"
    assert worker.close()


def test_a_closed_worker_refuses() -> None:
    worker = DeviceWorker("test")
    worker.close()
    with pytest.raises(DeviceError, match="closed"):
        worker.submit(lambda: 1)


def test_a_ticket_waits_as_long_as_asked_and_may_be_read_twice() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    ticket = worker.submit(lambda: release.wait() and 5)
    assert not ticket.wait(0.01)
    assert not ticket.done()
    release.set()
    assert (ticket.result(), ticket.result(), ticket.wait(0.0), ticket.done()) == (5, 5, True, True)
    assert worker.close()


def test_all_who_wait_for_a_ticket_are_woken() -> None:
    ticket: Ticket[int] = Ticket()
    found: list[int] = []
    waiting = [threading.Thread(target=lambda: found.append(ticket.result())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    ticket.finish(7)
    for thread in waiting:
        thread.join(5)
    assert found == [7, 7, 7]


def test_a_job_knows_how_long_it_stood_behind_anothers() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    worker.submit(release.wait, "one")
    own, other = worker.submit(lambda: 1, "one"), worker.submit(lambda: 2, "two")
    time.sleep(0.05)
    release.set()
    assert (own.result(), other.result()) == (1, 2)
    assert own.queued_s == 0.0, "its own job was before it"
    assert other.queued_s >= 0.05
    assert worker.run(lambda: 3) == 3
    assert worker.close()


def test_a_worker_knows_whether_it_serves_others() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    assert not worker.serves_others("one")
    job = worker.submit(release.wait, "one")
    assert not worker.serves_others("one")
    assert worker.serves_others("two")
    release.set()
    job.wait()
    assert not worker.serves_others("two")
    assert worker.close()


def test_a_free_device_that_is_lent_works_on_the_callers_thread() -> None:
    worker = DeviceWorker("test", is_lent=True)
    here = worker.perform(threading.get_ident)
    assert here.done()
    assert here.result() == threading.get_ident()
    assert worker.run(threading.get_ident) != threading.get_ident()
    error = worker.perform(lambda: 1 // 0).error
    assert isinstance(error, ZeroDivisionError)
    assert not worker.has_pending()
    assert worker.close()
    with pytest.raises(DeviceError, match="closed"):
        worker.perform(threading.get_ident)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")
def test_a_thread_that_stays_goes_to_the_devices_cores_once(monkeypatch: pytest.MonkeyPatch) -> None:
    at, moves = {0, 1}, list[set[int]]()

    def move(_: int, cores: set[int]) -> None:
        at.clear()
        at.update(cores)
        moves.append({*cores})

    worker, own = DeviceWorker("test", (0,), is_lent=True), DeviceWorker("own", (0,))
    with monkeypatch.context() as here:
        here.setattr(os, "sched_getaffinity", lambda _: {*at})
        here.setattr(os, "sched_setaffinity", move)
        with own.staying():  # its jobs are done on its own thread
            assert at == {0, 1}
        with worker.staying():
            assert [worker.perform(lambda: {*at}).result() for _ in range(3)] == [{0}] * 3
        assert moves == [{0}, {0, 1}]
        worker.perform(lambda: None)
        assert moves == [{0}, {0, 1}] * 2
    assert worker.close()
    assert own.close()


def test_a_device_is_lent_to_one_at_a_time() -> None:
    """While a caller's thread has the device, others' jobs wait for it, in their order, and know how long."""
    worker, began, release, order = DeviceWorker("test", is_lent=True), threading.Event(), threading.Event(), []

    def long_job() -> None:
        began.set()
        release.wait(5)
        order.append("first")

    first = threading.Thread(target=lambda: worker.perform(long_job, "one"))
    first.start()
    assert began.wait(5)
    second = worker.perform(lambda: order.append("second"), "two")
    third = worker.submit(lambda: order.append("third"), "two")
    assert not second.done()
    assert worker.serves_others("two")
    time.sleep(0.05)
    release.set()
    first.join(5)
    assert third.wait(5)
    assert order == ["first", "second", "third"]
    assert second.queued_s >= 0.05
    assert worker.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are pinned on Linux only")
def test_a_lent_device_keeps_to_its_cores_and_leaves_the_callers_as_they_were() -> None:
    usual = os.sched_getaffinity(0)
    worker = DeviceWorker("test", (min(usual),), is_lent=True)
    assert worker.perform(lambda: os.sched_getaffinity(0)).result() == {min(usual)}
    assert os.sched_getaffinity(0) == usual
    assert worker.close()
