"""What batch-invariance costs: passes of one bundle beside those of others of the same target, by turns.

So it is with a mixture of experts beside a dense target of the size that a token goes through.

    mirrorsd export TARGET --draft DRAFT -o exact.mirror --precision int8
    mirrorsd export TARGET --draft DRAFT -o loose.mirror --precision int8 --no-batch-invariant
    python bench/claims/row_invariance.py loose.mirror exact.mirror --device-map cpu --layout shared --output rows.json

Says for each bundle by how much a row's logits differ between passes of one row and of several (0: not at all), how
long a pass takes by its rows (median), and that over the first bundle's.
"""

import argparse
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.machine.doctor.row_invariance import largest_row_difference
from mirrorsd.runtime.backends.protocol import TargetSession
from mirrorsd.runtime.ledger import Ledger

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16)
CACHED = 100
TOKENS = 250
IN_A_ROW = 6
"""Passes of one bundle before the next one's turn; the first finds others' weights in the caches and is left out."""


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        settings = {"device_map": options.device_map, "layout": options.layout, "use_tuned": False}
        pipes = [stack.enter_context(MirrorPipeline.load(bundle, **settings)) for bundle in options.bundles]
        workers = [pipe.engine.target_worker for pipe in pipes]
        sessions = [pipe.engine.target_worker.run(pipe.engine.target_model.new_session) for pipe in pipes]
        pairs = list(zip(workers, sessions, strict=True))
        differences = [worker.run(partial(largest_row_difference, session)) for worker, session in pairs]
        seconds: dict[tuple[int, int], list[float]] = {}
        for turn in range(options.repeats):
            for size in SIZES:
                for number, (worker, session) in enumerate(pairs):
                    found = worker.run(partial(time_passes, session, size, turn))
                    seconds.setdefault((number, size), []).extend(found)
        layout = pipes[0].layout
    rows = [
        report_of(bundle, differences[number], {size: (seconds[number, size], seconds[0, size]) for size in SIZES})
        for number, bundle in enumerate(options.bundles)
    ]
    shown = [row | {"rows_differ_by": f"{row['rows_differ_by']:.0e}"} for row in rows]
    runs.print_rows(shown, tuple(rows[0]))
    where = {"device_map": options.device_map, "layout": layout, "cached_rows": CACHED, "repeats": options.repeats}
    runs.finish(runs.header(options.bundles[0], **where) | {"rows": rows}, options.output)


def time_passes(session: TargetSession, size: int, turn: int) -> list[float]:
    """Seconds of passes of `size` rows behind the cached ones; each has other tokens, and so other experts."""
    found = []
    for number in range(IN_A_ROW):
        tokens = 5 + (np.arange(size) + (turn * IN_A_ROW + number) * size) % TOKENS
        start = time.perf_counter()
        session.run(tokens, CACHED, with_logits=False, ledger=Ledger(), exits=())
        found.append(time.perf_counter() - start)
    return found[1:]


def report_of(bundle: Path, difference: float, by_size: dict[int, tuple[list[float], list[float]]]) -> dict[str, Any]:
    """One bundle's row: its times by rows, `ms 1` and so on, and each over the first bundle's."""
    row: dict[str, Any] = {"bundle": bundle.name, "rows_differ_by": difference}
    for size, (own, first) in by_size.items():
        row[f"ms {size}"] = round(1e3 * median(own), 3)
        row[f"/ first {size}"] = round(median(own) / median(first), 3)
    return row


if __name__ == "__main__":
    main()
