"""`summa3d report FILE…`: tables and plots of the results of `summa3d bench`, `summa3d gemm --json` and bench/. Uses no MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import figures
from ..bench import plots
from ..bench.results import merge, read
from ..bench.table import FORMATS
from ..bench.tables import table
from ..errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d report` to `parser`."""
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Read this JSON file of `summa3d bench` or of a script in bench/, or this file of lines of `summa3d gemm --json`.",
    )
    parser.add_argument(
        "--format",
        action="append",
        choices=(*figures.FORMATS, *(name for name in FORMATS if name != "text")),
        help="Write a plot (png, svg, pdf) or a table (markdown, csv, latex) to a file. The option may be repeated. The default "
        "is png.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="Write to this folder. The default is the folder of FILE.")
    parser.add_argument("--no-plots", action="store_true", help="Write no plots, which need matplotlib.")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="Take the products of all files together, as of one job. Files written are named merged-FILE after the first.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table of each result and write what --format names; returns the exit status."""
    formats = [name for name in args.format or ["png"] if not (args.no_plots and name in figures.FORMATS)]
    if args.merge:
        names = ", ".join(map(str, args.files))
        found = [(f"merged: {names}", args.files[0].with_name(f"merged-{args.files[0].name}"), merge(args.files))]
    else:
        found = [(str(file), file, read(file)) for file in args.files]  # all files are read before anything is printed
    for heading, file, results in found:
        for number, result in enumerate(results, 1):
            name = file.stem if len(results) == 1 else f"{file.stem}-{number}-{result['kind']}"
            written = write(result, (args.out or file.parent) / name, formats)
            print(f"{heading}\n{table(result).text()}\n", flush=True)
            for path in written:
                print(f"written: {path}", file=sys.stderr)
    return 0


def write(result: Mapping[str, Any], stem: Path, formats: Sequence[str]) -> list[Path]:
    """Write the plots and tables of a result, each to stem.ENDING; returns the files.

    Raises DataError where a file cannot be written, or matplotlib is not installed.
    """
    endings = {name: FORMATS[name][0] if name in FORMATS else name for name in formats}
    paths = {name: stem.parent / f"{stem.name}.{ending}" for name, ending in endings.items()}  # stems may have dots
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        plots.write(result, [paths[name] for name in formats if name in figures.FORMATS])
        for name in formats:
            if name in FORMATS:
                labelled = replace(table(result), label=stem.name)
                paths[name].write_text(FORMATS[name][1](labelled) + "\n", encoding="utf-8")
    except ImportError as error:
        raise DataError(f"plots need matplotlib ({error}): pip install 'summa3d[plot]', or give --no-plots.") from None
    except OSError as error:
        raise DataError(f"{stem} cannot be written: {error}") from None
    return list(paths.values())
