"""The drawings of the report: bars with intervals, lines, a cloud of points. SVG, light and dark by the page's colours.

Owns: scales, marks, labels, tips. Does not own: figures (`tables`), the page and its colours (`report`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Any

_WIDTH, _HEIGHT = 920, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 30, 44
_STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_MOST_LINES = 6
_LABEL_ROOM = 22
"""Pixels that a bar must be wide to have its number above it."""


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A drawing whose vertical axis goes from 0 to `top`, and its horizontal one from `first` to `last`."""

    top: float
    first: float
    last: float

    def x(self, value: float) -> float:
        """Where a value is from the left, in pixels."""
        return _LEFT + (value - self.first) / (self.last - self.first) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Where a value is from the top, in pixels."""
        return _HEIGHT - _BOTTOM - value / self.top * (_HEIGHT - _TOP - _BOTTOM)


def bars(rows: Sequence[Mapping[str, Any]], value: str, interval: str, places: Mapping[str, int]) -> str:
    """A group of bars per task, a bar per method with its interval, and a line at plain decoding's speed.

    Args:
        rows: of `tables.summarise`; those without a value are left out.
        value: name of the height.
        interval: name of the two ends of the interval.
        places: number of every method's colour.
    """
    shown = [row for row in rows if row[value] is not None and row["method"] in places]
    tasks = list(dict.fromkeys(row["task"] for row in shown))
    if not shown:
        return ""
    sheet = _Sheet(_top(max(max(row[interval] or [row[value]]) for row in shown)), 0.0, len(tasks))
    wide = min(30.0, 0.8 * (sheet.x(1) - sheet.x(0)) / len(places))
    shapes = [_grid(sheet, "times plain")]
    for number, task in enumerate(tasks):
        middle = sheet.x(number + 0.5)
        weight = ' font-weight="600"' if task == "all" else ""
        shapes.append(f'<text x="{middle:.1f}" y="{_HEIGHT - 24}" text-anchor="middle"{weight}>{escape(task)}</text>')
        group = [row for row in shown if row["task"] == task]
        shapes += [
            _bar(sheet, row, (value, interval), middle + wide * (place - len(group) / 2), wide, places[row["method"]])
            for place, row in enumerate(group)
        ]
    shapes.append(
        f'<line class="one" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{sheet.y(1):.1f}" y2="{sheet.y(1):.1f}"/>'
    )
    return _svg(shapes, "Speed over plain decoding, by task and method")


def _bar(sheet: _Sheet, row: Mapping[str, Any], names: tuple[str, str], left: float, wide: float, colour: int) -> str:
    value, ends = row[names[0]], row[names[1]]
    said = f"{row['task']}, {row['method']}: {value:.2f} times plain"
    said += f", 95 % interval {ends[0]:.2f} to {ends[1]:.2f}" if ends else ", of one question"
    top, middle = sheet.y(value), left + wide / 2
    marks = f'<rect class="c{colour}" x="{left + 1:.1f}" y="{top:.1f}" width="{wide - 2:.1f}" rx="2" '
    marks += f'height="{sheet.y(0) - top:.1f}"/>'
    if ends:
        low, high = sheet.y(ends[0]), sheet.y(ends[1])
        marks += f'<path class="end" d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 3:.1f} {low:.1f}h6'
        marks += f'M{middle - 3:.1f} {high:.1f}h6"/>'
    above = sheet.y(max(ends or [value])) - 4
    label = f'<text class="soft" x="{middle:.1f}" y="{above:.1f}" text-anchor="middle">{value:.2f}</text>'
    label = label if wide >= _LABEL_ROOM else ""
    return f"<g><title>{escape(said)}</title>{marks}{label}</g>"


def lines(series: Mapping[str, Sequence[float]], places: Mapping[str, int]) -> str:
    """A line per method: of the windows that long, the share that was right up to the first, second, ... token."""
    longest = max((len(values) for values in series.values()), default=0)
    if not longest:
        return ""
    sheet = _Sheet(1.0, 0.5, longest + 0.5)
    shapes = [_grid(sheet, "share accepted")]
    shapes += [
        f'<text x="{sheet.x(place):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{place}</text>'
        for place in range(1, longest + 1)
    ]
    shapes.append(_caption("place in the window"))
    for method, values in series.items():
        spots = [(sheet.x(place), sheet.y(value)) for place, value in enumerate(values, start=1)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        shapes.append(f'<path class="s{places[method]}" d="M{path}"/>' if path else "")
        shapes += [
            f"<g><title>{escape(method)}, token {place}: {value:.0%}</title>"
            f'<circle class="c{places[method]}" cx="{x:.1f}" cy="{y:.1f}" r="4"/></g>'
            for place, (value, (x, y)) in enumerate(zip(values, spots, strict=True), start=1)
        ]
    return _svg(shapes, "Share of windows accepted up to each place, by method")


def cloud(points: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> str:
    """A point per question and method: tokens per step to the right, speed over plain decoding upwards."""
    known = ("over_plain", "tokens_per_step")
    shown = [point for point in points if point["method"] in places and None not in (point[name] for name in known)]
    if not shown:
        return ""
    right = max(point["tokens_per_step"] for point in shown)
    apart = next(step for step in _STEPS if step * _MOST_LINES * 2 >= right - 1)
    sheet = _Sheet(
        _top(max(point["over_plain"] for point in shown)), 1.0, 1 + apart * max(1, ceil((right - 1) / apart))
    )
    shapes = [_grid(sheet, "times plain")]
    for number in range(round((sheet.last - 1) / apart) + 1):
        value = 1 + apart * number
        shapes.append(f'<text x="{sheet.x(value):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">{value:g}</text>')
    shapes.append(_caption("tokens per step"))
    shapes.append(
        f'<line class="one" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{sheet.y(1):.1f}" y2="{sheet.y(1):.1f}"/>'
    )
    for point in shown:
        x, y = sheet.x(point["tokens_per_step"]), sheet.y(point["over_plain"])
        said = f"question {point['question_id']} ({point['task']}), {point['method']}: {point['over_plain']:.2f} times "
        said += f"plain, {point['tokens_per_step']:.2f} tokens per step"
        shapes.append(
            f"<g><title>{escape(said)}</title>"
            f'<circle class="c{places[point["method"]]} dot" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/></g>'
        )
    return _svg(shapes, "Every question's speed over plain decoding and tokens per step")


def _top(highest: float) -> float:
    """Where an axis ends that has to hold `highest`: behind a round number of lines.

    >>> _top(1.7), _top(3.2), _top(0.4)
    (2.0, 4.0, 1.2)
    """
    highest = max(highest, 1.1)
    apart = next(step for step in _STEPS if step * _MOST_LINES >= highest or step == _STEPS[-1])
    return round(apart * ceil(highest / apart + 0.15), 6)


def _grid(sheet: _Sheet, unit: str) -> str:
    """Horizontal lines at round values, and what they count."""
    apart = next(step for step in _STEPS if step * (_MOST_LINES + 2) >= sheet.top or step == _STEPS[-1])
    marks = []
    for number in range(int(sheet.top / apart + 1e-6) + 1):
        y = sheet.y(apart * number)
        marks.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text class="soft" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{apart * number:g}</text>')
    marks.append(f'<text class="soft" x="2" y="12">{escape(unit)}</text>')
    return "".join(marks)


def _caption(text: str) -> str:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return f'<text class="soft" x="{middle:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(text)}</text>'


def _svg(shapes: Sequence[str], label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )
