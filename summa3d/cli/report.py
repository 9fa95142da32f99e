"""`summa3d report FILE…`: tables and plots of the JSON files of `summa3d bench` and of the scripts in bench/. Uses no MPI."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from . import plots
from .tables import table

KINDS = ("gemm", "strong", "weak", "versus", "block")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d report` to `parser`."""
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="Read this JSON file of `summa3d bench` or of a script in bench/."
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="Write plots to this folder. The default is the folder of FILE."
    )
    parser.add_argument(
        "--format",
        action="append",
        choices=("png", "svg"),
        help="Write plots in this format. The option may be repeated. The default is png.",
    )
    parser.add_argument("--no-plots", action="store_true", help="Print tables only.")


def run(args: argparse.Namespace) -> int:
    """Print the table of each file and write its plots; returns the exit status."""
    for file in args.files:
        result = read(file)
        print(f"{file}\n{table(result)}\n")
        if not args.no_plots:
            for written in draw(result, (args.plots or file.parent) / file.stem, args.format or ["png"]):
                print(f"plot: {written}", file=sys.stderr)
    return 0


def read(file: Path) -> dict[str, Any]:
    """The benchmark result in a file. Raises DataError where the file cannot be read or holds no such result."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is not JSON: {error}.") from None
    if not isinstance(result, dict) or result.get("kind") not in KINDS or not result.get("rows"):
        raise DataError(f"{file} is not a result of `summa3d bench` (a JSON object with kind {', '.join(KINDS)} and rows).")
    return result


def draw(result: Mapping[str, Any], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write the plot of a result to stem.FORMAT, for each format. Raises DataError where matplotlib is not installed."""
    try:
        figure = plots.figure(result)
    except ImportError as error:
        raise DataError(f"plots need matplotlib ({error}): pip install 'summa3d[plot]', or give --no-plots.") from None
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for ending in formats:
        path = stem.parent / f"{stem.name}.{ending}"  # with_suffix would cut a stem at its own dots
        figure.savefig(path, dpi=120)
        written.append(path)
    return written
