"""Is one state of this repository as fast as another? Both decode the same texts by turns, in processes of their own.

    git worktree add ../before 1a2b3c4
    python bench/claims/two_trees.py ../before . pair.mirror --methods serial,mirror --repeats 5 --output two_trees.json

A tree is any checkout: a link in a folder of its own makes it the package `mirrorsd`. In each turn both trees load the
bundle and decode all texts, one after the other, several times; which comes first changes. Only the last time counts,
and not in the first turn: before, drafts are compiled and their shapes loaded, in the first text or beside later ones,
as each tree has it. `old` and `new` are all tokens over all their time, from the call to the last token: what counts
as reading the prompt is not the same in every state. A pair is the same text in the same turn by both; `ratio` is the
median over pairs of the new tree's tokens per second over the old one's, and `interval` holds it in 95 of 100 cases
(pairs drawn again). `same` counts the pairs whose texts are. A tree that cannot read the bundle decodes its own export
of the same checkpoints (`--old-bundle`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mirrorsd.bench import runs

ONE_TURN = """
import json, sys, time
from pathlib import Path
import mirrorsd

wanted = json.load(sys.stdin)
found = []
with mirrorsd.MirrorPipeline.load(Path(wanted["bundle"]), **wanted["load"]) as pipe:
    for text in wanted["texts"]:
        started = time.perf_counter()
        token_ids = list(pipe.generate(**text).token_ids)
        found.append({"seconds": time.perf_counter() - started, "token_ids": token_ids})
print(json.dumps({"package": mirrorsd.__file__, "texts": found}))
"""
"""What a process of either tree runs: nothing but what every state of the package has."""
DRAWN = 2000


class Case(NamedTuple):
    """What a row of the report is about."""

    method: str
    temperature: float


def main() -> None:
    """Measure, print and write the report."""
    parser = runs.parser(__doc__, count=4, tokens=128)
    parser.add_argument("old", type=checkout, help="a checkout")
    parser.add_argument("new", type=checkout, help="another")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--old-bundle", type=Path, help="the old tree's own export, where it cannot read the other")
    parser.add_argument("--methods", default="serial,mirror", help="separated by commas")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--untimed", type=int, default=3, help="how often all texts of a case are decoded before that")
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--layout", help="of the processor's cores; otherwise the card's first, or the tuned one")
    parser.add_argument("--tuned", action="store_true", help="start from what `mirrorsd tune` found")
    parser.add_argument("--deadline-s", type=float, default=900.0, help="for a turn of one tree")
    options = parser.parse_args()
    cases = [Case(method, heat) for method in options.methods.split(",") for heat in options.temperatures]
    wanted = wanted_of(options, cases)
    sides = [(options.old, options.old_bundle or options.bundle), (options.new, options.bundle)]
    turns: list[list[list[dict[str, Any]]]] = []
    for number in range(options.repeats + 1):
        order = (0, 1) if number % 2 else (1, 0)
        by_tree = {side: one_turn(*sides[side], wanted, options.deadline_s) for side in order}
        turns.append([by_tree[0], by_tree[1]])
    rows = rows_of(cases, options.count, options.untimed, turns[1:])
    runs.print_rows(rows, tuple(rows[0])[:-1])
    report = runs.header(options.bundle, device_map=options.device_map, is_tuned=options.tuned, tokens=options.tokens)
    report |= {"untimed": options.untimed}
    runs.finish(report | {"repeats": options.repeats, "ends": runs.ends(options), "rows": rows}, options.output)


def checkout(name: str) -> Path:
    """The folder of a state of this repository.

    Raises:
        ArgumentTypeError: it is none.
    """
    tree = Path(name).resolve()
    if not (tree / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{tree} is no checkout of this repository: it has no __init__.py")
    return tree


def wanted_of(options: argparse.Namespace, cases: Sequence[Case]) -> dict[str, Any]:
    """What a turn decodes, as JSON: for each case all texts, untimed ones first."""
    prompts = [*runs.enough(runs.spread_prompts(options.prompts, options.count), options)]
    texts = [
        {"messages": messages, "method": case.method, "max_new_tokens": options.tokens}
        | {"temperature": case.temperature, "ignore_eos": options.ignore_eos}
        | ({"seed": number} if case.temperature > 0 else {})
        for case in cases
        for number, messages in enumerate(prompts * (options.untimed + 1))
    ]
    load = {"device_map": options.device_map, "use_tuned": options.tuned}
    load |= {"layout": options.layout} if options.layout else {}
    return {"load": load, "texts": texts}


def one_turn(tree: Path, bundle: Path, wanted: dict[str, Any], deadline_s: float) -> list[dict[str, Any]]:
    """Seconds and ids of every text by one tree (absolute), in a process of its own.

    Raises:
        SystemExit: its process failed, or another package was imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mirrorsd").symlink_to(tree, target_is_directory=True)
        command = [sys.executable, "-P", "-c", ONE_TURN]
        done = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": folder},
            input=json.dumps(wanted | {"bundle": str(bundle.resolve())}),
            stdout=subprocess.PIPE,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{tree} did not decode the texts: what it says is above")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if Path(found["package"]).resolve().parent != tree:
            raise SystemExit(f"{found['package']} was imported instead of {tree}")
    texts: list[dict[str, Any]] = found["texts"]
    return texts


def rows_of(
    cases: Sequence[Case], count: int, untimed: int, turns: Sequence[Sequence[Sequence[dict[str, Any]]]]
) -> list[dict[str, Any]]:
    """A row per case, from every turn of both trees: by case `count` texts after so many untimed rounds of them."""
    rows = []
    for place, case in enumerate(cases):
        first = (place * (untimed + 1) + untimed) * count
        mine = slice(first, first + count)
        pairs = [pair for old, new in turns for pair in zip(old[mine], new[mine], strict=True)]
        ratios = [speed_of([new]) / speed_of([old]) for old, new in pairs]
        rows.append(
            {
                "case": f"{case.method}, T={case.temperature:g}",
                "old": round(speed_of([old for old, _ in pairs]), 2),
                "new": round(speed_of([new for _, new in pairs]), 2),
                "ratio": round(median(ratios), 4),
                "interval": interval_of_median(ratios),
                "same": f"{sum(old['token_ids'] == new['token_ids'] for old, new in pairs)} of {len(pairs)}",
                "ratios": [round(ratio, 4) for ratio in ratios],
            }
        )
    return rows


def speed_of(texts: Sequence[dict[str, Any]]) -> float:
    """All their tokens over all their time.

    >>> speed_of([{"token_ids": [1] * 10, "seconds": 1.0}, {"token_ids": [1] * 20, "seconds": 4.0}])
    6.0
    """
    return float(sum(len(text["token_ids"]) for text in texts) / sum(text["seconds"] for text in texts))


def interval_of_median(values: Sequence[float]) -> list[float]:
    """What holds the median in 95 of 100 cases: the values are drawn again.

    >>> interval_of_median([1.0, 1.0, 1.0])
    [1.0, 1.0]
    """
    drawn = np.random.default_rng(0).choice(np.asarray(values), (DRAWN, len(values)))
    return [round(float(end), 4) for end in np.quantile(np.median(drawn, axis=1), (0.025, 0.975))]


if __name__ == "__main__":
    main()
