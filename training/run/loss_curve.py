"""Draw the table of losses of a run."""

from __future__ import annotations

import csv
import logging
from importlib.util import find_spec
from pathlib import Path

import numpy as np

__all__ = ["plot_losses"]
_log = logging.getLogger("mirrorsd")


def plot_losses(table: Path, picture: Path, *, window: int = 5) -> None:
    """Draw every column of a run's `losses.csv` over millions of tokens, smoothed over `window` rows."""
    if find_spec("matplotlib") is None:
        _log.warning("%s is not drawn, as matplotlib is not installed: pip install 'mirrorsd[plots]'.", picture.name)
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    tokens = np.array([float(row["tokens"]) for row in rows]) / 1e6
    window = max(1, min(window, len(rows)))
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in rows[0]:
        if name not in ("step", "tokens", "seconds"):
            values = np.array([float(row[name]) for row in rows])
            axes.plot(tokens[window - 1 :], np.convolve(values, np.ones(window) / window, "valid"), label=name)
    axes.set(xlabel="million tokens", ylabel="nats (agreement: share)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
