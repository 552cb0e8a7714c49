"""How many files one step passes, by method: on the scheduler's thread and on those of the devices.

    python bench/studies/files_per_token.py storyteller.mirror --output files_per_token.json

Texts are decoded with Python's profiler on every thread, so their speed means nothing. Counted are the files of
`runtime/`, `texts/` and `devices/` in which a function begins while a step is taken; `outer` of them only hand the
step on (pipeline, session, turns, engine, seat). `median` and `most` are over the steps from the second on, `files`
those of the longest. Counting begins when weights have moved to huge pages, which no step waits for, and after a text
by each method, so that what is needed has been compiled. What `mirrorsd tune` has found is used, and adds what cuts
windows; `--untuned` leaves it out.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from mirrorsd import MirrorPipeline
from mirrorsd.bench import runs
from mirrorsd.graphs.names import Method

HOUSE = Path(__file__).resolve().parents[2]
FOLDERS = ("runtime/", "texts/", "devices/")
METHODS: tuple[Method, ...] = ("plain", "serial", "mirror", "auto")
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filtered, penalised": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1},
}
OUTER = {f"runtime/{name}.py" for name in ("pipeline", "session", "seats", "turns", "engine", "decoding/seat")}


def main() -> None:
    """Count, print and write the report."""
    parser = runs.parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--device-map", default="cpu")
    parser.add_argument("--untuned", action="store_true")
    options = parser.parse_args()
    passed = PassedFiles()
    threading.setprofile(passed.note)  # for the threads that loading starts
    sys.setprofile(passed.note)
    rows, (prompt,) = [], runs.spread_prompts(options.prompts, 1)
    with MirrorPipeline.load(options.bundle, device_map=options.device_map, use_tuned=not options.untuned) as pipe:
        pipe.engine.beside.settle()
        for method in METHODS:
            pipe.generate(messages=prompt, config=runs.text_config(options), method=method)
        for kind, settings in TEXTS.items():
            config = runs.seeded(runs.text_config(options, settings["temperature"]), 1).with_overrides(settings)
            for method in METHODS:
                text = pipe.stream(messages=prompt, config=config, method=method)
                rows.append({"text": kind, "method": method, **count(passed.by_step(text))})
                runs.print_rows(rows[-1:], ("text", "method", "median", "most", "outer"))
        report = {"placement": pipe.placement, "rows": rows}
    sys.setprofile(None)
    runs.finish(report, options.output)


class PassedFiles:
    """Files of the project in which a function has begun, on any thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """What Python calls; a set may be added to from several threads."""
        if event == "call":
            self._seen.add(frame.f_code.co_filename)

    def by_step(self, text: Iterator[Any]) -> Iterator[set[str]]:
        """Of every step but the first, with which the text begins."""
        next(text)
        while True:
            self._seen = set()
            if next(text, None) is None:
                return
            seen, self._seen = self._seen, set()
            paths = [Path(name).resolve() for name in seen]
            inside = {path.relative_to(HOUSE).as_posix() for path in paths if path.is_relative_to(HOUSE)}
            yield {name for name in inside if name.startswith(FOLDERS)}


def count(steps: Iterator[set[str]]) -> dict[str, Any]:
    """How many files a step passes, those that only hand it on apart."""
    inner = [(files - OUTER, files & OUTER) for files in steps]
    sizes = [len(files) for files, _ in inner]
    longest, outer = max(inner, key=lambda found: len(found[0]))
    return {"median": median(sizes), "most": max(sizes), "outer": len(outer), "files": sorted(longest)}


if __name__ == "__main__":
    main()
