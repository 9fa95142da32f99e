"""The search: plans in the order of what they take at least, until no other can be among the best or the best of its family."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush, nsmallest
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ...cluster import Cluster
from ...columns import counted
from ...comm.topology import several
from ...dry.record import ENTER, LEAVE
from ...errors import ConfigError, GridError, LayoutError
from ..cells import BLOCK
from .bounds import Bounds
from .cells import PASSES
from .memory import Memory, memory
from .plans import FAMILIES, MemoryOption, Plan, PlanTable, Space, columns, less, refused, tiles
from .timing import Times

ProgressCallback = Callable[[int, int, int], None]
"""Is told how many plans are done, of how many, and how many cells have been traced."""
EVERY = 0.5
"""Seconds between two reports."""
TILE = ("tile", "grid.tile")
NEAR = 1.04
"""Plans whose estimate is within so much of the last one that is kept are simulated whole: it is at most so much too long."""
IN_PIECES = 3
"""So many of the fastest plans are priced in pieces, too, where their grids leave a node."""
AHEAD = 63
"""Entries of the heap that are looked at for cells to trace: the first levels, where the next ones are."""


@dataclass(frozen=True)
class Priced:
    """A plan, its seconds, its bytes, and what its time consists of (`terms`)."""

    plan: Plan
    seconds: float
    memory: Memory
    terms: dict[str, object] = field(default_factory=dict, compare=False)


@dataclass
class Found:
    """What a search found.

    best : the fastest plans, ascending. families : the best plan of each. pareto : plans priced that no other beats in both
    seconds and bytes. considered : how many plans were looked at, all of which divide evenly. rejected : (family, reason) → how
    many. limit : bytes of a rank.
    """

    space: Space
    cluster: Cluster
    limit: float
    best: list[Priced]
    families: dict[str, Priced]
    pareto: list[Priced]
    considered: int
    priced: int
    rejected: Counter[tuple[str, str]]


class PlanCandidate(NamedTuple):
    """A plan that waits for its turn, in the order of its least seconds: a row of the plans of a scheme, which saves so much.

    placements : the least seconds of each, where they are known.
    """

    floor: float
    number: int
    scheme: int
    row: int
    saving: MemoryOption
    placements: tuple[tuple[float, Plan], ...] = ()


@dataclass
class PlanSearch:
    """A search over `space` on a cluster, with `limit` bytes a rank; `top` plans are kept."""

    space: Space
    times: Times
    limit: float
    top: int
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    considered: int = 0
    done: list[tuple[float, Plan, Memory]] = field(default_factory=list)
    _kept: dict[Plan, float] = field(default_factory=dict)
    _best: dict[str, float] = field(default_factory=dict)
    _cutoff: float = float("inf")
    _waiting: list[PlanCandidate] = field(default_factory=list)
    _schemes: list[PlanTable] = field(default_factory=list)
    _failed: list[dict[MemoryOption, Any]] = field(default_factory=list)
    _known: dict[Plan, float] = field(default_factory=dict)
    _held: dict[Plan, Memory] = field(default_factory=dict)
    _bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        self._bounds = Bounds(self.times)

    def run(self, tell: ProgressCallback) -> Found:
        """Search. Raises ConfigError where no plan is left, with the reasons of each family."""
        for scheme, rows in enumerate(columns(self.space, self.rejected)):
            self._schemes.append(rows)
            self._failed.append({})
            for saving, there in rows.savings.items():
                self._failed[scheme][saving] = np.zeros(len(rows), bool)
                self._consider(scheme, np.flatnonzero(there & self._useful(scheme, saving)), saving)
        tell(0, self.considered, 0)
        told = time.monotonic()
        while self._waiting:
            item = heappop(self._waiting)
            if time.monotonic() > told + EVERY:
                told = time.monotonic()
                tell(self.considered - len(self._waiting), self.considered, self.times.store.traces)
            family = str(self._schemes[item.scheme].family[item.row])
            if self._hopeless(family, item.floor):
                self.rejected[family, "slower than the best by a lower bound"] += 1
            elif item.placements:
                self._trace_ahead(item)
                self._try(item)
            else:
                plan = self._schemes[item.scheme].plan(item.row, item.saving)
                placements = self._placements(plan)
                result = sorted(zip(self._bounds.placed(plan, placements), placements, strict=True), key=lambda pair: pair[0])
                heappush(self._waiting, item._replace(floor=max(item.floor, result[0][0]), placements=tuple(result)))
        tell(self.considered, self.considered, self.times.store.traces)
        if not self.done:
            raise ConfigError(nothing_fits(self.space, self.limit, self.times.cluster["device.memory"], self.rejected))
        return self._found()

    def _useful(self, scheme: int, saving: MemoryOption) -> Any:
        """Mask of the rows of a scheme for which a saving may be of use: all that save less do not fit."""
        return np.logical_and.reduce(
            [np.ones(len(self._schemes[scheme]), bool), *(self._failed[scheme][item] for item in less(saving))]
        )

    def _consider(self, scheme: int, at: Any, saving: MemoryOption, floor: float | None = None) -> None:
        """Let rows of a scheme that save so much wait for their turn by their least time, unless bounds rule them out.

        floor : a lower bound of it that is known.
        """
        rows, kept = self._schemes[scheme], at
        if self.space.fixed or self.space.least or self.space.most:
            reasons = np.array([self._refused(rows.plan(row, saving)) for row in at], str)
            for reason in sorted({*reasons.tolist()} - {""}):
                self._fail(scheme, at[reasons == reason], saving, f"not within {reason}")
            kept = at[reasons == ""]
        if len(kept):
            states, held = self._bounds.bytes(rows, kept, saving)
            self._fail(scheme, kept[states > self.limit], saving, "weights and their states alone do not fit")
            self._fail(scheme, kept[(held > self.limit) & (states <= self.limit)], saving, "memory, by a lower bound")
            kept = kept[held <= self.limit]
        if len(kept):
            floors = self._bounds.floor(rows, kept, saving).tolist() if floor is None else [floor] * len(kept)
            for number, (least, row) in enumerate(zip(floors, kept.tolist(), strict=True), self.considered):
                heappush(self._waiting, PlanCandidate(least, number, scheme, row, saving))
        self.considered += len(at)

    def _fail(self, scheme: int, at: Any, saving: MemoryOption, reason: str) -> None:
        """Reject rows that save so much."""
        self._failed[scheme][saving][at] = True
        for family, many in zip(*np.unique(self._schemes[scheme].family[at], return_counts=True), strict=True):
            self.rejected[str(family), reason] += int(many)

    def _save(self, candidate: PlanCandidate, reason: str) -> None:
        """Reject a plan, and consider those that save more memory, once none fits that saves less."""
        at, failed, fresh = np.array([candidate.row]), self._failed[candidate.scheme], {candidate.saving}
        self._fail(candidate.scheme, at, candidate.saving, reason)
        for saving, there in self._schemes[candidate.scheme].savings.items():
            if (
                there[candidate.row]
                and not fresh.isdisjoint(less(saving))
                and self._useful(candidate.scheme, saving)[candidate.row]
            ):
                self._consider(candidate.scheme, at, saving, candidate.floor)
                if failed[saving][candidate.row]:
                    fresh.add(saving)

    def _trace_ahead(self, first: PlanCandidate) -> None:
        """Let other processes trace what this plan and the next ones need: of a heap, the nearest of its first entries."""
        store = self.times.store
        if store.idle:
            for item in (first, *sorted(self._waiting[:AHEAD])):
                if item.placements and not self._hopeless(self._schemes[item.scheme].family[item.row], item.floor):
                    store.begin(item.placements[0][1].inner)

    @cached_property
    def _fixed_tiles(self) -> list[dict[str, int]]:
        return [several(tile) for key, tile in (self.space.fixed or {}).items() if key in TILE]

    @cached_property
    def _untiled(self) -> Space:
        """The space that is searched, whatever sub-grid a node holds."""
        return replace(self.space, fixed={key: value for key, value in (self.space.fixed or {}).items() if key not in TILE})

    def _refused(self, plan: Plan) -> str:
        """Keys of --fix and --limit that a plan without a tile, or all its placements, are not within; empty for nothing."""
        tiled = not self._fixed_tiles or self._placements(plan)
        return refused(self._untiled if tiled else self.space, plan)

    def _placements(self, plan: Plan) -> list[Plan]:
        """The plan with every sub-grid that a node may hold, or with the one that is fixed."""
        every = tiles(plan, self.space.nodes)
        return [item for item in every if all(several(dict(item.tile)) == tile for tile in self._fixed_tiles)]

    def _hopeless(self, family: str, seconds: float) -> bool:
        return seconds >= self._cutoff and seconds >= self._best.get(family, float("inf"))

    def _try(self, waiting: PlanCandidate) -> None:
        """Price a plan with each of its placements, as far as its bounds leave it a chance."""
        plan = waiting.placements[0][1]
        try:
            held = self.memory(plan)
        except (LayoutError, GridError, ConfigError) as error:
            self.rejected[plan.family, str(error).partition("\n")[0]] += 1
            return
        if held.total > self.limit:
            self._save(waiting, "memory")
            return
        seen = set()
        for floor, placement in waiting.placements:
            if self._hopeless(plan.family, floor):
                self.rejected[plan.family, "slower than the best by a lower bound"] += 1
                continue
            if (each := self.times.each(placement)) in seen:
                self.rejected[plan.family, "its placement loads the links as another's"] += 1
                continue
            seen.add(each)
            if self._hopeless(plan.family, self.times.estimate(placement, least=True)):
                self.rejected[plan.family, "slower than the best by counted operations"] += 1
                continue
            several = self._overlapped(placement, self.times.estimate)
            self.done += several if self.space.device == "cuda" else [next(several)]
            self._kept[placement] = seconds = self.done[-1][0]
            self._best[plan.family] = min(seconds, self._best.get(plan.family, float("inf")))
            if len(self._kept) >= self.top:
                self._cutoff = nsmallest(self.top, self._kept.values())[-1]

    def memory(self, plan: Plan) -> Memory:
        """The bytes of a plan's fullest rank, wherever its ranks lie."""
        plan = replace(plan, tile=())
        if plan not in self._held:
            self._held[plan] = memory(plan, *self.times.store.cells(plan.inner, plan.units), self.times.muon(plan))
        return self._held[plan]

    def _overlapped(self, plan: Plan, seconds_of: Callable[[Plan], float]) -> Iterator[tuple[float, Plan, Memory]]:
        """The plan, and the same with more and more behind arithmetic: as long as that gains, and fits."""
        least, best = float("inf"), plan.inner
        for more in (lambda inner: [inner], lambda inner: inner.in_pieces, lambda inner: inner.with_prefetch):
            for inner in more(best):
                plan = replace(plan, inner=inner)
                held = self.memory(plan)
                if held.total > self.limit or (seconds := seconds_of(plan)) >= least:
                    break
                least, best = seconds, inner
                yield seconds, plan, held
            if least == float("inf"):
                return

    def _found(self) -> Found:
        ranked = sorted(self._kept.items(), key=lambda item: (item[1], str(item[0])))
        chosen = [plan for plan, seconds in ranked if seconds <= NEAR * ranked[: self.top][-1][1]]
        for family in FAMILIES:
            chosen += [plan for plan, _ in ranked if plan.family == family][:1]
        fastest, on_devices = lambda item: (item.seconds, str(item.plan)), self.space.device == "cuda"
        best = sorted((self._simulated_with(plan, on_devices) for plan in dict.fromkeys(chosen)), key=fastest)
        if not on_devices:
            in_pieces = (self._simulated_with(item.plan, True) for item in best[:IN_PIECES])
            best = sorted([*in_pieces, *best[IN_PIECES:]], key=fastest)
        families = {item.plan.family: item for item in reversed(best)}
        families = {family: families[family] for family in FAMILIES if family in families}
        front: list[Priced] = []
        for seconds, plan, held in sorted(self.done, key=lambda item: (item[0], str(item[1]))):
            if not front or held.total < front[-1].memory.total:
                front.append(Priced(plan, seconds, held))
        told = self.considered, len(self.done), self.rejected
        return Found(self.space, self.times.cluster, self.limit, best[: self.top], families, front, *told)

    def _simulated_with(self, plan: Plan, overlap: bool) -> Priced:
        """A plan, or, with `overlap`, the plan with as much behind arithmetic as gains."""
        several = self._overlapped(plan, self._simulated)
        *_, (_, plan, held) = several if overlap else [next(several)]
        return self.priced(plan, held)

    def priced(self, plan: Plan, held: Memory) -> Priced:
        """A plan with its pipeline simulated, and its time term by term."""
        seconds, after = self._simulated(plan), self.times.step(plan).parts.after
        return Priced(plan, seconds, held, terms(plan, self.times, seconds - after))

    def _simulated(self, plan: Plan) -> float:
        if plan not in self._known:
            self._known[plan] = self.times.seconds(plan)
        return self._known[plan]


