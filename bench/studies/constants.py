"""What each constant of the scheduler is worth: recorded texts, replayed with it at two other values.

    mirrorsd simulate pair.mirror --record pair.npz --prompts prompts.jsonl --temperature 0
    python bench/studies/constants.py pair.npz@processor-1.5b storyteller.npz@paced-laptop --output constants.json

A recording is replayed at the pace behind its @: that of a paced card, or one of `PROCESSORS`, on which target and
draft take turns. Constants are the numbers in capital letters of `policy/`, `decoding/`, `draft/` and the ledger, and
the fields of `account.Constants`. What is above one half and below one (a memory, a share) is moved away from one to
twice its distance and to half of it, anything else to a half and to twice its value. A row says what that did to the
tokens per second of all texts of a recording by each method, over those with the constant as it is: the least and the
most of all.
"""

import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from mirrorsd import runtime
from mirrorsd.bench import runs
from mirrorsd.device_maps import Pace, load_device_map
from mirrorsd.machine.tuning.recording import Recording
from mirrorsd.machine.tuning.simulation import Scenario, simulate, tokens_per_second
from mirrorsd.runtime import ledger
from mirrorsd.runtime.policy import account
from mirrorsd.texts.speculation import speculation_of

ROOMS = ("policy", "decoding", "draft")
COLUMNS = ("constant", "is", "as", "least", "most", "moves")
METHODS = ("serial", "mirror", "lookup", "auto")
PROCESSORS = {
    "processor-1.5b": Pace(
        target_ms=((1, 42.5), (2, 42.9), (4, 50), (8, 66), (16, 90), (32, 145)),
        draft_ms=((1, 14.5), (4, 15.5), (8, 18.5), (32, 40)),
    ),
    "processor-135m": Pace(
        target_ms=((1, 5.0), (2, 5.1), (4, 5.9), (8, 7.9), (16, 10.5), (32, 15.5)), draft_ms=((4, 2.2), (32, 4))
    ),
}
"""Two cores of an AMD EPYC with AVX-512, int8 products of integers; drafts of 0.5 billion and ten million weights."""
_NAME = re.compile(r"_?(?!NUM_)[A-Z][A-Z0-9_]+")
_LEAST = 0.01
"""A change of speed that counts."""
Texts = dict[str, Recording]


class Constant(NamedTuple):
    """A number, and where it is."""

    name: str
    value: Any
    owners: tuple[object, ...]


def main() -> None:
    """Replay, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("recordings", nargs="+", help="FILE@PACE")
    parser.add_argument("--only", default="", help="a part of the names of constants")
    parser.add_argument("--texts", type=int, help="of each recording, the first so many")
    options = parser.parse_args()
    texts = {given: Recording.read(Path(given.rpartition("@")[0])) for given in options.recordings}
    texts = {given: dataclasses.replace(found, texts=found.texts[: options.texts]) for given, found in texts.items()}
    base, rows = speeds(texts), list[dict[str, Any]]()
    for constant in constants():
        if options.only not in constant.name:
            continue
        for value in others(constant.value):
            with set_to(constant, value):
                found = speeds(texts)
            ratios = {key: round(found[key] / base[key], 3) for key in base}
            least, most = min(ratios.values()), max(ratios.values())
            moves = least < 1 - _LEAST or most > 1 + _LEAST
            rows.append({"constant": constant.name, "is": str(constant.value), "as": str(value)})
            rows[-1] |= {"least": least, "most": most, "moves": "yes" if moves else "no"}
            runs.print_rows(rows[-1:], COLUMNS)
            rows[-1]["ratios"] = ratios
    header = runs.header(Path(options.recordings[0].rpartition("@")[0]), recordings=len(texts), SIMULATED=True)
    runs.finish(header | {"base": base, "rows": rows}, options.output)


def speeds(texts: Texts) -> dict[str, float]:
    """Tokens per second by recording and method."""
    found = {}
    for given, recording in texts.items():
        pace_name = given.rpartition("@")[2]
        card = load_device_map("cpu" if pace_name in PROCESSORS else pace_name)
        pace, speculation = PROCESSORS.get(pace_name) or card.pace, speculation_of(card)
        assert pace is not None, f"{pace_name} is no paced card"
        for method in METHODS:
            if method == "mirror" and pace_name in PROCESSORS:
                continue  # nobody mirrors on one processor
            is_shared = pace_name in PROCESSORS
            scenario = Scenario(pace=pace, speculation=speculation, method=method, takes_turns=is_shared)
            found[f"{Path(given).name} {method}"] = tokens_per_second(simulate(recording, scenario))
    return found


def constants() -> Iterator[Constant]:
    """Every number in capital letters of the rooms, with all modules that have it, and the fields of one class."""
    modules = [ledger, *(module for room in ROOMS for module in modules_of(f"{runtime.__name__}.{room}"))]
    seen: set[str] = set()
    for module in modules:
        for name, value in sorted(vars(module).items()):
            if _NAME.fullmatch(name) and name not in seen and others(value):
                seen.add(name)
                yield Constant(name, value, tuple(m for m in modules if vars(m).get(name) is value))
    for field in dataclasses.fields(account.Constants):
        yield Constant(f"account.{field.name}", getattr(account._BY, field.name), (account,))


def modules_of(room: str) -> list[ModuleType]:
    """The modules of a package, imported."""
    package = importlib.import_module(room)
    for found in pkgutil.iter_modules(package.__path__, f"{room}."):
        importlib.import_module(found.name)
    return [module for name, module in sys.modules.items() if name.startswith(f"{room}.")]


def others(value: Any) -> list[Any]:
    """Two other values of a number, or of numbers in a tuple; none for anything else.

    >>> others(0.95), others(8), others(1), others((0.1, 0.9)), others("text")
    ([0.9, 0.975], [4, 16], [2], [(0.05, 0.8), (0.2, 0.95)], [])
    """
    if isinstance(value, bool) or not isinstance(value, int | float | tuple) or not value:
        return []
    if isinstance(value, tuple):
        found = [others(part) for part in value]
        return [tuple(pair[side] for pair in found) for side in (0, 1)] if all(len(pair) == 2 for pair in found) else []
    if isinstance(value, int):
        return sorted({max(1, value // 2), 2 * value} - {value})
    if 0.5 < value < 1:
        return [round(1 - 2 * (1 - value), 4), round(1 - (1 - value) / 2, 4)]
    return [round(value / 2, 4), round(value * 2, 4)]


@contextmanager
def set_to(constant: Constant, value: Any) -> Iterator[None]:
    """Another value, wherever the constant is known."""
    with ExitStack() as changed:
        if constant.name.startswith("account."):
            by = dataclasses.replace(account._BY, **{constant.name.removeprefix("account."): value})
            changed.enter_context(patch.object(account, "_BY", by))
        else:
            for owner in constant.owners:
                changed.enter_context(patch.object(owner, constant.name, value))
        yield


if __name__ == "__main__":
    main()
