"""Several sessions on one pair of devices: each gets its own exact text, whatever the others do."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mirrorsd.graphs.errors import Cancelled
from mirrorsd.runtime.decoding.request import Request
from mirrorsd.runtime.decoding.seat import Seat
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.engine import Engine
from mirrorsd.testing.fake import FakeBatch, FakeDraft, FakeModel, FakeTarget
from mirrorsd.texts.config import GenerationConfig, SpeculationConfig

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8, 13]]


@pytest.fixture(params=[False, True], ids=["own thread", "lent"])
def engine(scripted: Callable, draft_handler: Callable, request: pytest.FixtureRequest):
    made = Engine(
        lambda: FakeModel(lambda: FakeTarget(scripted, vocab_size=16, suffix_seconds=0.002)),
        lambda: FakeModel(lambda: FakeDraft(draft_handler(0.8, 3), vocab_size=16, num_streams=3)),
        is_target_lent=request.param,
    )
    yield made
    made.close()


def decode(seat: Seat, prompt: list[int], method: str, cancel: threading.Event | None = None, **settings) -> list[int]:
    return finish(seat, new_request(seat, prompt, method, cancel, **settings))


def new_request(seat: Seat, prompt: list[int], method: str, cancel: threading.Event | None = None, **settings):
    config = GenerationConfig(method=method, **{"max_new_tokens": 60, **settings})
    return Request(prompt, config, SpeculationConfig(), seat.context, cancel or threading.Event())


def finish(seat: Seat, request: Request) -> list[int]:
    decoder = seat.decoder(request, request.config.method)
    inflight = decoder.start()
    try:
        while request.num_tokens < request.max_tokens:
            request.raise_if_cancelled()
            inflight = decoder.step(inflight).inflight
    finally:
        decoder.close()
    return request.tokens[request.num_prompt :].tolist()


class CancelledWhenAsked(threading.Event):
    """Is set when it is looked at for the fifth time: in the middle of a text, on every machine."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks >= 5


@pytest.mark.parametrize("method", ["mirror", "serial", "auto"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}])
def test_concurrent_sessions_get_their_own_texts(engine: Engine, method: str, settings: dict) -> None:
    expected = [decode(Seat(engine), prompt, "plain", **settings) for prompt in PROMPTS]
    seats = [Seat(engine) for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        for _ in range(2):
            futures = [
                pool.submit(decode, seat, prompt, method, **settings)
                for seat, prompt in zip(seats, PROMPTS, strict=True)
            ]
            assert [future.result() for future in futures] == expected


def test_cancelling_one_session_leaves_the_other_alone(engine: Engine) -> None:
    expected = decode(Seat(engine), PROMPTS[1], "plain")
    with ThreadPoolExecutor(2) as pool:
        cancelled = pool.submit(decode, Seat(engine), PROMPTS[0], "mirror", CancelledWhenAsked())
        other = pool.submit(decode, Seat(engine), PROMPTS[1], "mirror")
        with pytest.raises(Cancelled):
            cancelled.result()
        assert other.result() == expected


def test_two_sessions_share_the_devices_fairly(engine: Engine) -> None:
    """When the first has finished, the other has more than half of its text."""
    seats = [Seat(engine), Seat(engine)]
    together = threading.Barrier(2)
    requests = [
        new_request(seat, prompt, "mirror", max_new_tokens=120) for seat, prompt in zip(seats, PROMPTS[:2], strict=True)
    ]
    least_tokens: list[int] = []

    def run(seat: Seat, request: Request) -> None:
        together.wait()
        finish(seat, request)
        least_tokens.append(min(other.num_tokens - other.num_prompt for other in requests))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, seats, requests))
    assert least_tokens[0] > 60


def test_a_new_session_starts_with_empty_caches(engine: Engine) -> None:
    expected = decode(Seat(engine), PROMPTS[0], "plain")
    seat = Seat(engine)
    decode(seat, [int(token) for token in np.arange(10)], "mirror")
    assert decode(seat, PROMPTS[0], "mirror") == expected


