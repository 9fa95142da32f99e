"""Figures of papers' tables: published points as hollow marks, predictions as lines with the band of their cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from summa3d.errors import DataError
from summa3d.figures import draw, look

from .paper import Paper

FORMATS = ("png", "svg")


PlottedPoint = tuple[Any, float, float, float]
"""Where it stands on the x axis; published, predicted, and the band of the prediction."""


def write(paper: Paper, found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the figure of a report; returns its files. Raises DataError where it cannot be drawn or written.

    The table's `figure` says what the x axis is, as in the paper: ranks, batch, names of rows, or reported (predicted against
    reported); efficiency is against the fewest ranks, as in Optimus' figure 7.
    """
    return drawn(partial(_fill, paper=paper, found=found), folder, paper.name)


def drawn(fill: Callable[[Any], None], folder: Path, name: str) -> list[Path]:
    """Draw a figure, in each format; returns the files. Raises DataError where it cannot be drawn or written."""
    files = [folder / f"{name}.{kind}" for kind in FORMATS]
    try:
        draw(fill, files)
    except ImportError as error:
        raise DataError(f"a figure needs matplotlib ({error}): pip install 'summa3d[plot]'.") from None
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from None
    return files


def _fill(figure: Any, paper: Paper, found: Mapping[str, Any]) -> None:
    axes, kind = figure.subplots(), paper.table.get("figure", "ranks")
    for number, (name, points) in enumerate(_series(paper, found, kind).items()):
        _line(axes, look(number), name, points, kind)
    label = {"ranks": "GPUs", "efficiency": "GPUs", "batch": "batch", "reported": f"reported: {found['unit']}"}.get(kind, "")
    unit = "efficiency against the fewest GPUs" if kind == "efficiency" else found["unit"]
    axes.set(xlabel=label, ylabel=f"predicted: {unit}" if kind == "reported" else unit, title=paper.table["title"])
    if kind in ("ranks", "batch", "efficiency"):
        axes.set_xscale("log", base=2)
    if kind == "names":
        axes.tick_params("x", rotation=90)
    axes.legend(title="lines: predicted; hollow: published" if kind != "reported" else "on the line: as reported")


def _series(paper: Paper, found: Mapping[str, Any], kind: str) -> dict[str, list[PlottedPoint]]:
    """The points of each series; of several clusters one series each."""
    series: dict[str, list[PlottedPoint]] = {}
    for row, line in zip(paper.rows, found["rows"], strict=True):
        name, label = row.series, line["name"].removeprefix(f"{row.series}, ").removesuffix(f", {row.series}")
        if len(paper.table["clusters"]) > 1:
            label, name = line["name"].split(f", {row.cluster.name}, ")
            name = f"{row.cluster.name}, {name}"
        at = {"batch": row.batch, "names": label, "reported": row.target}.get(kind, row.ranks)
        band = row.cluster["band.percent"] / 100
        series.setdefault(name, []).append((at, row.target, line["predicted"], band))
    if kind == "efficiency":
        return {name: _efficiencies(paper, name, points) for name, points in series.items()}
    return series


def _efficiencies(paper: Paper, series: str, points: Sequence[PlottedPoint]) -> list[PlottedPoint]:
    """Work of a sequence ÷ (ranks · seconds), as parts of the first point's."""
    hidden = [row["hidden"] for row in paper.table["row"] if row["series"] == series]
    works = [12 * size**2 + 2 * paper.table["sequence"] * size for size in hidden]
    found = []
    for work, (ranks, target, predicted, band) in zip(works, points, strict=True):
        found.append((ranks, work / (ranks * target), work / (ranks * predicted), band))
    _, published, first, _ = found[0]
    return [(ranks, target / published, predicted / first, band) for ranks, target, predicted, band in found]


def _line(axes: Any, style: dict[str, Any], name: str, points: Sequence[PlottedPoint], kind: str) -> None:
    """Draw a series: its predictions as a line with their band, and what was published as hollow marks."""
    places, reported, predicted, bands = zip(*(points if kind == "names" else sorted(points)), strict=True)
    hollow = {**style, "markerfacecolor": "none", "linestyle": "none"}
    if kind == "reported":
        axes.plot(places, predicted, label=name, **hollow)
        axes.axline((places[0], places[0]), slope=1, color="0.5", linewidth=0.6)
        return
    axes.plot(places, predicted, color=style["color"], label=name)
    low, high = ([value * (1 + sign * band) for value, band in zip(predicted, bands, strict=True)] for sign in (-1, 1))
    axes.fill_between(places, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.plot(places, reported, **hollow)
