"""`summa3d report FILE…`: tables and plots of the results of `summa3d bench`, `summa3d gemm --json` and bench/. Uses no MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .. import figures
from ..bench import plots
from ..bench.results import merge, read
from ..bench.tables import in_one_line, table
from ..errors import DataError
from ..files import from_json, replace_text
from ..table import FORMATS, Table

SWEEP, POINTS = "sweep", "points.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d report` to `parser`."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Read this JSON file of `summa3d bench` or of a script in bench/, this file of lines of `summa3d gemm --json` or of "
        "`summa3d sweep`, or this folder of a sweep.",
    )
    add_outputs(parser)
    parser.add_argument(
        "--merge",
        action="store_true",
        help="Take the products of all files together, as of one job. Files written are named merged-FILE after the first.",
    )


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is written, and where."""
    parser.add_argument(
        "--format",
        action="append",
        choices=(*figures.FORMATS, *(name for name in FORMATS if name != "text")),
        help="Write a plot (png, svg, pdf) or a table (markdown, csv, latex) to a file. The option may be repeated. The default "
        "is png.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Write to this folder. The default is the folder of FILE.")
    parser.add_argument("--no-plots", action="store_true", help="Write no plots, which need matplotlib.")


def run(args: argparse.Namespace) -> int:
    """Print the table of each result and write what --format names; returns the exit status."""
    return show(args.files, args, args.merge)


def show(files: Sequence[Path], args: argparse.Namespace, merged: bool = False) -> int:
    """Print the table of each result in `files` and write what --format names; returns the exit status."""
    formats = [name for name in args.format or ["png"] if not (args.no_plots and name in figures.FORMATS)]
    if merged:
        together = _swept(files) if all(map(has_points, files)) else merge(files)
        outcome = [(f"merged: {', '.join(map(str, files))}", files[0].with_name(f"merged-{files[0].name}"), together)]
    else:  # all files are read before anything is printed
        outcome = [(str(file), file, _swept([file]) if has_points(file) else read(file)) for file in files]
    for heading, file, results in outcome:
        for number, result in enumerate(results, 1):
            name = file.stem if len(results) == 1 else f"{file.stem}-{number}-{result['kind']}"
            written = write(result, (args.out or file.parent) / name, formats)
            print(f"{heading}\n{table_of(result).text()}\n", flush=True)
            for path in written:
                print(f"written: {path}", file=sys.stderr)
    return 0


def has_points(file: Path) -> bool:
    """Return whether this is a folder with points of a sweep, or a file whose first line is one."""
    if file.is_dir():
        return any(file.rglob(POINTS))
    if not file.is_file():
        return False
    try:
        with file.open(encoding="utf-8") as lines:
            first = from_json(lines.readline())
    except (OSError, ValueError):  # the reader of other files says what is wrong with it
        return False
    return isinstance(first, dict) and SWEEP in first


def _swept(places: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of sweeps."""
    from ..sweep.lines import collect
    from ..sweep.report import results

    return results(collect(places, lambda text: print(f"summa3d report: {text}", file=sys.stderr)))


def table_of(result: Mapping[str, Any]) -> Table:
    """The table of a result of any kind, of sweeps too."""
    if result["kind"] != SWEEP:
        return table(result)
    from ..sweep import report

    made = report.table(result)
    return replace(made, remarks=[*made.remarks, *map(in_one_line, result["machines"])])


def write(result: Mapping[str, Any], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write the plots and tables of a result, each to stem.ENDING; returns the files.

    Raises DataError where a file cannot be written, or matplotlib is not installed.
    """
    endings = {name: FORMATS[name][0] if name in FORMATS else name for name in formats}
    paths = {name: stem.parent / f"{stem.name}.{ending}" for name, ending in endings.items()}  # stems may have dots
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        drawn = [paths[name] for name in formats if name in figures.FORMATS]
        if result["kind"] != SWEEP:
            plots.write(result, drawn)
        elif drawn and result["rows"]:
            from ..sweep import report

            figures.draw(partial(report.draw, result=result), drawn)
        for name in formats:
            if name in FORMATS:
                labelled = replace(table_of(result), label=stem.name)
                replace_text(paths[name], FORMATS[name][1](labelled) + "\n")
    except ImportError as error:
        raise DataError(f"plots need matplotlib ({error}): pip install 'summa3d[plot]', or give --no-plots.") from None
    except OSError as error:
        raise DataError(f"{stem} cannot be written: {error}") from None
    return list(paths.values())