def test_a_seat_is_released_on_the_workers_after_what_runs_there(engine: Engine) -> None:
    """Closing while a draft round is under way must not pull its buffers away."""
    seat, release, events = Seat(engine), threading.Event(), []
    seat._draft_session.close = lambda: events.append(threading.current_thread().name)
    engine.draft_worker.submit(lambda: (release.wait(5), events.append("round")))
    seat.close()
    assert events == []
    release.set()
    engine.draft_worker.run(lambda: None)
    assert events == ["round", "mirrorsd-draft"]


@pytest.mark.parametrize("is_crowded", [False, True])
def test_nothing_is_prepared_while_another_conversation_fills_the_target(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_crowded: bool
) -> None:
    expected = decode(Seat(engine), PROMPTS[0], "plain")
    monkeypatch.setattr(DeviceWorker, "serves_others", lambda worker, owner: is_crowded)
    seat = Seat(engine)
    request = new_request(seat, PROMPTS[0], "mirror")
    assert finish(seat, request) == expected
    sources = {step.next_source for step in request.steps}
    assert (sources <= {"fresh", "none"}) == is_crowded
    assert any(span.name == "expand" for span in request.ledger.spans) != is_crowded


def test_a_job_beside_rests_as_long_as_its_pieces_took_where_a_device_works_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(engine.beside._is_waited_for, "wait", lambda seconds: rested.append(seconds) or False)
    idle = {"target": 7.0, "draft": 9.0}
    monkeypatch.setattr(DeviceWorker, "idle_seconds", lambda worker: idle[worker.name])
    rests: list[Callable[[float], bool]] = []
    engine.beside.begin(rests.append)
    engine.beside.settle()
    assert not rests[0](6.0)
    assert not rested  # both have been idle for longer than the piece took
    for name in idle:
        idle[name] = 5.0
        assert not rests[0](6.0)
        idle[name] = 8.0
    assert rested == [6.0, 6.0]


def test_an_engine_that_is_closed_has_what_was_left_for_later_leave_off(engine: Engine) -> None:
    ended = threading.Event()

    def work(rest: Callable[[float], bool]) -> None:
        while not rest(1e-3):
            pass
        ended.set()

    engine.beside.begin(work)
    engine.close()
    assert ended.wait(5)


def test_work_that_somebody_waits_for_rests_no_more(engine: Engine) -> None:
    engine.beside.begin(lambda rest: rest(3600.0))
    engine.beside.settle()


def test_a_seat_that_forgot_reads_the_prompt_anew_and_says_the_same(engine: Engine) -> None:
    seat = Seat(engine)
    expected = decode(seat, PROMPTS[0], "mirror")
    assert len(seat.target.cached) > len(PROMPTS[0])
    seat.forget()
    assert len(seat.target.cached) == 0
    request = new_request(seat, PROMPTS[0], "mirror")
    assert finish(seat, request) == expected
    assert request.num_reused == 0


def test_who_opens_what_conversations_share_keeps_no_other_thread(engine: Engine) -> None:
    """A signal's handler may interrupt him, and wait for the target's thread, which opens the same."""
    passes = engine._passes
    threads, others = passes._threads, list[threading.Thread]()

    class Interrupted:
        preparing = threads.preparing

        @property
        def is_open(self) -> bool:
            if not others:
                others.append(threading.Thread(target=passes.open, args=(4,), daemon=True))
                others[0].start()
                others[0].join(2.0)
            return True

    passes._threads = Interrupted()  # type: ignore[assignment]
    passes.open(4)
    passes._threads = threads
    assert not others[0].is_alive()


def test_what_conversations_share_is_opened_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[int]()

    def open_batch(num_slots: int) -> FakeBatch:
        opened.append(num_slots)
        return FakeBatch(num_slots)

    monkeypatch.setattr(engine.target_model, "open_batch", open_batch)
    for num_slots in (4, 4, 2, 8):
        engine._passes.join(num_slots)
    assert opened == [4, 8]