def terms(plan: Plan, times: Times, pipeline: float) -> dict[str, Any]:
    """The seconds of a step on the busiest rank of the pipeline, by what they are spent on.

    `bubble` is what it waits for: other stages, and the slowest node.

    pipeline : seconds of all forwards and backwards.
    """
    spans, step = times.spans(plan), times.step(plan)
    after = times.after(plan)

    def work(rank: int) -> dict[tuple[str, str], int]:
        many = dict(zip((BLOCK, ENTER, LEAVE), step.works[rank], strict=False))
        return {(cell, way): count * plan.micro_batches for cell, count in many.items() for way in PASSES}

    def busy(rank: int) -> float:
        return sum(spans[key].seconds * many for key, many in work(rank).items())

    rank = max(range(plan.pp), key=busy)
    axes: dict[str, float] = {}
    hidden = 0.0
    for key, many in work(rank).items():
        for axis, seconds in spans[key].exposed.items():
            axes[axis] = axes.get(axis, 0.0) + many * seconds
        hidden += many * sum(spans[key].hidden.values())
    compute = sum(spans[key].compute * many for key, many in work(rank).items())
    sends = step.works[rank][3] * plan.micro_batches * step.parts.send
    return {
        "compute": compute,
        "axis": dict(sorted(axes.items())),
        "p2p": sends,
        "bubble": max(0.0, pipeline - busy(rank) - sends),
        "dp": after.replicas,
        "optimizer": after.optimizer,
        "hidden": hidden,
    }


def flops_of(space: Space, recomputed: bool = False) -> float:
    """Operations of a step: the model's, as MFU counts them, or with what `full` recomputes, as HFU does."""
    model = space.model
    weights = sum(rows * columns for rows, columns in model.matrices)
    block = (8 if recomputed else 6) * model.sequence * weights + (16 if recomputed else 12) * model.sequence**2 * model.hidden
    return float(space.batch * (model.layers * block + 6 * model.sequence * model.hidden * model.vocabulary))


def nothing_fits(space: Space, limit: float, whole: float, rejected: Counter[tuple[str, str]]) -> str:
    """Reason why no plan is left: each family's reasons, the most frequent first."""
    parts = []
    ordered = sorted(rejected.items(), key=lambda item: (FAMILIES.index(item[0][0]), -item[1], item[0][1]))
    for family, lines in groupby(ordered, key=lambda item: item[0][0]):
        parts.append(f"{family}: " + ", ".join(f"{reason} ({many})" for (_, reason), many in [*lines][:3]))
    size = f"{counted(space.ranks, 'rank')}, batch {space.batch}, {limit / 2**30:.3g} GiB a rank of {whole / 2**30:.3g}"
    return f"no plan fits {size}. " + "; ".join(parts) + "."
