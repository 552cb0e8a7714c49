"""Seats that are asked at once for texts with the same beginning: one reads it, and the others wait for that."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from mirrorsd import Cancelled, CancelToken, DeviceError, GenerationResult, MirrorPipeline, MirrorSession
from mirrorsd.runtime import seats as seats_module
from mirrorsd.runtime.seats import Seats

SYSTEM = "You are the old heron of the dark river. Say what you have seen. " * 3
QUESTIONS = ("What does the fox do?", "Who came by?", "Where is the moon?")
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as loaded:
        yield loaded


@contextmanager
def busy(pipe: MirrorPipeline) -> Iterator[threading.Event]:
    """The target has something else to do until the event is set."""
    release = threading.Event()
    try:
        pipe.engine.target_worker.submit(lambda: release.wait(60))
        yield release
    finally:
        release.set()


def answer(seats: Seats, ids: list[int], cancel: CancelToken | None = None) -> GenerationResult:
    with seats.take(ids, cancel=cancel) as session:
        return session.generate(token_ids=ids, **OPTIONS)


def num_reading(seats: Seats) -> int:
    return sum(len(session._seat.target.reading) > 0 for session in seats._sessions)


@pytest.mark.parametrize("method", ["plain", "serial", "auto"])
def test_the_beginning_is_read_once(pipe: MirrorPipeline, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "method", method)
    prompts = [pipe.encode(SYSTEM + question) for question in QUESTIONS]
    num_common = len(pipe.encode(SYSTEM)) - 1
    with pipe.session() as alone:
        expected = [alone.generate(token_ids=ids, **OPTIONS).token_ids for ids in prompts]
    seats = pipe.seats(3)
    with ThreadPoolExecutor(3) as threads, busy(pipe) as release:
        found = [threads.submit(answer, seats, prompts[0])]
        wait_until(lambda: num_reading(seats) == 1)
        found += [threads.submit(answer, seats, ids) for ids in prompts[1:]]
        wait_until(lambda: not seats.num_free)
        threading.Event().wait(2 * seats_module.LOOK_S)
        assert num_reading(seats) == 1, "the others wait"
        release.set()
        results = [one.result(60) for one in found]
    assert [result.token_ids for result in results] == expected
    assert results[0].stats.num_reused_tokens == 0
    assert all(result.stats.num_reused_tokens >= num_common for result in results[1:])
    seats.close()


def test_who_comes_before_the_first_one_has_begun_waits_for_it_too(pipe: MirrorPipeline) -> None:
    ids = pipe.encode(SYSTEM)
    seats, taken, begin = pipe.seats(2), threading.Event(), threading.Event()

    def late() -> GenerationResult:
        with seats.take(ids) as session:
            taken.set()
            begin.wait(60)
            return session.generate(token_ids=ids, **OPTIONS)

    with ThreadPoolExecutor(2) as threads, busy(pipe) as release:
        first = threads.submit(late)
        assert taken.wait(60)
        seats._asked[next(iter(seats._asked))].begins_until += 60  # however slow this machine is
        second: Future[GenerationResult] = threads.submit(answer, seats, ids)
        wait_until(lambda: not seats.num_free)
        begin.set()
        wait_until(lambda: num_reading(seats) == 1)
        release.set()
        assert first.result(60).token_ids == second.result(60).token_ids
    assert second.result().stats.num_reused_tokens == len(ids) - 1
    seats.close()


def test_nobody_waits_long_for_one_that_does_not_begin(pipe: MirrorPipeline) -> None:
    ids, seats, done = pipe.encode(SYSTEM), pipe.seats(3), threading.Event()

    def idle() -> None:
        with seats.take(ids):
            done.wait(60)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(idle)
        wait_until(lambda: seats.num_free == 2)
        assert answer(seats, ids).stats.num_reused_tokens == 0
        done.set()
    seats.close()


def test_no_thread_waits_for_itself(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(seats_module, "sleep", refuse)
    ids, seats = pipe.encode(SYSTEM), pipe.seats(2)
    with seats.take(ids), seats.take(ids) as second:
        assert second.num_cached_tokens == 0
    seats.close()


def test_who_waits_for_another_one_can_be_stopped(pipe: MirrorPipeline) -> None:
    ids, seats, cancel = pipe.encode(SYSTEM), pipe.seats(2), CancelToken()
    with ThreadPoolExecutor(2) as threads, busy(pipe) as release:
        first = threads.submit(answer, seats, ids)
        wait_until(lambda: num_reading(seats) == 1)
        second = threads.submit(answer, seats, ids, cancel)
        wait_until(lambda: not seats.num_free)
        cancel.cancel()
        with pytest.raises(Cancelled):
            second.result(30)
        assert seats.num_free == 1
        release.set()
        assert first.result(60).num_tokens == OPTIONS["max_new_tokens"]
    assert not seats._asked
    seats.close()


def test_who_waits_reads_by_itself_where_the_other_one_is_stopped(pipe: MirrorPipeline) -> None:
    ids, seats, cancel = pipe.encode(SYSTEM), pipe.seats(2), CancelToken()
    with pipe.session() as alone:
        expected = alone.generate(token_ids=ids, **OPTIONS).token_ids

    def stopped() -> None:
        with seats.take(ids) as session:
            session.generate(token_ids=ids, cancel=cancel, **OPTIONS)

    with ThreadPoolExecutor(2) as threads, busy(pipe) as release:
        first = threads.submit(stopped)
        wait_until(lambda: num_reading(seats) == 1)
        second = threads.submit(answer, seats, ids)
        wait_until(lambda: not seats.num_free)
        cancel.cancel()
        release.set()
        with pytest.raises(Cancelled):
            first.result(60)
        assert second.result(60).token_ids == expected
    seats.close()


def test_a_thread_that_has_another_seat_waits_for_nobody(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler in the middle of a pass, or an event loop with several texts: nobody else would go on."""
    monkeypatch.setattr(seats_module, "sleep", None)
    ids, seats = pipe.encode(SYSTEM), pipe.seats(2)
    with ThreadPoolExecutor(1) as threads, seats.take(ids) as first, busy(pipe) as release:
        text = threads.submit(first.generate, token_ids=ids, **OPTIONS)
        wait_until(lambda: num_reading(seats) == 1)
        with seats.take(ids) as second:
            assert second.num_cached_tokens == 0
        release.set()
        assert text.result(60).num_tokens == OPTIONS["max_new_tokens"]
    seats.close()


def test_nobody_waits_for_a_reading_without_time(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats_module, "sleep", None)
    ids, seats = pipe.encode(SYSTEM), pipe.seats(2)
    with ThreadPoolExecutor(1) as threads, busy(pipe) as release:
        first = threads.submit(answer, seats, ids)
        wait_until(lambda: num_reading(seats) == 1)
        with seats.take(ids, timeout_s=0) as second:
            assert second.num_cached_tokens == 0
        release.set()
        first.result(60)
    seats.close()


def test_what_cannot_be_copied_is_read(pipe: MirrorPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise DeviceError("the copy fails")

    ids, seats = pipe.encode(SYSTEM), pipe.seats(2)
    with seats.take(ids) as first:
        text = first.generate(token_ids=ids, **OPTIONS)
        monkeypatch.setattr(MirrorSession, "follow", fail)
        found = answer(seats, ids)
    assert (found.stats.num_reused_tokens, found.token_ids) == (0, text.token_ids)
    seats.close()
