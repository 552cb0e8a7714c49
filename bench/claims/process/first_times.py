"""What times are worth that the scheduler begins with, and what watching a device costs.

    mirrorsd simulate pair.mirror --record pair.npz --prompts prompts.jsonl --temperature 0
    python bench/claims/process/first_times.py pair.mirror pair.npz@processor-135m --output first_times.json

A recording is replayed by `auto` at the pace behind its @, as in `constants.py`. Speeds are over those of a scheduler
that begins with right times.

* `_MEASURING_S`: passes are measured as at the start, for so many seconds, by turns. `off` is how far points of these
  curves are from the shortest that any has at so many rows: the median, and the worst of each curve. The scheduler then
  begins with times that are off as much: the least speed, the median, the most.
* `_MOST_PASSES`: the scheduler begins with plain steps of so many passes of one row, where they take one.
* `_WATCH_S`: microseconds of a processor that the thread of an idle device takes in a second, looking so often.
"""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.bench.studies.constants import PROCESSORS
from mirrorsd.device_maps import Pace, interpolate, load_device_map
from mirrorsd.device_maps.pace import Curve
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, simulate, tokens_per_second
from mirrorsd.runtime import loading
from mirrorsd.runtime.devices import workers
from mirrorsd.runtime.policy.knowledge import Knowledge
from mirrorsd.texts.speculation import speculation_of

SECONDS = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)
PASSES = (0.5, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
LOOKS_S = (0.05, 0.2, 1.0, 5.0)


def main() -> None:
    """Measure, replay, print and write the report."""
    parser = runs.parser(__doc__, count=8)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("recordings", nargs="+", help="FILE@PACE")
    parser.add_argument("--turns", type=int, default=5, help="of measuring passes")
    options = parser.parse_args()
    rows = [{"constant": "_WATCH_S", "is": seconds, "us a second": watching_us(seconds)} for seconds in LOOKS_S]
    curves = measured(options.bundle, options.turns)
    for given in options.recordings:
        texts = Recording.read(Path(given.rpartition("@")[0]))
        texts = dataclasses.replace(texts, texts=texts.texts[: options.count])
        found = of_recording(texts, scenario_of(given.rpartition("@")[2]), curves)
        rows += [row | {"recording": Path(given).name} for row in found]
    for constant in ("_WATCH_S", "_MEASURING_S", "_MOST_PASSES"):
        found = [row for row in rows if row["constant"] == constant]
        runs.print_rows(found, tuple(found[0]))
    header = runs.header(
        options.bundle, recordings=options.recordings, texts=options.count, turns=options.turns, SIMULATED=True
    )
    runs.finish(header | {"rows": rows, "curves": curves}, options.output)


def measured(bundle: Path, turns: int) -> dict[float, list[Curve]]:
    """Curves as at the start, by the seconds that they took."""
    found: dict[float, list[Curve]] = {seconds: [] for seconds in SECONDS}
    with MirrorPipeline.load(bundle, device_map="cpu", use_tuned=False) as pipe:
        rows_of_window = 1 + pipe.speculation.gamma
        job = partial(loading.measure_passes, pipe.engine.target_model, rows_of_window)
        for _ in range(turns):
            for seconds, curves in found.items():
                with patch.object(loading, "_MEASURING_S", seconds):
                    curves.append(pipe.engine.target_worker.submit(job).result())
    return found


def watching_us(seconds: float, for_s: float = 5.0) -> float:
    """What an idle device's thread takes of a processor where it looks so often."""
    with patch.object(workers, "_WATCH_S", seconds), closing(workers.DeviceWorker("watched", is_lent=True)) as worker:
        worker.run(lambda: None)
        started = time.process_time()
        time.sleep(for_s)
        return round(1e6 * (time.process_time() - started) / for_s, 1)


def scenario_of(pace_name: str) -> Scenario:
    """`auto` at a pace."""
    card = load_device_map("cpu" if pace_name in PROCESSORS else pace_name)
    pace = PROCESSORS.get(pace_name) or card.pace
    assert pace is not None, f"{pace_name} is no paced card"
    is_shared = pace_name in PROCESSORS
    return Scenario(pace=pace, speculation=speculation_of(card), method="auto", takes_turns=is_shared)


def of_recording(texts: Recording, scenario: Scenario, curves: dict[float, list[Curve]]) -> list[dict[str, Any]]:
    """The rows that a recording's speeds give."""
    right = speed(texts, scenario)
    every = [point for found in curves.values() for curve in found for point in curve]
    shortest = {rows: min(ms for other, ms in every if other == rows) for rows, _ in every}
    rows = []
    for seconds, taken in curves.items():
        off = [[ms / shortest[rows] for rows, ms in curve] for curve in taken]
        ratios = [speed(texts, scenario, told_times(scenario.pace, curve, shortest)) / right for curve in taken]
        row = {"constant": "_MEASURING_S", "is": seconds, "points": median(len(curve) for curve in taken)}
        row |= {"off": round(median(value for curve in off for value in curve), 3)}
        row |= {"worst off": round(median(max(curve) for curve in off), 3)}
        rows.append(row | spread(ratios))
    one = interpolate(scenario.pace.target_ms, 1) / 1e3
    right = speed(texts, scenario, partial(tell_plain, seconds=one))
    rows.append({"constant": "_MOST_PASSES", "is": "not kept", "speed": round(speed(texts, scenario) / right, 3)})
    for passes in PASSES:
        found = speed(texts, scenario, partial(tell_plain, seconds=passes * one))
        rows.append({"constant": "_MOST_PASSES", "is": passes, "speed": round(found / right, 3)})
    return rows


def speed(texts: Recording, scenario: Scenario, begin: Any = None) -> float:
    """Tokens per second of all texts."""
    return tokens_per_second(simulate(texts, dataclasses.replace(scenario, begin=begin)))


def told_times(pace: Pace, curve: Curve, shortest: dict[float, float]) -> Any:
    """Begins with times of a pace that are off as a curve's are; more rows take no less, as where they are measured."""
    times = [interpolate(pace.target_ms, int(rows)) * ms / shortest[rows] for rows, ms in curve]
    least = [*accumulate(reversed(times), min)][::-1]
    return partial(tell_times, target_ms=tuple((rows, ms) for (rows, _), ms in zip(curve, least, strict=True)))


def tell_times(known: Knowledge, target_ms: Curve) -> None:
    """Begins with these times."""
    known.target_ms = target_ms


def tell_plain(known: Knowledge, seconds: float) -> None:
    """Begins with plain steps of so many seconds."""
    for pair in known.pairs.values():
        pair.start_plain(seconds)


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """The least, the median and the most."""
    return {"least": round(min(ratios), 3), "median": round(median(ratios), 3), "most": round(max(ratios), 3)}


if __name__ == "__main__":
    main()
