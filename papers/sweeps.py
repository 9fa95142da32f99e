"""Published points of the sweeps that are shipped, from the papers' tables: x and FLOP/s, relative to a series' first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from summa3d.sweep.file import FOLDER

from .paper import table_of

SERIES: dict[str, tuple[str, dict[str, str], str]] = {
    "optimus-weak": ("optimus", {"1-D": "weak, 1-D", "2-D": "weak, 2-D"}, "gpus"),
    "optimus-strong": ("optimus", {"1-D": "strong, 1-D", "2-D": "strong, 2-D"}, "gpus"),
    "3d-weak": ("3d", {"cuboid-sequence": "weak"}, "gpus"),
    "3d-strong": ("3d", {"cuboid-sequence": "strong"}, "gpus"),
    "ptdp-fig13": ("ptdp-fig13", {"batch 8": "batch 32", "batch 32": "batch 128"}, "pp"),
    "ptdp-fig17": ("ptdp-fig17", {"with": "with", "without": "without"}, "batch"),
}
"""Sweep → the paper, its series of each of the sweep's, and the key of its rows that stands on the sweep's horizontal axis."""


def file_of(sweep: str) -> Path:
    """Return where the points of a sweep are kept."""
    return FOLDER / "published" / f"{sweep}.toml"


def as_toml(sweep: str) -> str:
    """The file of a sweep's published points."""
    return "\n".join(_lines(sweep)) + "\n"


def _lines(sweep: str) -> Iterator[str]:
    name, series, x = SERIES[sweep]
    paper = table_of(name)
    yield f"# Points of papers/tables/{name}.toml, by `python -m papers published --write`: x, and FLOP/s over the first point's."
    yield f'source = "{paper["source"].partition(";")[0]}"\n\n[series]'
    for ours, theirs in series.items():
        points = sorted((float(row[x]), _speed(row)) for row in _rows(paper) if row["series"] == theirs)
        yield f'"{ours}" = [{", ".join(f"[{at:g}, {speed / points[0][1]:.4g}]" for at, speed in points)}]'


def _rows(paper: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows, each with what they share."""
    shared = {"layers": paper.get("layers"), "sequence": paper.get("sequence"), **paper.get("step", {})}
    for row in paper["row"]:
        yield {**shared, "gpus": prod(row.get("axes", {}).values()), **row}


def _speed(row: Mapping[str, Any]) -> float:
    """FLOP/s of a row, up to a factor that all rows of a series share: from FLOP/s, sequences per second, or seconds."""
    flops = row["layers"] * (6 * row["hidden"] ** 2 + row["sequence"] * row["hidden"])  # of a sequence's products, in units of 4s
    if "tflops" in row:
        return float(row["tflops"] * row["gpus"])
    if "sequences" in row:
        return float(row["sequences"] * flops)
    seconds = row.get("corrected", row.get("average"))
    if seconds is None:
        seconds = row["step"] / row["batch"] if "step" in row else row["forward"] + row["backward"]
    return float(flops / seconds)
