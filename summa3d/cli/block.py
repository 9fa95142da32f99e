# `summa3d bench block`: transformer blocks side by side in any schemes, on the same ranks. May import nn through blocks.py.
# Next: blocks.py (how they are timed), report.py (tables and plots of the JSON).
from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..comm.arrays import DEVICES
from ..errors import ConfigError
from .traces import ranges_for

ALL = "all"
SCHEME = (
    "NAME races on every grid of these ranks that fits, NAME:2,2,2 or NAME:x=2,y=4 on this one; may be repeated; "
    "`all`, the default: every scheme"
)
QUIET_PROFILER = ("KINETO_LOG_LEVEL", "99")  # torch's profiler reports its own start on stderr, once per rank


@dataclass(frozen=True)
class PaperShape:
    """A row of a paper's tables: s = 512 tokens, f = 4h, float32."""

    batch: int
    hidden: int
    heads: int
    source: str


OPTIMUS = "Optimus (arXiv 2104.05343), Table {}, 2-D on {} GPUs"
BIAN = "3-D parallelism (arXiv 2105.14450), Table {}, 3-D on {} GPUs; heads as in Optimus"
PAPER_SEQUENCE = 512
PAPER_SHAPES = {
    "optimus-weak-4": PaperShape(96, 2048, 32, OPTIMUS.format(2, 4)),
    "optimus-weak-16": PaperShape(192, 4096, 64, OPTIMUS.format(2, 16)),
    "optimus-weak-64": PaperShape(384, 8192, 128, OPTIMUS.format(2, 64)),
    "optimus-strong": PaperShape(24, 3072, 24, OPTIMUS.format(3, "4 to 64")),
    "3d-weak-8": PaperShape(192, 2048, 32, BIAN.format(1, 8)),
    "3d-weak-64": PaperShape(384, 8192, 128, BIAN.format(1, 64)),
    "3d-strong": PaperShape(24, 3072, 24, BIAN.format(2, "8 to 64")),
}


def add_block_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheme", action="append", metavar="NAME[:GRID]", help=SCHEME)
    parser.add_argument("--family", choices=("gpt2", "bert", "llama"), default="gpt2", help="whose blocks")
    parser.add_argument("--blocks", type=int, default=1, help="blocks in the stack")
    parser.add_argument("--batch", type=int, default=8, help="b, sequences")
    parser.add_argument("--sequence", type=int, default=256, help="s, tokens of each")
    parser.add_argument("--hidden", type=int, default=512, help="h")
    parser.add_argument("--heads", type=int, default=8, help="a")
    parser.add_argument("--kv-heads", type=int, help="heads of k and v (llama)")
    parser.add_argument("--ffn", type=int, help="f (default: 4h)")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the two residual branches")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=DEVICES, help="where blocks compute; default: SUMMA3D_DEVICE, else cpu")
    parser.add_argument("--regather", choices=("yes", "no", "both"), default="yes", help="gather operands again in backward")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count, after one that does not")
    parser.add_argument("--paper-shape", choices=PAPER_SHAPES, help="b, s, h and a of a row of the papers' tables, scaled down")
    parser.add_argument("--factor", type=int, default=8, help="what divides the paper's s and h; E/h² = b·s/h stays as it was")
    parser.add_argument("--json", metavar="FILE", help="write the result; - prints it as one line instead of the table")


