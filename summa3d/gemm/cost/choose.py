"""Choose algorithm and grid for a shape and rank count: enumerate all, compare predicted times, give the reason.

Every rank makes the same choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ...columns import aligned, counted
from ...comm.grid import Grid
from ...comm.topology import describe
from ...dtypes import Dtype, dtype_of
from ...errors import ConfigError, ShapeError
from ..algorithms import registry
from ..algorithms.checks import is_whole
from ..pieces.timing import best_pieces, predicted
from .machine import Machine
from .mean import Mean, lower_bound

if TYPE_CHECKING:
    from mpi4py import MPI

AWKWARD = 1.15
"""A rank count whose best grid moves more than this times the lower bound is awkward: fewer ranks are looked at too."""
ALIKE = 1.10
"""Predicted seconds within this factor are alike; of rank counts that are alike, the one with the fewest words is taken."""
EVERY_COUNT = 256
"""Up to this many ranks every smaller count down to half is looked at, beyond it the largest sixteenth, and no more than this."""
PANEL_WIDTHS = (256, 64)
"""Panel widths to fall back on when a memory limit forbids panels as wide as the splits allow."""
SHOWN = 8
HEADINGS = ("", "algorithm and grid", "ranks", "mean words", "÷ bound", "messages", "workspace bytes", "seconds")


@dataclass(frozen=True)
class Candidate:
    """One algorithm on one grid. Words are those that a rank receives."""

    algorithm: str
    grid: dict[str, int]
    ranks: int
    plan: Any
    mean: Mean
    dtype: Dtype
    machine: Machine

    @property
    def words(self) -> float:
        """Mean over the ranks in use."""
        return float(self.mean.words)

    @property
    def pieces(self) -> int:
        """Into how many pieces messages are cut."""
        return getattr(self.plan, "pieces", 1)

    @property
    def messages(self) -> float:
        """Mean over the ranks in use."""
        return float(self.mean.messages * self.pieces)

    @cached_property
    def seconds(self) -> float:
        """Predicted for the busiest rank: its products at the speed of their shape, what it receives, and its sums.

        In pieces, as much of that as the schedule of the pieces takes of its own seconds in one.
        """
        return self.in_one_piece * self.share_of_one

    @cached_property
    def share_of_one(self) -> float:
        """Seconds in the plan's pieces ÷ those in one."""
        if self.pieces == 1:
            return 1.0
        at, rest = dict.fromkeys(self.grid, 0), (self.dtype, self.machine)
        return predicted(self.plan, self.grid, at, *rest) / predicted(replace(self.plan, pieces=1), self.grid, at, *rest)

    def in_pieces(self, memory_limit: int | None) -> Candidate:
        """The candidate in the pieces of fewest predicted seconds; itself in one node's memory, or in panels of a given width."""
        if self.machine.node or "pieces" not in registry.ALGORITHMS[self.algorithm].options or getattr(self.plan, "panel", None):
            return self
        count = best_pieces(self.plan, self.grid, self.dtype, self.machine)
        result = replace(self, plan=replace(self.plan, pieces=count))
        return self if memory_limit is not None and result.workspace_bytes > memory_limit else result

    @cached_property
    def in_one_piece(self) -> float:
        """Predicted seconds where nothing is cut into pieces."""
        mean, crowding = self.mean, self.machine.cluster.crowding(self.ranks)
        sizes = zip(self._extents(), (mean.m, mean.n, mean.k), strict=True)
        m, n, k = (_largest(extent, part) for extent, part in sizes)
        imbalance = max(1.0, m * n * k / (mean.m * mean.n * mean.k)) if m * n * k else 1.0
        item = self.machine.product(m, n, k, self.dtype)
        reduced, rest = float(mean.reduced) * imbalance, (mean.messages, self.dtype, self.ranks)
        if self.machine.node and registry.ALGORITHMS[self.algorithm].reads_in_place:
            moved = self.machine.node_transfer(self._copied_words(), reduced, *rest)
            collectives: float = sum(size > 1 for size in self.grid.values())  # each waits once, however many members it has
        else:
            moved, collectives = self.machine.transfer(float(mean.gathered) * imbalance, reduced, *rest), mean.messages
        return crowding * (mean.products * item + moved + self.machine.waits(collectives))

    def _copied_words(self) -> float:
        """Words of A and B that a rank of the cuboid copies into slots, where the others read them."""
        plan = self.plan
        return (plan.m * plan.k * (self.grid[plan.y] > 1) + plan.k * plan.n * (self.grid[plan.x] > 1)) / self.ranks

    def _extents(self) -> tuple[int, int, int]:
        plan = self.plan
        return (plan.n, plan.m, plan.k) if plan.by_transpose else (plan.m, plan.n, plan.k)

    @cached_property
    def workspace_bytes(self) -> int:
        """Peak workspace of the rank that needs most: one of those with the lowest or highest indices."""
        staged = self.grid if self.machine.node else ()
        volume = registry.ALGORITHMS[self.algorithm].volume(self.plan, self.grid, self.dtype.name, staged)
        corners = product(*(sorted({0, min(1, size - 1), size - 1}) for size in self.grid.values()))
        return self.dtype.nbytes * max(volume.workspace_of(dict(zip(self.grid, corner, strict=True))) for corner in corners)

    @cached_property
    def max_words(self) -> int:
        """Words of the rank that receives most."""
        words: int = registry.ALGORITHMS[self.algorithm].volume(self.plan, self.grid, self.dtype.name).max_words
        return words

    @property
    def even(self) -> bool:
        """Return whether A, B and C are each spread over all ranks, no element on two."""
        return all(size == 1 or axis in self.plan.split_by_all for axis, size in self.grid.items())

    def __str__(self) -> str:
        panel = getattr(self.plan, "panel", None)
        pieces = f" in {self.pieces} pieces" if self.pieces > 1 else ""
        return f"{self.algorithm} {describe(self.grid)}" + (f" panel {panel}" if panel else "") + pieces


