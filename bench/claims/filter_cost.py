"""What choosing a sampled token costs the host: milliseconds a row, by filter and by how flat the distribution is.

    python bench/claims/filter_cost.py --output filter_cost.json

Rows of float32 logits, medians, and the least, which a busy machine disturbs less. `choose` is the whole choice where
the noise of the row lies ready, `noise` what drawing noise costs on top where it does not: for the candidates or, where
too many are kept (`whole_row`), for the whole vocabulary. Noise of whole rows is drawn ahead, while the devices work,
from the second such row on. `hand_over_ms` is what a pass costs more on its device's thread than on the caller's: texts
whose noise takes less time than that draw it when the pass is over.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirrorsd import GenerationConfig
from mirrorsd.bench import runs
from mirrorsd.cli.output.machine import describe_machine, installed_versions
from mirrorsd.runtime.devices.workers import DeviceWorker
from mirrorsd.runtime.sampling.chooser import TokenChooser

FILTERS: tuple[dict[str, Any], ...] = (
    *({}, {"top_k": 20}, {"top_k": 1000}, {"top_p": 0.9}, {"top_p": 0.3}, {"min_p": 0.05}),
    *({"top_k": 20, "top_p": 0.8}, {"top_p": 0.95, "min_p": 0.02}),
)
SHAPES = ("peaked", "usual", "flat", "even")


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        drawn = [draw(shape, options.vocab, np.random.default_rng(number)) for number in range(8)]
        for filters in FILTERS:
            rows.append({"filters": str(filters), "shape": shape, **measure(filters, drawn, options.rows)})
            runs.print_rows(rows[-1:], tuple(rows[-1]))
    report = {"vocab": options.vocab, "rows_each": options.rows, "machine": describe_machine()}
    report["hand_over_ms"] = hand_over_ms(options.rows)
    print(f"a hand-over takes {report['hand_over_ms']} ms")
    runs.finish(report | {"versions": installed_versions(), "rows": rows}, options.output)


def draw(shape: str, vocab: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Logits `[V]`: a few that stand out, a heavy tail as of a language model, a narrow bell, and all the same."""
    if shape == "even":
        return np.zeros(vocab, dtype=np.float32)
    if shape == "usual":
        return (random.permutation(-1.3 * np.log(np.arange(1.0, vocab + 1)))).astype(np.float32)
    logits = random.normal(scale=0.5 if shape == "flat" else 2.0, size=vocab).astype(np.float32)
    if shape == "peaked":
        logits[random.integers(0, vocab, 5)] = np.linspace(16.0, 20.0, 5)
    return logits


def measure(filters: dict[str, Any], drawn: list[NDArray[np.float32]], count: int) -> dict[str, Any]:
    """Median milliseconds of a choice with the noise at hand, of the noise, and of both together."""
    config = GenerationConfig(temperature=0.8, seed=1, **filters)
    ready, bare = TokenChooser(config), TokenChooser(config)
    bare.choose(drawn[0], 0, None)
    is_row = not filters or bare.draws_noise
    choose_ms, both_ms = [], []
    for number in range(count):
        logits, position = drawn[number % len(drawn)], 1 + number
        ready.is_heard_by_draft = True
        ready.draw_ahead(position, 1, len(logits))
        choose_ms.append(milliseconds(lambda: ready.choose(logits, position, None)))  # noqa: B023 - called at once
        both_ms.append(milliseconds(lambda: bare.choose(logits, position, None)))  # noqa: B023 - called at once
    choose, both = median(choose_ms), median(both_ms)
    return {
        "choose": round(choose, 3),
        "choose_least": round(min(choose_ms), 3),
        "noise": round(max(both - choose, 0.0), 3),
        "both": round(both, 3),
        "both_least": round(min(both_ms), 3),
        "whole_row": is_row,
    }


def hand_over_ms(count: int) -> float:
    """How much longer a job of half a millisecond takes on the device's thread."""
    worker, by_way = DeviceWorker("measured", is_lent=True), list[float]()
    for way in (worker.submit, worker.perform):
        by_way.append(median(milliseconds(lambda: way(lambda: sleep(5e-4)).wait(1.0)) for _ in range(count)))  # noqa: B023
    worker.close()
    return round(by_way[0] - by_way[1], 3)


def milliseconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = perf_counter()
    call()
    return 1e3 * (perf_counter() - started)


if __name__ == "__main__":
    main()
