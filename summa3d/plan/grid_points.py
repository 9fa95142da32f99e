"""Words of a rank against the bytes that it holds in a training step, on every grid of as many ranks: dry runs, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

from ..comm.topology import OUTER
from ..errors import GridError, LayoutError
from ..nn.schemes.registry import SCHEME_SPECS
from ..nn.schemes.scheme import Scheme
from ..train.config import Config
from ..train.dry_run import MEBI, dry_run

GAP = (3, 3)
"""Points between a mark and its text."""


class GridPoint(NamedTuple):
    """A grid, and of its fullest rank the words received, the most bytes held beside the node's memory, and the bound."""

    grid: dict[str, int]
    words: int
    peak: int
    bound: float


def grid_points(config: Config, ranks_per_node: int | None = None) -> Iterator[GridPoint]:
    """A point for each grid of the configuration's scheme and ranks on which all have like parts; `dp` and `pp` stay."""
    outer = {axis: size for axis, size in config.grid.axes.items() if axis in OUTER}
    inner = prod(config.grid.axes.values()) // prod(outer.values())
    for shape in SCHEME_SPECS[config.scheme].grids(inner):
        try:
            Scheme.of(config.scheme, shape).check_even(config.local_model, config.rows)
            result = dry_run(config, {**shape, **outer}, ranks_per_node=ranks_per_node)
        except (GridError, LayoutError):  # the sizes do not fit that grid
            continue
        yield GridPoint({**shape, **outer}, result.total_words, result.peak, result.bound)


def draw_points(figure: Any, points: Sequence[GridPoint], title: str) -> None:
    """Draw a mark for each grid, and below it a dash where the sum of the bounds of its single products lies."""
    from ..figures import CAPTION, COLUMN, look

    figure.set_size_inches(COLUMN, COLUMN)
    axes = figure.add_subplot()
    held = [point.peak / MEBI for point in points]
    axes.plot(held, [point.words for point in points], linestyle="none", **look(0))
    style = {"linestyle": "none", "marker": "_", "color": "0.5"}
    axes.plot(held, [point.bound for point in points], label="sum of the bounds of single products", **style)
    for at, point in zip(held, points, strict=True):
        axes.annotate(
            "×".join(map(str, point.grid.values())), (at, point.words), xytext=GAP, textcoords="offset points", fontsize=5
        )
    axes.set(xlabel="MiB that a rank holds at most", ylabel="words that a rank receives in a step", ylim=(0, None))
    axes.margins(x=0.12)
    axes.legend(loc="best")
    grids = f"; grids {'×'.join(points[0].grid)}" if points else ""
    figure.supxlabel("\n".join(wrap(title + grids, 80)), x=0.01, ha="left", **CAPTION)


def write_points(points: Sequence[GridPoint], title: str, file: Path) -> None:
    """Write the plot to a file, in the format of its ending. Raises ImportError where matplotlib is not installed."""
    from ..figures import draw

    draw(partial(draw_points, points=points, title=title), [file])
