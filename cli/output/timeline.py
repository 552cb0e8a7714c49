"""Drawing when the devices worked, and which words each step brought: one SVG, for files, pages and notebooks.

Owns lanes, colours (light and dark), labels and the legend. Does not own where the boxes come from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, NamedTuple

_LANES = ("text", "target", "draft", "plain")
_LANE_NAMES = {"text": "text", "target": "target", "draft": "draft", "plain": "plain decoding"}
_LANE_HEIGHTS = {"text": 46, "target": 30, "draft": 30, "plain": 22}
_GAP, _LEFT, _RIGHT, _TOP, _PER_LETTER = 8, 104, 12, 8, 6.6
_AXIS_ROOM, _LEGEND_LETTER = 40, 6.0
_MEANINGS = {
    "prefix": "target: first layers",
    "exit": "target: an early guess, for the draft",
    "suffix": "target: the other layers",
    "prefill": "reading the prompt",
    "expand": "draft: what may come next, for each likely outcome",
    "fresh": "draft: asked while the target waits",
    "exposed": "the target waits for the draft",
    "head": "a head guesses what comes next",
    "plain": "plain decoding: a token a pass, at its own speed",
}
"""The legend, by kind of box."""
_NAMES = {
    **{"prefix": "first layers", "exit": "early guess", "suffix": "other layers", "prefill": "reads the prompt"},
    **{"expand": "guesses", "fresh": "asked", "exposed": "waits", "read": "takes the result", "head": "head"},
}
"""What is written into a box."""
_STYLE = """
.m{--paper:#fff;--ink:#1c2733;--soft:#66727f;--line:#dde3e9;--step:#eef2f6;--prefix:#7ba3cf;--exit:#e0a243;
--suffix:#3d6ea5;--prefill:#aab4be;--read:#c9d1d9;--expand:#56a570;--fresh:#c8544f;--exposed:#f3c9c6;--plain:#b9c2cc;--head:#8b6fc0}
@media(prefers-color-scheme:dark){.m{--paper:#12171d;--ink:#e8edf2;--soft:#93a0ad;--line:#2b343e;--step:#222b35;
--prefix:#6f97c4;--exit:#d6993a;--suffix:#3f74b0;--prefill:#5c6772;--read:#46515c;--expand:#4a9a64;--fresh:#c8544f;
--exposed:#5d3634;--plain:#56616d;--head:#7d62b2}}
.m{background:var(--paper);font:12px system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.m text{fill:var(--ink)}.m .soft{fill:var(--soft);font-size:11px}.m .on{fill:#fff;font-size:11px}
.m .paper{fill:var(--paper)}.m .line{stroke:var(--line)}.m rect{rx:2px}
"""
_STYLE += "".join(f".m .{kind}{{fill:var(--{kind})}}" for kind in ("step", "read", *_MEANINGS))


class Box(NamedTuple):
    """One piece of work in milliseconds from the start; `lane` is `text`, `target`, `draft`, `host` or `plain`."""

    lane: str
    name: str
    start: float
    end: float
    details: dict[str, Any]

    @property
    def kind(self) -> str:
        """What colours it: its name, less the number of a layer.

        >>> Box("target", "middle1", 0, 1, {}).kind, Box("target", "exit2", 0, 1, {}).kind
        ('prefix', 'exit')
        """
        name = "step" if self.lane == "text" else self.name.rstrip("0123456789")
        return "prefix" if name == "middle" else name


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened in a text, or in the stretch of it from `start_ms` to `end_ms`.

    `plain_ms` is what a token takes by plain decoding, None where nobody knows.
    """

    title: str
    boxes: tuple[Box, ...]
    start_ms: float
    end_ms: float
    plain_ms: float | None = None

    @property
    def length_ms(self) -> float:
        """From the first to the last moment."""
        return self.end_ms - self.start_ms

    def between(self, start_ms: float, end_ms: float) -> "Timeline":
        """The part that touches this stretch of time."""
        boxes = tuple(box for box in self.boxes if box.end > start_ms and box.start < end_ms)
        return replace(self, boxes=boxes, start_ms=start_ms, end_ms=min(end_ms, self.end_ms))

    def usual_stretch(self, num_steps: int = 8) -> float:
        """Milliseconds that so many steps take on the whole; everything where there are fewer."""
        steps = self.steps()
        if len(steps) <= num_steps:
            return self.length_ms
        return num_steps * (steps[-1].end - steps[0].start) / len(steps)

    def steps(self) -> list[Box]:
        """The verification steps."""
        return [box for box in self.boxes if box.lane == "text"]

    def with_plain(self) -> "Timeline":
        """With a box for every token that plain decoding would have said by then, from the first step on."""
        steps = self.steps()
        if self.plain_ms is None or not steps:
            return self
        start, num_tokens = steps[0].start, sum(1 + box.details.get("accepted", 0) for box in steps)
        count = min(int((steps[-1].end - start) / self.plain_ms) + 1, num_tokens)
        own = [
            Box(
                "plain",
                "plain",
                start + number * self.plain_ms,
                start + (number + 1) * self.plain_ms,
                {"token": number + 1},
            )
            for number in range(count)
        ]
        return replace(self, boxes=(*self.boxes, *own))

    def figures(self) -> list[str]:
        """What was gained and how, in words."""
        steps = self.steps()
        rounds = [box for box in self.boxes if box.lane == "draft" and box.name == "expand"]
        passes = [box for box in self.boxes if box.lane == "target" and box.kind in ("prefix", "exit", "suffix")]
        drafted = sum(box.end - box.start for box in rounds)
        hidden = sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in rounds for b in passes)
        exposed = sum(box.end - box.start for box in self.boxes if box.name == "exposed")
        total = sum(box.end - box.start for box in steps)
        tokens = sum(1 + box.details.get("accepted", 0) for box in steps)
        words = [f"{tokens} tokens in {len(steps)} passes of the target, {total:.0f} ms"]
        if self.plain_ms is not None:
            words.append(f"plain decoding would have said {min(int(total / self.plain_ms), tokens)} by then")
        if drafted:
            words.append(f"{hidden / drafted:.0%} of the draft's work cost no time, beside the target's")
        return [*words, f"the target waited for the draft {exposed / total if total else 0.0:.0%} of the time"]


@dataclass
class _Sheet:
    """SVG elements, and how milliseconds become pixels."""

    part: Timeline
    scale: float
    shapes: list[str] = field(default_factory=list)

    def x(self, moment_ms: float) -> float:
        return _LEFT + (moment_ms - self.part.start_ms) * self.scale

    def add(self, box: Box, top: float, height: float) -> None:
        start, end = max(box.start, self.part.start_ms), min(box.end, self.part.end_ms)
        left, width = self.x(start), max(0.8, (end - start) * self.scale - 0.6)
        labels = _labels(box)
        tip = escape("; ".join([*labels, f"{box.end - box.start:.2f} ms"]))
        lines = []
        for number, line in enumerate(labels):
            cut = fitting(line, width - 8, is_whole=bool(box.lane != "text" or number))
            place = f'x="{left + 4:.1f}" y="{top + _baseline(height, len(labels), number):.1f}"'
            lines.append(f'<text class="{_ink(box, number)}" {place} data-full="{escape(line)}">{escape(cut)}</text>')
        times = f'data-start="{start - self.part.start_ms:.3f}" data-ms="{end - start:.3f}"'
        rect = f'<rect class="{box.kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}"/>'
        self.shapes.append(f"<g {times}><title>{tip}</title>{rect}{''.join(lines)}</g>")


def draw(timeline: Timeline, width: int = 1200) -> str:
    """An SVG element of a stretch of time, `width` pixels wide: lanes, words, an axis, a legend.

    Colours follow the viewer's choice of light or dark. Elements with `data-start` and `data-ms` may be laid out anew.
    """
    lanes = [lane for lane in _LANES if any(box.lane == lane for box in timeline.boxes)]
    tops = _tops(lanes)
    bottom = max((tops[lane] + _LANE_HEIGHTS[lane] for lane in lanes), default=_TOP) + _GAP
    sheet = _Sheet(timeline, (width - _LEFT - _RIGHT) / max(timeline.length_ms, 1e-9))
    _axis(sheet, bottom)
    for box in timeline.boxes:
        lane = "target" if box.name == "exposed" else box.lane
        if lane in tops:
            sheet.add(box, tops[lane], _LANE_HEIGHTS[lane])
    margin = f'<rect class="paper" width="{_LEFT - 4}" height="{bottom + 20}"/>'
    names = "".join(
        f'<text x="6" y="{tops[lane] + _LANE_HEIGHTS[lane] / 2 + 4:.0f}" class="name">{_LANE_NAMES[lane]}</text>'
        for lane in lanes
    )
    legend, height = _legend(timeline.boxes, bottom + 34, min(width, 1200))
    return (
        f'<svg class="m" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(timeline.title)}"><style>{_STYLE}</style>'
        f'<rect class="paper" width="{width}" height="{height}"/>{"".join(sheet.shapes)}'
        f'<g class="names">{margin}{names}</g>{legend}</svg>'
    )


def fitting(text: str, room: float, *, is_whole: bool = False) -> str:
    """As much of a text as fits into so many pixels; nothing where not even two letters do, or not all that `is_whole`.

    >>> fitting("a little fox", 100), fitting("a little fox", 50), fitting("a little fox", 10)
    ('a little fox', 'a littl', '')
    """
    letters = int(room / _PER_LETTER)
    return text[:letters] if letters >= (len(text) if is_whole else min(2, len(text))) else ""


def _labels(box: Box) -> Sequence[str]:
    """What is written into a box: words and how they came about, or what it is."""
    if box.lane == "text":
        window, accepted = box.details.get("window", 0), box.details.get("accepted", 0)
        guessed = f"{accepted} of {window} right" if window else "no guess"
        return [box.details.get("text", "").replace("\n", "\u23ce").strip(" "), guessed]
    if box.lane == "plain":
        return [str(box.details["token"])]
    return [_NAMES.get(box.kind, box.name)]


def _ink(box: Box, number: int) -> str:
    if box.lane == "text":
        return "soft" if number else "words"
    return "soft" if box.kind in ("plain", "exposed", "read") else "on"


def _baseline(height: float, num_lines: int, number: int) -> float:
    return height / 2 + 4 if num_lines == 1 else 18 + 18 * number


def _tops(lanes: Iterable[str]) -> dict[str, float]:
    tops, top = {}, float(_TOP)
    for lane in lanes:
        tops[lane] = top
        top += _LANE_HEIGHTS[lane] + _GAP
    return tops


def _axis(sheet: _Sheet, bottom: float) -> None:
    """Lines at round milliseconds."""
    part = sheet.part
    apart = next((step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if step * sheet.scale >= 70), 5000)
    moment = apart * -(-part.start_ms // apart)
    while sheet.x(moment) <= sheet.x(part.end_ms) - _AXIS_ROOM:
        x = sheet.x(moment)
        sheet.shapes.append(
            f'<g data-start="{moment - part.start_ms:.3f}" data-ms="0"><line class="line" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{_TOP}" y2="{bottom}"/><text class="soft" x="{x + 3:.1f}" y="{bottom + 12}">{moment:g} ms</text></g>'
        )
        moment += apart


def _legend(boxes: Sequence[Box], top: float, width: int) -> tuple[str, float]:
    """What the colours mean, in rows; and where it ends."""
    present = {box.kind for box in boxes}
    x, y, shapes = float(_LEFT), top, []
    for kind, meaning in _MEANINGS.items():
        if kind not in present:
            continue
        room = 34 + _LEGEND_LETTER * len(meaning)
        if x + room > width and x > _LEFT:
            x, y = float(_LEFT), y + 20
        shapes.append(
            f'<rect class="{kind}" x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12"/>'
            f'<text x="{x + 17:.0f}" y="{y:.0f}" class="soft">{meaning}</text>'
        )
        x += room
    return f'<g class="legend">{"".join(shapes)}</g>', y + 14
