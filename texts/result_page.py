"""A result as a notebook shows it: the text with drafted tokens marked, and what each device did when.

Owns: that piece of HTML, which needs no script and takes the notebook's own colours. Does not own: the trace with every
step's details (`trace`, `mirrorsd trace`).
"""

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

_WIDTH, _LANE, _LABEL = 800, 16, 60
_LANES = (("target", "#4878a8"), ("draft", "#3f9a6b"))
_MARK = "background:rgba(63,154,107,.25)"
_SOURCES = {
    "window": "drafted, then found right by the target",
    "lookup": "taken from earlier text, then found right by the target",
    "correction": "the target's own",
    "plain": "the target's own",
}
_VERIFIED = ("window", "lookup")


Work = tuple[str, str, float, float]
"""Device, what it did, and from when to when, in seconds of one clock."""


class Piece(NamedTuple):
    """What text became certain with one token, and where the token came from (`GeneratedToken.source`)."""

    source: str
    text: str


def result_page(title: str, text: str, pieces: Sequence[Piece], spans: Sequence[Work]) -> str:
    """Return the HTML of a result; its size grows with the text, not with the number of spans.

    Args:
        title: how the text was made, and why it ended.
        text: the whole text, for a result of which no pieces are known.
        pieces: one per token.
        spans: what the devices did when.
    """
    num_drafted = sum(piece.source in _VERIFIED for piece in pieces)
    legend = f'<span style="{_MARK}">drafted and right</span>: {num_drafted} of {len(pieces)} tokens'
    return (
        f'<div style="max-width:{_WIDTH + _LABEL}px"><p style="opacity:.7">{escape(title)}. {legend}</p>'
        f'<p style="white-space:pre-wrap">{_marked(pieces) or escape(text)}</p>'
        f"{_timeline(spans)}</div>"
    )


def _marked(pieces: Sequence[Piece]) -> str:
    runs = groupby(pieces, lambda piece: piece.source)
    return "".join(_run(source, "".join(piece.text for piece in run)) for source, run in runs)


def _run(source: str, text: str) -> str:
    style = f' style="{_MARK}"' if source in _VERIFIED else ""
    return f'<span title="{escape(_SOURCES.get(source, source))}"{style}>{escape(text)}</span>'


def _timeline(spans: Sequence[Work]) -> str:
    """Two lanes over the time from the first span to the last."""
    if not spans:
        return ""
    start, end = min(span[2] for span in spans), max(span[3] for span in spans)
    scale = _WIDTH / max(end - start, 1e-9)
    height = _LANE * len(_LANES) + 14
    rows = []
    for place, (device, colour) in enumerate(_LANES):
        y = place * _LANE
        rows.append(f'<text x="0" y="{y + 11}">{device}</text>')
        working = (span for span in spans if span[0] == device)
        rows += [
            f'<rect x="{_LABEL + x}" y="{y + 2}" width="{width}" height="{_LANE - 4}" fill="{colour}"/>'
            for x, width in _bars(working, start, scale)
        ]
    rows.append(f'<text x="{_LABEL}" y="{height - 2}">0</text>')
    rows.append(f'<text x="{_LABEL + _WIDTH}" y="{height - 2}" text-anchor="end">{end - start:.2f} s</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH + _LABEL} {height}" width="100%" role="img" font-size="11" fill="currentColor" '
        f'aria-label="when target and draft worked">{"".join(rows)}</svg>'
    )


def _bars(spans: Iterable[Work], start: float, scale: float) -> list[tuple[int, int]]:
    """Runs of pixels in which a device worked, as (x, width).

    >>> _bars([("draft", "a", 0, 2), ("draft", "b", 2, 3), ("draft", "c", 8, 9)], 0.0, 1.0)
    [(0, 3), (8, 1)]
    """
    pixels: set[int] = set()
    for _, _, began, ended in spans:
        first = int((began - start) * scale)
        pixels.update(range(first, max(first + 1, round((ended - start) * scale))))
    ordered = sorted(pixels)
    runs = [[x for _, x in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    return [(run[0], len(run)) for run in runs]
