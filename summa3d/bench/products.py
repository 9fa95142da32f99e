"""Benchmark of products: algorithms and grids on the same ranks in interleaved rounds, and numpy's product beside them.

Executors are reused, and the operands are distributed before the first round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from threadpoolctl import threadpool_limits

from ..comm.device.select import placed, settle
from ..comm.grid import BaseGrid, Grid
from ..comm.nodes import Nodes
from ..comm.profile.nvtx import Ranges
from ..comm.profile.trace import Trace, write
from ..comm.topology import describe
from ..errors import ConfigError
from ..gemm.algorithms.registry import Algorithm, algorithm
from ..gemm.cost.choose import choose
from ..gemm.cost.machine import Machine
from ..gemm.matmul import matmul
from ..gemm.matrix import DistMatrix
from ..gemm.syrk import syrk
from ..launcher.runtime import on_all_cores
from .capacity import peak_bytes, require, serial_bytes
from .clock import Clock, sleep_until_all_are_here
from .machine import threads_of_rank
from .race import raced, show, split
from .series import same_problem
from .statistics import times_of

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN = 0.3  # seconds after which OpenBLAS's idle threads, which spin for 2^26 cycles after a product, leave the cores


Element = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The elements of a matrix at row and column indices."""


@dataclass(frozen=True)
class Problem:
    """The product C (m×n) = op(A) (m×k) · op(B) (k×n), on the host or on each rank's current CUDA device.

    >>> Problem(2, 3, 4).flops
    48
    """

    m: int
    n: int
    k: int
    form: str = "nn"
    dtype: str = "float64"
    device: str = "cpu"

    @property
    def flops(self) -> int:
        """Floating-point operations: 2mnk, or 8mnk for complex dtypes."""
        return (8 if self.dtype.startswith("complex") else 2) * self.m * self.n * self.k


@dataclass(frozen=True)
class ProductEntry:
    """An entry of the benchmark: an algorithm on a grid of the first ranks, with its options.

    `chosen` marks the library's own choice of algorithm and grid for `given` ranks, some of which it may leave idle.
    """

    algorithm: str
    grid: Mapping[str, int]
    problem: Problem
    options: Mapping[str, Any] = field(default_factory=dict)
    chosen: bool = False
    given: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks of the grid."""
        return prod(self.grid.values())

    @property
    def label(self) -> str:
        """The entry's name in tables: algorithm, grid and options; what is chosen for one rank is "serial"."""
        if self.chosen and self.ranks == 1:
            return "serial"
        extra = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([f"{self.algorithm} {describe(self.grid)}", *extra])


def fewest_words(algorithm: Algorithm, problem: Problem, ranks: int) -> dict[str, int]:
    """The grid of exactly `ranks` ranks on which the algorithm moves the fewest words per rank.

    Among grids of equal words, the one with the smallest reduction axis is taken.
    """

    def cost(grid: Mapping[str, int]) -> tuple[int, int, int]:
        plan = algorithm.plan(problem.form, problem.m, problem.n, problem.k)
        return algorithm.volume(plan, grid, problem.dtype).max_words, grid.get("z", grid.get("d", 1)), max(grid.values())

    return min(algorithm.grids(ranks), key=cost)


def own_choice(problem: Problem, ranks: int, machine: Machine) -> ProductEntry:
    """The algorithm and grid that the library chooses for this product on a machine, which may leave ranks idle."""
    choice = choose(problem.m, problem.n, problem.k, ranks, problem.dtype, form=problem.form, machine=machine)
    return ProductEntry(choice.algorithm, choice.grid, problem, chosen=True, given=ranks)


def operands(plan: Any, grid: BaseGrid, element: Element, dtype: str, device: str) -> list[DistMatrix]:
    """A, B and C of a product, as its plan has them on the grid, each made on the host and placed on the device."""
    made = [DistMatrix.from_function(element, shape, grid, layout, dtype) for layout, shape in plan.stored]
    for operand in made:
        operand.block = placed(operand.block, device)
    return made


