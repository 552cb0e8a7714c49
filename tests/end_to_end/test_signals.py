"""Signal handlers, cancels in the middle of a step, streams with two readers: an error at once, and nothing lost."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_pipelines import guesses_after, make_pipeline, target_of
from waiting import Entered

from mirrorsd import MirrorPipeline
from mirrorsd.graphs.contract import HeadShape
from mirrorsd.graphs.errors import Cancelled, DeviceError, GenerationError
from mirrorsd.graphs.manifest import Head, SourceModel
from mirrorsd.testing.fake import FakeTarget

PROMPT, OTHER = "Every morning the fox", "The old heron said to the river that"
SETTINGS = {"max_new_tokens": 30, "ignore_eos": True}
SIGNAL = getattr(signal, "SIGWINCH", signal.SIGTERM)
"""One that nobody minds who has no handler: a pass that comes late must not end the process of all tests."""


class SignalledTarget(FakeTarget):
    """A signal comes in the middle of its third pass, on the thread that does it."""

    num_until = 3

    def run(self, *arguments: Any, **options: Any) -> Any:
        self.num_until -= 1
        if self.num_until == 0:
            signal.raise_signal(SIGNAL)
        return super().run(*arguments, **options)


class HeldTarget(FakeTarget):
    """Each pass waits until the test lets it go on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held = Entered()

    def run(self, *arguments: Any, **options: Any) -> Any:
        assert self.held.wait(60)
        return super().run(*arguments, **options)


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], list[BaseException]]]:
    """Makes a job the handler of the signal; the list gets what it raises."""
    usual = signal.getsignal(SIGNAL)

    def handle_by(job: Callable[[], object]) -> list[BaseException]:
        raised: list[BaseException] = []

        def handler(*_: object) -> None:
            try:
                job()
            except Exception as error:
                raised.append(error)

        signal.signal(SIGNAL, handler)
        return raised

    yield handle_by
    signal.signal(SIGNAL, usual)


