"""Draw the table of losses of a run."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np

from mirrorsd.training.plot_style import legend_outside, save

__all__ = ["plot_losses"]
_log = logging.getLogger("mirrorsd")

_SHARES = {"agreement": "best token equals the target's"}
_WORDS = {"main": "next token", "loss": "next token", "exit_loss": "next token, at the exit"}
_IGNORED = ("step", "tokens", "seconds")
_START = 0.02
"""Of the run: its first losses are those of chance, and would press all others together."""


def plot_losses(table: Path, picture: Path, *, window: int = 5) -> None:
    """Draw every column of a run's `losses.csv` over millions of tokens, smoothed over `window` rows.

    Losses (nats) and shares have a panel each. A table without rows gives no picture.
    """
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return
    names = [name for name in rows[0] if name not in _IGNORED]
    panels = [[name for name in names if name not in _SHARES], [name for name in names if name in _SHARES]]
    panels = [panel for panel in panels if panel]
    window = max(1, min(window, len(rows)))
    first = int(_START * len(rows))

    def draw(figure: Any) -> None:
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            for name in panel:
                values = np.array([float(row[name]) for row in rows])
                smooth = np.convolve(values, np.ones(window) / window, "valid")
                tokens = np.array([float(row["tokens"]) for row in rows])[window - 1 :] / 1e6
                axes.plot(tokens[first:], smooth[first:], label=in_words(name))
            axes.set_ylabel("share" if panel[0] in _SHARES else "loss, nats")
            legend_outside(axes)
        all_axes[0].set_title("lower is better: what the model still has to learn")
        all_axes[-1].set_xlabel("million tokens read")

    save(picture, draw, size=(8.5, 2.6 + 1.6 * len(panels)))


def in_words(column: str) -> str:
    """What a column of the table is, for people.

    >>> in_words("main"), in_words("stream_1")
    ('next token', 'stream 1: 2 tokens ahead')
    """
    kind, _, number = column.partition("_")
    if kind == "stream" and number.isdigit():
        return f"stream {number}: {int(number) + 1} tokens ahead"
    return _WORDS.get(column) or _SHARES.get(column) or column.replace("_", " ")
