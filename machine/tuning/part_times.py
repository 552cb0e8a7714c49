"""How long each part of a step takes on this machine: medians, alone and with both devices at work.

Owns the measuring, and the pace that comes of it. Which settings are fast at that pace is for `tuning` to find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import TypeVar

import numpy as np

from mirrorsd.device_maps import Pace
from mirrorsd.device_maps.pace import Curve
from mirrorsd.devices.draft_memory import RowBlock
from mirrorsd.graphs.errors import Cancelled
from mirrorsd.runtime.engine import Engine
from mirrorsd.runtime.ledger import Ledger
from mirrorsd.texts.config import CancelToken

ROW_COUNTS = (*range(1, 18), 25, 33)
"""Every window's rows: a kernel that computes six or twelve rows at a time makes steps that no line shows."""
_MOST_TURNS, _LEAST_TURNS = 12, 3
_TURNS_SECONDS = 6.0
_REPEATS = 12
_SIDE_BY_SIDE_SECONDS = 0.4
_NAP_SECONDS = 0.002

Timing = TypeVar("Timing")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Medians in milliseconds.

    Attributes:
        target: by number of rows: `prefix`, `exit`, `suffix`.
        draft: by number of rows of a round.
        target_slowdown: a target pass beside a busy draft, over one alone.
        draft_slowdown: a draft round beside a busy target, over one alone.
        transfer_ms: from the target's thread having something for the draft until the draft's thread has it.
    """

    target: dict[int, dict[str, float]]
    draft: dict[int, float]
    target_slowdown: float
    draft_slowdown: float
    transfer_ms: float


def measure_parts(engine: Engine, cancel: CancelToken) -> PartTimes:
    """Time every part, first alone, then both devices at once.

    Raises:
        Cancelled: somebody had enough before all was timed.
    """
    target = engine.target_worker.run(engine.target_model.new_session)
    draft = engine.draft_worker.run(engine.draft_model.new_session)

    def target_pass(num_rows: int) -> Ledger:
        ledger = Ledger()
        rows = np.zeros(num_rows, dtype=np.int64)
        target.run(rows, 64, with_logits=False, ledger=ledger, on_exit=lambda _: None)
        return ledger

    def draft_round(num_rows: int) -> float:
        # The second in a row counts: every size has weights of its own, which the other sizes' have driven from the
        # caches, while the rounds of a window are mostly of one size.
        for _ in range(2):
            started = perf_counter()
            draft.run([RowBlock([0] * num_rows, 64, 64)], range(num_rows))
        return 1e3 * (perf_counter() - started)

    def busy(work: Callable[[], object]) -> list[float]:
        times, end = [], perf_counter() + _SIDE_BY_SIDE_SECONDS
        while perf_counter() < end:
            _go_on(cancel)
            started = perf_counter()
            work()
            times.append(1e3 * (perf_counter() - started))
        return times

    passes = engine.target_worker.run(partial(_by_turns, target_pass, ROW_COUNTS, cancel))
    rounds = engine.draft_worker.run(partial(_by_turns, draft_round, draft.round_sizes, cancel))
    by_rows = {rows: _stage_medians(ledgers) for rows, ledgers in passes.items()}
    by_size = {size: float(np.median(times)) for size, times in rounds.items()}
    smallest = min(draft.round_sizes)
    side_target = engine.target_worker.submit(lambda: busy(lambda: target_pass(8)))
    side_draft = engine.draft_worker.submit(lambda: busy(lambda: draft_round(smallest)))
    target_alone = sum(by_rows[8].values())
    times = PartTimes(
        target=by_rows,
        draft=by_size,
        target_slowdown=float(np.median(side_target.result())) / target_alone,
        draft_slowdown=float(np.median(side_draft.result())) / by_size[smallest],
        transfer_ms=engine.target_worker.run(partial(_hand_over_ms, engine)),
    )
    target.close()
    draft.close()
    return times


def _hand_over_ms(engine: Engine) -> float:
    """Median time until a job that the target's thread posts begins on the draft's, which has gone to sleep before."""
    times = []
    for _ in range(_REPEATS):
        sleep(_NAP_SECONDS)
        posted = perf_counter()
        times.append(1e3 * (engine.draft_worker.run(perf_counter) - posted))
    return float(np.median(times))


def _go_on(cancel: CancelToken) -> None:
    if cancel.is_cancelled:
        raise Cancelled("Stopped while the parts were measured.")


def _by_turns(work: Callable[[int], Timing], sizes: Sequence[int], cancel: CancelToken) -> dict[int, list[Timing]]:
    """Repeat all sizes in turn, after an untimed run of each: whatever disturbs the machine meets all of them.

    A slow device gets fewer turns than a fast one, three at least.
    """
    for size in sizes:
        _go_on(cancel)
        work(size)
    turns: list[dict[int, Timing]] = []
    end = perf_counter() + _TURNS_SECONDS
    while len(turns) < _LEAST_TURNS or (len(turns) < _MOST_TURNS and perf_counter() < end):
        _go_on(cancel)
        turns.append({size: work(size) for size in sizes})
    return {size: [turn[size] for turn in turns] for size in sizes}


def _stage_medians(ledgers: list[Ledger]) -> dict[str, float]:
    names = dict.fromkeys(span.name for ledger in ledgers for span in ledger.spans if span.name != "read")
    return {
        name: 1e3 * float(np.median([sum(s.seconds for s in led.spans if s.name == name) for led in ledgers]))
        for name in names
    }


def pace_of(parts: PartTimes, *, is_side_by_side: bool = True) -> Pace:
    """The parts' times as a pace: what a replay of this machine takes.

    A pass without its exits is the target's time; the prompt's tokens cost nothing.

    Args:
        parts: What was measured.
        is_side_by_side: both devices at work, as in mirror decoding; by turns otherwise.
    """
    slow, draft_slow = 1.0, 1.0
    if is_side_by_side:  # a part that repeats alone finds its caches warm: it is not faster for having company
        slow, draft_slow = max(1.0, parts.target_slowdown), max(1.0, parts.draft_slowdown)
    target = tuple((rows, slow * ms) for rows, ms in pass_ms(parts))
    draft = tuple((float(rows), draft_slow * ms) for rows, ms in sorted(parts.draft.items()))
    exit_ms = slow * parts.target[8].get("exit", 0.0)
    return Pace(target_ms=target, draft_ms=draft, exit_ms=exit_ms, transfer_ms=parts.transfer_ms)


def pass_ms(parts: PartTimes) -> Curve:
    """What a pass of the target takes, by rows, without its exits: `[rows, ms]` points."""
    return tuple((float(rows), round(_without_exit(stages), 3)) for rows, stages in parts.target.items())


def _without_exit(stages: dict[str, float]) -> float:
    return sum(ms for name, ms in stages.items() if name != "exit")
