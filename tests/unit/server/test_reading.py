"""Work that is broken off: it ends, even where Python drops what is raised, and its thread is fit for others' work."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

from mirrorsd.server.bundles.reading import BrokenOff, Reading


def for_ever() -> None:
    while True:
        time.sleep(0.001)


def check_until_done(reading: Reading[None], found: "Future[None]") -> None:
    deadline = time.monotonic() + 30
    while not found.done():
        assert time.monotonic() < deadline
        reading.check()
        time.sleep(0.002)


def test_what_python_drops_is_raised_again() -> None:
    num_dropped = 0

    def work() -> None:
        nonlocal num_dropped
        while num_dropped < 2:
            try:
                for_ever()
            except BrokenOff:  # as in the callback of a weak reference
                num_dropped += 1
        for_ever()

    reading = Reading(work, limit_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reading.run)
        check_until_done(reading, found)
        with pytest.raises(BrokenOff):
            found.result(0)
        assert pool.submit(lambda: "others' work").result(30) == "others' work"
    assert num_dropped == 2


def test_work_that_has_not_begun_or_is_not_late_goes_on() -> None:
    reading = Reading(lambda: time.sleep(0.05), limit_s=30)
    reading.check()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reading.run)
        check_until_done(reading, found)
        found.result(0)


def test_what_is_sent_at_the_last_moment_ends_nothing_else() -> None:
    """The work ends by itself just when it is broken off; the thread's next work must not be."""
    with ThreadPoolExecutor(1) as pool:
        for number in range(300):
            reading = Reading(partial(sum, range(number * 5)), limit_s=0)
            found, after = pool.submit(reading.run), pool.submit(lambda: sum(one for one in range(2000)))
            while not found.done():
                reading.check()
            assert found.exception(0) is None or isinstance(found.exception(0), BrokenOff)
            assert after.result(30) == 1999000
