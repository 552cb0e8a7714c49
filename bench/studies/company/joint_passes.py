"""What a joint pass takes, with other numbers too, beside the same passes one after another.

    python bench/studies/company/joint_passes.py smol.mirror --past 300,300,300 --past 900,50 --with _MOST_AT_A_TABLE=4
    python bench/studies/company/joint_passes.py smol.mirror --past 300:8,300,300:4,300 --with _GUEST_COST=1000

Each text brings a row behind so many tokens, or, as `300:8`, eight of them: a window. Says the least and the median
milliseconds of a pass of all of them: as joint passes are, and with a number of `batch` or `seating` at another value.
`turns` runs a pass for each text instead, and `window` one of as many rows of the first.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.devices.huge_pages import new_regions, regions_now, use_huge_pages
from mirrorsd.runtime.backends.onnxruntime import batch, seating
from mirrorsd.runtime.ledger import Ledger, TargetPass

_SLOTS, _MOST_S = 8, 3600.0
_OWNERS = (batch, seating)
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
    parser.add_argument("--with", dest="numbers", action="append", default=[], type=runs.changed, metavar="NAME=VALUE")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    texts = [[_text_of(part) for part in one.split(",")] for one in options.past or _DEFAULT]
    with MirrorPipeline.load(options.bundle, device_map="cpu", use_tuned=False) as pipe:
        job = partial(measure, pipe.engine.target_model, texts, [None, *options.numbers], options.repeats)
        rows = pipe.engine.target_worker.run(job, deadline_s=_MOST_S)
    runs.print_rows(rows, tuple(rows[0]))
    runs.finish(runs.header(options.bundle, repeats=options.repeats) | {"rows": rows}, options.output)


def _text_of(part: str) -> Text:
    past, _, num_rows = part.partition(":")
    return Text(int(past), int(num_rows or 1))


def measure(
    model: Any, texts: Sequence[Sequence[Text]], numbers: Sequence[runs.Changed | None], repeats: int
) -> list[dict[str, Any]]:
    """A row for each set of texts; on the target's thread."""
    before, opened = regions_now(), list[Any]()
    for number in numbers:
        with runs.with_changed(number, _OWNERS):
            opened.append(model.open_batch(_SLOTS))
    use_huge_pages(new_regions(before))
    sessions = [[model.new_session() for _ in range(_SLOTS)] for _ in numbers]
    ids = np.arange(model.entry.context) * 7 % model.entry.shape.vocab_size
    found = []
    for asked_of in texts:
        ways: dict[str, Callable[[], object]] = {}
        for number, own, joint in zip(numbers, sessions, opened, strict=True):
            for session, text in zip(own, asked_of, strict=False):
                session.prefill(ids[: text.past], 0, ledger=Ledger())
            passes = [_pass(session, *text, ids) for session, text in zip(own, asked_of, strict=False)]
            ways[str(number or "joint")] = partial(_together, joint, passes, number)
            ways.setdefault("turns", partial(_one_by_one, passes))
        ways["window"] = _pass(sessions[0][0], asked_of[0].past, sum(text.num_rows for text in asked_of), ids)
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


def _together(joint: Any, passes: Sequence[TargetPass], number: runs.Changed | None) -> None:
    with runs.with_changed(number, _OWNERS):
        joint.run(passes)


def _one_by_one(passes: Sequence[TargetPass]) -> None:
    for one in passes:
        one()


def _pass(session: Any, past: int, num_rows: int, ids: Any) -> TargetPass:
    rows = ids[past : past + num_rows]
    return TargetPass(session=session, tokens=rows, start=past, ledger=Ledger(), with_logits=False)


if __name__ == "__main__":
    main()
