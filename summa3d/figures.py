"""Figures for a paper: the width of a column, readable type at that size, colours that differ for the colour-blind.

matplotlib is imported at the first figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .files import replacing

COLUMN = 3.4
"""Width of a column in inches; two columns with the gutter are 7.0."""
BOTH_COLUMNS = 7.0
FORMATS = ("png", "svg", "pdf")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
MARKERS = "osD^v<>p"
STYLE: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "legend.fontsize": 6,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1,
    "lines.markersize": 3.5,
    "lines.markeredgewidth": 0.7,
    "errorbar.capsize": 1.5,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.4,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # TrueType: journals refuse the Type 3 fonts of the default
    "savefig.dpi": 300,
}
CAPTION = {"fontsize": 5.5, "color": "0.25"}


def draw(fill: Callable[[Any], None], paths: Sequence[Path]) -> None:
    """Let `fill` draw into a new matplotlib figure, and write it to `paths`, whose endings select the formats.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(COLUMN, COLUMN), layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as new:
                figure.savefig(new)


def look(number: int) -> dict[str, Any]:
    """Colour and marker of the line `number` of a panel."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