class ProductRunner:
    """An entry of the benchmark with its distributed operands and its executor. Its constructor is collective over `world`.

    Parameters
    ----------
    factors : α and β
    values : the elements of A, B and C; those of a race are a cheap function
    raced : whether products may leave C as they find it; else each begins with the same C
    check : whether memory is left to compare C with a serial product
    transport : of device arrays
    """

    def __init__(
        self,
        entry: ProductEntry,
        world: MPI.Intracomm,
        factors: tuple[float, float] = (1.0, 0.0),
        values: Element | None = None,
        raced: bool = True,
        check: bool = False,
        transport: str | None = None,
    ) -> None:
        self.entry, self.ranks, self.factors, problem = entry, entry.ranks, factors, entry.problem
        if entry.ranks > world.size:
            raise ConfigError(f"{entry.label} needs {entry.ranks} ranks; {world.size} were started.")
        rules = algorithm(entry.algorithm)
        self.plan = rules.plan(problem.form, problem.m, problem.n, problem.k, **entry.options)
        check_grid = getattr(self.plan, "check_grid", None)
        if check_grid is not None:
            check_grid(entry.grid)
        self.here = world.rank < entry.ranks
        if self.here:
            self.comm = world.Create_group(world.Get_group().Incl(range(entry.ranks)))
            self.grid = Grid(self.comm, dict(entry.grid), transport=transport)
        need = peak_bytes(rules, self.plan, self.grid, problem.dtype, problem.device, check, raced) if self.here else 0
        require(need, world)
        if not self.here:
            return
        self.clock = Clock(self.grid)
        self.executor = rules.executor(self.plan, self.grid)
        self.a, self.b, self.c = operands(self.plan, self.grid, values or element, problem.dtype, problem.device)
        self._before = None if raced else self.c.block.copy()

    def begin(self) -> None:
        """Give C the elements that it begins with."""
        if self._before is not None:
            self.c.block[...] = self._before
            settle(self.c.block)

    def run(self) -> None:
        """Run one product and wait for its result; collective over the entry's ranks."""
        self.executor.run(self.a.block, self.b.block, self.c.block, *self.factors)
        settle(self.c.block)

    def seconds(self) -> float:
        """Seconds of one product, over all ranks of the entry; 0 on ranks outside its grid."""
        if not self.here:
            return 0.0
        self.begin()
        with self.grid.ledger.run(self.entry.label):
            return self.clock.spans(self.run)[0]

    def moved(self) -> dict[str, Any]:
        """Words and seconds of one product, the largest over ranks; all ranks' cores; both by the closed form; and `split`.

        Collective over the entry's ranks; {} on ranks outside its grid.
        """
        if not self.here:
            return {}
        self.begin()
        self.grid.ledger.reset_peak()
        with self.grid.ledger.watch() as account:
            self.run()
        node = sum(self.grid[axis].node_bytes or 0 for axis in self.grid.shape)
        mine = (account.words, account.messages, self.grid.ledger.workspace_peak, node, threads_of_rank())
        of_ranks = self.comm.allgather(mine)
        names = ("words_per_rank", "messages_per_rank", "workspace_bytes", "node_bytes", "threads")
        problem, grid, rules = self.entry.problem, self.grid, algorithm(self.entry.algorithm)
        costs = rules.volume(self.plan, grid.shape, problem.dtype, grid.staged, problem.device == "cuda")
        return {
            **{name: max(values) for name, values in zip(names, zip(*of_ranks, strict=True), strict=True)},
            "cores": Nodes.of(self.comm).total_cores,
            "words_per_rank_formula": costs.max_words,
            "words_mean": sum(words for words, *_ in of_ranks) / len(of_ranks),
            "workspace_bytes_formula": max(cost.workspace for cost in costs.costs()) * self.a.block.itemsize,
            "split": split(grid.ledger, self.seconds, self.comm),
        }

    def free(self) -> None:
        """Free the entry's grid and communicator; collective over the entry's ranks."""
        if self.here:
            self.grid.free()
            self.comm.Free()


class NumpyRunner:
    """numpy's product of the whole matrices with `threads` threads, on rank 0 only, while all other ranks sleep."""

    ranks = 0  # rank 0 computes the whole product, no rank a share

    def __init__(self, problem: Problem, world: MPI.Intracomm, threads: int) -> None:
        self.problem, self.threads, self.here = problem, threads, world.rank == 0
        require(serial_bytes(problem.m, problem.n, problem.k, problem.dtype) if self.here else 0, world)
        if self.here:
            self.a = whole(problem.m, problem.k, problem.dtype, problem.form[0] != "n")
            self.b = whole(problem.k, problem.n, problem.dtype, problem.form[1] != "n")
            self.c = np.empty((problem.m, problem.n), problem.dtype)

    def seconds(self) -> float:
        """Seconds of numpy's product on rank 0; 0 on other ranks."""
        if not self.here:
            return 0.0
        taken = numpy_seconds(self.a, self.b, self.c, self.threads)
        time.sleep(SPIN)
        return taken


def numpy_seconds(a: np.ndarray, b: np.ndarray, out: np.ndarray, threads: int) -> float:
    """Return the seconds of numpy's product with so many threads, free to use all cores."""
    with on_all_cores(), threadpool_limits(limits=threads, user_api="blas"):
        start = time.perf_counter()
        np.matmul(a, b, out=out)
        return time.perf_counter() - start