def block_result(args: argparse.Namespace) -> dict[str, Any]:
    """Run the race that the arguments describe. Collective; complete on rank 0."""
    os.environ.setdefault(*QUIET_PROFILER)
    from mpi4py import MPI

    from ..train.device import open_device
    from .blocks import Case, race

    for name in ("blocks", "batch", "rounds", "factor"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    args.device = open_device(args.device, MPI.COMM_WORLD).type
    case, about = _paper_case(args) if args.paper_shape else (Case(_config(args), args.batch, args.dtype, args.device), {})
    entries = list(_entries(args.scheme or [ALL], {"yes": (True,), "no": (False,), "both": (True, False)}[args.regather], case))
    return {"kind": "block", **about, **race(entries, case, MPI.COMM_WORLD, args.rounds, args.trace, ranges_for(args))}


def _config(args: argparse.Namespace, **sizes: int | None) -> Any:
    from ..nn.config import ModelConfig

    given = {"hidden": args.hidden, "heads": args.heads, "ffn": args.ffn, "sequence": args.sequence, **sizes}
    kind = {"family": args.family, "kv_heads": args.kv_heads, "layers": args.blocks, "dropout": args.dropout}
    return ModelConfig(**kind, **given)


def _paper_case(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from .blocks import Case

    shape, factor = PAPER_SHAPES[args.paper_shape], args.factor
    for what, size in (("sequence", PAPER_SEQUENCE), ("hidden", shape.hidden)):
        if size % factor or (what == "hidden" and size // factor % shape.heads):
            fits = [
                number for number in range(1, 65) if PAPER_SEQUENCE % number == 0 and shape.hidden % (number * shape.heads) == 0
            ]
            raise ConfigError(
                f"--factor {factor} does not divide the {what} {size} of {args.paper_shape} ({shape.heads} heads). "
                f"Factors that do: {', '.join(map(str, fits))}."
            )
    config = _config(args, hidden=shape.hidden // factor, heads=shape.heads, sequence=PAPER_SEQUENCE // factor, ffn=None)
    paper = {"name": args.paper_shape, "source": shape.source, "factor": factor, "batch": shape.batch, "hidden": shape.hidden}
    return Case(config, shape.batch, args.dtype, args.device), {
        "paper": {**paper, "heads": shape.heads, "sequence": PAPER_SEQUENCE}
    }


def _entries(names: list[str], regathers: tuple[bool, ...], case: Any) -> Iterator[Any]:
    """What --scheme names, in its order; raises ConfigError where a scheme has no grid that fits."""
    from mpi4py import MPI

    from ..nn.schemes import SCHEMES
    from .blocks import Entry, gathers, grids_for

    ranks = MPI.COMM_WORLD.size
    for text in names:
        name, _, grid = text.partition(":")
        if name not in (*SCHEMES, ALL) or (grid and name == ALL):
            raise ConfigError(
                f"--scheme {text}: {name!r} is not a scheme. Schemes: {', '.join(SCHEMES)}; or all, without a grid."
            )
        chosen = {known: grids_for(known, ranks, case) for known in SCHEMES} if name == ALL else {name: _grids(text, ranks, case)}
        for known, grids in chosen.items():
            for shape in grids:
                yield from (Entry(known, shape, regather) for regather in (regathers if gathers(known) else (True,)))


def _grids(text: str, ranks: int, case: Any) -> list[dict[str, int]]:
    """The grids that ``NAME``, ``NAME:2,2,2`` or ``NAME:x=2,y=4`` stands for."""
    from ..comm.topology import describe
    from .blocks import grids_for

    name, _, grid = text.partition(":")
    fitting = grids_for(name, ranks, case)
    found = [shape for shape in fitting if _is_meant(grid, shape)]
    if not found:
        known = " · ".join(map(describe, fitting)) or "none; change the sizes or the number of ranks"
        raise ConfigError(
            f"--scheme {text}: no such grid of {ranks} ranks can run this block. Grids of {name} that can: {known}."
        )
    return found


def _is_meant(grid: str, shape: dict[str, int]) -> bool:
    """Whether ``2,2,2`` (every axis in order), ``x=2,y=4`` (the others are 1) or nothing (any) names this grid."""
    parts = grid.split(",") if grid else []
    if all("=" in part for part in parts):
        named = dict(part.split("=", 1) for part in parts)
        axes = {**dict.fromkeys(shape, "1"), **named} if named else {axis: str(size) for axis, size in shape.items()}
        return axes == {axis: str(size) for axis, size in shape.items()}
    return parts == [str(size) for size in shape.values()]
