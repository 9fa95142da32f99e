"""Cannon's 2-D product on q×q ranks: a skew, then q−1 shifts around rings; no rank holds more than blocks of its own size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array
from ...comm.pending import Pending
from ...layout.layout import Layout, split_sizes
from ..local.blas import add
from ..pieces.slabs import multiply_in_slabs
from .executor import Executor
from .plan import ProductPlan
from .summa import normal
from .workspace import Workspace


@dataclass(frozen=True)
class CannonPlan(ProductPlan):
    """A product on q×q ranks, axes x and y; operands lie as rows:x columns:y, in every form. Rank (i, j), indices mod q:

    | form | step t multiplies | what moves, a step each | words received of A, B, C blocks |
    |---|---|---|---|
    | nn | A(i,l)·B(l,j), l = i+j+t | A along y, B along x | q−1+[i≠0], q−1+[j≠0], 0 |
    | nt | A(i,j)·B(l,j)ᵀ, l = i+j+1+t, into C(i,l) | B along x, C along y | 0, q−1+[j≠q−1], q−1+[i≠0] |
    | tn | A(i,l)ᵀ·B(i,j), l = i+j+1+t, into C(l,j) | A along y, C along x | q−1+[i≠q−1], 0, q−1+[j≠0] |
    | tt | (B·A) by nn, then one transpose | | |
    """

    x: str = "x"
    y: str = "y"

    transposes = True

    def layout_of(self, operand: str, names: str) -> Layout:
        """rows:x columns:y, as each is stored."""
        return Layout((self.x,), (self.y,), names=names)

    @classmethod
    def grids(cls, ranks: int) -> list[dict[str, int]]:
        """The square q×q, if `ranks` is a square number."""
        root = isqrt(ranks)
        return [{"x": root, "y": root}] if root**2 == ranks else []


class Cannon(Executor):
    """Cannon's algorithm: in nn A and B shift, in nt and tn one operand and the accumulating C. Source: Cannon 1969.

    Between nodes a step is multiplied slab by slab, so that MPI moves the shifts meanwhile.
    """

    plan: CannonPlan

    def _prepare(self) -> None:
        plan, form = self.plan, normal(self.plan.form)
        self.x, self.y = self.grid[plan.x], self.grid[plan.y]
        i, j, self.q = self.x.index, self.y.index, self.x.size
        m, n, k = (split_sizes(extent, self.q) for extent in (plan.m, plan.n, plan.k))
        if form == "nn":
            first, second = ("a", self.y, lambda at: (m[i], k[at])), ("b", self.x, lambda at: (k[at], n[j]))
        elif form == "nt":
            first, second = ("b", self.x, lambda at: (n[at], k[j])), ("c", self.y, lambda at: (m[i], n[at]))
        else:
            first, second = ("a", self.y, lambda at: (k[i], m[at])), ("c", self.x, lambda at: (m[at], n[j]))
        self.rings = Shifts(self.workspace, *first), Shifts(self.workspace, *second)

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """Skew, then q products with q−1 shifts; each shift is in flight during a product."""
        if self.q == 1:
            a, b = self.workspace.widened("a", a), self.workspace.widened("b", b)
            return self.workspace.accumulate(a, b, self.plan.form, out, alpha, beta, self.workspace.scratch(out))
        for axis in (self.x, self.y):
            axis.open_device(a)
        shift = self._shift_both if normal(self.plan.form) == "nn" else self._shift_sum
        shift(a, b, out, alpha, beta)

    def _shift_both(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """C stays. The next blocks of A and B are in flight during the product of the current ones."""
        along_y, along_x = self.rings
        first = self.x.index + self.y.index
        arrived = finish(along_y.begin(a, self.x.index, first), along_x.begin(b, self.y.index, first))
        scratch = self.workspace.scratch(out)
        for step in range(self.q):
            left, right = arrived
            last = step == self.q - 1
            coming = () if last else (along_y.shift(left, 1, first + step + 1), along_x.shift(right, 1, first + step + 1))
            self._multiply(along_y.widened(left), along_x.widened(right), out, alpha, beta if step == 0 else 1, scratch)
            arrived = finish(*coming)

    def _shift_sum(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """One operand stays. The next block of the other is in flight during a product, added to the shifted block of C."""
        moving, sums = self.rings
        a_moves = moving.name == "a"
        staying = self.workspace.widened("staying", b if a_moves else a)
        first = moving.axis.index + sums.axis.index + 1
        (block,) = finish(moving.begin(a if a_moves else b, sums.axis.index + 1, first))
        total = sums.fresh(first, out)
        for step in range(self.q):
            coming = () if step == self.q - 1 else (moving.shift(block, 1, first + step + 1),)
            if step > 0:
                (total,) = finish(sums.shift(total, 1, first + step))
            panel = moving.widened(block)
            operands = (panel, staying) if a_moves else (staying, panel)
            self._multiply(*operands, total, alpha, int(step > 0), self.workspace.scratch(total, sums.capacity))
            block = finish(*coming)[0] if coming else block
        (total,) = finish(sums.shift(total, -moving.axis.index, sums.axis.index))
        add(total, out, beta)

    def _multiply(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any, scratch: Array | None) -> None:
        """A step's product, in slabs where a shift may leave the node meanwhile."""
        form, whole = self.plan.form, self.q * prod(out.shape) * a.shape[1 if self.plan.form[0] == "n" else 0]
        inside = all(axis.node_bytes is not None for axis in (self.x, self.y))
        if inside:
            self.workspace.accumulate(a, b, form, out, alpha, beta, scratch)
        else:
            multiply_in_slabs(self.workspace, form, a, b, out, whole, alpha, beta, scratch)


Move = tuple[Array, list[Pending]]


class Shifts:
    """Blocks passed around an axis, between two buffers of workspace. `shape_of` gives the shape of the block with an index."""

    def __init__(self, workspace: Workspace, name: str, axis: Axis, shape_of: Callable[[int], tuple[int, int]]) -> None:
        self.workspace, self.name, self.axis, self.shape_of = workspace, name, axis, shape_of
        self.capacity = shape_of(0)[0] * shape_of(0)[1]  # larger blocks come first
        self.slot = 0

    def begin(self, block: Array, steps: int, index: int) -> Move:
        """Start the skew: exchange the rank's own block for the one with `index`."""
        self.slot = 0
        return self.shift(block, steps, index)

    def fresh(self, index: int, like: Array) -> Array:
        """The first buffer, in the shape of the block with `index`."""
        self.slot = 1
        return self.workspace.buffer(f"{self.name}0", self.shape_of(index % self.axis.size), like, self.capacity)

    def shift(self, block: Array, steps: int, index: int) -> Move:
        """Start receiving the block with `index` from `steps` members up and sending `block` as many down."""
        size, own = self.axis.size, self.axis.index
        if steps % size == 0:
            return block, []
        incoming = self.workspace.buffer(f"{self.name}{self.slot}", self.shape_of(index % size), block, self.capacity)
        self.slot = 1 - self.slot
        receive = self.axis.start_receive(incoming, (own + steps) % size)
        return incoming, [receive, self.axis.start_send(block, (own - steps) % size)]

    def widened(self, block: Array) -> Array:
        """`block` in the dtype that products are taken in: itself, or a float32 copy in workspace."""
        return self.workspace.widened(self.name, block, self.capacity)


def finish(*moves: Move) -> tuple[Array, ...]:
    """Wait for the moves; returns the blocks that have arrived."""
    for _, pending in moves:
        for communication in pending:
            communication.wait()
    return tuple(block for block, _ in moves)