@pytest.fixture
def pipe(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with make_pipeline(tiny_bundle, lambda: target_of(SignalledTarget), is_lent=True) as made:
        yield made


@pytest.mark.parametrize("method", ["plain", "serial", "mirror"])
@pytest.mark.parametrize("way", ["same session", "other session", "new session", "stream", "saved"])
def test_generating_in_a_handler_while_a_pass_is_lent_fails_at_once_and_harms_nothing(
    pipe: MirrorPipeline, on_signal: Any, tmp_path: Path, method: str, way: str
) -> None:
    other = pipe.session()
    other._seat._target_session.num_until = 0
    expected = other.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids
    stream = pipe.stream(OTHER, **SETTINGS)
    next(stream)
    pipe._own._seat._target_session.num_until = 3
    ways: dict[str, Callable[[], object]] = {
        "same session": lambda: pipe.generate(OTHER, **SETTINGS),
        "other session": lambda: other.generate(OTHER, **SETTINGS),
        "new session": pipe.session,
        "stream": lambda: next(stream),
        "saved": lambda: pipe._own.save_cache(tmp_path / "cache"),
    }
    raised, started = on_signal(ways[way]), time.perf_counter()
    found = pipe.generate(PROMPT, method=method, **SETTINGS)
    assert time.perf_counter() - started < 60, "nobody waits for a device that cannot answer"
    assert [type(error) for error in raised] == [GenerationError]
    assert "in the middle of a pass on this very thread" in str(raised[0])
    assert found.token_ids[:4] == expected, "the text that was interrupted goes on"
    assert pipe.generate(OTHER, **SETTINGS).num_tokens == 30


def test_closing_in_a_handler_ends_the_text_and_waits_for_nobody(pipe: MirrorPipeline, on_signal: Any) -> None:
    raised, started = on_signal(pipe.close), time.perf_counter()
    with pytest.raises((Cancelled, GenerationError)):
        pipe.generate(PROMPT, **SETTINGS)
    assert time.perf_counter() - started < 60
    assert not raised


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
def test_who_leaves_in_a_handler_leaves_even_if_the_text_was_cancelled(
    pipe: MirrorPipeline, on_signal: Any, leaving: type[BaseException]
) -> None:
    def leave() -> None:
        pipe.cancel()
        raise leaving(3)

    on_signal(leave)
    with pytest.raises(leaving):
        pipe.generate(PROMPT, **SETTINGS)
    assert pipe.generate(PROMPT, **SETTINGS).num_tokens == 30


def head_that(guess: Callable[[list[int]], list[int]]) -> tuple[Head, Callable[[list[int]], list[int]]]:
    shape = HeadShape(taps=(2,), length=3, num_candidates=1, num_layers=0, num_kv_heads=0, head_dim=8)
    source = SourceModel(name="fake", family="medusa", licence="unknown", num_parameters=1)
    return Head(kind="medusa", file="", source=source, shape=shape, vocabulary="own", num_tokens=16), guess


@pytest.mark.parametrize("number", range(1, 6))
def test_a_cancel_beside_a_head_leaves_a_record_of_every_token(tiny_bundle: Path, number: int) -> None:
    """The head is asked after its step's tokens are committed, and before anybody was told of them."""
    num_asked = 0

    def guess(text: list[int]) -> list[int]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == number:
            session.cancel()
            raise DeviceError("The run was terminated.")  # as ONNX Runtime says it
        return guesses_after(text)

    def new_target() -> FakeTarget:
        target = target_of()
        target.add_head(*head_that(guess))
        return target

    with make_pipeline(tiny_bundle, new_target) as pipe:
        whole = pipe.generate(PROMPT, method="plain", **SETTINGS)
        session, told = pipe.session(), list[int]()
        with pytest.raises(Cancelled) as cancelled:
            for chunk in session.stream(PROMPT, method="medusa", **SETTINGS):
                told += [token.id for token in chunk.tokens]
        result = cancelled.value.result
        assert result is not None
        assert result.token_ids == told == whole.token_ids[: len(told)]
        assert sum(1 + step.num_accepted for step in result.steps) == len(told)
        assert len(result.steps) == len(result.step_texts)
        assert pipe.generate(PROMPT, method="medusa", **SETTINGS).token_ids == whole.token_ids


def test_the_second_of_two_readers_is_told_and_the_first_gets_every_chunk(tiny_bundle: Path) -> None:
    with make_pipeline(tiny_bundle, lambda: target_of(HeldTarget)) as pipe:
        stream = pipe.stream(PROMPT, max_new_tokens=12, ignore_eos=True, method="plain")
        chunks, held = [], pipe._own._seat._target_session.held
        reader = threading.Thread(target=lambda: chunks.extend(stream))
        reader.start()
        assert held.is_awaited.wait(60)
        with pytest.raises(GenerationError) as refused:
            next(stream)
        assert str(refused.value) == "Another thread is reading this stream: one thread at a time may do that."
        held.set()
        reader.join(60)
        result = next(chunk.result for chunk in chunks if chunk.result is not None)
        assert sum(len(chunk.tokens) for chunk in chunks) == result.num_tokens == 12


def test_a_stream_that_is_closed_while_another_thread_reads_it_ends_there(tiny_bundle: Path) -> None:
    with make_pipeline(tiny_bundle, lambda: target_of(seconds=0.05)) as pipe:
        stream, errors, began = pipe.stream(PROMPT, max_new_tokens=400, ignore_eos=True), [], threading.Event()

        def read() -> None:
            try:
                for _ in stream:
                    began.set()
            except Cancelled as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert began.wait(60)
        stream.close()
        reader.join(60)
        assert not reader.is_alive()
        assert len(errors) <= 1, "it was between two chunks, or in the middle of one"
        assert list(stream) == []
        assert pipe.generate(OTHER, **SETTINGS).num_tokens == 30
