"""A finished generation as a Chrome trace (chrome://tracing, ui.perfetto.dev): one track per device, one per step."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mirrorsd.graphs.whole_file import write_whole
from mirrorsd.runtime.decoding.request import StepRecord
from mirrorsd.runtime.ledger import Span

_TRACKS = {"target": 1, "draft": 2, "host": 3, "steps": 4}


def write_trace(
    path: Path,
    spans: Sequence[Span],
    steps: Sequence[StepRecord],
    *,
    title: str,
    texts: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the trace; times are microseconds from the first span.

    Args:
        path: file to write (JSON).
        spans: work of the devices and the host.
        steps: the verification steps, with what was accepted and where the next window came from.
        title: shown as the name of the process.
        texts: what text each step made certain; none where nobody kept it.
        about: figures of the whole text, such as the speed of plain decoding.
    """
    origin = min([span.start for span in spans] + [step.started for step in steps], default=0.0)
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": title}}]
    for name, track in _TRACKS.items():
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})
    events += [_event(s.name, _TRACKS.get(s.device, 3), s.start, s.end, origin, {}) for s in spans]
    for number, step in enumerate(steps):
        details = {
            "window": step.num_window,
            "accepted": step.num_accepted,
            "next_window": step.next_source,
            "method": step.method,
            "text": texts[number] if number < len(texts) else "",
        }
        events.append(_event(f"step {number}", _TRACKS["steps"], step.started, step.ended, origin, details))
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
    write_whole(path, json.dumps(document).encode())


def _event(name: str, track: int, start: float, end: float, origin: float, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": 1,
        "tid": track,
        "ts": round(1e6 * (start - origin), 1),
        "dur": round(1e6 * (end - start), 1),
        "args": details,
    }
