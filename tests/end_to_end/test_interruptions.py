"""Streams that nobody reads on, Ctrl-C, cancel, close, devices that hang: the next text is right, and nobody waits."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from waiting import Entered, wait_until

from mirrorsd import MirrorPipeline
from mirrorsd.device_maps import load_device_map
from mirrorsd.devices import endings
from mirrorsd.devices.layouts import choose_layout
from mirrorsd.graphs.bundle_files import read_bundle
from mirrorsd.graphs.errors import Cancelled, DeviceError, GenerationError
from mirrorsd.runtime.decoding import links
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.session import MirrorSession
from mirrorsd.testing.fake import FakeDraft, FakeModel, FakeTarget
from mirrorsd.texts.config import SpeculationConfig, Speculations
from mirrorsd.texts.tokenizer import BundleTokenizer

VOCAB = 300
PROMPT, OTHER = "Every morning the fox", "The old heron said to the river that"
SETTINGS = {"max_new_tokens": 30, "ignore_eos": True}
METHODS = ["plain", "serial", "mirror", "auto"]
LONG = "Once upon a time there was a little fox who lived at the edge of a dark forest. "


def logits_after(text: list[int]) -> np.ndarray:
    return np.random.default_rng([len(text), *text[-3:]]).normal(size=VOCAB)


def guesses_after(text: list[int]) -> list[int]:
    text = list(text)
    for _ in range(3):
        text.append(int(logits_after(text).argmax()) if len(text) % 5 else 7)
    return text[-3:]


class StubbornTarget(FakeTarget):
    """Hangs in its next pass once `hang` is set, whatever it is told, until the test is over."""

    hang = threading.Event()
    release = threading.Event()

    def run(self, *arguments, **options):
        if self.hang.is_set():
            self.release.wait(30)
        return super().run(*arguments, **options)


@pytest.fixture(scope="module")
def real(tiny_bundle: Path) -> Iterator[MirrorPipeline]:
    with MirrorPipeline.load(tiny_bundle, device_map="cpu", speculation={"prefill_rows": 16}) as loaded:
        yield loaded


@pytest.fixture
def make_pipe(tiny_bundle: Path) -> Iterator[Callable[..., MirrorPipeline]]:
    """Pipelines over fakes: the text depends on what the caches hold, row by row."""
    opened: list[MirrorPipeline] = []
    StubbornTarget.release.clear()

    def make(target: type[FakeTarget] = FakeTarget, *, is_lent: bool = False, **speculation) -> MirrorPipeline:
        engine = Engine(
            lambda: FakeModel(lambda: target(logits_after, vocab_size=VOCAB, context=512, suffix_seconds=0.002)),
            lambda: FakeModel(lambda: FakeDraft(guesses_after, vocab_size=VOCAB, num_streams=2, capacity=512)),
            is_target_lent=is_lent,
        )
        layout = choose_layout(load_device_map("cpu"), None, None)
        ways = SpeculationConfig(**{"prefill_rows": 16, **speculation})
        tokenizer, manifest = BundleTokenizer(tiny_bundle), read_bundle(tiny_bundle)
        opened.append(MirrorPipeline(engine, tokenizer, manifest, layout, Speculations(ways, ways)))
        return opened[-1]

    yield make
    StubbornTarget.hang.clear()
    StubbornTarget.release.set()
    for pipe in opened:
        pipe.close()


def in_a_long_pass(session: MirrorSession) -> threading.Event:
    """Have the session's passes take a minute each; the event says that one is under way, and can be ended."""
    target = session._seat._target_session
    target._suffix_seconds, target._is_terminated = 60.0, Entered()
    return target._is_terminated.is_awaited


