"""One thread per device: order, errors, a bounded queue, and an end that never blocks."""

import os
import threading
import time

import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.workers import DeviceWorker, Ticket


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


def test_a_stalled_device_fills_a_bounded_queue() -> None:
    worker, release = DeviceWorker("test"), threading.Event()
    with pytest.raises(DeviceError, match="32 jobs waiting: the device has stalled"):
        for _ in range(100):
            worker.submit(release.wait)
    assert not worker.close(timeout_s=0.05)
    release.set()
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
