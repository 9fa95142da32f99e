# `summa3d gemm`: one distributed product, timed, counted and checked. Imports gemm, and torch only when a dtype needs it.
# Next: gemm/matrix.py.
from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..errors import ConfigError
from .runtime import usable_cores

DTYPES = ("float64", "float32", "float16")
NAP = 0.02  # seconds between a sleeping rank's looks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Multiply C = alpha·op(A)·op(B) + beta·C on a grid of MPI ranks; print time, words moved and error."
    for size in ("m", "n", "k"):
        parser.add_argument(f"--{size}", type=int, required=True, help=f"size {size} of C (m×n) = op(A) (m×k) · op(B) (k×n)")
    parser.add_argument("--algorithm", choices=("cuboid",), default="cuboid")
    parser.add_argument("--grid", type=parse_grid, required=True, metavar="x=X,y=Y,z=Z", help="axis sizes; their product is the number of ranks")
    parser.add_argument("--form", choices=("nn", "nt", "tn", "tt"), default="nn")
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=5, help="timed runs, after one that is not counted")
    parser.add_argument("--check", action="store_true", help="compare with a serial product on rank 0, timed on all cores")
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def parse_grid(text: str) -> dict[str, int]:
    """``x=2,y=2,z=2`` → {"x": 2, "y": 2, "z": 2}"""
    grid: dict[str, int] = {}
    try:
        for name, size in (part.split("=") for part in text.split(",")):
            if name.strip() in grid:
                raise ValueError(name)
            grid[name.strip()] = int(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid; write it as x=2,y=2,z=2") from None
    return grid


def run(args: argparse.Namespace) -> int:
    from mpi4py import MPI

    from ..comm.grid import Grid

    unknown = [axis for axis in args.grid if axis not in ("x", "y", "z")]
    if unknown:
        raise ConfigError(f"--grid names axis {unknown[0]!r}; the cuboid's axes are x, y, z.")
    for name in ("m", "n", "k", "repeat"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    grid = Grid(MPI.COMM_WORLD, {axis: args.grid.get(axis, 1) for axis in ("x", "y", "z")})
    result = measure(args, grid)
    if grid.rank == 0:
        print(json.dumps(result) if args.json else table(result), file=sys.stdout, flush=True)
    return 0


def element(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """A well-scaled matrix given by its indices, so that every rank makes its own block of the same operand."""
    return np.sin(0.37 * rows + 1.3) * np.cos(0.11 * columns) + 0.1 * np.sin((rows * 7 + columns * 3) % 101)


def measure(args: argparse.Namespace, grid: Any) -> dict[str, Any]:
    """Run the product and return the fields of DESIGN §8."""
    from ..gemm import CuboidPlan, DistMatrix, matmul, volume

    plan = CuboidPlan(args.form, args.m, args.n, args.k)
    a = DistMatrix.from_function(element, plan.a_shape, grid, plan.a_layout, args.dtype)
    b = DistMatrix.from_function(element, plan.b_shape, grid, plan.b_layout, args.dtype)
    c = DistMatrix.from_function(element, plan.c_shape, grid, plan.c_layout, args.dtype)
    seconds, serial_seconds = [], []
    for _ in range(args.repeat + 1):
        c.block[...] = 0
        seconds.append(_timed(grid, lambda: matmul(a, b, args.form, alpha=args.alpha, beta=args.beta, out=c)))
    grid.ledger.reset_peak()
    c = DistMatrix.from_function(element, plan.c_shape, grid, plan.c_layout, args.dtype)
    with grid.ledger.watch() as moved:
        matmul(a, b, args.form, alpha=args.alpha, beta=args.beta, out=c)
    peak = grid.ledger.workspace_peak
    costs = volume.of_plan(plan, grid.shape)
    words, messages, workspace = (grid.comm.allgather(value) for value in (moved.words, moved.messages, peak))
    error = relative_error(args, plan, c, serial_seconds) if args.check else None
    times = {"min": min(seconds[1:]), "median": median(seconds[1:]), "max": max(seconds[1:])}
    return {
        "algorithm": args.algorithm,
        "form": args.form,
        "grid": grid.shape,
        "m": args.m,
        "n": args.n,
        "k": args.k,
        "dtype": args.dtype,
        "seconds": times,
        "gflops": 2 * args.m * args.n * args.k / times["median"] / 1e9,
        "words_per_rank": max(words),
        "words_per_rank_formula": costs.max_words,
        "words_mean": sum(words) / len(words),
        "messages_per_rank": max(messages),
        "workspace_bytes": max(workspace),
        "workspace_bytes_formula": max(cost.workspace for cost in costs.costs()) * a.block.itemsize,
        "relative_error": error,
        **({"serial_seconds": median(serial_seconds)} if serial_seconds else {}),
    }


def relative_error(args: argparse.Namespace, plan: Any, c: Any, serial_seconds: list[float]) -> float:
    """‖C − C_serial‖ / ‖C_serial‖ (Frobenius) on rank 0, 0 elsewhere; times the serial product, which has all cores to itself."""
    whole, error = c.to_global(), 0.0
    if c.grid.rank == 0:
        wide = np.float64 if args.dtype == "float64" else np.float32
        shapes = (plan.a_shape, plan.b_shape, plan.c_shape)
        a, b, old = (whole_operand(*shape).astype(args.dtype).astype(wide) for shape in shapes)
        product = serial_product(a.T if args.form[0] == "t" else a, b.T if args.form[1] == "t" else b, args.repeat, serial_seconds)
        want = args.alpha * product + args.beta * old
        error = float(np.linalg.norm(whole.astype(wide) - want) / (np.linalg.norm(want) or 1.0))
    _sleep_until_all_are_here(c.grid.comm)
    return error


def whole_operand(rows: int, columns: int) -> np.ndarray:
    """What `element` gives for every index."""
    return element(np.arange(rows)[:, None], np.arange(columns)[None, :])


def serial_product(left: np.ndarray, right: np.ndarray, repeat: int, seconds: list[float]) -> np.ndarray:
    """left·right by numpy with as many threads as this process has cores; appends the time of each of `repeat` runs after a first."""
    product = np.empty((left.shape[0], right.shape[1]), left.dtype)
    with threadpool_limits(limits=usable_cores(), user_api="blas"):
        for _ in range(repeat + 1):
            start = time.perf_counter()
            np.matmul(left, right, out=product)
            seconds.append(time.perf_counter() - start)
    del seconds[0]
    return product


def _sleep_until_all_are_here(comm: Any) -> None:
    """A barrier whose waiting ranks leave their cores alone."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(NAP)


def _timed(grid: Any, call: Any) -> float:
    """Seconds from a common start until the last rank has finished."""
    grid.comm.Barrier()
    start = time.perf_counter()
    call()
    grid.comm.Barrier()
    return time.perf_counter() - start


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    seconds = result["seconds"]
    lines = [
        f"{result['algorithm']} {result['form']} {result['m']}×{result['n']}×{result['k']} {result['dtype']} on {result['grid']}",
        f"time      {seconds['median'] * 1e3:.2f} ms (min {seconds['min'] * 1e3:.2f}, max {seconds['max'] * 1e3:.2f}), {result['gflops']:.1f} Gflop/s",
        f"words     {result['words_per_rank']:,} per rank (formula {result['words_per_rank_formula']:,}), mean {result['words_mean']:,.1f}",
        f"messages  {result['messages_per_rank']} per rank",
        f"workspace {result['workspace_bytes']:,} bytes per rank (formula {result['workspace_bytes_formula']:,})",
    ]
    if result["relative_error"] is not None:
        lines.append(f"error     {result['relative_error']:.2e} against a serial product ({result['serial_seconds'] * 1e3:.2f} ms)")
    return "\n".join(lines)
