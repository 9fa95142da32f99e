"""`summa3d bench block`: its options, the shapes of the papers' tables, and the entries that the options name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...columns import counted
from ...comm.device.arrays import DEVICES
from ...errors import ConfigError
from ...files import grid_of
from ..traces import JSON, check_positive, ranges_for

ALL = "all"
SCHEME = (
    "Time this scheme: NAME on every grid of the ranks that fits, NAME:2,2,2 or NAME:x=2,y=4 on one grid. The option may be "
    "repeated. `all`, the default, takes every scheme."
)
QUIET_PROFILER = ("KINETO_LOG_LEVEL", "99")  # otherwise torch's profiler reports its start on stderr, once per rank


@dataclass(frozen=True)
class PaperShape:
    """A row of a paper's tables: b, h and a, with s = 512 tokens, f = 4h, float32, and its source."""

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
    """Add the options of `summa3d bench block` to `parser`."""
    parser.add_argument("--scheme", action="append", metavar="NAME[:GRID]", help=SCHEME)
    parser.add_argument("--family", choices=("gpt2", "bert", "llama"), default="gpt2", help="Take the blocks of this family.")
    parser.add_argument("--blocks", type=int, default=1, help="Stack this many blocks.")
    parser.add_argument("--batch", type=int, default=8, help="Set the batch b, in sequences.")
    parser.add_argument("--sequence", type=int, default=256, help="Set the length s of a sequence, in tokens.")
    parser.add_argument("--hidden", type=int, default=512, help="Set the hidden size h.")
    parser.add_argument("--heads", type=int, default=8, help="Set the number a of attention heads.")
    parser.add_argument("--kv-heads", type=int, help="Set the number of key and value heads (llama only).")
    parser.add_argument(
        "--ffn", type=int, help="Set the width f of the MLP. The default is the family's own width (4h for gpt2)."
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="Set the dropout rate of the two residual branches.")
    parser.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="Set the dtype of weights and activations."
    )
    parser.add_argument("--device", choices=DEVICES, help="Compute there. The default is SUMMA3D_DEVICE, else cpu.")
    parser.add_argument(
        "--regather",
        choices=("yes", "no", "both"),
        default="yes",
        help="Gather operands again in backward (yes), keep the gathered operands of forward (no), or time both.",
    )
    parser.add_argument("--rounds", type=int, default=5, help="Time this many rounds, after a warm-up round that is not counted.")
    parser.add_argument(
        "--paper-shape", choices=PAPER_SHAPES, help="Take b, s, h and a from this row of the papers' tables, scaled by --factor."
    )
    parser.add_argument(
        "--factor", type=int, default=8, help="Divide the paper's s and h by this number, which keeps the ratio b·s/h."
    )
    parser.add_argument("--json", metavar="FILE", help=JSON)


def block_result(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark that the arguments describe and return its result; collective, complete on rank 0."""
    os.environ.setdefault(*QUIET_PROFILER)
    from mpi4py import MPI

    from ...bench.blocks import Case, run_benchmark
    from ...bench.predicted import compared, of_block
    from ...cluster import load
    from ...train.device import open_device

    check_positive(args, "blocks", "batch", "rounds", "factor")
    args.device = open_device(args.device, MPI.COMM_WORLD).type
    case, about = _paper_case(args) if args.paper_shape else (Case(_config(args), args.batch, args.dtype, args.device), {})
    entries = list(_entries(args.scheme or [ALL], {"yes": (True,), "no": (False,), "both": (True, False)}[args.regather], case))
    cluster = None if args.cluster is None else load(args.cluster)
    predicted = [] if cluster is None else [of_block(entry, case, cluster) for entry in entries]
    results = run_benchmark(entries, case, MPI.COMM_WORLD, args.rounds, args.trace, ranges_for(args))
    result = {"kind": "block", **about, **results}
    return result if cluster is None or MPI.COMM_WORLD.rank else compared(result, predicted, cluster)


def _config(args: argparse.Namespace, **sizes: int | None) -> Any:
    from ...nn.config import ModelConfig

    given = {"hidden": args.hidden, "heads": args.heads, "ffn": args.ffn, "sequence": args.sequence, **sizes}
    kind = {"family": args.family, "kv_heads": args.kv_heads, "layers": args.blocks, "dropout": args.dropout}
    return ModelConfig(**kind, **given)


def _paper_case(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from ...bench.blocks import Case

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
    """The entries of --scheme, in order. Raises ConfigError for an unknown scheme, and for one without a grid that fits."""
    from mpi4py import MPI

    from ...bench.blocks import BlockEntry, gathers, grids_for
    from ...nn.schemes.scheme import SCHEMES

    ranks = MPI.COMM_WORLD.size
    for text in names:
        name, _, grid = text.partition(":")
        if name not in (*SCHEMES, ALL) or (grid and name == ALL):
            raise ConfigError(f"--scheme {text}: {name!r} is not a scheme. Schemes: {', '.join(SCHEMES)}; or all without a grid.")
        chosen = {known: grids_for(known, ranks, case) for known in SCHEMES} if name == ALL else {name: _grids(text, ranks, case)}
        for known, grids in chosen.items():
            for shape in grids:
                yield from (BlockEntry(known, shape, regather) for regather in (regathers if gathers(known) else (True,)))


def _grids(text: str, ranks: int, case: Any) -> list[dict[str, int]]:
    """The grids of ``NAME``, ``NAME:2,2,2`` or ``NAME:x=2,y=4``. Raises ConfigError where none can run the block."""
    from ...bench.blocks import grids_for
    from ...comm.topology import describe

    name, _, grid = text.partition(":")
    fitting = grids_for(name, ranks, case)
    result = [shape for shape in fitting if _is_meant(grid, shape)]
    if not result:
        known = " · ".join(map(describe, fitting)) or "none; change the sizes or the number of ranks"
        raise ConfigError(
            f"--scheme {text}: no such grid of {counted(ranks, 'rank')} can run this block. Grids of {name} that can: {known}."
        )
    return result


def _is_meant(grid: str, shape: dict[str, int]) -> bool:
    """True if the text names this grid: ``2,2,2`` lists all axes, ``x=2,y=4`` leaves the others at 1, "" names any grid."""
    if not grid:
        return True
    named = grid_of(grid)
    if named is None:
        return grid.split(",") == [str(size) for size in shape.values()]
    return {**dict.fromkeys(shape, 1), **named} == shape
