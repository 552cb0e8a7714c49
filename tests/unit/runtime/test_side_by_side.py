"""Several texts at once: their order, who writes which, and how they end."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from mirrorsd.runtime.reporting.results import Chunk
from mirrorsd.runtime.side_by_side import side_by_side
from mirrorsd.runtime.turns import ChunkStream

WORDS = ("one ", "two ", "three ")


class Desk:
    """Writers, and what each of them has written; a text may wait for `gates`, or fail."""

    def __init__(self, count: int) -> None:
        self.writers: dict[int, str] = {}
        self.given_back: list[str] = []
        self.stopped: list[int] = []
        self.gates = [threading.Event() for _ in range(count)]
        self.failing: set[int] = set()
        self.texts = [partial(self._begin, number) for number in range(count)]

    def _begin(self, number: int, writer: str) -> ChunkStream[Chunk]:
        self.writers[number] = writer
        return ChunkStream(self._write(number), partial(self._stop, number))

    def _write(self, number: int) -> Iterator[Chunk]:  # type: ignore[misc]
        for word in WORDS:
            if writer_waits := self.writers[number] != "own":
                assert self.gates[number].wait(5), writer_waits
            if number in self.failing:
                raise ValueError(f"text {number}")
            yield Chunk(word, ())

    def _stop(self, number: int) -> None:
        self.stopped.append(number)
        self.gates[number].set()

    def lend(self, most: int, *, at_hand: int = 9) -> list[object]:
        return [self._other(f"other {number}") for number in range(min(most, at_hand))]

    @contextmanager
    def _other(self, name: str) -> Iterator[str]:
        yield name
        self.given_back.append(name)


def words_of(found: list[tuple[int, Chunk]]) -> list[tuple[int, str]]:
    return [(number, chunk.text) for number, chunk in found]


EXPECTED = [(number, word) for number in range(3) for word in WORDS]


@pytest.mark.parametrize("at_hand", [0, 1, 2])
def test_texts_come_in_their_order_whoever_writes_them(at_hand: int) -> None:
    desk = Desk(3)
    for gate in desk.gates:
        gate.set()
    found = list(side_by_side("own", desk.texts, partial(desk.lend, at_hand=at_hand)))
    assert words_of(found) == EXPECTED
    assert desk.writers[0] == "own"
    assert len(desk.given_back) == at_hand


def test_all_are_written_at_once_from_the_first_chunk_on() -> None:
    desk = Desk(3)
    reading = side_by_side("own", desk.texts, desk.lend)
    next(reading)
    assert set(desk.writers) == {0}
    next(reading)
    for gate in reversed(desk.gates):
        gate.set()
    assert words_of(list(reading)) == EXPECTED[2:]
    assert set(desk.writers.values()) == {"own", "other 0", "other 1"}


def test_a_failure_comes_when_its_text_is_read_and_ends_the_others() -> None:
    desk = Desk(3)
    desk.failing.add(1)
    desk.gates[1].set()
    found: list[tuple[int, Chunk]] = []
    with pytest.raises(ValueError, match="text 1"):
        found.extend(side_by_side("own", desk.texts, desk.lend))
    assert words_of(found) == EXPECTED[:3]
    assert desk.stopped in ([], [2]), "whether it had begun"
    assert len(desk.given_back) == 2


@pytest.mark.parametrize("num_threads", [0, 1])
def test_where_the_system_has_no_more_threads_who_reads_writes_the_rest(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    desk, begin, begun = Desk(3), threading.Thread.start, list[threading.Thread]()
    for gate in desk.gates:
        gate.set()

    def begin_some(thread: threading.Thread) -> None:
        if len(begun) == num_threads:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", begin_some)
    assert words_of(list(side_by_side("own", desk.texts, desk.lend))) == EXPECTED
    assert set(desk.writers.values()) <= {"own", "other 0"}
    assert len(desk.given_back) == num_threads


def test_who_reads_no_further_stops_what_is_written() -> None:
    desk = Desk(3)
    reading = side_by_side("own", desk.texts, desk.lend)
    next(reading), next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert sorted(desk.stopped) == [1, 2]
    assert len(desk.given_back) == 2


def test_who_is_needed_elsewhere_is_given_back_after_a_text() -> None:
    desk = Desk(3)
    for gate in desk.gates:
        gate.set()
    lend = partial(desk.lend, at_hand=1)
    assert words_of(list(side_by_side("own", desk.texts, lend, lambda: False))) == EXPECTED
    assert desk.writers == {0: "own", 1: "other 0", 2: "own"}


def test_behind_a_text_that_fails_none_is_begun() -> None:
    """Nobody will read it. Own texts wait for what failed, so that its writer has had the time to begin others."""
    desk = Desk(4)
    desk.failing = {1}
    desk.gates[1].set()
    reading = side_by_side("own", desk.texts, partial(desk.lend, at_hand=1))
    assert next(reading)[0] == 0
    next(reading)  # which lends the place, before this chunk is asked for
    while not desk.given_back:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="text 1"):
        list(reading)
    assert set(desk.writers) == {0, 1}
