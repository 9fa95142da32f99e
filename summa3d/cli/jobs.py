"""`summa3d jobs`: Slurm scripts that need no other file, for a site."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import DataError
from ..files import replace_text
from ..jobs import script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d jobs` to `parser`."""
    parser.description = "Write Slurm scripts that train, sweep a setting and measure scaling. Without --write, list the sites."
    parser.add_argument(
        "--site", default="cpu", metavar="NAME|FILE", help="Write those of this site, or of a TOML file. The default is cpu."
    )
    parser.add_argument("--write", type=Path, metavar="DIR", help="Write the scripts to this folder.")


def run(args: argparse.Namespace) -> int:
    """List the sites, or write the scripts of one; returns the exit status."""
    of = script.site(args.site)
    if args.write is None:
        for name in script.names():
            result = script.site(name)
            print(f"{name}: {result.about} Jobs: {', '.join(result.kinds)}.")
        return 0
    for name, text in script.write_all(of).items():
        try:
            args.write.mkdir(parents=True, exist_ok=True)
            replace_text(args.write / name, text)
        except OSError as error:
            raise DataError(f"--write {args.write} cannot be written: {error.strerror}.") from error
        print(args.write / name)
    return 0
