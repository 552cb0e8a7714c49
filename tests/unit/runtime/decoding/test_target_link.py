"""The scheduler's line to the target: what counts as cached, whatever was interrupted, and who ends a pass."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mirrorsd.graphs.errors import Cancelled, DeviceError
from mirrorsd.runtime.decoding.links import TargetLink
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.draft.tree import NO_TOKENS
from mirrorsd.runtime.ledger import TargetOutput
from mirrorsd.testing.fake import FakeTarget
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

CONTEXT = 16


class Noting(FakeTarget):
    """Its next token is the sum of the text so far. It notes what it is given, and what is to happen meanwhile."""

    def __init__(self) -> None:
        super().__init__(lambda text: np.eye(16)[sum(text) % 16], vocab_size=16, context=CONTEXT)
        self.read: list[tuple[int, list[int]]] = []
        self.rows: list[int] = []
        self.beside: Callable[[int], None] = lambda start: None

    def prefill(self, tokens: NDArray[np.int64], start: int, **options: Any) -> None:
        super().prefill(tokens, start, **options)
        self.read.append((start, tokens.tolist()))
        self.beside(start)

    def run(self, tokens: NDArray[np.int64], start: int, **options: Any) -> TargetOutput:
        self.rows = tokens.tolist()
        return super().run(tokens, start, **options)


class Endless(Noting):
    """A pass lasts until it is ended."""

    def __init__(self) -> None:
        super().__init__()
        self._is_ended = threading.Event()

    def run(self, tokens: NDArray[np.int64], start: int, **options: Any) -> TargetOutput:
        self.beside(start)
        assert self._is_ended.wait(10.0)
        raise DeviceError("ended early")

    def terminate(self) -> None:
        self._is_ended.set()


@pytest.fixture
def worker() -> Iterator[DeviceWorker]:
    worker = DeviceWorker("target")
    yield worker
    worker.close()


def make_request(prompt: list[int], **speculation: Any) -> Request:
    return Request(prompt, GenerationConfig(), SpeculationConfig(**speculation), CONTEXT, threading.Event())


def check_read_again(link: TargetLink, prompt: list[int]) -> None:
    """Read seven tokens of which two are still cached, and the text is right."""
    again = make_request(prompt)
    link.prefill(again)
    assert again.num_reused == 2
    output = link.result(again, link.submit(again, 6, NO_TOKENS))
    assert output.argmax_ids.tolist() == [sum(prompt) % 16]


def test_all_but_the_last_token_is_read_in_chunks(worker: DeviceWorker) -> None:
    target = Noting()
    TargetLink(target, worker).prefill(make_request([1, 2, 3, 4, 5, 6, 7, 8], prefill_rows=3))
    assert target.read == [(0, [1, 2, 3]), (3, [4, 5, 6]), (6, [7])]


def test_the_common_beginning_of_the_next_text_is_not_read_again(worker: DeviceWorker) -> None:
    target, following = Noting(), make_request([1, 2, 3, 9, 9, 9])
    link = TargetLink(target, worker)
    link.prefill(make_request([1, 2, 3, 4, 5, 6]))
    link.prefill(following)
    assert target.read[1:] == [(3, [9, 9])]
    assert following.num_reused == 3


def test_what_an_interrupted_reading_wrote_over_counts_as_unread(worker: DeviceWorker) -> None:
    """The device fails after it has written: of the first text only its common beginning is still there."""
    target, first = Noting(), [1, 2, 3, 4, 5, 6, 7]
    link = TargetLink(target, worker)
    link.prefill(make_request(first))

    def fail(start: int) -> None:
        raise DeviceError("out of memory")

    target.beside = fail
    with pytest.raises(DeviceError, match="out of memory"):
        link.prefill(make_request([1, 2, 9, 9, 9], prefill_rows=2))
    target.beside = lambda start: None
    check_read_again(link, first)


def test_a_cancelled_request_reads_no_further(worker: DeviceWorker) -> None:
    target, request = Noting(), make_request([1, 2, 3, 4, 5, 6], prefill_rows=2)
    target.beside = lambda start: request.cancel()
    with pytest.raises(Cancelled):
        TargetLink(target, worker).prefill(request)
    assert target.read == [(0, [1, 2])]


def test_a_rejected_token_does_not_count_as_cached(worker: DeviceWorker) -> None:
    """After 1 2 3 4 (sum 10) the window 10 7 was in flight: 10 was right, then came 4 (sum 20), not 7."""
    link = TargetLink(Noting(), worker)
    request = make_request([1, 2, 3, 4])
    link.prefill(request)
    output = link.result(request, link.submit(request, 3, np.array([10, 7])))
    assert output.argmax_ids[:2].tolist() == [10, 4]
    request.commit([10, 4], [1.0, 1.0], 0.1)
    link.keep(request, 5)
    following = make_request([1, 2, 3, 4, 10, 7, 5])
    link.prefill(following)
    assert following.num_reused == 5


def beside(link: TargetLink) -> None:
    """Another text, of a signal's handler: it reads 1 2 and verifies a wrong guess, in rows that the first one has."""
    other = make_request([1, 2])
    link.prefill(other)
    link.result(other, link.submit(other, 1, np.array([9])))
    other.commit([3], [1.0], 0.1)
    link.keep(other, 2)


