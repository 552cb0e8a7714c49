"""What rows cost is known from the first text on, tuned or not."""

import inspect
import threading
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from pytest import approx

from mirrorsd.runtime import loading
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.policy.knowledge import Knowledge

measure_passes = inspect.unwrap(loading.measure_passes)


class CountedSession:
    context = 12

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, tokens: np.ndarray, start: int, **_: Any) -> None:
        self.sizes.append(len(tokens))

    def close(self) -> None:
        self.sizes.append(0)


class CountedModel(nullcontext):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__()
        self.session = CountedSession()

    def new_session(self) -> CountedSession:
        return self.session


def test_rows_beyond_the_context_are_not_tried_and_more_rows_never_cost_less() -> None:
    model = CountedModel()
    curve = measure_passes(model, 7)  # type: ignore[arg-type]
    assert [rows for rows, _ in curve] == [1, 2, 4, 7]
    assert all(before <= after for (_, before), (_, after) in pairwise(curve))
    assert model.session.sizes[-1] == 0, "its session is closed"


def test_a_slow_target_is_asked_for_two_sizes_alone(monkeypatch: Any) -> None:
    clock = iter(float(second) for second in range(1000))
    monkeypatch.setattr("mirrorsd.runtime.loading.perf_counter", lambda: next(clock))
    model = CountedModel()
    assert [rows for rows, _ in measure_passes(model, 7)] == [1, 7]  # type: ignore[arg-type]


class TimedSession(CountedSession):
    """Time passes in its passes alone, each as long as `seconds` says."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def run(self, tokens: np.ndarray, start: int, **_: Any) -> None:
        self.now += self.seconds(len(tokens), is_cold=len(tokens) not in self.sizes)
        super().run(tokens, start)

    def seconds(self, rows: int, *, is_cold: bool) -> float:
        raise NotImplementedError


class SlowSession(TimedSession):
    """A pass takes 0.03 s, with seven rows a third longer, the first of a size eight times as long."""

    def seconds(self, rows: int, *, is_cold: bool) -> float:
        return (0.03 if rows == 1 else 0.04) * (8 if is_cold else 1)


def test_no_size_is_left_with_its_first_pass_alone(monkeypatch: Any) -> None:
    model = CountedModel()
    model.session = session = SlowSession()
    monkeypatch.setattr("mirrorsd.runtime.loading.perf_counter", lambda: session.now)
    assert dict(measure_passes(model, 7)) == approx({1: 30, 7: 40})  # type: ignore[arg-type]
    assert session.sizes == [1, 1, 7, 7, 0]


def test_passes_that_were_disturbed_at_load_are_measured_again_behind_texts_without_windows(monkeypatch: Any) -> None:
    measured = [((1.0, 20.0), (7.0, 26.0)), ((1.0, 25.0), (7.0, 30.0))]
    monkeypatch.setattr(loading, "measure_passes", lambda *_: measured.pop(0))
    known, worker = Knowledge(target_ms=((1.0, 21.0), (7.0, 260.0))), DeviceWorker("target")
    known.measure_again = partial(loading._measure_again, worker, CountedModel(), 7)  # type: ignore[arg-type]
    known.text_ended(3)
    worker.run(lambda: None)
    assert len(measured) == 2, "it had windows"
    known.text_ended(0)
    worker.run(lambda: None)
    assert known.target_ms == ((1.0, 20.0), (7.0, 26.0))
    known.text_ended(0)
    worker.run(lambda: None)
    assert known.target_ms == ((1.0, 20.0), (7.0, 26.0)), "what was once shorter stays"
    known.text_ended(0)
    worker.run(lambda: None)
    assert not measured, "not behind the third"
    worker.close()


def test_nothing_is_measured_again_while_somebody_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "measure_passes", measure_passes)
    known, worker, release = Knowledge(target_ms=((1.0, 21.0), (7.0, 260.0))), DeviceWorker("target"), threading.Event()
    model = CountedModel()
    known.measure_again = partial(loading._measure_again, worker, model, 7)  # type: ignore[arg-type]
    worker.submit(lambda: release.wait(5))
    known.text_ended(0)
    assert worker.jobs.num_pending == 1
    release.set()
    worker.close()
    assert not model.session.sizes


def test_measuring_again_makes_way_for_a_text(monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "measure_passes", measure_passes)
    known, worker, model = Knowledge(target_ms=((1.0, 20.0), (7.0, 26.0))), DeviceWorker("target"), CountedModel()
    began, release, run = threading.Event(), threading.Event(), model.session.run

    def slowly(tokens: np.ndarray, start: int, **_: Any) -> None:
        began.set()
        release.wait(5)
        run(tokens, start)

    model.session.run = slowly  # type: ignore[method-assign]
    known.measure_again = partial(loading._measure_again, worker, model, 7)  # type: ignore[arg-type]
    known.text_ended(0)
    assert began.wait(5)
    ticket = worker.submit(lambda: None, "text")
    release.set()
    assert ticket.wait(5)
    assert model.session.sizes == [1, 0], "it leaves off after the pass that it is at"
    assert known.target_ms[1] == (7.0, 26.0)
    worker.close()


class ColdSession(TimedSession):
    """The first pass of every size takes ten milliseconds more, and so does every one of two rows."""

    def seconds(self, rows: int, *, is_cold: bool) -> float:
        return 1e-3 * rows + (0.01 if is_cold or rows == 2 else 0.0)


def test_a_cold_or_disturbed_pass_makes_no_other_size_dear(monkeypatch: Any) -> None:
    model = CountedModel()
    model.session = session = ColdSession()
    monkeypatch.setattr("mirrorsd.runtime.loading.perf_counter", lambda: session.now)
    assert dict(measure_passes(model, 7)) == approx({1: 1, 2: 4, 4: 4, 7: 7})  # type: ignore[arg-type]