def within(seconds: float, job: Callable[[], object]) -> object:
    """Run a job on a thread of its own; it must end in time."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(job).result(seconds)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("method", METHODS)
def test_a_half_read_stream_blocks_nobody_and_goes_on_with_the_same_text(real: MirrorPipeline, method: str) -> None:
    whole = real.generate(PROMPT, method=method, **SETTINGS)
    other = real.generate(OTHER, method="plain", **SETTINGS)
    stream = real.stream(PROMPT, method=method, **SETTINGS)
    chunks = [next(stream)]
    assert real.generate(OTHER, method=method, **SETTINGS).token_ids == other.token_ids, "on the same thread, at once"
    chunks.append(next(stream))
    assert within(30, lambda: real.generate(OTHER, method=method, **SETTINGS).token_ids) == other.token_ids
    chunks += list(stream)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].result is not None
    assert chunks[-1].result.token_ids == whole.token_ids


def test_two_streams_of_one_session_may_be_read_by_turns(real: MirrorPipeline) -> None:
    expected = [real.generate(prompt, **SETTINGS).text for prompt in (PROMPT, OTHER)]
    streams = [real.stream(prompt, **SETTINGS) for prompt in (PROMPT, OTHER)]
    texts = ["", ""]
    while not all(text == whole for text, whole in zip(texts, expected, strict=True)):
        for number, stream in enumerate(streams):
            texts[number] += "".join(chunk.text for chunk in [next(stream, None)] if chunk)
    assert texts == expected


def test_a_client_that_went_away_keeps_nobody_waiting(make_pipe) -> None:
    """As web frameworks do it: every `next` on some thread, and the iterator is kept."""
    pipe = make_pipe()
    expected = pipe.generate(OTHER, **SETTINGS).token_ids
    stream = pipe.stream(PROMPT, **SETTINGS)
    within(30, lambda: next(stream))
    assert within(30, lambda: pipe.generate(OTHER, **SETTINGS).token_ids) == expected
    within(30, pipe.close)
    with pytest.raises((Cancelled, GenerationError)):
        next(stream)


def test_leaving_with_ends_while_a_stream_is_half_read(make_pipe) -> None:
    def leave() -> None:
        with make_pipe() as pipe:
            pipe.kept = pipe.stream(PROMPT, **SETTINGS)
            next(pipe.kept)

    within(30, leave)


def test_requests_of_one_session_wait_for_each_other_in_order(make_pipe) -> None:
    pipe, ended = make_pipe(StubbornTarget), []

    def ask(number: int) -> list[int]:
        text = pipe.generate(PROMPT if number % 2 else OTHER, **SETTINGS).token_ids
        ended.append(number)
        return text

    expected = {number % 2: ask(number) for number in (0, 1)}
    turns = pipe._own._turns
    StubbornTarget.hang.set()
    with ThreadPoolExecutor(6) as pool:
        asked = []
        for number in range(6):
            asked.append(pool.submit(ask, number))
            wait_until(lambda: (turns._left_at is None) + len(turns._queue) == len(asked) and turns._holder is not None)
        StubbornTarget.hang.clear()
        StubbornTarget.release.set()
        texts = [future.result(60) for future in asked]
    assert texts == [expected[number % 2] for number in range(6)]
    assert ended[2:] == list(range(6))


def test_closing_a_session_reaches_requests_that_wait(make_pipe) -> None:
    session = make_pipe().session()
    is_passing = in_a_long_pass(session)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(session.generate, PROMPT, **SETTINGS) for _ in range(3)]
        wait_until(lambda: is_passing.is_set() and len(session._turns._queue) == 2)
        within(30, session.close)
        for future in asked:
            with pytest.raises((Cancelled, GenerationError)):
                future.result(30)


def test_cancel_reaches_the_running_the_waiting_and_the_not_yet_started(make_pipe) -> None:
    pipe = make_pipe()
    not_started, is_passing = pipe.stream(PROMPT, **SETTINGS), in_a_long_pass(pipe._own)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(pipe.generate, PROMPT, **SETTINGS) for _ in range(2)]
        wait_until(lambda: is_passing.is_set() and len(pipe._own._turns._queue) == 1)
        pipe.cancel()
        for future in asked:
            with pytest.raises(Cancelled, match="Cancelled after"):
                future.result(30)
    with pytest.raises(Cancelled, match="Cancelled after 0 new tokens"):
        list(not_started)
    pipe._own._seat._target_session._suffix_seconds = 0.0
    assert pipe.generate(PROMPT, max_new_tokens=5, ignore_eos=True).num_tokens == 5, "later requests are not affected"


@pytest.mark.parametrize("is_lent", [False, True], ids=["own thread", "lent"])
def test_cancel_ends_a_pass_that_takes_for_ever(make_pipe, is_lent: bool) -> None:
    pipe = make_pipe(is_lent=is_lent)
    expected = pipe.generate(PROMPT, **SETTINGS).token_ids
    is_passing = in_a_long_pass(pipe._own)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pipe.generate, PROMPT, **SETTINGS)
        assert is_passing.wait(30)
        pipe.cancel()
        with pytest.raises(Cancelled):
            asked.result(30)
    pipe._own._seat._target_session._suffix_seconds = 0.0
    assert pipe.generate(PROMPT, **SETTINGS).token_ids == expected


@pytest.mark.parametrize("is_lent", [False, True], ids=["own thread", "lent"])
def test_a_pass_that_takes_too_long_is_ended(make_pipe, is_lent: bool) -> None:
    pipe = make_pipe(is_lent=is_lent, target_deadline_s=1.0)
    expected = pipe.generate(PROMPT, **SETTINGS).token_ids
    pipe._own._seat._target_session._suffix_seconds = 60.0
    with pytest.raises(DeviceError):
        within(30, lambda: pipe.generate(PROMPT, **SETTINGS))
    pipe._own._seat._target_session._suffix_seconds = 0.0
    assert pipe.generate(PROMPT, **SETTINGS).token_ids == expected


def test_a_target_that_hangs_for_ever_hangs_nobody(make_pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "CLOSE_S", 0.5)
    monkeypatch.setattr(links, "_TERMINATE_S", 0.2)
    pipe = make_pipe(StubbornTarget, target_deadline_s=0.3)
    other = pipe.session()
    StubbornTarget.hang.set()
    with pytest.raises(DeviceError, match=r"not answered for 0.3 s \(target_deadline_s\)"):
        within(30, lambda: pipe.generate(PROMPT, **SETTINGS))
    with pytest.raises(DeviceError, match="not answered"):
        within(30, lambda: other.generate(PROMPT, **SETTINGS))
    asked = ThreadPoolExecutor(1).submit(pipe.generate, PROMPT, **SETTINGS)
    within(30, pipe.cancel)
    with pytest.raises((Cancelled, DeviceError)):
        asked.result(30)
    within(30, pipe.close)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, DeviceError])
def test_an_interrupted_prefill_promises_nothing(make_pipe, failure: type[BaseException]) -> None:
    """The first chunk of another prompt is written over the cache, then the wait for it is interrupted."""
    pipe = make_pipe()
    long_prompt, other = LONG * 3, OTHER * 5
    expected = pipe.generate(long_prompt, **SETTINGS).token_ids
    target = pipe._own._seat._target_session
    prefill = target.prefill

    def interrupted(*arguments, **options) -> None:
        prefill(*arguments, **options)
        raise failure("interrupted")

    target.prefill = interrupted
    with pytest.raises(failure):
        pipe.generate(other, **SETTINGS)
    target.prefill = prefill
    assert pipe.generate(long_prompt, **SETTINGS).token_ids == expected


@pytest.mark.parametrize(
    "how",
    [
        ("80", "told"),
        pytest.param(("200", "told"), marks=pytest.mark.long),
        pytest.param(("200", "signals"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_the_next_text_is_right_after_interruptions_at_random_moments(tiny_bundle: Path, how: tuple[str, str]) -> None:
    """In a process of its own: a Ctrl-C is meant for a whole program, and one that dies of it must say how."""
    program = [sys.executable, str(Path(__file__).with_name("interrupted_texts.py")), str(tiny_bundle), *how]
    done = subprocess.run(program, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


def test_64_sessions_at_once_get_their_texts_and_close(tiny_bundle: Path) -> None:
    before = {*threading.enumerate()}  # some of which an earlier test may still be ending
    prompts = [f"{LONG[: 10 + 5 * number % 60]}{number}" for number in range(8)]
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    with MirrorPipeline.load(tiny_bundle, device_map="cpu") as pipe:
        expected = [pipe.generate(prompt, method="plain", **settings).token_ids for prompt in prompts]
        sessions = [pipe.session() for _ in range(64)]

        def ask(number: int) -> bool:
            method, which = METHODS[number % 4], number % len(prompts)
            return (
                sessions[number % 64].generate(prompts[which], method=method, **settings).token_ids == expected[which]
            )

        with ThreadPoolExecutor(64) as pool:
            assert sum(pool.map(ask, range(192))) == 192
            busy = [pool.submit(one.generate, LONG, max_new_tokens=400, ignore_eos=True) for one in sessions]
            wait_until(lambda: any(session._turns._holder for session in sessions))
            within(30, pipe.close)
            assert all(isinstance(one.exception(30), Cancelled | GenerationError) for one in busy)
    assert not {*threading.enumerate()} - before


def test_a_session_is_let_go_when_it_is_closed_or_dropped(make_pipe) -> None:
    pipe, released = make_pipe(), []
    with pipe.session() as session:
        session._seat._target_session.close = lambda: released.append("left")
        session.generate(PROMPT, **SETTINGS)
    with pytest.raises(GenerationError, match="session is closed"):
        session.generate(PROMPT)
    dropped = pipe.session()
    dropped._seat._target_session.close = lambda: released.append("dropped")
    del dropped, session
    gc.collect()
    pipe.engine.target_worker.run(lambda: None)
    assert released == ["left", "dropped"]
    assert len(pipe.engine.sessions) == 1, "its own"


def test_a_dropped_pipeline_ends_its_threads(make_pipe, tiny_bundle: Path) -> None:
    before = threading.enumerate()
    pipe = MirrorPipeline.load(tiny_bundle, device_map="cpu")
    session = pipe.session()
    workers = pipe.engine.draft_worker, pipe.engine.target_worker
    del pipe
    gc.collect()
    assert session.generate(PROMPT, **SETTINGS).num_tokens == 30, "a session keeps its devices"
    del session
    gc.collect()
    for worker in workers:
        worker._thread.join(5)
        assert not worker._thread.is_alive()
    others = [thread for thread in threading.enumerate() if thread not in before]
    for thread in others:
        thread.join(5)
    assert not [thread.name for thread in others if thread.is_alive()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_says_so(tiny_bundle: Path) -> None:
    program = f"""
import os, sys
from mirrorsd import MirrorPipeline
from mirrorsd.graphs.errors import GenerationError
pipe = MirrorPipeline.load({str(tiny_bundle)!r}, device_map="cpu")
pipe.generate({PROMPT!r}, max_new_tokens=3)
child = os.fork()
if child == 0:
    status = 1
    try:
        pipe.generate({PROMPT!r}, max_new_tokens=3)
    except GenerationError as error:
        status = 0 if "forked" in str(error) else 2
    pipe.close()
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
pipe.generate({PROMPT!r}, max_new_tokens=3)
pipe.close()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="memory is read from /proc")
def test_closed_sessions_leave_no_memory_behind(real: MirrorPipeline) -> None:
    def megabytes() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6

    def use(count: int) -> None:
        for number in range(count):
            with real.session() as session:
                session.generate(PROMPT, max_new_tokens=4, ignore_eos=True, method=METHODS[number % 4])

    use(20)
    after: list[float] = [megabytes()]
    for _ in range(7):
        use(20)
        after.append(megabytes())
    assert median(now - before for before, now in pairwise(after)) < 0.5, after  # other tests' memory comes and goes