def test_a_step_in_the_middle_of_which_another_text_came_leaves_no_record(worker: DeviceWorker) -> None:
    link, request = TargetLink(Noting(), worker), make_request([1, 2, 3, 4])
    link.prefill(request)
    link.result(request, link.submit(request, 3, np.array([10])))
    beside(link)
    request.commit([10, 4], [1.0, 1.0], 0.1)
    link.keep(request, 5)
    following = make_request([1, 2, 3, 4, 10, 4])
    link.prefill(following)
    assert following.num_reused == 2


def test_a_prompt_in_the_middle_of_which_another_text_came_is_read_again(worker: DeviceWorker) -> None:
    class Interrupted:
        def num_read(self, tokens: NDArray[np.int64]) -> int:
            return len(tokens)

        def read(self, start: int, stop: int) -> None:
            if start == 2:
                beside(link)

    link, prompt = TargetLink(Noting(), worker), [1, 2, 3, 4, 5, 6, 7]
    link.prefill(make_request(prompt, prefill_rows=2), Interrupted())
    assert link.cached.tolist() == [1, 2], "it is read again with its next step"
    check_read_again(link, prompt)


def test_a_copy_that_comes_when_the_next_text_has_begun_writes_over_nothing(worker: DeviceWorker) -> None:
    """Whoever asked for it has waited for a device that hung, and was told so."""

    class Copying(Noting):
        copies_rows = True  # type: ignore[assignment]

        def copy_rows(self, source: Any, rows: range) -> None:
            if rows:
                self._text[rows.start :] = source._text[rows.start : rows.stop]

    link, other, request = TargetLink(Copying(), worker), TargetLink(Copying(), worker), make_request([1, 2, 3, 4, 5])
    other.prefill(make_request([1, 9, 9, 9, 9]))
    assert link.follow(other)
    assert link.cached.tolist() == [1, 9, 9, 9]
    link.prefill(request)
    worker.run(partial(link._copy, other, None))
    output = link.result(request, link.submit(request, 4, NO_TOKENS))
    assert output.argmax_ids.tolist() == [sum([1, 2, 3, 4, 5]) % 16]


@pytest.mark.parametrize(("num_prompt", "num_rows"), [(4, 8), (12, 3)], ids=["there is room", "the context ends"])
def test_passes_are_padded_to_equal_numbers_of_rows(worker: DeviceWorker, num_prompt: int, num_rows: int) -> None:
    target, request = Noting(), make_request([1] * num_prompt, pad_rows_to=8)
    link = TargetLink(target, worker)
    link.prefill(request)
    output = link.result(request, link.submit(request, num_prompt - 1, np.array([5, 6])))
    assert (target.rows[:3], len(target.rows)) == ([1, 5, 6], num_rows)
    assert output.argmax_ids[:3].tolist() == [num_prompt % 16, (num_prompt + 5) % 16, (num_prompt + 11) % 16]


def test_cancelling_ends_the_pass_that_runs(worker: DeviceWorker) -> None:
    target, request = Endless(), make_request([1, 2, 3])
    link = TargetLink(target, worker)
    link.prefill(request)
    target.beside = lambda start: request.cancel()
    with pytest.raises(Cancelled):
        link.result(request, link.submit(request, 2, NO_TOKENS))
    assert not worker.has_pending()


def test_a_pass_that_lasts_too_long_is_ended(worker: DeviceWorker) -> None:
    request = make_request([1, 2, 3], target_deadline_s=0.1)
    link = TargetLink(Endless(), worker)
    link.prefill(request)
    with pytest.raises(DeviceError, match="ended early"):
        link.result(request, link.submit(request, 2, NO_TOKENS))
    assert not worker.has_pending()


def test_a_target_that_keeps_states_at_some_places_reads_again_from_the_last_of_them(worker: DeviceWorker) -> None:
    class EveryThird(Noting):
        def resumable(self, position: int) -> int:
            return position // 3 * 3

    target, following = EveryThird(), make_request([1, 2, 3, 4, 5, 9, 9])
    link = TargetLink(target, worker)
    link.prefill(make_request([1, 2, 3, 4, 5, 6, 7]))
    link.prefill(following)
    assert target.read[1:] == [(3, [4, 5, 9])]
    assert following.num_reused == 3
