"""The load-balanced 3-D product on any X×Y×Z grid: its plan and its executor.

Axes have roles: y gathers A, x gathers B, z reduces C. Any grid axes may take the roles, so the gradients of a product are
products of the same algorithm with permuted roles (dA: y↔z, dB: x↔z), and nothing is ever redistributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ...comm.arrays import Array
from ...comm.axis import Axis
from ...comm.pending import Completed, Pending
from ...comm.topology import grids_of
from ...errors import ShapeError
from ...layout.layout import Layout, split_sizes
from ..local.blas import scale
from .executor import Executor
from .plan import ProductPlan

WORTH_A_SLOT = 1 << 15
"""Bytes of a summand from which its copy into a slot of the node's memory costs more than taking the slot before the product."""


@dataclass(frozen=True)
class CuboidPlan(ProductPlan):
    """C (m×n) = op(A)·op(B), op(A) m×k, with grid axes in the roles x, y, z. Plain data.

    | form | A | B | C |
    |---|---|---|---|
    | nn | [m:(x,y), k:z] | [k:(z,x), n:y] | [m:(x,z), n:y] |
    | nt | [m:(x,y), k:z] | [n:(y,x), k:z] | [m:(x,z), n:y] |
    | tn | [k:(z,y), m:x] | [k:(z,x), n:y] | [m:(x,z), n:y] |
    | tt | [k:(z,y), m:x] | [n:(y,x), k:z] | [m:(x,z), n:y] |

    That is with every fine split on dim 0 (rows), so that each gather and scatter is contiguous in memory. `a_fine`, `b_fine`,
    `c_fine` = 1 put it on dim 1 (columns) of the operand instead, for the same words: `b_fine=1` is the storage of the 3-D paper,
    B [k:z, n:(y,x)]. c splits as t does. Raises ShapeError for another fine dim.
    """

    x: str = "x"
    y: str = "y"
    z: str = "z"
    a_fine: int = 0
    b_fine: int = 0
    c_fine: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("a_fine", "b_fine", "c_fine"):
            if getattr(self, name) not in (0, 1):
                raise ShapeError(f"{name} is {getattr(self, name)}; the fine split lies on dim 0 (rows) or 1 (columns).")

    def layout_of(self, operand: str, names: str) -> Layout:
        """m:x, n:y and k:z, with the fine split by the axis of the third dim: y of A, x of B, z of C."""
        coarse = {"m": self.x, "n": self.y, "k": self.z}
        fine, dim = {"a": (self.y, self.a_fine), "b": (self.x, self.b_fine), "c": (self.z, self.c_fine)}[operand]
        rows, columns = coarse[names[0]], coarse[names[1]]
        return Layout(*(((rows, fine), (columns,)) if dim == 0 else ((rows,), (columns, fine))), names=names)

    def no_reduction(self, grid_shape: Mapping[str, int]) -> bool:
        """True where the reduction axis z has one member."""
        return grid_shape[self.z] == 1

    @staticmethod
    def grids(ranks: int) -> list[dict[str, int]]:
        """Every grid of these ranks."""
        return grids_of(ranks, ("x", "y", "z"))

    def check_grid(self, grid_shape: Any) -> None:
        """Any grid that has the three axes will do."""
        self.check_axes(grid_shape)


