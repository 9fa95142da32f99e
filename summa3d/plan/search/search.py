"""The search: plans in the order of what they take at least, until no other can be among the best or the best of its family."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

from ...cluster import Cluster
from ...dry.record import ENTER, LEAVE
from ...errors import ConfigError, GridError, LayoutError
from ..cells import BLOCK
from .cells import matrices
from .memory import Memory, least, least_saved, memory, reserve
from .plans import FAMILIES, Plan, Saving, Space, admits, next_savings, plans, tiles
from .store import Store
from .timing import PASSES, Times

Tell = Callable[[int, int, int], None]
"""Is told how many plans are done, of how many, and how many cells have been traced."""
EVERY = 0.5
"""Seconds between two reports."""


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
    traced: int
    read: int
    rejected: Counter[tuple[str, str]]


class Waiting(NamedTuple):
    """A plan that waits for its turn, in the order of its least seconds.

    placed : whether `floor` knows its placements. base : the plan that it saves memory of, by number
    """

    floor: float
    number: int
    placed: bool
    plan: Plan
    saving: Saving
    base: int


@dataclass
class Search:
    """A search over `space` on a cluster, with `limit` bytes a rank; `top` plans are kept."""

    space: Space
    times: Times
    limit: float
    top: int
    rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    considered: int = 0
    done: list[tuple[float, Plan, Memory]] = field(default_factory=list)
    _best: dict[str, float] = field(default_factory=dict)
    _cutoff: float = float("inf")
    _waiting: list[Waiting] = field(default_factory=list)
    _failed: dict[int, set[Saving]] = field(default_factory=dict)

    def run(self, tell: Tell) -> Found:
        """Search. Raises ConfigError where no plan is left, with the reasons of each family."""
        for plan in plans(self.space, self.rejected):
            self._consider(plan, (0, 0), self.considered)
        tell(0, self.considered, 0)
        told = time.monotonic()
        while self._waiting:
            one = heappop(self._waiting)
            plan = one.plan
            if time.monotonic() > told + EVERY:
                told = time.monotonic()
                tell(self.considered - len(self._waiting), self.considered, self.times.store.traces)
            if self._hopeless(plan, one.floor):
                self.rejected[plan.family, "slower than the best by a lower bound"] += 1
            elif one.placed:
                self._try(one)
            else:
                heappush(self._waiting, one._replace(floor=self.times.floor(plan, self._placements(plan)), placed=True))
        tell(self.considered, self.considered, self.times.store.traces)
        if not self.done:
            raise ConfigError(nothing_fits(self.space, self.limit, self.rejected))
        return self._found()

    def _consider(self, plan: Plan, saving: Saving, base: int) -> None:
        """Let a plan wait for its turn by its least time, unless bounds rule it out."""
        self.considered += 1
        if not admits(self.space, plan):
            self._save(plan, saving, base, "not within --fix and --limit")
        elif (states := least(plan)) > self.limit:
            self._save(plan, saving, base, "weights and their states alone do not fit")
        elif states + least_saved(plan, self.times.saved(plan)) > self.limit:
            self._save(plan, saving, base, "memory, by a lower bound")
        else:
            heappush(self._waiting, Waiting(self.times.floor(plan), self.considered, False, plan, saving, base))

    def _save(self, plan: Plan, saving: Saving, base: int, reason: str) -> None:
        """Reject a plan, and consider those that save more memory, once none fits that saves less."""
        self.rejected[plan.family, reason] += 1
        failed = self._failed.setdefault(base, set())
        failed.add(saving)
        for other, one in next_savings(plan, self.space.era, failed, saving):
            self._consider(one, other, base)

    def _placements(self, plan: Plan) -> list[Plan]:
        fixed = (self.space.fixed or {}).keys() & {"tile", "grid.tile"}
        return [plan] if fixed else [*tiles(plan, self.space.nodes)]

    def _hopeless(self, plan: Plan, seconds: float) -> bool:
        return seconds >= self._cutoff and seconds >= self._best.get(plan.family, float("inf"))

    def _try(self, waiting: Waiting) -> None:
        """Price a plan with each of its placements, as far as its bounds leave it a chance."""
        plan = waiting.plan
        try:
            cells, units = self.times.store.cells(plan.inner, plan.units)
        except (LayoutError, GridError, ConfigError) as error:
            self.rejected[plan.family, str(error).partition("\n")[0]] += 1
            return
        held = memory(plan, cells, units)
        if held.total > self.limit:
            self._save(plan, waiting.saving, waiting.base, "memory")
            return
        seen = set()
        for one in self._placements(plan):
            bound = self.times.closed(one, least=True)
            if bound in seen:
                self.rejected[plan.family, "its placement loads the links as another's"] += 1
                continue
            seen.add(bound)
            if self._hopeless(one, bound):
                self.rejected[plan.family, "slower than the best by counted operations"] += 1
                continue
            self._keep(self.times.closed(one), one, held)

    def _keep(self, seconds: float, plan: Plan, held: Memory) -> None:
        self.done.append((seconds, plan, held))
        self._best[plan.family] = min(seconds, self._best.get(plan.family, float("inf")))
        if len(self.done) >= self.top:
            self._cutoff = sorted(one for one, *_ in self.done)[self.top - 1]

    def _found(self) -> Found:
        done = sorted(self.done, key=lambda one: (one[0], str(one[1])))
        chosen = {plan: held for _, plan, held in done[: self.top]}
        for family in FAMILIES:
            chosen |= {plan: held for _, plan, held in [one for one in done if one[1].family == family][:1]}
        best = sorted((self.priced(plan, held) for plan, held in chosen.items()), key=lambda one: (one.seconds, str(one.plan)))
        families = {one.plan.family: one for one in reversed(best)}
        families = {family: families[family] for family in FAMILIES if family in families}
        front = [Priced(plan, seconds, held) for seconds, plan, held in front_of(done)]
        store = self.times.store
        counts = (self.considered, len(done), store.traces, store.read)
        return Found(self.space, self.times.cluster, self.limit, best[: self.top], families, front, *counts, self.rejected)

    def priced(self, plan: Plan, held: Memory) -> Priced:
        """A plan with its pipeline simulated, and its time term by term."""
        return Priced(plan, self.times.seconds(plan), held, terms(plan, self.times))


def search(
    space: Space,
    cluster: Cluster,
    top: int = 8,
    limit: float | None = None,
    store: Store | None = None,
    tell: Tell = lambda *state: None,
) -> Found:
    """The fastest plans of `space` on a cluster, the best of each family, and what the others failed by.

    limit : bytes of a rank; the device's memory less `reserve`, by default. Raises ConfigError where no plan is left.
    """
    whole = cluster["device.memory"]
    return Search(space, Times(cluster, store or Store()), whole - reserve(whole) if limit is None else limit, top).run(tell)


def front_of(done: Sequence[tuple[float, Plan, Memory]]) -> Iterable[tuple[float, Plan, Memory]]:
    """Of plans in the order of their seconds, those that need fewer bytes than all faster ones."""
    fewest = float("inf")
    for one in done:
        if one[2].total < fewest:
            fewest = one[2].total
            yield one


def terms(plan: Plan, times: Times) -> dict[str, object]:
    """The seconds of a step on the busiest rank of the pipeline, by what they are spent on; `bubble` is what it waits for."""
    spans, step = times.spans(plan), times.step(plan)
    after, last = times.after(plan), plan.pp - 1

    def work(rank: int) -> dict[tuple[str, bool], int]:
        many = {BLOCK: plan.layers_of(rank), ENTER: int(rank == 0), LEAVE: int(rank == last)}
        return {(cell, way): count * plan.micro_batches for cell, count in many.items() for way in PASSES}

    def busy(rank: int) -> float:
        return sum(spans[key].seconds * many for key, many in work(rank).items())

    rank = max(sorted({0, min(1, last), last}), key=busy)
    axes: dict[str, float] = {}
    hidden = 0.0
    for key, many in work(rank).items():
        for axis, seconds in spans[key].exposed.items():
            axes[axis] = axes.get(axis, 0.0) + many * seconds
        hidden += many * sum(spans[key].hidden.values())
    compute = sum(spans[key].compute * many for key, many in work(rank).items())
    ends = 2 * plan.chunks - (rank == 0) - (rank == last) if plan.pp > 1 else 0
    sends = 2 * 0.5 * ends * plan.micro_batches * step.parts.send
    pipeline = step.pipeline(times.cluster)
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
    weights = sum(rows * columns for rows, columns in matrices(model))
    block = (8 if recomputed else 6) * model.sequence * weights + (16 if recomputed else 12) * model.sequence**2 * model.hidden
    return float(space.batch * (model.layers * block + 6 * model.sequence * model.hidden * model.vocabulary))


def nothing_fits(space: Space, limit: float, rejected: Counter[tuple[str, str]]) -> str:
    """Why no plan is left: each family's reasons, the most frequent first."""
    parts = []
    ordered = sorted(rejected.items(), key=lambda one: (FAMILIES.index(one[0][0]), -one[1], one[0][1]))
    for family, lines in groupby(ordered, key=lambda one: one[0][0]):
        parts.append(f"{family}: " + ", ".join(f"{reason} ({many})" for (_, reason), many in [*lines][:3]))
    size = f"{space.ranks} ranks, batch {space.batch}, {limit / 2**30:.3g} GiB a rank"
    return f"no plan fits {size}. " + "; ".join(parts) + "."
