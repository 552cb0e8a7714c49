"""One thread per device: order, errors, a bounded queue, and an end that never blocks."""

import threading

import pytest

from mirrorsd.graphs.errors import DeviceError
from mirrorsd.runtime.workers import DeviceWorker


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