class Cuboid(Executor):
    """A plan bound to the axes of a grid: C = op(A)·op(B) by gathering A along y and B along x, and scatter-adding C along z.

    `run` moves [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ) words per rank (mean) in (Y−1)+(X−1)+(Z−1) messages; its workspace, the
    gathered A and B, the partial C and the Z parts to be summed, is allocated once. Where an axis has slots in the node's memory
    (comm/transport/node.py), a gather copies the rank's own block there and needs no workspace, and summands of C are computed
    and summed there.

    Gradients call the steps one by one: two products share one gather, and a reduce-scatter overlaps the next product.

    Source: Bian et al. 2021, Algorithm 1, on a cuboid instead of a cube.
    """

    plan: CuboidPlan

    def _prepare(self) -> None:
        plan, grid = self.plan, self.grid
        self.ledger = grid.ledger
        self.x, self.y, self.z = grid[plan.x], grid[plan.y], grid[plan.z]
        coarse = Layout((plan.x,), (plan.y,), (plan.z,))
        self.m, self.n, self.k = coarse.local_shape((plan.m, plan.n, plan.k), grid.shape, grid.coordinates)
        self.a_whole = (self.m, self.k) if plan.form[0] == "n" else (self.k, self.m)
        self.b_whole = (self.k, self.n) if plan.form[1] == "n" else (self.n, self.k)
        self.a_sizes = tuple(split_sizes(self.a_whole[plan.a_fine], self.y.size))
        self.b_sizes = tuple(split_sizes(self.b_whole[plan.b_fine], self.x.size))
        self.c_sizes = tuple(split_sizes((self.m, self.n)[plan.c_fine], self.z.size))
        summands = {"a": (self.y, self.a_whole), "b": (self.x, self.b_whole), "c": (self.z, (self.m, self.n))}
        self._summands = {name: (axis, shape, prod(shape) if axis.size > 1 else 0) for name, (axis, shape) in summands.items()}

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """Gather A along y and B along x, multiply, reduce-scatter C along z."""
        first = self._start_gather(self.y, a, self.plan.a_fine, self.a_sizes, name="a")
        second = self._start_gather(self.x, b, self.plan.b_fine, self.b_sizes, name="b")
        a_gathered, b_gathered = self.workspace.widened("a", first.wait()), self.workspace.widened("b", second.wait())
        if self.z.size == 1:
            scratch = self.workspace.scratch(out) if beta != 0 else None
            self.workspace.accumulate(a_gathered, b_gathered, self.plan.form, out, alpha, beta, scratch)
        else:
            self._add_parts(a_gathered, b_gathered, out, alpha, beta)

    def _add_parts(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """Scatter this rank's summand of C[m:x, n:y] and add what the others send, in the members' order."""
        slot = self.z.allocate((self.m, self.n), out)
        partial = self.workspace.buffer("partial", (self.m, self.n), out) if slot is None else slot
        parts = self.workspace.buffer("parts", (self.z.size, *out.shape), out) if slot is None else None
        self.workspace.accumulate(a, b, self.plan.form, partial, alpha, 0)
        if beta != 0:  # β·C comes along in this rank's own part
            scale(out, beta)
            start = sum(self.c_sizes[: self.z.index])
            own = slice(start, start + self.c_sizes[self.z.index])
            partial[own if self.plan.c_fine == 0 else (slice(None), own)] += out
        self.z.reduce_scatter(partial, self.plan.c_fine, self.c_sizes, into=out, parts=parts)

    def _start_gather(
        self, axis: Axis, block: Array, dim: int, sizes: Sequence[int], view: bool = True, name: str = ""
    ) -> Pending:
        """`block` gathered along `axis`: in flight in the node's memory, complete through MPI, whose blocking calls are faster.

        The result is a view where `view` allows one and the members share a node's memory; else, with a `name`, it lies in
        workspace.
        """
        in_node = axis.offers_views(block)
        into = None
        if name and axis.size > 1 and not (in_node and dim == 0):
            shape = [*block.shape]
            shape[dim] = sum(sizes)
            into = self.workspace.buffer(name, shape, block)
        if in_node:
            return axis.start_all_gather(block, dim, sizes, into, view and into is None)
        return Completed(axis.all_gather(block, dim, sizes, into))

    # -- the steps, for gradients ------------------------------------------------------------------------------------------

    def gather_a(self, a: Array, view: bool = False) -> Array:
        """A gathered along y. Words: gathered − own. With `view` it may hold only until the next communication along y."""
        return self._tracked(self.y, self.y.all_gather(a, self.plan.a_fine, self.a_sizes, view=view))

    def gather_both(self, a: Array, b: Array, view: bool = False) -> tuple[Array, Array]:
        """`gather_a` and `gather_b`: in the node's memory both are under way before either is waited for."""
        first = self._start_gather(self.y, a, self.plan.a_fine, self.a_sizes, view)
        second = self._start_gather(self.x, b, self.plan.b_fine, self.b_sizes, view)
        return self._tracked(self.y, first.wait()), self._tracked(self.x, second.wait())

    def gather_b(self, b: Array, view: bool = False) -> Array:
        """B gathered along x. Words: gathered − own. With `view` it may hold only until the next communication along x."""
        return self._tracked(self.x, self.x.all_gather(b, self.plan.b_fine, self.b_sizes, view=view))

    def start_gather_b(self, b: Array) -> Pending:
        """Start gathering B along x, into memory of its own. Words: gathered − own."""
        return self.x.start_all_gather(b, self.plan.b_fine, self.b_sizes)

    def gather_c(self, c: Array, view: bool = False) -> Array:
        """A gradient of C gathered along z: what both dA and dB are products of. `view` as in gather_a, along z."""
        return self._tracked(self.z, self.z.all_gather(c, self.plan.c_fine, self.c_sizes, view=view))

    def multiply(self, a_gathered: Array, b_gathered: Array) -> Array:
        """This rank's summand of C[m:x, n:y], to be scattered next."""
        slot = self.summand_buffer("c", a_gathered)
        return self._tracked(self.z, self.workspace.multiply(a_gathered, b_gathered, self.plan.form, slot))

    def summand_buffer(self, operand: str, like: Array) -> Array | None:
        """Where a summand of the operand (a, b or c) may be computed, so that its scatter, if it comes next, copies nothing.

        None for a small one, by its shape, which all members of the axis share.
        """
        axis, shape, elements = self._summands[operand]
        return axis.allocate(shape, like) if elements * like.itemsize >= WORTH_A_SLOT else None

    def scatter_c(self, partial: Array) -> Array:
        """C summed along z and scattered to its layout. Words: (Z−1)·own."""
        return self.z.reduce_scatter(partial, self.plan.c_fine, self.c_sizes)

    def start_scatter_a(self, partial: Array) -> Pending:
        """Start summing dA along y and scattering it to A's layout. Words: (Y−1)·own."""
        return self.y.start_reduce_scatter(partial, self.plan.a_fine, self.a_sizes)

    def start_scatter_b(self, partial: Array) -> Pending:
        """Start summing dB along x and scattering it to B's layout. Words: (X−1)·own."""
        return self.x.start_reduce_scatter(partial, self.plan.b_fine, self.b_sizes)

    def _tracked(self, axis: Axis, array: Array) -> Array:
        """Count `array` as workspace, unless the axis has one member and it is the caller's own block."""
        return array if axis.size == 1 else self.ledger.track(array)
