"""Turns on a session's caches: order, streams that are left alone, and a Ctrl-C at any line."""

import gc
import linecache
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from mirrorsd.graphs.errors import Cancelled, GenerationError
from mirrorsd.runtime.turns import Turns


class Taker:
    def __init__(self) -> None:
        self.num_left = 0
        self.is_wanted = True

    def raise_if_unwanted(self) -> None:
        if not self.is_wanted:
            raise Cancelled("Cancelled after 0 new tokens.")

    def leave(self) -> None:
        self.num_left += 1


def on_a_thread(job: Any) -> Any:
    """What a job on another thread gives, within a minute."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(job())
        except (GenerationError, Cancelled) as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    return found[0]


def test_a_taker_that_comes_back_finds_its_caches_and_one_that_was_displaced_does_not() -> None:
    turns, first, second = Turns(), Taker(), Taker()
    assert not turns.take(first)
    turns.pause(first)
    assert turns.take(first)
    turns.pause(first)
    assert not turns.take(second), "on the same thread, at once"
    turns.pause(second)
    assert first.num_left == 1
    assert not turns.take(first)


def test_a_step_on_another_thread_is_waited_for() -> None:
    turns, first, second = Turns(), Taker(), Taker()
    turns.take(first)
    timer = threading.Timer(0.1, lambda: turns.pause(first))
    timer.start()
    assert on_a_thread(lambda: turns.take(second)) is False
    assert first.num_left == 1


def test_a_stream_is_read_by_one_thread_at_a_time() -> None:
    turns, taker = Turns(), Taker()
    turns.take(taker)
    assert "one thread at a time" in str(on_a_thread(lambda: turns.take(taker)))


def test_who_is_not_wanted_any_more_stops_waiting() -> None:
    turns, first, second = Turns(), Taker(), Taker()
    turns.take(first)

    def stop() -> None:
        second.is_wanted = False
        turns.end_unwanted(lambda: pytest.fail("nobody who has the turn is unwanted"))

    timer = threading.Timer(0.1, stop)
    timer.start()
    assert isinstance(on_a_thread(lambda: turns.take(second)), Cancelled)


def test_the_pass_of_another_request_is_never_ended() -> None:
    """A later request may have begun by the time that an earlier one's pass would be ended."""
    turns, taker, ended = Turns(), Taker(), list[str]()
    turns.end_unwanted(lambda: ended.append("nobody's"))
    turns.take(taker)
    turns.end_unwanted(lambda: ended.append("another's"))
    assert not ended
    taker.is_wanted = False
    turns.end_unwanted(lambda: ended.append("its own"))
    assert ended == ["its own"]


def test_nobody_has_a_turn_after_the_end() -> None:
    turns, first, second = Turns(), Taker(), Taker()
    turns.take(first)
    turns.pause(first)
    turns.close()
    assert turns.wait_until_free(1.0)
    assert first.num_left == 1
    for taker in (first, second):
        with pytest.raises(GenerationError, match="session is closed"):
            turns.take(taker)


def test_a_turn_that_was_taken_away_in_the_middle_of_a_step_is_noticed() -> None:
    turns, first, second = Turns(), Taker(), Taker()
    turns.take(first)
    turns.take(second)  # as a signal handler might, on the same thread
    with pytest.raises(GenerationError, match="in the middle of a step"):
        turns.check(first)


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """A Ctrl-C at the so-many-th line of Python that runs, in whatever module; once.

    Not where a `with` is left: Python looks for signals before that and behind it, but not in between. Nor where the
    garbage collector calls back on another test's objects: what is raised there goes nowhere.
    """
    count = [0]
    seen: set[tuple[int, int]] = set()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        place = id(frame), frame.f_lineno
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_leaving = text.startswith("with ") and place in seen
        seen.add(place)
        if event == "line" and not is_leaving:
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    usual = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(usual)
        gc.enable()


def test_a_ctrl_c_at_any_line_leaves_the_turn_to_others() -> None:
    for line in range(1, 400):
        turns, first, second = Turns(), Taker(), Taker()
        try:
            with interrupted_at(line) as count:
                try:
                    for _ in range(2):
                        try:
                            turns.take(first)
                        finally:
                            turns.pause(first)
                finally:
                    turns.retire(first)
        except KeyboardInterrupt:
            assert on_a_thread(lambda: turns.take(second)) is False, line  # noqa: B023 - it has run by then
        else:
            assert count[0] < line, "the last line has been reached"
            return
    raise AssertionError("more lines than the test tries")


def test_one_that_waits_and_whose_time_is_over_goes_without_being_woken() -> None:
    turns, busy, late = Turns(), Taker(), Taker()
    turns.take(busy)
    until = time.perf_counter() + 0.05
    late.raise_if_unwanted = lambda: _check_time(until)  # type: ignore[method-assign]
    assert isinstance(on_a_thread(lambda: turns.take(late)), Cancelled)


def _check_time(until: float) -> None:
    if time.perf_counter() > until:
        raise Cancelled("Its time is over.")
