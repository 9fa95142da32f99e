"""Figures of papers' tables: published points as hollow marks, predictions as lines with the band of their cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...figures import draw, look
from .paper import Paper

FORMATS = ("png", "svg")


def write(paper: Paper, found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the figure of a report; returns its files. Raises DataError where it cannot be drawn or written."""
    files = [folder / f"{paper.name}.{kind}" for kind in FORMATS]
    try:
        draw(partial(_fill, paper=paper, found=found), files)
    except ImportError as error:
        raise DataError(f"a figure needs matplotlib ({error}): pip install 'summa3d[plot]'.") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from None
    return files


def _fill(figure: Any, paper: Paper, found: Mapping[str, Any]) -> None:
    axes = figure.subplots()
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for row, line in zip(paper.rows, found["rows"], strict=True):
        name = row.series if len(paper.table["clusters"]) == 1 else f"{row.series}, {line['name'].split(', ', 3)[-1]}"
        band = row.numbers.cluster["band.percent"] / 100
        series.setdefault(name, []).append((row.ranks, row.target, line["predicted"], band))
    for number, (name, points) in enumerate(series.items()):
        ranks, reported, predicted, bands = zip(*sorted(points), strict=True)
        style = look(number)
        axes.plot(ranks, predicted, color=style["color"], label=name)
        low, high = ([value * (1 + sign * band) for value, band in zip(predicted, bands, strict=True)] for sign in (-1, 1))
        axes.fill_between(ranks, low, high, color=style["color"], alpha=0.12, linewidth=0)
        axes.plot(ranks, reported, linestyle="none", **{**style, "markerfacecolor": "none"})
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=found["unit"], title=paper.table["title"])
    axes.legend(title="lines: predicted; marks: published")
