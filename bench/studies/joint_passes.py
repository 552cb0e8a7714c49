"""What a joint pass takes, by how many texts are attended together, beside the same passes one after another.

    python bench/studies/joint_passes.py smollm2.mirror --past 300,300,300,300 --past 900,50 --at-each 4,2,1
    python bench/studies/joint_passes.py smollm2.mirror --at-each 2 --past 300:8,300,300:4,300

Each text brings a row behind so many tokens, or, as `300:8`, eight of them: a window. Says the least and the median
milliseconds of a pass of all of them, with tables of so many texts each; `turns` runs a pass for each text instead, and
`window` one of as many rows of the first.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.devices.huge_pages import new_regions, regions_now, use_huge_pages
from mirrorsd.runtime.backends.onnxruntime import batch as batch_module
from mirrorsd.runtime.ledger import Ledger, TargetPass

_SLOTS = 8
_DEFAULT = ("50,50", "50,50,50,50,50,50,50,50", "900,900", "900,700,50,30,200,300,100,400")


class Text(NamedTuple):
    """So many tokens, and the rows behind them."""

    past: int
    num_rows: int


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--past", action="append", help="tokens before the row of each text, or before N rows: 300:8")
    parser.add_argument("--at-each", default="4,2,1")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    texts = [[_text_of(part) for part in one.split(",")] for one in options.past or _DEFAULT]
    at_each = [int(number) for number in options.at_each.split(",")]
    with MirrorPipeline.load(options.bundle, device_map="cpu", use_tuned=False) as pipe:
        worker, model = pipe.engine.target_worker, pipe.engine.target_model
        rows = worker.run(partial(measure, model, texts, at_each, options.repeats))
    runs.print_rows(rows, tuple(rows[0]))
    runs.finish(runs.header(options.bundle, repeats=options.repeats) | {"rows": rows}, options.output)


def _text_of(part: str) -> Text:
    past, _, num_rows = part.partition(":")
    return Text(int(past), int(num_rows or 1))


def measure(model: Any, texts: Sequence[Sequence[Text]], at_each: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each set of texts; on the target's thread."""
    before, batches = regions_now(), dict[int, Any]()
    for number in at_each:
        with patch.object(batch_module, "_MOST_AT_A_TABLE", number):
            batches[number] = model.open_batch(_SLOTS)
    use_huge_pages(new_regions(before))
    sessions = {number: [model.new_session() for _ in range(_SLOTS)] for number in at_each}
    ids = np.arange(model.entry.context) * 7 % model.entry.shape.vocab_size
    found = []
    for asked_of in texts:
        for own in sessions.values():
            for session, text in zip(own, asked_of, strict=False):
                session.prefill(ids[: text.past], 0, ledger=Ledger())
        asked = {
            number: [_pass(session, *text, ids) for session, text in zip(own, asked_of, strict=False)]
            for number, own in sessions.items()
        }
        ways: dict[str, Callable[[], object]] = {
            f"tables of {number}": partial(batches[number].run, passes) for number, passes in asked.items()
        }
        alone = asked[at_each[0]]
        ways["turns"] = partial(_one_by_one, alone)
        ways["window"] = _pass(sessions[at_each[0]][0], asked_of[0].past, sum(text.num_rows for text in asked_of), ids)
        name = ",".join(f"{text.past}:{text.num_rows}" if text.num_rows > 1 else str(text.past) for text in asked_of)
        found.append({"past": name} | times_of(ways, repeats))
    return found


def times_of(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, str]:
    """Least and median milliseconds of each, by turns; the first time does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: f"{min(found[1:]):.1f} {median(found[1:]):.1f}" for name, found in times.items()}


def _one_by_one(passes: Sequence[TargetPass]) -> None:
    for one in passes:
        one()


def _pass(session: Any, past: int, num_rows: int, ids: Any) -> TargetPass:
    rows = ids[past : past + num_rows]
    return TargetPass(session=session, tokens=rows, start=past, ledger=Ledger(), with_logits=False)


if __name__ == "__main__":
    main()
