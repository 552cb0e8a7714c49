"""What `tune` measures of a pass: every window's rows, with as many turns as the device is fast."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from mirrorsd.device_maps import interpolate
from mirrorsd.devices.draft_memory import TipGuesses
from mirrorsd.graphs.contract import DraftShape
from mirrorsd.graphs.errors import Cancelled
from mirrorsd.machine.tuning import part_times
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.testing.fake import FakeModel
from mirrorsd.texts.config import CancelToken

BLOCK = 6
"""Rows that the target computes at a time."""
BLOCK_SECONDS = 0.001
COLD_SECONDS, WARM_SECONDS = 0.02, 0.0001


class Clock:
    """Seconds that pass where somebody sleeps, and nowhere else."""

    def __init__(self) -> None:
        self._seconds, self._lock = 0.0, threading.Lock()

    def __call__(self) -> float:
        return self._seconds

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._seconds += seconds


clock = Clock()


class BlockTarget:
    """A target whose pass takes a fixed time for every block of rows that is begun."""

    def __init__(self) -> None:
        self.passes: Counter[int] = Counter()

    def run(self, tokens: np.ndarray, start: int, *, ledger: Ledger, **options: Any) -> None:
        self.passes[len(tokens)] += 1
        with ledger.time("target", "suffix"):
            clock.sleep(BLOCK_SECONDS * -(-len(tokens) // BLOCK))

    def close(self) -> None:
        """Nothing to release."""


class QuickDraft:
    """A draft that answers soon, but for a round of another size than the one before: those weights are cold."""

    round_sizes = (4, 8)
    shape = DraftShape(num_layers=1, vocab_size=4, num_kv_heads=1, head_dim=8, num_streams=0, num_candidates=1)

    def __init__(self) -> None:
        self._last_size = 0

    def run(self, blocks: Any, tip_rows: Any) -> TipGuesses:
        clock.sleep(COLD_SECONDS if len(tip_rows) != self._last_size else WARM_SECONDS)
        self._last_size = len(tip_rows)
        size = (len(tip_rows), 1, 1)
        return TipGuesses(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32))

    def close(self) -> None:
        """Nothing to release."""


@contextmanager
def engine_with(target: BlockTarget) -> Iterator[Engine]:
    engine = Engine(lambda: FakeModel(lambda: target), lambda: FakeModel(QuickDraft))  # type: ignore[arg-type,return-value]
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_times, "perf_counter", clock)
    monkeypatch.setattr(part_times, "Ledger", lambda: Ledger(clock))
    monkeypatch.setattr(part_times, "_SIDE_BY_SIDE_SECONDS", 0.02)


def test_a_step_between_row_counts_is_seen() -> None:
    """Seven rows take twice as long as six: a line from four to eight rows would put half of that at six."""
    with engine_with(BlockTarget()) as engine:
        curve = part_times.pass_ms(part_times.measure_parts(engine, CancelToken()))
    assert interpolate(curve, 7) > 1.5 * interpolate(curve, 6)
    assert interpolate(curve, 13) > 1.2 * interpolate(curve, 12)
    assert interpolate(curve, 6) < 1.3 * interpolate(curve, 1)


def test_rounds_are_timed_with_their_weights_at_hand() -> None:
    """As in a window, whose rounds are mostly of one size; cold ones would look dearer alone than beside the target."""
    with engine_with(BlockTarget()) as engine:
        parts = part_times.measure_parts(engine, CancelToken())
    assert max(parts.draft.values()) < 1e3 * COLD_SECONDS / 4


@pytest.mark.parametrize(("seconds", "turns"), [(0.0, 3), (60.0, 12)])
def test_a_slow_device_gets_fewer_turns(monkeypatch: pytest.MonkeyPatch, seconds: float, turns: int) -> None:
    monkeypatch.setattr(part_times, "_TURNS_SECONDS", seconds)
    target = BlockTarget()
    with engine_with(target) as engine:
        part_times.measure_parts(engine, CancelToken())
    assert target.passes[33] == 1 + turns


def test_who_has_had_enough_waits_for_no_more_than_a_turn() -> None:
    class Stopping(BlockTarget):
        def run(self, *given: Any, **more: Any) -> Any:
            cancel.cancel()
            return super().run(*given, **more)

    cancel, target = CancelToken(), Stopping()
    with engine_with(target) as engine, pytest.raises(Cancelled):
        part_times.measure_parts(engine, cancel)
    assert sum(target.passes.values()) == 1