@dataclass(frozen=True)
class Choice:
    """The candidate taken for a product, the best of the others, and why. Printing it shows the table."""

    best: Candidate
    others: list[Candidate]
    ranks: int
    bound: float
    why: str
    shape: tuple[int, int, int] = field(kw_only=True)

    # What the candidate taken says, and the ranks that it leaves out.
    algorithm = property(attrgetter("best.algorithm"), doc="The name of the algorithm.")
    grid = property(attrgetter("best.grid"), doc="Axis → size.")
    plan = property(
        attrgetter("best.plan"), doc="The plan to run, by `registry.ALGORITHMS[choice.algorithm].executor(plan, grid)`."
    )
    pieces = property(attrgetter("best.pieces"), doc="Into how many pieces messages are cut.")
    used = property(attrgetter("best.ranks"), doc="Ranks in use; the others idle.")
    idle = property(lambda self: self.ranks - self.used, doc="Ranks that are left out.")
    words = property(attrgetter("best.words"), doc="Words that a rank in use receives, on average.")
    max_words = property(attrgetter("best.max_words"), doc="Words of the rank that receives most.")
    messages = property(attrgetter("best.messages"), doc="Messages that a rank in use receives, on average.")
    workspace_bytes = property(attrgetter("best.workspace_bytes"), doc="Peak workspace of the rank that needs most.")
    seconds = property(attrgetter("best.seconds"), doc="Predicted time of the busiest rank.")

    def place(self, comm: MPI.Intracomm) -> Grid:
        """The grid on the first ranks of `comm`; those that idle are outside it."""
        return Grid(comm, self.grid, ranks=range(self.used))

    def __str__(self) -> str:
        m, n, k = self.shape
        on = f"{self.best.dtype.name}, on {counted(self.ranks, 'rank')}"
        head = f"C {m}×{n} = op(A) {m}×{k} · op(B) {k}×{n}, form {self.plan.form}, {on}"
        rows: list[tuple[str, ...]] = [HEADINGS]
        rows += [self._row(candidate) for candidate in (self.best, *self.others)]
        for ranks in sorted({self.ranks, *(candidate.ranks for candidate in (self.best, *self.others))}, reverse=True):
            bound = lower_bound(*self.shape, ranks)
            rows.append(("", "lower bound", str(ranks), f"{bound:,.0f}", "1.00" if bound else "-", "", "", ""))
        return "\n".join([head, f"takes {self.best}: {self.why}", *aligned(rows, left=(0, 1))])

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        bound = lower_bound(*self.shape, candidate.ranks)
        return (
            "→" if candidate is self.best else "",
            str(candidate),
            str(candidate.ranks),
            f"{candidate.words:,.0f}",
            f"{candidate.words / bound:.2f}" if bound else "-",
            f"{candidate.messages:,.0f}",
            f"{candidate.workspace_bytes:,}",
            f"{candidate.seconds:.3g}",
        )


