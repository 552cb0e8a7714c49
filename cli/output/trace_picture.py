"""Reading a Chrome trace that mirrorsd wrote, and drawing it: tracks as rows, work as labelled boxes."""

import html
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mirrorsd.graphs.errors import ConfigError

_ROWS = ("steps", "target", "draft", "host")
_COLOURS = {
    "prefix": "#4878a8",
    "middle": "#6f97bf",
    "exit": "#d8893b",
    "suffix": "#2f5d8a",
    "prefill": "#9aa5b1",
    "read": "#c5ccd3",
    "expand": "#4e9a5b",
    "fresh": "#c44e52",
    "exposed": "#e9a3a6",
}
_STEP_COLOUR = "#eceff2"
_WIDTH, _ROW_HEIGHT, _LEFT = 1200, 46, 80


class Box(NamedTuple):
    """One piece of work in milliseconds from the start of the trace."""

    row: str
    name: str
    start: float
    end: float
    details: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace: its title and its boxes, of which `start_ms .. end_ms` is looked at."""

    title: str
    boxes: tuple[Box, ...]
    start_ms: float
    end_ms: float

    @property
    def length_ms(self) -> float:
        """From the first to the last moment."""
        return self.end_ms - self.start_ms

    def between(self, start_ms: float, end_ms: float) -> "Recorded":
        """The part that touches this stretch of time."""
        boxes = tuple(box for box in self.boxes if box.end > start_ms and box.start < end_ms)
        return replace(self, boxes=boxes, start_ms=start_ms, end_ms=min(end_ms, self.end_ms))

    def figures(self) -> list[str]:
        """Overlap, exposed time and acceptance in words."""
        steps = [box for box in self.boxes if box.row == "steps"]
        rounds = [box for box in self.boxes if box.row == "draft" and box.name == "expand"]
        passes = [b for b in self.boxes if b.row == "target" and b.name in ("prefix", "middle", "exit", "suffix")]
        drafted = sum(box.end - box.start for box in rounds)
        hidden = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in rounds for b in passes)
        exposed = sum(box.end - box.start for box in self.boxes if box.name == "exposed")
        total = sum(box.end - box.start for box in steps)
        accepted = sum(box.details.get("accepted", 0) for box in steps)
        return [
            f"{len(steps)} steps in {total:.1f} ms",
            f"{accepted / max(len(steps), 1):.2f} tokens accepted per step",
            f"{100 * hidden / drafted if drafted else 0:.0f} % of the branch rounds beside the target",
            f"{100 * exposed / total if total else 0:.0f} % of the time waiting for the draft",
        ]


def read_trace(path: Path) -> Recorded:
    """Read a trace that `generate --trace` wrote.

    Raises:
        ConfigError: no such file, not JSON, or not such a trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        title = next(e["args"]["name"] for e in events if e["name"] == "process_name")
        work = [e for e in events if e["ph"] == "X"]
        boxes = [
            Box(rows[e["tid"]], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e.get("args", {})) for e in work
        ]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(f"{path} is not a trace; make one with `mirrorsd generate ... --trace FILE`.") from error
    if not boxes:
        raise ConfigError(f"{path} holds no work at all; nothing can be drawn.")
    return Recorded(title, tuple(boxes), 0.0, max(box.end for box in boxes))


def label(box: Box) -> str:
    """What is written into a box."""
    if box.row == "steps":
        return f"{box.details.get('accepted', 0)} of {box.details.get('window', 0)}, next: {box.details['next_window']}"
    return box.name


def draw_html(part: Recorded, figures: list[str]) -> str:
    """A page with an SVG of the part and the figures of the whole trace."""
    scale = (_WIDTH - _LEFT) / part.length_ms
    shapes = [
        f'<text x="4" y="{30 + index * _ROW_HEIGHT}" font-weight="bold">{row}</text>' for index, row in enumerate(_ROWS)
    ]
    for box in part.boxes:
        left = _LEFT + max(0.0, box.start - part.start_ms) * scale
        width = max(0.8, (min(box.end, part.end_ms) - max(box.start, part.start_ms)) * scale)
        top = 8 + _ROWS.index(box.row) * _ROW_HEIGHT
        tip = html.escape(f"{label(box)}: {box.end - box.start:.2f} ms")
        shapes.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="34" fill="{_colour(box)}" stroke="#fff">'
            f"<title>{tip}</title></rect>"
        )
        if width > 7 * len(label(box)):
            ink = "#222" if box.row == "steps" else "#fff"
            shapes.append(f'<text x="{left + 4:.1f}" y="{top + 22}" fill="{ink}">{html.escape(label(box))}</text>')
    height = 20 + len(_ROWS) * _ROW_HEIGHT
    span = f"{part.start_ms:.1f} to {part.end_ms:.1f} ms"
    return (
        '<!doctype html><meta charset="utf-8">'
        f"<title>{html.escape(part.title)}</title>"
        f'<body style="font: 13px sans-serif"><h2>{html.escape(part.title)}</h2>'
        f"<p>{'; '.join(figures)}.</p><p>Drawn: {span}.</p>"
        f'<svg width="{_WIDTH}" height="{height}" font-size="12">{"".join(shapes)}</svg></body>\n'
    )


def draw_png(part: Recorded, figures: list[str], output: Path) -> None:
    """The same as a PNG; needs matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("A .png needs matplotlib: pip install 'mirrorsd[plots]', or write an .html.") from error
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    axes = figure.subplots()
    per_letter = part.length_ms / 190
    for box in part.boxes:
        start, end = max(box.start, part.start_ms), min(box.end, part.end_ms)
        y = len(_ROWS) - _ROWS.index(box.row)
        axes.broken_barh([(start, end - start)], (y - 0.4, 0.8), facecolors=_colour(box), edgecolors="white")
        if end - start > per_letter * len(label(box)):
            ink = "#222" if box.row == "steps" else "white"
            axes.text(start + per_letter / 2, y, label(box), va="center", fontsize=7, color=ink, clip_on=True)
    axes.set_yticks(range(len(_ROWS), 0, -1), _ROWS)
    axes.set_xlim(part.start_ms, part.end_ms)
    axes.set_xlabel("ms")
    axes.set_title(f"{part.title}\n{'; '.join(figures)}", fontsize=9)
    figure.savefig(output, dpi=110)


def _colour(box: Box) -> str:
    return _STEP_COLOUR if box.row == "steps" else _COLOURS.get(box.name, "#888")
