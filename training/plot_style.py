"""One look for every plot: colours by meaning, quiet grids, legends outside, one way to save; needs matplotlib."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "SERIES", "legend_outside", "save"]

SERIES = ("#3d6ea5", "#d8893b", "#4e9a5b", "#8a5fa8", "#c8544f", "#66727f")
COLOURS = {
    **{"plain": "#66727f", "serial": "#3d6ea5", "mirror": "#d8893b", "auto": "#8a5fa8"},
    **{"proxy": "#c8544f", "early": "#4878a8", "progressive": "#4e9a5b"},
}
"""The same thing has the same colour in every picture: methods, and where roots come from."""
_log = logging.getLogger("mirrorsd")
_STYLE: dict[str, Any] = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8b96a1",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e8ed",
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "savefig.dpi": 130,
}


def save(path: Path, draw: Callable[[Any], None], *, size: tuple[float, float] = (8.0, 4.0)) -> None:
    """Let `draw` fill a figure of this size (inches), and write it; the ending of the name says in what format.

    Without matplotlib a warning says that it is not drawn: no training fails for want of a picture.
    """
    if find_spec("matplotlib") is None:
        _log.warning('%s is not drawn, as matplotlib is not installed: pip install "mirrorsd[plots]".', path.name)
        return
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    style: Any = {**_STYLE, "axes.prop_cycle": cycler(color=list(SERIES))}
    with rc_context(style):
        figure = Figure(figsize=size)
        draw(figure)
        figure.savefig(path)


def legend_outside(axes: Any) -> None:
    """Put the legend beside the plot, where no curve runs."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)
