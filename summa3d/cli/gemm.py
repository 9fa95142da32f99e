"""`summa3d gemm`: runs one distributed product; reports its time, words moved, workspace and error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from math import prod
from statistics import median
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..bench.capacity import peak_bytes, require
from ..bench.traced import show
from ..comm.device.arrays import DEVICES, numpy_dtype, quiet
from ..dtypes import DTYPES, HALVES
from ..errors import ConfigError
from ..files import grid_of
from ..launch.runtime import on_all_cores, usable_cores
from .traces import add_trace_arguments, check_trace_arguments, ranges_for

FORMS = tuple(first + second for first in "ntc" for second in "ntc")
CHOOSES = "Choose by the times that are predicted for this described cluster."
PANEL_ALGORITHMS = "summa, tesseract and ca25d"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d gemm` to `parser`."""
    from ..gemm.algorithms.registry import ALGORITHMS, ALIASES

    parser.description = "Multiply C = alpha·op(A)·op(B) + beta·C on a grid of MPI ranks; print time, words moved and error."
    for size in ("m", "n", "k"):
        text = f"Set the size {size} of C (m×n) = op(A) (m×k) · op(B) (k×n)."
        parser.add_argument(f"--{size}", type=int, required=True, help=text)
    parser.add_argument(
        "--algorithm",
        type=one_algorithm,
        choices=[*ALGORITHMS, *ALIASES],
        help="Use this algorithm. Without it, the library chooses algorithm and grid; with --grid alone, cuboid is used.",
    )
    parser.add_argument(
        "--grid",
        type=parse_grid,
        metavar="x=X,y=Y,z=Z",
        help="Set the sizes of the grid axes, whose product is the number of ranks. By default the library chooses the grid.",
    )
    parser.add_argument(
        "--form", choices=FORMS, default="nn", help="Take A and B as they are (n), transposed (t) or conjugate transposed (c)."
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float64", help="Set the dtype of A, B and C.")
    parser.add_argument(
        "--panel", type=int, help=f"Set the panel width of {PANEL_ALGORITHMS}. By default panels are not divided."
    )
    parser.add_argument("--device", choices=DEVICES, help="Hold the operands there. The default is SUMMA3D_DEVICE, else cpu.")
    parser.add_argument("--transport", help="Use this transport for device arrays. The default is SUMMA3D_TRANSPORT, else auto.")
    parser.add_argument("--alpha", type=float, default=1.0, help="Multiply op(A)·op(B) by this factor.")
    parser.add_argument("--beta", type=float, default=0.0, help="Multiply C by this factor before the product is added.")
    parser.add_argument("--repeat", type=int, default=5, help="Time this many runs, after a warm-up run that is not counted.")
    parser.add_argument(
        "--check", action="store_true", help="Compare the result with a serial product on rank 0, and time that product too."
    )
    add_cluster_argument(parser, CHOOSES)
    add_trace_arguments(parser, "one more run")
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON line.")


def add_cluster_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --cluster to `parser`; `what` it does."""
    parser.add_argument("--cluster", metavar="here|NAME|FILE", help=f"{what} `here` is what bench calibrate has measured.")


def machine_of(name: str | None, device: str, comm: Any) -> Any:
    """The machine of --cluster, else the default one, as the ranks of `comm` stand on it; collective."""
    from ..cluster import load
    from ..comm.transport.node_memory import in_one_node
    from ..gemm.cost.machine import Machine, default_cluster

    cluster = default_cluster() if name is None else load(name)
    return Machine(cluster, node=device == "cpu" and in_one_node(comm))


def one_algorithm(name: str) -> str:
    """The name given to --algorithm; `all`, which `bench gemm` has, raises argparse.ArgumentTypeError."""
    if name == "all":
        raise argparse.ArgumentTypeError("gemm runs one algorithm; `summa3d bench gemm … --algorithm all` compares all of them")
    return name


def parse_grid(text: str) -> dict[str, int]:
    """Parse the text of --grid. Raises argparse.ArgumentTypeError for text of another form.

    >>> parse_grid("x=2,y=2,z=2")
    {'x': 2, 'y': 2, 'z': 2}
    """
    sizes = grid_of(text)
    if sizes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a grid; write it as x=2,y=2,z=2")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Run the product, print its figures on rank 0, and return the exit status; collective over all ranks."""
    from mpi4py import MPI

    from ..bench.machine import machine
    from ..comm.device.select import requested_device, take_device
    from ..comm.transport.select import requested

    if args.cluster is not None and args.grid is not None:
        raise ConfigError("--cluster helps to choose a grid, and --grid names one: leave one of them out.")
    for name in ("m", "n", "k", "repeat"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it must be at least 1.")
    args.device = requested_device(args.device)
    requested(args.transport)
    check_trace_arguments(args, MPI.COMM_WORLD)
    if args.device == "cuda":
        take_device(MPI.COMM_WORLD)
    algorithm, plan, shape, chosen = decided(args, MPI.COMM_WORLD)
    found = machine(MPI.COMM_WORLD, probe=False)
    result = measure(args, algorithm, plan, shape, MPI.COMM_WORLD, chosen) | {"ranks": MPI.COMM_WORLD.size, "machine": found}
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(result) if args.json else table(result), file=sys.stdout, flush=True)
    return 0


def decided(args: argparse.Namespace, comm: Any) -> tuple[Any, Any, dict[str, int], str]:
    """The algorithm, its plan, its grid, and, where the library has chosen what the command line leaves open, its reasons.

    Collective. Raises ConfigError for an axis or an option that the algorithm does not have.
    """
    from ..gemm.algorithms.registry import ALGORITHMS
    from ..gemm.algorithms.registry import algorithm as named
    from ..gemm.cost.choose import choose

    if args.grid is None:
        if args.panel is not None and args.algorithm is None:
            raise ConfigError(f"--panel applies to {PANEL_ALGORITHMS} only. Name one of them with --algorithm.")
        name = None if args.algorithm is None else named(args.algorithm, comm.size).name
        machine = machine_of(args.cluster, args.device, comm)
        choice = choose(args.m, args.n, args.k, comm.size, args.dtype, algorithm=name, form=args.form, machine=machine)
        algorithm, shape = ALGORITHMS[choice.algorithm], dict(choice.grid)
        chosen = str(choice)
    else:
        chosen = ""
        algorithm, shape = named(args.algorithm or "cuboid"), dict(args.grid)
        unknown = [axis for axis in shape if axis not in algorithm.axes]
        if unknown:
            raise ConfigError(f"--grid names axis {unknown[0]!r}; the axes of {algorithm.name} are {', '.join(algorithm.axes)}.")
        shape = {axis: shape.get(axis, 1) for axis in algorithm.axes}
    options = {} if args.panel is None else {"panel": args.panel}
    if not set(options) <= set(algorithm.options):
        raise ConfigError(f"--panel applies to {PANEL_ALGORITHMS} only (algorithm is {algorithm.name}).")
    return algorithm, algorithm.plan(args.form, args.m, args.n, args.k, **options), shape, chosen


def measure(
    args: argparse.Namespace, algorithm: Any, plan: Any, shape: dict[str, int], world: Any, chosen: str = ""
) -> dict[str, Any]:
    """Run the product, and say before, on stderr, what was chosen, if it fits. Returns the fields of its JSON line; collective.

    Ranks beyond the grid sleep and return {}.
    """
    from ..bench.clock import sleep_until_all_are_here
    from ..bench.products import operands
    from ..comm.grid import Grid

    used = prod(shape.values())
    idle = args.grid is None and used < world.size
    comm = world if not idle else world.Split(int(world.rank >= used), world.rank)
    result: dict[str, Any] = {}
    if not idle or world.rank < used:
        with Grid(comm, shape, transport=args.transport) as grid:
            require(peak_bytes(algorithm, plan, grid, args.dtype, args.device, args.check), comm)
            if chosen and world.rank == 0:
                print(chosen, file=sys.stderr, flush=True)
            made = operands(plan, grid, element(args.dtype), args.dtype, args.device)
            result = timed_and_counted(args, algorithm, plan, *made)
    sleep_until_all_are_here(world)
    return result


def timed_and_counted(args: argparse.Namespace, algorithm: Any, plan: Any, a: Any, b: Any, c: Any) -> dict[str, Any]:
    """Time a reused executor; count its words, messages and workspace; with --check, compare its result; collective."""
    from ..bench.clock import Clock
    from ..bench.machine import threads_of_rank
    from ..bench.products import Problem, ProductEntry, row_of
    from ..comm.device.select import settle
    from ..comm.nodes import Nodes

    grid, old, factors = a.grid, c.block.copy(), (scalar(args.alpha, args.dtype), scalar(args.beta, args.dtype))
    grid.ledger.reset_peak()
    executor = algorithm.executor(plan, grid)
    seconds: list[float] = []
    clock = Clock(grid)

    def once() -> None:
        executor.run(a.block, b.block, c.block, *factors)
        settle(c.block)

    for _ in range(args.repeat + 1):
        c.block[...] = old
        settle(c.block)
        with grid.ledger.watch() as moved:
            seconds += clock.spans(once)
    peak = grid.ledger.workspace_peak
    if args.trace is not None or args.nvtx:
        c.block[...] = old
        settle(c.block)
        show_once(args, clock, once)
    on_device = args.device == "cuda"
    costs = algorithm.volume(plan, grid.shape, args.dtype, grid.staged, on_device)
    words, messages, workspace = (grid.comm.allgather(value) for value in (moved.words, moved.messages, peak))
    serial_seconds: list[float] = []
    error = relative_error(args, plan, c, serial_seconds) if args.check else None
    problem = Problem(args.m, args.n, args.k, args.form, args.dtype, args.device)
    options = {} if args.panel is None else {"panel": args.panel}
    entry = ProductEntry(algorithm.name, grid.shape, problem, options, args.grid is None and args.algorithm is None)
    counted = {
        "threads": max(grid.comm.allgather(threads_of_rank())),
        "cores": Nodes.of(grid.comm).total_cores,
        "words_per_rank": max(words),
        "words_per_rank_formula": costs.max_words,
        "words_mean": sum(words) / len(words),
        "messages_per_rank": max(messages),
        "workspace_bytes": max(workspace),
        "workspace_bytes_formula": max(cost.workspace for cost in costs.costs()) * a.block.itemsize,
        "relative_error": error,
        **({"serial_seconds": median(serial_seconds)} if serial_seconds else {}),
    }
    return row_of(entry, seconds[1:], counted)


def show_once(args: argparse.Namespace, clock: Any, once: Callable[[], None]) -> None:
    """Run the product once more, with a trace and with NVTX ranges as the options ask; collective."""
    from ..comm.profile.trace import Trace, write

    ledger, whole = clock.grid.ledger, Trace()

    def run() -> None:
        with ledger.run("product"):
            once()

    show(ledger, lambda: clock.spans(run), whole, ranges_for(args))
    if args.trace is not None:
        write(args.trace, whole, clock.grid.comm)


def scalar(value: float, dtype: str) -> float | int:
    """α or β as a scalar for `dtype`: whole numbers become int for integer dtypes.

    >>> scalar(2.0, "int32"), scalar(2.0, "float64")
    (2, 2.0)
    """
    return int(value) if dtype.startswith("int") and value == int(value) else value


@quiet
def relative_error(args: argparse.Namespace, plan: Any, c: Any, serial_seconds: list[float]) -> float:
    """‖C − C_serial‖ / ‖C_serial‖ (Frobenius) on rank 0, 0 on other ranks; collective.

    Appends the times of the serial product, which runs on all cores while the other ranks sleep, to `serial_seconds`. Memory:
    rank 0 holds A, B and C as a whole.
    """
    from ..bench.clock import sleep_until_all_are_here
    from ..comm.device.arrays import to_host

    whole, error = to_host(c.to_global()), 0.0
    if c.grid.rank == 0:
        wide = np.float32 if args.dtype in HALVES else np.dtype(args.dtype).type
        shapes = (plan.a_shape, plan.b_shape, plan.c_shape)
        a, b, old = (whole_operand(rows, columns, args.dtype).astype(wide) for rows, columns in shapes)
        product = serial_product(op(a, args.form[0]), op(b, args.form[1]), args.repeat, serial_seconds)
        want = args.alpha * product + args.beta * old
        error = float(np.linalg.norm(whole.astype(want.dtype) - want) / (np.linalg.norm(want) or 1.0))
    sleep_until_all_are_here(c.grid.comm)
    return error


def op(array: np.ndarray, letter: str) -> np.ndarray:
    """op of an operand: as it is (n), transposed (t) or conjugate transposed (c)."""
    return array if letter == "n" else array.T if letter == "t" else array.T.conj()


def element(dtype: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """A function of row and column indices, from which every rank makes its block of the same operand without communication.

    Values are whole numbers for integer dtypes.
    """

    def value(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        real = np.sin(0.37 * rows + 1.3) * np.cos(0.11 * columns) + 0.1 * np.sin((rows * 7 + columns * 3) % 101)
        if dtype.startswith("complex"):
            return real + 1j * np.cos(0.23 * rows - 0.29 * columns)
        return np.rint(9 * real) if dtype.startswith("int") else real

    return value


def whole_operand(rows: int, columns: int, dtype: str) -> np.ndarray:
    """The whole operand [rows, columns], with the values of `element`."""
    return element(dtype)(np.arange(rows)[:, None], np.arange(columns)[None, :]).astype(numpy_dtype(dtype))


def serial_product(left: np.ndarray, right: np.ndarray, repeat: int, seconds: list[float]) -> np.ndarray:
    """left·right by numpy with one thread per core; appends the times of `repeat` runs, after a warm-up run, to `seconds`."""
    product = np.empty((left.shape[0], right.shape[1]), left.dtype)
    with on_all_cores(), threadpool_limits(limits=usable_cores(), user_api="blas"):
        for _ in range(repeat + 1):
            start = time.perf_counter()
            np.matmul(left, right, out=product)
            seconds.append(time.perf_counter() - start)
    del seconds[0]
    return product


def table(result: dict[str, Any]) -> str:
    """The result as text, one fact per line."""
    from ..bench.series import in_ranks

    low, middle, high = (1e3 * result["seconds"][name] for name in ("min", "median", "max"))
    formula = result["words_per_rank_formula"]
    lines = [
        f"{result['label']}, {result['m']}×{result['n']}×{result['k']} {result['form']} {result['dtype']}, "
        f"{in_ranks(result['ranks'])}",
        f"time      {middle:.2f} ms (min {low:.2f}, max {high:.2f}), {result['gflops']:.1f} Gflop/s",
        f"words     {result['words_per_rank']:,} per rank (formula {formula:,}), mean {result['words_mean']:,.1f}",
        f"messages  {result['messages_per_rank']} per rank",
        f"workspace {result['workspace_bytes']:,} bytes per rank (formula {result['workspace_bytes_formula']:,})",
    ]
    if result["relative_error"] is not None:
        serial = 1e3 * result["serial_seconds"]
        lines.append(f"error     {result['relative_error']:.2e} against a serial product ({serial:.2f} ms)")
    return "\n".join(lines)
