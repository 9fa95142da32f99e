"""The plan of a symmetric product: plain data, exact for each rank, that says what moves; and the choice of the cheapest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from ...columns import aligned, counted
from ...comm.grid import BaseGrid
from ...dtypes import HALVES, Dtype, dtype_of
from ...errors import ConfigError
from ...layout.cyclic import Ownership
from ...layout.redistribute import Placement, Redistribution
from ..any_layout.plan import AnyPlan, Owned, PlannedWords
from ..any_layout.planned import plan_any
from ..any_layout.vectors import DealtParts, RangeParts, RankParts, RankSpace, overlap
from ..cost.machine import Machine
from .work import PAIRS, RING, GatheredParts, SymmetricWork, elements, lengths, pairs, ring

FORMS = {"n": "nt", "t": "tn", "c": "cn", **{form: form for form in ("nt", "tn", "nc", "cn")}}
"""What `syrk` takes, and the form of the product that it is: A·Aᵀ, Aᵀ·A, A·Aᴴ, Aᴴ·A."""


@dataclass(frozen=True, eq=False)
class SymmetricPlan(PlannedWords):
    """C (n×n) = op(A)·op(A)ᵀ, or ᴴ, of one matrix A: each pair of an element and its mirror image is computed once.

    A rank fetches the parts of rows that meet on it, makes blocks of C's half, adds them to those of its group, and owns a share
    of the sum. The shares are the packed result; `c` given, they go with their mirror images to C's layout.

    form : nt, tn, nc or cn. way : `ring`, A in parts over the axes of `x` and k over `y`; or `pairs`, over the square plane of
    `x` and `y`, k over `z` and `y` (work.py). general : the product that does not know that its operands are one matrix
    """

    form: str
    n: int
    k: int
    dtype: Dtype
    space: RankSpace
    a: Owned
    c: Owned | None
    way: str
    x: tuple[str, ...]
    y: tuple[str, ...]
    z: tuple[str, ...]
    machine: Machine
    general: AnyPlan

    @cached_property
    def work(self) -> SymmetricWork:
        """Products of each rank."""
        if self.way == RING:
            return ring(self.space, self.x, self.y, self.n, self.k)
        return pairs(self.space, self.x, self.y, self.z, self.n, self.k)

    @cached_property
    def shares(self) -> np.ndarray:
        """The boxes of C that each rank owns (`SymmetricWork.shares`)."""
        return self.work.shares()

    @property
    def turned(self) -> bool:
        """Return whether A is stored as k×n."""
        return self.form[0] != "n"

    @property
    def is_hermitian(self) -> bool:
        """Return whether C is op(A)·op(A)ᴴ of complex numbers."""
        return "c" in self.form

    @cached_property
    def fetch(self) -> Redistribution:
        """Move of A to the ranks that multiply it."""
        points = self.space.points
        source = Placement(self.a.layout, self.space.shape, points)
        return Redistribution(self.a.shape, source, GatheredParts(self.work, points, self.turned))

    # -- what it costs ------------------------------------------------------------------------------------------------------

    @cached_property
    def received(self) -> dict[str, np.ndarray]:
        """Words that each rank receives: of A, of the blocks that it adds, and of C."""
        work, held = self.work, self.space.held(self.a.layout, self.a.shape)
        kept: Any = 1
        for part, runs in zip(held[:: -1 if self.turned else 1], (work.rows, work.inner), strict=True):
            kept = kept * _within(part, runs).sum(0)
        sums = (work.summands - 1) * elements(self.shares).sum(0)
        result = {"a": lengths(work.rows).sum(0) * lengths(work.inner).sum(0) - kept, "sums": sums, "c": 0 * sums}
        if self.c is not None:
            rows, columns = self.space.held(self.c.layout, self.c.shape)
            across, along = self.shares[..., :2], self.shares[..., 2:]
            own = _within(rows, across) * _within(columns, along)
            own[1:] += (_within(rows, along) * _within(columns, across))[1:]
            result["c"] = rows.size * columns.size - own.sum(0)
        return result

    def multiply_adds_of(self, rank: int) -> int:
        """Multiply-adds of `rank`; all ranks together do n·(n+1)/2·k."""
        return int(self.work.multiply_adds()[rank])

    @property
    def max_multiply_adds(self) -> int:
        """Multiply-adds of the rank that does most."""
        return int(self.work.multiply_adds().max())

    def messages_of(self, rank: int) -> int:
        """Messages that `rank` receives: an all-to-all for each matrix that moves, and the sum, of pairs an all-to-all too."""
        ranks, moves = len(self.space), sum(bool(self.received[name].any()) for name in "ac")
        adds = (ranks if self.way == PAIRS else int(self.work.summands[rank])) - 1 if self.sums else 0
        return moves * (ranks - 1) + adds * bool(self.space.inside[rank])

    @property
    def sums(self) -> bool:
        """Return whether any block of C is made by several ranks, which add theirs."""
        return bool((self.work.summands > 1).any())

    def workspace_of(self, rank: int) -> int:
        """Words that `rank` allocates beside C, all counted as if held at once; a word of float32 for 16 bits counts as two."""
        wide, work = 2 if self.dtype.name in HALVES else 1, self.work
        read = int(lengths(work.rows)[:, rank].sum() * lengths(work.inner)[:, rank].sum())
        made, corner = elements(work.blocks[:, rank]).sum(), int(lengths(work.blocks[0, rank, :2])) ** 2
        moved = bool(self.received["a"].any()) * (read + self.fetch.workspace_of(rank))
        added = int(self.received["sums"][rank]) + (int(made) if self.way == RING and self.sums else 0)
        return moved + (wide > 1) * 2 * read + wide * (int(made) + corner + added) + 2 * int(self.received["c"][rank])

    @property
    def seconds(self) -> float:
        """Predicted for the busiest rank of each step."""
        latency = self.machine.cluster.link(len(self.space))[1]
        return self.steady_seconds + latency * max(map(self.messages_of, range(len(self.space))))

    @cached_property
    def steady_seconds(self) -> float:
        """The same without the latency of messages: arithmetic and words alone, which grow with the sizes."""
        machine, ranks, dtype = self.machine, len(self.space), self.dtype
        busiest = int(self.work.multiply_adds().argmax())
        inner = int(lengths(self.work.inner)[:, busiest].sum())
        local = 0.0
        for place, (r0, r1, c0, c1) in enumerate(self.work.blocks[:, busiest].tolist()):
            local += machine.product(r1 - r0, c1 - c0, inner, dtype) / (2 if place == 0 else 1)
        holders = max(1, int(np.count_nonzero(_size(self.space.held(self.a.layout, self.a.shape)))))
        a, sums, c = (self.received[name] for name in ("a", "sums", "c"))
        fetched = max(int(a.max()), int(a.sum()) // holders)
        moved = machine.transfer(fetched + int(c.max()), int(sums.max()), 0, dtype, ranks)
        return machine.cluster.crowding(ranks) * (local + moved)

    # -- text ---------------------------------------------------------------------------------------------------------------

    @property
    def summary(self) -> str:
        """One line on what moves."""
        parts = f"rows:({','.join(self.x)}) k:({','.join((*self.z, *self.y))})"
        words = {name: int(words.sum()) for name, words in self.received.items()}
        goal = "packed" if self.c is None else f"C completed in {self.c.layout} ({words['c']:,} words)"
        gathered, summed = f"A {self.a.layout} gathered ({words['a']:,} words)", f"half of C summed ({words['sums']:,} words)"
        return f"{self.way} by {parts}: {gathered}, {summed}, {goal}"

    def __repr__(self) -> str:
        goal = "packed" if self.c is None else f"C {self.c.layout}"
        axes = " ".join(f"{name}:({','.join(axes)})" for name, axes in (("x", self.x), ("y", self.y), ("z", self.z)))
        return f"SymmetricPlan({self.form} {self.n}×{self.n}×{self.k}, A {self.a.layout}, {goal}, by {self.way} {axes})"

    def __str__(self) -> str:
        ranks = f"{self.dtype.name}, on {counted(len(self.space), 'rank')}"
        head = f"C {self.n}×{self.n}, a product of form {self.form} of one matrix, k {self.k}, {ranks}"
        rows: list[tuple[str, ...]] = [("", "words", "most of a rank", "multiply-adds, most of a rank", "messages", "seconds")]
        compared: list[tuple[str, SymmetricPlan | AnyPlan]] = [(self.way, self), ("general", self.general)]
        for name, plan in compared:
            numbers = plan.words, plan.max_words, plan.max_multiply_adds, sum(map(plan.messages_of, range(len(self.space))))
            rows.append((name, *(f"{number:,}" for number in numbers), f"{plan.seconds:.3g}"))
        return "\n".join([head, self.summary, *aligned(rows, left=(0,))])


def _size(parts: list[RankParts]) -> np.ndarray:
    return np.asarray(parts[0].size * parts[1].size)


def _within(part: RankParts, runs: np.ndarray) -> np.ndarray:
    """Indices that each rank holds in each of its ranges [·, ranks, 2]."""
    ranges = RangeParts(runs[..., 0], runs[..., 1])
    if isinstance(part, DealtParts):
        return np.asarray(part.below(ranges.stop) - part.below(ranges.start))
    return overlap(part, ranges)


def planned(
    a_layout: Ownership | str,
    n: int,
    k: int,
    grid: BaseGrid,
    target: Ownership | str | None,
    form: str,
    dtype: Any,
    storage: str,
    objective: str,
    machine: Machine | None = None,
) -> SymmetricPlan:
    """The cheapest plan, of what was checked; `target` is C's layout, and of a packed half that of its completion."""
    number = dtype_of(dtype)
    if not number.name.startswith("complex"):
        form = form.replace("c", "t")
    general = plan_any(a_layout, a_layout, n, n, k, grid, target, form, dtype, objective, machine=machine)
    n, k = general.extents["m"], general.extents["k"]
    c = None if storage == "lower" else general.c
    return cheapest(form, n, k, number, general.a, c, general, objective)


