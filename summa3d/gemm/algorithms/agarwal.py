"""Agarwal's 3-D product on q×q×q ranks: operands on three faces of the cube, two broadcasts and a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array
from ...layout.layout import Layout
from .executor import Executor
from .plan import ProductPlan


@dataclass(frozen=True)
class AgarwalPlan(ProductPlan):
    """A product on a cube of ranks (i, j, l), axes x, y, z: A_il on (i,0,l), B_lj on (0,j,l), C_ij on (i,j,0).

    Transposed operands lie where the plain ones do. The other ranks hold empty blocks. Words per rank (mean), in every form:
    (q−1)(mk + kn + mn)/P.
    """

    x: str = "x"
    y: str = "y"
    z: str = "z"

    def layout_of(self, operand: str, names: str) -> Layout:
        """m:x k:z, k:z n:y and m:x n:y, root-only along the axis of the third dim."""
        axis_of, third = {"m": self.x, "n": self.y, "k": self.z}, {"a": self.y, "b": self.x, "c": self.z}[operand]
        return Layout((axis_of[names[0]],), (axis_of[names[1]],), root_only=(third,), names=names)

    def gradient_roles(self, dims: str) -> dict[str, str]:
        """The axes belong to dims, x to m, y to n, z to k, and follow them."""
        axis_of = {"m": self.x, "n": self.y, "k": self.z}
        return dict(zip("xyz", (axis_of[dim] for dim in dims), strict=True))

    @classmethod
    def grids(cls, ranks: int) -> list[dict[str, int]]:
        """The cube q×q×q, if `ranks` is a third power."""
        root = round(ranks ** (1 / 3))
        return [{"x": root, "y": root, "z": root}] if root**3 == ranks else []


def broadcast_layout(layout: Layout) -> Layout:
    """The layout once root-only blocks have been broadcast."""
    return Layout(*layout.dims, names=layout.names)


class Agarwal(Executor):
    """Broadcast A along y and B along x from their faces, multiply, reduce C along z onto its face.

    Source: Agarwal, Balle, Gustavson, Joshi and Palkar 1995.
    """

    plan: AgarwalPlan

    def _prepare(self) -> None:
        plan, grid = self.plan, self.grid
        self.x, self.y, self.z = grid[plan.x], grid[plan.y], grid[plan.z]
        self.a_whole, self.b_whole, self.c_whole = (
            broadcast_layout(layout).local_shape(shape, grid.shape, grid.coordinates) for layout, shape in plan.stored
        )

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """Broadcast A along y and B along x, multiply, reduce C along z onto its face."""
        a = self.workspace.widened("a", self._broadcast("a", a, self.a_whole, self.y))
        b = self.workspace.widened("b", self._broadcast("b", b, self.b_whole, self.x))
        hosts = self.z.index == 0
        partial = out if hosts else self.workspace.buffer("partial", self.c_whole, out)
        self.workspace.accumulate(a, b, self.plan.form, partial, alpha, beta if hosts else 0, self.workspace.scratch(partial))
        self.z.reduce(partial, into=partial)

    def _broadcast(self, name: str, block: Array, shape: tuple[int, ...], axis: Axis) -> Array:
        whole = block if axis.index == 0 else self.workspace.buffer(name, shape, block)
        return axis.broadcast(whole)
