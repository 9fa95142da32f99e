"""`python -m papers NAME`: a paper's tables beside predictions; claims, choices, cost tables; bands and points that are kept."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import mpi4py

from summa3d.cluster import load as load_cluster
from summa3d.errors import ConfigError, Summa3dError
from summa3d.plan.programs import judge, text
from summa3d.plan.programs.bands import FILE

from . import bands, costs, sweeps
from .paper import load, names

OWN = {
    "claims": "What papers claim of whole families of runs, beside ours.",
    "choices": "Plans that labs took, ranked among all that their program could run.",
    "formulas": "Papers' cost tables beside the closed forms of our schemes, isoefficiency, and figures of words.",
    "bands": "The bands of predicted seconds of `summa3d plan`, from papers/rows.",
    "rows": "All measured rows of papers/rows, priced: errors, bands, null model, order, of each GPU.",
    "published": "The published points of the sweeps that are shipped, from papers/tables.",
}


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    whole = argparse.ArgumentParser(prog="python -m papers", description=__doc__)
    commands = whole.add_subparsers(dest="what", required=True, metavar="NAME")
    for name in (*names(), *OWN):
        one = commands.add_parser(name, help=OWN.get(name, "Its tables beside predictions."))
        if name in ("bands", "published"):
            one.add_argument("--write", action="store_true", help="Write them where the package reads them.")
            continue
        one.add_argument("--json", action="store_true", help="Print JSON in place of text.")
        if name not in ("choices", "rows"):
            one.add_argument("--plots", type=Path, metavar="DIR", help="Write figures into DIR, as PNG and SVG.")
        if name == "formulas":
            one.add_argument("--hidden", type=int, required=True, metavar="H", help="Hidden size of the layer.")
            one.add_argument("--rows", type=int, default=2048, metavar="R", help="Batch times sequence. The default is 2048.")
            one.add_argument("--costs", type=int, metavar="P", help="Papers' costs of a layer on P ranks, beside ours.")
            one.add_argument("--isoefficiency", metavar="CLUSTER", help="How work must grow with ranks, beside papers' growth.")
    return whole


def main(words: Sequence[str] | None = None) -> int:
    """Do what the words name; returns the exit status."""
    args = parser().parse_args(words)
    mpi4py.rc.initialize = False  # dry runs need the names of MPI alone
    try:
        act = {"bands": keep, "published": keep, "rows": rows, "formulas": formulas, "claims": claims, "choices": claims}
        act.get(args.what, paper)(args)
    except Summa3dError as error:
        print(f"python -m papers: {error}", file=sys.stderr)
        return 1
    return 0


def keep(args: argparse.Namespace) -> None:
    """Print what the package has from here, or write it there."""
    texts = {FILE: bands.text()} if args.what == "bands" else {sweeps.file_of(one): sweeps.as_toml(one) for one in sweeps.SERIES}
    for file, content in texts.items():
        if args.write:
            file.write_text(content, encoding="utf-8")
        print(content, end="")


def rows(args: argparse.Namespace) -> None:
    """Print all measured rows beside predictions."""
    found = judge.judged([row for file in sorted(bands.ROWS.glob("*.json")) for row in bands.rows_of(file.stem)])
    print(json.dumps(found) if args.json else "\n".join(text.as_text(found)))


def paper(args: argparse.Namespace) -> None:
    """Print a paper's tables beside predictions."""
    from .figures import write
    from .report import as_text, report

    read = load(args.what)
    found = report(read)
    print(json.dumps(found) if args.json else "\n".join(as_text(read, found)))
    written(() if args.plots is None else write(read, found, args.plots))


def claims(args: argparse.Namespace) -> None:
    """Print papers' claims, or labs' choices, beside ours."""
    from . import choices, claims

    module = claims if args.what == "claims" else choices
    found = module.report()
    print(json.dumps(found) if args.json else "\n".join(module.as_text(found)))
    written(claims.write(found, args.plots) if args.what == "claims" and args.plots is not None else ())


def formulas(args: argparse.Namespace) -> None:
    """Print papers' cost tables and growths beside ours. Raises ConfigError for ranks that are no square and cube at once."""
    if args.costs is not None and (args.costs < 1 or round(args.costs ** (1 / 6)) ** 6 != args.costs):
        raise ConfigError(f"--costs {args.costs} is no sixth power, a square and a cube at once: 64, 729, 4096, … are.")
    for name in ("hidden", "rows"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    table = [] if args.costs is None else costs.costs(args.costs, args.rows, args.hidden)
    growths = [] if args.isoefficiency is None else costs.isoefficiency(load_cluster(args.isoefficiency))
    if args.json:
        print(json.dumps({"costs": [one._asdict() for one in table], "isoefficiency": [one._asdict() for one in growths]}))
    else:
        print("\n".join(costs.as_text(table, growths)))
    written(() if args.plots is None else costs.write(args.hidden, args.rows, args.plots))


def written(files: Iterable[Path]) -> None:
    """Say which files were written."""
    for file in files:
        print(f"written: {file}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
