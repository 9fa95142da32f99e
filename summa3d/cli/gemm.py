"""`summa3d gemm`: runs one distributed product; reports its time, words moved, workspace and error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.device.arrays import DEVICES, numpy_dtype, quiet
from ..dtypes import DTYPES, HALVES, dtype_of
from ..errors import ConfigError
from ..files import grid_of
from ..launcher.runtime import usable_cores
from .traces import add_trace_arguments, check_positive, check_trace_arguments, ranges_for

if TYPE_CHECKING:
    from ..bench.products import ProductEntry, ProductRunner
    from ..gemm.any_layout.plan import AnyPlan

FORMS = tuple(first + second for first in "ntc" for second in "ntc")
CHOOSES = "Choose by the times that are predicted for this described cluster."
PANEL_ALGORITHMS = "summa, tesseract and ca25d"
OPTIONS_OF = {"panel": PANEL_ALGORITHMS, "pieces": "cuboid, summa, tesseract, ca25d, oned-column and oned-row"}
"""Options of the command line that are an algorithm's, and the algorithms that take them."""


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
    parser.add_argument(
        "--pieces",
        type=pieces_of,
        metavar="N|auto",
        help="Cut what a rank sends to another node into N pieces, which travel behind arithmetic; auto takes the number of "
        f"fewest predicted seconds, as where the library chooses the grid. The default is 1. Of {OPTIONS_OF['pieces']}.",
    )
    parser.add_argument("--device", choices=DEVICES, help="Hold the operands there. The default is SUMMA3D_DEVICE, else cpu.")
    parser.add_argument("--transport", help="Use this transport for device arrays. The default is SUMMA3D_TRANSPORT, else auto.")
    parser.add_argument("--alpha", type=float, default=1.0, help="Multiply op(A)·op(B) by this factor.")
    parser.add_argument("--beta", type=float, default=0.0, help="Multiply C by this factor before the product is added.")
    parser.add_argument("--repeat", type=int, default=5, help="Time this many runs, after a warm-up run that is not counted.")
    parser.add_argument(
        "--check", action="store_true", help="Compare the result with a serial product on rank 0, and time that product too."
    )
    add_layout_arguments(parser)
    add_cluster_argument(parser, CHOOSES)
    add_trace_arguments(parser, "one more run")
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON line.")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of products whose operands' layouts are given."""
    from ..gemm.any_layout.search import OBJECTIVES

    for operand, lies in (("a", "A lies"), ("b", "B lies"), ("out", "C is left, by default in its cheapest layout")):
        parser.add_argument(f"--{operand}-layout", metavar="LAYOUT", help=f"Say where {lies}, as 'm:(x,y) k'. Needs --dry.")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, help="Take the plan of fewest predicted seconds (the default), or words. Needs --dry."
    )
    parser.add_argument(
        "--workspace",
        metavar="SIZE",
        help="Bound the workspace of each rank, as 64MiB: what must move comes in panels of k. Needs --dry.",
    )
    parser.add_argument(
        "--dry", action="store_true", help="Print the plan of a product of these layouts on --grid, and multiply nothing."
    )
    parser.add_argument(
        "--symmetric",
        action="store_true",
        help="Multiply one matrix, in --a-layout (by default m:x k:y), with its own transpose (form nt, or tn, nc or cn); "
        "compare plan and times with the general product's.",
    )


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


