"""`summa3d plot RUN…`: the losses of several runs of `summa3d train` in one plot. Starts no MPI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import DataError
from ..figures import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d plot` to `parser`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Draw the run in this folder.")
    parser.add_argument(
        "--out",
        action="append",
        type=Path,
        metavar="FILE",
        help=f"Write this file, in the format of its ending ({', '.join(FORMATS)}). The option may be repeated. The default is "
        "RUN/loss.png, or losses.png for several runs.",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the runs, and return the exit status. Raises DataError for a folder without a run and a file of no known format."""
    files = args.out or [args.runs[0] / "loss.png" if len(args.runs) == 1 else Path("losses.png")]
    for file in files:
        if file.suffix[1:] not in FORMATS:
            raise DataError(f"--out {file} names no format; end it in one of .{', .'.join(FORMATS)}.")
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # layers name MPI's types, but no rank is started
        from ..train.loss_plot import draw_loss

        draw_loss(args.runs, files)
    except ImportError as error:
        raise DataError(f"a plot needs torch and matplotlib ({error}): pip install 'summa3d[train,plot]'.") from None
    except OSError as error:
        raise DataError(f"{' and '.join(map(str, files))} cannot be written: {error}") from None
    for file in files:
        print(f"written: {file}", file=sys.stderr)
    return 0