def check_form(form: str) -> None:
    """Raise ConfigError for a form that is no symmetric product's."""
    if form not in FORMS:
        raise ConfigError(f"form {form!r} is no symmetric product's; forms: {', '.join(FORMS)}.")


def check_storage(storage: str, out_layout: Any = None) -> None:
    """Raise ConfigError for a storage that there is not, or an output layout of packed shares."""
    if storage not in ("full", "lower"):
        raise ConfigError(f"storage {storage!r} is not known; storages: full, lower.")
    if storage == "lower" and out_layout is not None:
        raise ConfigError(f"storage lower has no out_layout, which is {str(out_layout)!r}: leave it out, or call .full(layout).")


def cheapest(
    form: str, n: int, k: int, dtype: Dtype, a: Owned, c: Owned | None, general: AnyPlan, objective: str
) -> SymmetricPlan:
    """The plan of fewest predicted seconds, then words, then the first; or by words first."""
    (space,), machine = general.spaces, general.machine
    plans = [
        SymmetricPlan(form, n, k, dtype, space, a, c, way, x, y, z, machine, general)
        for way, (x, y, z) in _candidates(space, a, form)
    ]
    keys = [(round(plan.seconds * 1e12), plan.words) for plan in plans]
    order = 1 if objective == "seconds" else -1
    return plans[min(range(len(plans)), key=lambda number: keys[number][::order])]


def _candidates(space: RankSpace, a: Owned, form: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Ways and their axes: each axis in each role, in the grid's order and in that in which A has them."""
    held = [axis for axes in a.layout.dims[:: 1 if form[0] == "n" else -1] for axis in axes if axis in space.axes]
    names = list(dict.fromkeys([space.axes, (*held, *(axis for axis in space.axes if axis not in held))]))
    seen = set()
    for axes in names:
        for roles in product("xyz", repeat=len(axes)):
            given = [tuple(axis for axis, role in zip(axes, roles, strict=True) if role == item) for item in "xyz"]
            sides = [prod(space.shape[axis] for axis in item) for item in given[:2]]
            for way, fits in ((RING, not given[2]), (PAIRS, sides[0] == sides[1] > 1)):
                if fits and (way, *given) not in seen:
                    seen.add((way, *given))
                    yield way, given