def pieces_of(text: str) -> int | str:
    """Parse the text of --pieces. Raises argparse.ArgumentTypeError for what is neither a number nor `auto`."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of pieces nor auto")
    return text if text == "auto" else int(text)


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
    if args.symmetric:
        return run_symmetric(args)
    if args.dry:
        return run_dry(args)
    for option in ("a_layout", "b_layout", "out_layout", "objective", "workspace"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is of a plan that is printed: it needs --dry.")
    from mpi4py import MPI

    from ..bench.machine import machine as machine_facts
    from ..bench.predicted import of_product
    from ..comm.device.select import requested_device, take_device
    from ..comm.transport.select import requested

    if args.cluster is not None and args.grid is not None:
        raise ConfigError("--cluster helps to choose a grid, and --grid names one: leave one of them out.")
    check_positive(args, "m", "n", "k", "repeat")
    args.device = requested_device(args.device)
    requested(args.transport)
    check_trace_arguments(args, MPI.COMM_WORLD)
    if args.device == "cuda":
        take_device(MPI.COMM_WORLD)
    machine = machine_of(args.cluster, args.device, MPI.COMM_WORLD)
    entry, chosen = decided(args, MPI.COMM_WORLD, machine)
    facts = {"ranks": MPI.COMM_WORLD.size, "machine": machine_facts(MPI.COMM_WORLD, probe=False)}
    result = measure(args, entry, MPI.COMM_WORLD, chosen)
    predicted = {"predicted": of_product(entry, machine), "cluster": machine.cluster.name, "assumed": args.cluster is None}
    if MPI.COMM_WORLD.rank == 0:
        result = {**result, **predicted, **facts}
        print(json.dumps(result) if args.json else table(result), file=sys.stdout, flush=True)
    return 0


def run_dry(args: argparse.Namespace) -> int:
    """Print the plan of operands in the layouts of the command line, with the other compute layouts; returns the exit status.

    Raises ConfigError for what says nothing of a plan, and what `plan_any` raises.
    """
    from ..cluster import load
    from ..comm.grid import Place
    from ..comm.health.processes import launched_as
    from ..gemm.any_layout.planned import plan_any
    from ..gemm.cost.machine import Machine
    from ..plan.search.request import bytes_of

    for option in ("grid", "a_layout", "b_layout"):
        if getattr(args, option) is None:
            raise ConfigError(
                f"--dry prints the plan of --a-layout and --b-layout on --grid: --{option.replace('_', '-')} is missing."
            )
    for option in ("algorithm", "panel", "pieces", "check", "trace"):
        if getattr(args, option):
            raise ConfigError(f"--{option} is of products that run, and --dry multiplies nothing: leave one of them out.")
    machine = None if args.cluster is None else Machine(load(args.cluster))
    objective, layouts = args.objective or "seconds", (args.a_layout, args.b_layout)
    sizes, limit = (args.m, args.n, args.k), None if args.workspace is None else int(bytes_of(args.workspace, "--workspace"))
    place, dtype = Place(args.grid), args.dtype
    plan = plan_any(*layouts, *sizes, place, args.out_layout, args.form, dtype, objective, machine=machine, workspace=limit)
    launched = launched_as()
    if launched is None or launched[1] == 0:
        print(json.dumps(facts_of_plan(plan)) if args.json else plan, flush=True)
    return 0


def run_symmetric(args: argparse.Namespace) -> int:
    """Print the plan of a product of one matrix, and unless it is dry what `race_symmetric` measures; returns the exit status.

    Raises ConfigError for what is not of such a product, and what `plan_syrk` raises.
    """
    from ..cluster import load
    from ..comm.grid import Grid, Place
    from ..comm.health.processes import launched_as
    from ..gemm import DistMatrix, Machine, plan_syrk

    for option in ("algorithm", "panel", "check", "trace", "b_layout", "workspace"):
        if getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')} is not of a product of one matrix: leave it or --symmetric out.")
    if args.m != args.n:
        raise ConfigError(
            f"--symmetric multiplies one matrix with its own transpose: --m {args.m} and --n {args.n} must be equal."
        )
    form, world = args.form.replace("nn", "nt"), None
    if not args.dry:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        check_positive(args, "m", "k", "repeat")
        args.grid = args.grid or dict(zip("xy", MPI.Compute_dims(world.size, 2), strict=True))
    elif args.grid is None:
        raise ConfigError("--dry prints the plan on --grid: --grid is missing.")
    layout, place = args.a_layout or ("m:x k:y" if form[0] == "n" else "k:y m:x"), Place(args.grid)
    more = {"form": form, "dtype": args.dtype, "objective": args.objective or "seconds"}
    machine = None if args.cluster is None else Machine(load(args.cluster))
    plan = plan_syrk(layout, args.n, args.k, place, args.out_layout, machine=machine, **more)
    result = {"plan": plan.summary, **figures(plan), "c_layout": str(plan.general.c.layout), "general": figures(plan.general)}
    if world is not None:
        from ..bench.products import race_symmetric

        with Grid(world, args.grid) as grid:
            a = DistMatrix.from_function(element(args.dtype), plan.a.shape, grid, layout, numpy_dtype(args.dtype))
            result |= race_symmetric(a, form, args.repeat, args.out_layout, more["objective"])
    launched = launched_as()
    if world.rank == 0 if world is not None else launched is None or launched[1] == 0:
        text = [str(plan)]
        for name, times in result.get("seconds", {}).items():
            text.append(f"{name}: {1e3 * median(times):.2f} ms, most words of a rank {result['measured_words'][name]:,}")
        print(json.dumps(result) if args.json else "\n".join(text), flush=True)
    return 0


def figures(plan: Any) -> dict[str, Any]:
    """Words, messages, multiply-adds and seconds of a plan."""
    return {
        "words": plan.words,
        "max_words": plan.max_words,
        "max_multiply_adds": plan.max_multiply_adds,
        "messages": sum(map(plan.messages_of, range(len(plan.space)))),
        "predicted": plan.seconds,
    }


def facts_of_plan(plan: AnyPlan) -> dict[str, Any]:
    """The figures of a plan, words and workspace of the rank that has most, words and messages of all ranks together too."""
    ranks = range(len(plan.space))
    return {
        "plan": plan.summary,
        "compute_layout": plan.compute_layout,
        "panels": plan.panels,
        "c_layout": str(plan.c.layout),
        "words": plan.words,
        "max_words": plan.max_words,
        "messages": sum(map(plan.messages_of, ranks)),
        "workspace_bytes": plan.dtype.nbytes * plan.max_workspace,
        "seconds": plan.seconds,
        "bound": plan.bound,
        "others": [other._asdict() for other in plan.others],
    }


def decided(args: argparse.Namespace, comm: Any, machine: Any) -> tuple[ProductEntry, str]:
    """The run, and, where the library has chosen what the command line leaves open for `machine`, its reasons.

    Raises ConfigError for an axis or an option that the algorithm does not have.
    """
    from ..bench.products import Problem, ProductEntry
    from ..gemm.algorithms.registry import ALGORITHMS
    from ..gemm.algorithms.registry import algorithm as named
    from ..gemm.cost.choose import choose
    from ..gemm.pieces.timing import best_pieces

    if args.grid is None:
        for option, appliers in OPTIONS_OF.items():
            if getattr(args, option) is not None and args.algorithm is None:
                raise ConfigError(f"--{option} applies to {appliers} only. Name one of them with --algorithm.")
        name = None if args.algorithm is None else named(args.algorithm, comm.size).name
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
    options = {option: getattr(args, option) for option in OPTIONS_OF if getattr(args, option) is not None}
    for option in options:
        if option not in algorithm.options:
            raise ConfigError(f"--{option} applies to {OPTIONS_OF[option]} only (algorithm is {algorithm.name}).")
    if args.grid is None and not options and choice.pieces > 1:
        options["pieces"] = choice.pieces
    if options.get("pieces") == "auto":
        plan = algorithm.plan(args.form, args.m, args.n, args.k)
        options["pieces"] = best_pieces(plan, shape, dtype_of(args.dtype), machine)
    problem = Problem(args.m, args.n, args.k, args.form, args.dtype, args.device)
    return ProductEntry(algorithm.name, shape, problem, options, args.grid is None and args.algorithm is None), chosen


def measure(args: argparse.Namespace, entry: ProductEntry, world: Any, chosen: str = "") -> dict[str, Any]:
    """Run the product, and say before, on stderr, what was chosen, if it fits. Returns the row of the result; collective.

    The row is complete on rank 0. Ranks beyond the grid sleep, of which there are none where --grid names it.
    """
    from ..bench.products import ProductRunner, run_benchmark
    from ..comm.topology import Topology

    if args.grid is not None:
        Topology.checked(entry.grid).check_size(world.size)
    factors = scalar(args.alpha, args.dtype), scalar(args.beta, args.dtype)
    make = partial(
        ProductRunner, factors=factors, values=element(args.dtype), raced=False, check=args.check, transport=args.transport
    )

    def ready() -> None:
        if chosen and world.rank == 0:
            print(chosen, file=sys.stderr, flush=True)

    def checked(runner: ProductRunner) -> dict[str, Any]:
        if not args.check:
            return {"relative_error": None}
        runner.begin()
        runner.run()
        seconds: list[float] = []
        error = relative_error(args, runner.plan, runner.c, seconds)
        return {"relative_error": error, **({"serial_seconds": median(seconds)} if seconds else {})}

    result = run_benchmark([entry], world, args.repeat, 0, args.trace, ranges_for(args), make, ready, checked)
    row: dict[str, Any] = result["rows"][0]
    return row


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
    from ..bench.products import numpy_seconds

    product = np.empty((left.shape[0], right.shape[1]), left.dtype)
    seconds += [numpy_seconds(left, right, product, usable_cores()) for _ in range(repeat + 1)][1:]
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
        f"predicted {1e3 * result['predicted']:.2f} ms for {'the assumed ' * result['assumed']}cluster {result['cluster']}",
        f"words     {result['words_per_rank']:,} per rank (formula {formula:,}), mean {result['words_mean']:,.1f}",
        f"messages  {result['messages_per_rank']} per rank",
        f"workspace {result['workspace_bytes']:,} bytes per rank (formula {result['workspace_bytes_formula']:,}), "
        f"of the node's memory {result['node_bytes']:,}",
    ]
    if result["relative_error"] is not None:
        serial = 1e3 * result["serial_seconds"]
        lines.append(f"error     {result['relative_error']:.2e} against a serial product ({serial:.2f} ms)")
    return "\n".join(lines)