def choose(
    m: int,
    n: int,
    k: int,
    ranks: int,
    dtype: Any = "float64",
    memory_limit: int | None = None,
    algorithm: str | None = None,
    form: str = "nn",
    machine: Machine | None = None,
) -> Choice:
    """The algorithm and the grid for C (m×n) = op(A) (m×k) · op(B) (k×n) on `ranks` ranks.

    Of the grids of one rank count, the fewest words win; at equal words, splitting m or n before k, then predicted time. All
    ranks are used where their grid comes within 1.15 of the communication lower bound. Where it does not (7, 11, 13, 31
    ranks), fewer are looked at too, down to half: of the counts within 10 % of the shortest predicted time, the one with the
    fewest words. On a machine that is one `node`, whose memory is read in place, words cost next to nothing: there the shortest
    predicted time wins, on all ranks. What is taken is cut into the pieces of fewest predicted seconds, by the latency and the
    rates of the description: into one on a machine that is one node.

    Parameters
    ----------
    memory_limit : bytes of workspace per rank, beside its blocks of A, B and C; None is no limit
    algorithm : a name, to choose the grid only; None takes all algorithms that spread every operand over all ranks, uncopied
    machine : what predicted times rest on, `Machine(load("here"))` where `summa3d bench calibrate` has measured this one; must be
        the same on all ranks

    Raises ShapeError for what is no size; ConfigError for an unknown algorithm or dtype, and for a memory limit that nothing
    meets, naming the smallest workspace; GridError for an algorithm that cannot use `ranks` ranks, naming those that can.
    """
    for name, value, least in (("m", m, 0), ("n", n, 0), ("k", k, 0), ("ranks", ranks, 1)):
        if not is_whole(value) or value < least:
            raise ShapeError(f"{name} is {value!r}; it must be a whole number, at least {least}.")
    if memory_limit is not None and not (is_whole(memory_limit) or isinstance(memory_limit, float)):
        raise ConfigError(f"memory_limit is {memory_limit!r}; it takes a number of bytes, such as {2**30} for 1 GiB.")
    names = list(registry.ALGORITHMS) if algorithm is None else [registry.algorithm(algorithm, ranks).name]
    search = Search((m, n, k), dtype_of(dtype), memory_limit, names, form, machine or Machine(), even=algorithm is None)
    bound = lower_bound(m, n, k, ranks)
    here = search.best_of(ranks)
    counts = [here[0]] if here else []
    awkward = not here or (here[0].mean.words > AWKWARD * bound and not search.machine.node)
    if awkward:
        fewer = range(ranks - 1, ranks // 2 if ranks <= EVERY_COUNT else ranks - min(ranks // 16, EVERY_COUNT), -1)
        counts += [result[0] for result in map(search.best_of, fewer) if result]
    if not counts:
        raise ConfigError(_nothing_fits(search, ranks))
    fastest = min(candidate.seconds for candidate in counts)
    alike = [candidate for candidate in counts if candidate.seconds <= ALIKE * fastest]
    best = min(alike, key=lambda candidate: (candidate.mean.words, -candidate.ranks))
    others = [candidate for candidate in here if candidate is not best][: SHOWN - 1]
    if best.ranks < ranks:
        others = (here[:3] + sorted((item for item in alike if item is not best), key=lambda item: item.seconds))[: SHOWN - 1]
    why = _reason(best, here, ranks, awkward, fastest)
    best, *others = (item.in_pieces(memory_limit) for item in (best, *others))
    if best.pieces > 1:
        why += f" In {best.pieces} pieces it takes {best.share_of_one:.0%} of the seconds of one."
    return Choice(best, others, ranks, bound, why, shape=(m, n, k))


@dataclass
class Search:
    """All candidates of a product within a memory limit."""

    shape: tuple[int, int, int]
    dtype: Dtype
    memory_limit: int | None
    names: list[str]
    form: str
    machine: Machine
    even: bool

    def best_of(self, ranks: int) -> list[Candidate]:
        """The candidates on exactly this many ranks that fit the limit, the best first."""
        result = sorted(self.candidates(ranks), key=_order_in_a_node if self.machine.node else _order)
        if self.memory_limit is None:
            return result
        return [item for item in result if item.workspace_bytes <= self.memory_limit]

    def candidates(self, ranks: int) -> Iterator[Candidate]:
        """Every algorithm on every grid; with a memory limit, in narrower panels too."""
        m, n, k = self.shape
        for name in self.names:
            rules = registry.ALGORITHMS[name]
            limited = self.memory_limit is not None and "panel" in rules.options
            widths: tuple[int | None, ...] = (None, *PANEL_WIDTHS) if limited else (None,)
            plans = [(width, rules.plan(self.form, m, n, k, **({"panel": width} if width else {}))) for width in widths]
            for grid, (width, plan) in product(rules.grids(ranks), plans):
                mean = rules.mean(self.form.replace("c", "t"), m, n, k, grid)
                if width and k:
                    mean = in_panels(mean, max(mean.products, -(-k // width)))
                candidate = Candidate(name, grid, ranks, plan, mean, self.dtype, self.machine)
                if candidate.even or not self.even:
                    yield candidate


def _order(candidate: Candidate) -> tuple[Any, ...]:
    """Fewest words; then fewest summed, so that m or n is split before k; then least time; then m before n."""
    return candidate.mean.words, candidate.mean.reduced, candidate.seconds, *(-size for size in candidate.grid.values())


def _order_in_a_node(candidate: Candidate) -> tuple[Any, ...]:
    """Least time; then fewest words; then m before n."""
    return candidate.seconds, candidate.mean.words, *(-size for size in candidate.grid.values())


def in_panels(mean: Mean, count: int) -> Mean:
    """The same products and words in `count` panels."""
    ratio = count / mean.products
    return mean._replace(messages=mean.messages * ratio, products=count, k=mean.k / ratio)


def _largest(extent: int, part: float) -> float:
    """The largest of the balanced parts whose mean is `part`."""
    return -(-extent // max(1, round(extent / part))) if part else 0


def _reason(best: Candidate, here: list[Candidate], ranks: int, awkward: bool, fastest: float) -> str:
    if best.ranks == ranks:
        if best.machine.node:
            return "the shortest predicted time in one node's memory, where gathered words are read in place."
        fewer = "; fewer ranks would move more or take longer" if awkward and ranks > 2 else ""
        return f"the fewest words of all grids{fewer}."
    idle = f"{ranks - best.ranks} of {counted(ranks, 'rank')} idle: "
    if not here:
        return idle + f"nothing on {counted(ranks, 'rank')} fits the memory limit."
    all_of_them, these = (f"{item.words:,.0f} words each, {item.seconds:.3g} s in one piece" for item in (here[0], best))
    if best.seconds > fastest:
        these += f" (within {ALIKE - 1:.0%} of the fastest, {fastest:.3g} s, the fewest words)"
    return idle + f"{best.ranks} would move {these}; all of them {all_of_them}."


def _nothing_fits(search: Search, ranks: int) -> str:
    smallest = min(search.candidates(ranks), key=lambda item: item.workspace_bytes)
    m, n, k = search.shape
    return (
        f"Nothing multiplies {m}×{k} by {k}×{n} {search.dtype.name} on {counted(ranks, 'rank')} "
        f"with a workspace of {search.memory_limit:,} bytes a rank.\n"
        f"  The smallest workspace is {smallest.workspace_bytes:,} bytes: {smallest}."
    )
