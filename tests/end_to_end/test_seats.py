"""Seats are given back and end whatever comes in between: an interrupt at any line, ids that are none, closing."""

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from mirrorsd import ConfigError, GenerationError, MirrorPipeline
from mirrorsd.runtime import seats as seats_module

WITHIN = ("__enter__", "__exit__", "get", "__contains__", "__setitem__", "__delitem__")
"""Functions of others that `Seats.take` is in, or calls."""


@pytest.fixture(scope="module")
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as loaded:
        yield loaded


class InterruptedAt:
    """A Ctrl-C at the n-th line that is run of `seats.py`."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename != seats_module.__file__:
            return self if code.co_name in WITHIN else None
        if event == "line":
            self._left -= 1
            if not self._left:
                self.place = f"{code.co_name}, line {frame.f_lineno}"
                self.reached()
        return self

    def reached(self) -> None:
        raise KeyboardInterrupt


class CollectedAt(InterruptedAt):
    """Garbage is collected there instead."""

    def __init__(self, number: int, garbage: list[Any]) -> None:
        super().__init__(number)
        self._garbage: list[list[Any]] = [garbage]

    def reached(self) -> None:
        self._garbage.clear()
        gc.collect(1)  # it is new; a whole collection takes a fifth of a second where PyTorch is loaded


@pytest.mark.parametrize("is_known", [False, True])
def test_an_interrupt_at_any_line_leaves_all_seats_free(pipe: MirrorPipeline, is_known: bool) -> None:
    """Also where a seat is being given back; `is_known`: another one has cached the beginning, which is copied."""
    ids, places = pipe.encode("Once upon a time there was a fox who lived at the edge of a dark forest"), list[str]()
    for number in count(1):
        seats, interrupted = pipe.seats(2), InterruptedAt(number)
        if is_known:
            with seats.take(ids) as session:
                session.generate(token_ids=ids, max_new_tokens=1)
        traced = sys.gettrace()
        try:
            sys.settrace(interrupted)
            with seats.take([*ids, 70]):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(traced)
        assert seats.num_free == 2, interrupted.place
        with seats.take(ids, timeout_s=0), seats.take(ids, timeout_s=0):
            assert seats.num_free == 0
        seats.close()
        if not interrupted.place:
            break
        places.append(interrupted.place.partition(",")[0])
    assert {"take", "_free", "_best", "_share", "_give_back"} <= {*places}


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, "1", True])
def test_what_is_no_time_is_not_waited_for(pipe: MirrorPipeline, timeout_s: Any) -> None:
    refused = pytest.raises(ConfigError, match=r"timeout_s is .*allowed: 0 or more seconds")
    with closing(pipe.seats(1)) as seats, seats.take([1]), refused, seats.take([1], timeout_s):
        pass


@pytest.mark.parametrize("ids", [5, np.int64(3), "abc", None, [1.5], [True], [[1, 2], [3, 4]], [10**30]])
def test_what_is_no_prompt_takes_no_seat(pipe: MirrorPipeline, ids: Any) -> None:
    seats = pipe.seats(1)
    with pytest.raises(GenerationError, match="token_ids"), seats.take(ids):
        pass
    assert seats.num_free == 1
    seats.close()


def test_of_conversations_that_are_alike_the_one_used_longest_ago_makes_room(pipe: MirrorPipeline) -> None:
    beginning = pipe.encode("The old heron of the dark river")
    texts = [[*beginning, *[80 + number] * 4] for number in range(4)]
    seats = pipe.seats(3)
    with ExitStack() as stack:
        for text in texts[:3]:
            stack.enter_context(seats.take(text)).generate(token_ids=text, max_new_tokens=1)
    with seats.take(texts[3]) as session:
        assert session.cached_token_ids[: len(texts[2])] == texts[2], "it was given back first"
    seats.close()


def test_a_seat_that_garbage_gives_back_disturbs_nobody(pipe: MirrorPipeline) -> None:
    """As a `with` block that is left in a cycle of references, collected at any line of another one."""
    ids, seats = pipe.encode("The fox"), pipe.seats(2)
    for number in count(1):
        left = [seats.take(ids)]
        left[0].__enter__()
        left.append(left)  # type: ignore[arg-type]
        collected = CollectedAt(number, left)
        del left
        traced = sys.gettrace()
        try:
            sys.settrace(collected)
            with seats.take(ids):
                pass
        finally:
            sys.settrace(traced)
        if not collected.place:
            break
        assert seats.num_free == 2, collected.place
    seats.close()


def test_closed_seats_are_refused_at_once(pipe: MirrorPipeline) -> None:
    ids, seats = pipe.encode("The fox"), pipe.seats(1)

    def take() -> None:
        with seats.take(ids):
            pass

    with ThreadPoolExecutor(1) as threads, seats.take(ids):
        waiting = threads.submit(take)
        threading.Event().wait(2 * seats_module.LOOK_S)
        assert not waiting.done()
        seats.close()
        with pytest.raises(GenerationError, match="These seats are closed"):
            waiting.result(10)
    with pytest.raises(GenerationError, match="These seats are closed"):
        take()


def test_seats_of_a_closed_pipeline_are_refused(tiny_bundle: Path) -> None:
    pipe = MirrorPipeline.load(tiny_bundle, device_map="cpu")
    seats = pipe.seats(1)
    ids = pipe.encode("The fox")
    pipe.close()
    with pytest.raises(GenerationError, match="closed"), seats.take(ids):
        pass


def test_a_seat_that_its_user_closed_is_not_given_to_others(pipe: MirrorPipeline) -> None:
    ids, seats = pipe.encode("The fox"), pipe.seats(2)
    with seats.take(ids) as first:
        first.close()
    with seats.take(ids) as second:
        assert second.generate(token_ids=ids, max_new_tokens=1).num_tokens == 1
        with pytest.raises(TimeoutError), seats.take(ids, timeout_s=0.01):
            pass
    wait_until(lambda: seats.num_free == 2)
    seats.close()