def element(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The elements of a matrix at row and column indices: a cheap function, equal on every rank."""
    return np.sin(0.37 * rows + 1.3) + np.cos(0.11 * columns)


def whole(rows: int, columns: int, dtype: str, transposed: bool = False) -> np.ndarray:
    """The whole matrix [rows, columns] with the values of `element`; `transposed`, its transpose lies in C order."""
    order: Literal["C", "F"] = "F" if transposed else "C"
    return element(np.arange(rows)[:, None], np.arange(columns)[None, :]).astype(dtype, order, copy=False)


def run_benchmark(
    entries: Sequence[ProductEntry],
    world: MPI.Intracomm,
    rounds: int,
    numpy_threads: int = 0,
    file: Path | None = None,
    ranges: Ranges | None = None,
    make: Callable[[ProductEntry, MPI.Intracomm], ProductRunner] = ProductRunner,
    ready: Callable[[], None] = lambda: None,
    further: Callable[[ProductRunner], Mapping[str, Any]] = lambda runner: {},
) -> dict[str, Any]:
    """Run the benchmark: in each round, every entry runs once; collective over `world`, complete on rank 0.

    Parameters
    ----------
    rounds : rounds that are timed, after a warm-up round that is not counted
    numpy_threads : threads of numpy's product, which runs in every round too; 0 leaves it out
    file : trace of one more round
    ranges : NVTX ranges, which show that round to a profiler
    make : makes the runner of an entry. ready : called once all are made, which had the memory
    further : further columns of a row, from its runner; collective over the entry's ranks

    Returns `rows` with min, median, max and all seconds, Gflop/s, and the largest words, messages and bytes of workspace over
    ranks, and `numpy`, the times of numpy for each problem.
    """
    runners = [make(entry, world) for entry in entries]
    ready()
    problems = dict.fromkeys(entry.problem for entry in entries) if numpy_threads else ()
    numpys = [NumpyRunner(problem, world, numpy_threads) for problem in problems]
    contenders: list[ProductRunner | NumpyRunner] = [*runners, *numpys]
    times = raced(contenders, rounds, world)
    if file is not None or ranges is not None:
        _show(runners, world, file, ranges)
    moved = []
    for runner in runners:
        moved.append({**runner.moved(), **(further(runner) if runner.here else {})})
        sleep_until_all_are_here(world)
        runner.free()
    counted = iter(times)
    rows = [row_of(entry, next(counted), amounts) for entry, amounts in zip(entries, moved, strict=True)]
    peers = [{**asdict(peer.problem), "threads": peer.threads, **timing(next(counted), peer.problem)} for peer in numpys]
    for row in rows:
        row["speed_over_numpy"] = next((speed_over(peer, row) for peer in peers if same_problem(row, peer)), None)
    return {"rows": rows, "numpy": peers}


def _show(runners: Sequence[ProductRunner], world: MPI.Intracomm, file: Path | None, ranges: Ranges | None) -> None:
    """Run one round of all entries with a trace and NVTX ranges; ranks outside an entry's grid sleep."""
    whole = Trace()
    for runner in runners:
        if runner.here:
            show(runner.grid.ledger, runner.seconds, whole, ranges)
        sleep_until_all_are_here(world)
    if file is not None:
        write(file, whole, world)


def row_of(entry: ProductEntry, seconds: list[float], moved: Mapping[str, Any]) -> dict[str, Any]:
    """The row of an entry in a result: its name and problem, its times, and what `moved` holds."""
    who = {"algorithm": entry.algorithm, "grid": dict(entry.grid), "options": dict(entry.options), "label": entry.label}
    return {
        **who,
        "chosen": entry.chosen,
        "ranks": entry.given or entry.ranks,
        **asdict(entry.problem),
        **timing(seconds, entry.problem),
        **moved,
    }


def timing(seconds: list[float], problem: Problem) -> dict[str, Any]:
    """The columns `seconds` and `gflops` of a row."""
    times = times_of(seconds)
    return {"seconds": times, "gflops": problem.flops / times["median"] / 1e9 if times["median"] else 0.0}


def speed_over(peer: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """The time of `peer` divided by the row's time: the median of the quotients of all rounds."""
    quotients = [its / own if own else 0.0 for its, own in zip(peer["seconds"]["all"], row["seconds"]["all"], strict=True)]
    return median(quotients)


def race_symmetric(
    a: DistMatrix, form: str, rounds: int, out_layout: str | None = None, objective: str = "seconds"
) -> dict[str, Any]:
    """Multiply a matrix with its own transpose, whole, packed, and as if it were two matrices, in interleaved rounds; collective.

    Returns the seconds of each round, the words of the busiest rank as the ledger has them, and the relative difference of the
    whole product from the general one.
    """
    twin = a.with_block(a.block.copy(), a.layout)
    whole = syrk(a, form, out_layout=out_layout, objective=objective)
    assert isinstance(whole, DistMatrix)
    acts: dict[str, Callable[[], Any]] = {
        "whole": lambda: syrk(a, form, out_layout=whole.layout, objective=objective),
        "general": lambda: matmul(a, twin, form, out_layout=whole.layout, objective=objective),
        "packed": lambda: syrk(a, form, storage="lower", objective=objective),
    }
    words, comm = {}, a.grid.comm
    for name, act in acts.items():
        with a.grid.ledger.watch() as moved:
            act()
        words[name] = max(comm.allgather(moved.words))
    clock, seconds = Clock(a.grid), {name: list[float]() for name in acts}
    for _ in range(rounds):
        for name, span in zip(acts, clock.spans(*acts.values()), strict=True):
            seconds[name].append(span)
    want = acts["general"]()
    difference = (whole - want).norm() / (want.norm() or 1.0)
    return {"seconds": seconds, "measured_words": words, "difference": difference}
