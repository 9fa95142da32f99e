"""The load-balanced 3-D product on any X×Y×Z grid: its plan and its executor.

Axes have roles: y gathers A, x gathers B, z reduces C. Any grid axes may take the roles, so the gradients of a product are
products of the same algorithm with permuted roles (dA: y↔z, dB: x↔z), and nothing is ever redistributed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...comm.axis import Axis
from ...comm.collective import Collective
from ...comm.device.arrays import Array, empty, is_on_device, place_of
from ...comm.pending import Completed, Pending
from ...comm.prepared import Prepared
from ...errors import ShapeError
from ...layout.layout import Layout
from ..local.blas import scale
from ..pieces.executor import HERE, PiecedProduct, StartedProduct, WholeMoves
from .checks import check_pieces
from .executor import Executor
from .plan import ProductPlan
from .workspace import Workspace

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
    B [k:z, n:(y,x)]. c splits as t does.

    pieces : into how many pieces `run` cuts what a rank sends to another node at a time, so that some travel while others are
        multiplied: the same words, more messages. What moves in a node's memory is not cut
    Raises ShapeError for another fine dim, or a number of pieces that is no whole number of at least 1.
    """

    x: str = "x"
    y: str = "y"
    z: str = "z"
    a_fine: int = 0
    b_fine: int = 0
    c_fine: int = 0
    pieces: int = 1

    takes_grains = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pieces(self.pieces)
        for name in ("a_fine", "b_fine", "c_fine"):
            if getattr(self, name) not in (0, 1):
                raise ShapeError(f"{name} is {getattr(self, name)}; the fine split lies on dim 0 (rows) or 1 (columns).")

    def layout_of(self, operand: str, names: str) -> Layout:
        """m:x, n:y and k:z, with the fine split by the axis of the third dim: y of A, x of B, z of C."""
        coarse = {"m": self.x, "n": self.y, "k": self.z}
        fine, dim = {"a": (self.y, self.a_fine), "b": (self.x, self.b_fine), "c": (self.z, self.c_fine)}[operand]
        rows, columns = coarse[names[0]], coarse[names[1]]
        return Layout(*(((rows, fine), (columns,)) if dim == 0 else ((rows,), (columns, fine))), names=names)

    def local_extents(self, grid_shape: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
        """m, n and k of the product that a rank takes, of gathered operands."""
        coarse = Layout((self.x,), (self.y,), (self.z,))
        coarse = coarse.grained(*self.grains) if any(self.grains) else coarse
        return coarse.local_shape((self.m, self.n, self.k), grid_shape, at)

    def fine_sizes(self, operand: str, extent: int, parts: int) -> list[int]:
        """The sizes into which the fine split of a, b or c, over an axis of so many `parts`, cuts a gathered extent."""
        return self.parts(self.fine_dims[operand], extent, parts, 1)

    @property
    def fine_dims(self) -> dict[str, str]:
        """The letter of the dim on which the fine split of a, b and c lies."""
        return {"a": self.a_names[self.a_fine], "b": self.b_names[self.b_fine], "c": "mn"[self.c_fine]}

    def gradient_roles(self, dims: str) -> dict[str, Any]:
        """Roles and fine splits of the plan of a gradient whose m, n, k are `dims` of this product, on this one's operands."""
        axes = {"m": self.x, "n": self.y, "k": self.z}
        fine = {frozenset("mk"): self.a_fine, frozenset("kn"): self.b_fine, frozenset("mn"): self.c_fine}
        splits = zip(("a_fine", "b_fine", "c_fine"), (dims[::2], dims[1:], dims[:2]), strict=True)
        roles = {role: axes[dim] for role, dim in zip("xyz", dims, strict=True)}
        return roles | {name: fine[frozenset(pair)] for name, pair in splits}

    def no_reduction(self, grid_shape: Mapping[str, int]) -> bool:
        """True where the reduction axis z has one member."""
        return grid_shape[self.z] == 1


class Moves(NamedTuple):
    """The collectives of an operand whose fine split is along `dim` of its `whole` block, prepared for each dtype that comes.

    alone : whether the axis has one member: then they return what they are given, and are not called
    """

    axis: Axis
    alone: bool
    dim: int
    whole: tuple[int, int]
    gather: Prepared
    gather_view: Prepared
    scatter: Prepared

    @classmethod
    def of(cls, axis: Axis, whole: tuple[int, int], dim: int, parts: Sequence[int]) -> Moves:
        """The collectives over an axis whose members hold `parts` along the dim."""
        sizes = tuple(parts)
        gather, gather_view = (Prepared(axis, "all_gather", dim=dim, sizes=sizes, view=view) for view in (False, True))
        return cls(axis, axis.size == 1, dim, whole, gather, gather_view, Prepared(axis, "reduce_scatter", dim=dim, sizes=sizes))


def moves_of(plan: CuboidPlan, axes: Sequence[Axis], grid_shape: Mapping[str, int], at: Mapping[str, int]) -> dict[str, Moves]:
    """Moves of a, b and c over the axes in the roles x, y, z."""
    extents = dict(zip("mnk", plan.local_extents(grid_shape, at), strict=True))
    (x, y, z), result = axes, {}
    names = {"a": (y, plan.a_names, plan.a_fine), "b": (x, plan.b_names, plan.b_fine), "c": (z, "mn", plan.c_fine)}
    for operand, (axis, letters, fine) in names.items():
        whole = extents[letters[0]], extents[letters[1]]
        result[operand] = Moves.of(axis, whole, fine, plan.fine_sizes(operand, whole[fine], axis.size))
    return result


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
    is_local: bool
    """Whether no axis has several members: nothing is moved."""

    def _prepare(self) -> None:
        plan, grid = self.plan, self.grid
        self.ledger = grid.ledger
        self.x, self.y, self.z = grid[plan.x], grid[plan.y], grid[plan.z]
        self._moves = moves_of(plan, (self.x, self.y, self.z), grid.shape, grid.coordinates)
        self.m, self.n = self._moves["c"].whole
        self.is_local = all(moves.alone for moves in self._moves.values())
        self._starts: dict[tuple[Any, ...], tuple[Collective, tuple[int, int] | None, bool]] = {}

    def multiply_into(self, a: Array, b: Array, out: Array, alpha: Any, beta: Any) -> None:
        """Gather A along y and B along x, multiply, reduce-scatter C along z."""
        if self.plan.pieces > 1:
            whole = WholeMoves(self._gather, self._summand, self._add_parts)
            product = PiecedProduct(self.plan, self.grid.shape, self.grid.coordinates, self.workspace, self._moves, whole)
            product.start({"a": a, "b": b}, out, alpha, beta).wait()
            return
        first = self._start_gather("a", a, into_workspace=True) if self.y.size > 1 else None
        second = self._start_gather("b", b, into_workspace=True) if self.x.size > 1 else None
        a_gathered = self.workspace.widened("a", a if first is None else first.wait())
        b_gathered = self.workspace.widened("b", b if second is None else second.wait())
        if self.z.size == 1:
            scratch = self.workspace.scratch(out) if beta != 0 else None
            self.workspace.accumulate(a_gathered, b_gathered, self.plan.form, out, alpha, beta, scratch)
        else:
            partial, parts = self._summand(out)
            self.workspace.accumulate(a_gathered, b_gathered, self.plan.form, partial, alpha, 0)
            self._add_parts(partial, parts, out, beta)

    def _gather(self, operand: str, block: Array) -> Array:
        """An operand gathered for a product to come, in the node's memory or in workspace."""
        return self._start_gather(operand, block, into_workspace=True).wait()

    def _summand(self, out: Array) -> tuple[Array, Array | None]:
        """Memory for this rank's summand of C[m:x, n:y], and for the parts to be summed where it is no slot of the node's."""
        slot = self.z.allocate((self.m, self.n), out)
        if slot is not None:
            return slot, None
        partial = self.workspace.buffer("partial", (self.m, self.n), out)
        return partial, self.workspace.buffer("parts", (self.z.size, *out.shape), out)

    def _add_parts(self, partial: Array, parts: Array | None, out: Array, beta: Any) -> Pending:
        """Scatter this rank's summand and add what the others send, in the members' order."""
        if beta != 0:  # β·C comes along in this rank's own part
            scale(out, beta)
            sizes = self.plan.fine_sizes("c", (self.m, self.n)[self.plan.c_fine], self.z.size)
            start = sum(sizes[: self.z.index])
            own = slice(start, start + sizes[self.z.index])
            partial[own if self.plan.c_fine == 0 else (slice(None), own)] += out
        return Completed(self._moves["c"].scatter.of(partial).run(partial, out, parts))

    def _start_gather(self, operand: str, block: Array, view: bool = True, into_workspace: bool = False) -> Pending:
        """An operand's block gathered: in flight in the node's memory, complete through MPI, whose blocking calls are faster.

        The result is a view where `view` allows one and the members share a node's memory; else it may lie in workspace.
        """
        moves = self._moves[operand]
        if moves.alone:
            return Completed(block)
        key = operand, block.dtype, place_of(block), view, into_workspace
        if key not in self._starts:
            in_node = moves.axis.offers_views(block)
            named = into_workspace and not (in_node and moves.dim == 0)
            gather = (moves.gather_view if view and in_node and not named else moves.gather).of(block)
            self._starts[key] = gather, moves.whole if named else None, in_node
        gather, whole, in_node = self._starts[key]
        into = None if whole is None else self.workspace.buffer(operand, whole, block)
        return gather.start(block, into) if in_node else Completed(gather.run(block, into))

    # -- the steps, for gradients ------------------------------------------------------------------------------------------

    def gather_a(self, a: Array, view: bool = False) -> Array:
        """A gathered along y. Words: gathered − own. With `view` it may hold only until the next communication along y."""
        return self._gathered("a", a, view)

    def gather_both(self, a: Array, b: Array, view: bool = False) -> tuple[Array, Array]:
        """`gather_a` and `gather_b`: in the node's memory both are under way before either is waited for."""
        if self._moves["a"].alone and self._moves["b"].alone:
            return a, b
        first, second = self._start_gather("a", a, view), self._start_gather("b", b, view)
        return self._tracked(self.y, first.wait()), self._tracked(self.x, second.wait())

    def gather_b(self, b: Array, view: bool = False) -> Array:
        """B gathered along x. Words: gathered − own. With `view` it may hold only until the next communication along x."""
        return self._gathered("b", b, view)

    def start_gather(self, operand: str, block: Array, behind: bool = False) -> Pending:
        """Start gathering A or B, into memory of its own. Words: gathered − own.

        behind : between nodes it comes in the plan's pieces, which travel where products leave the port free: `GatheredBehind`.
        Not on devices, whose transport tells messages apart by their order alone
        """
        moves = self._moves[operand]
        if not behind or moves.alone or moves.axis.offers_views(block) or is_on_device(block) or prod(moves.whole) == 0:
            return moves.gather.of(block).start(block)
        return self._in_pieces().start_behind(operand, block)

    def gather_c(self, c: Array, view: bool = False) -> Array:
        """A gradient of C gathered along z: what both dA and dB are products of. `view` as in gather_a, along z."""
        return self._gathered("c", c, view)

    def multiply(self, a_gathered: Array, b_gathered: Array) -> Array:
        """This rank's summand of C[m:x, n:y], to be scattered next."""
        slot = self.summand_buffer("c", a_gathered)
        return self._tracked(self.z, self.workspace.multiply(a_gathered, b_gathered, self.plan.form, slot))

    def summand_buffer(self, operand: str, like: Array) -> Array | None:
        """Buffer for a summand of the operand (a, b or c), of which a scatter that comes next copies nothing.

        None for a small one, by its shape, which all members of the axis share.
        """
        axis, alone, _, whole, *_ = self._moves[operand]
        worth = not alone and prod(whole) * like.itemsize >= WORTH_A_SLOT
        return axis.allocate(whole, like) if worth else None

    def start_in_pieces(
        self, blocks: Mapping[str, Array], here: Mapping[str, Any], view: bool, in_flight: bool = True
    ) -> StartedProduct:
        """Start C = op(A)·op(B) in the plan's pieces, in memory of its own; its sum may be in flight when this returns.

        blocks : this rank's. here : operands that were gathered before, or are on their way (`GatheredBehind`). view : whether
        what is gathered in the node's memory may be a view. in_flight : whether a sum there, where it is not cut, is left in
        flight, too
        """
        scatter = self._moves["c"].scatter
        like = next(iter((*blocks.values(), *here.values())))

        def summand(out: Array) -> tuple[Array, Array | None]:
            slot = self.summand_buffer("c", out)
            return self._tracked(self.z, empty((self.m, self.n), out)) if slot is None else slot, None

        def add(partial: Array, parts: Array | None, out: Array, beta: Any) -> Pending:
            collective = scatter.of(partial)
            return collective.start(partial, out) if in_flight else Completed(collective.run(partial, out))

        moves = WholeMoves(lambda name, block: self._gathered(name, block, view), summand, add)
        return self._in_pieces(moves).start(blocks, empty(self.c_block, like), here=here)

    def _in_pieces(self, whole: WholeMoves = HERE) -> PiecedProduct:
        """This product in pieces, in workspace of its own; `whole` moves what is not cut."""
        grid, workspace = self.grid, Workspace(self.grid, stays=False)
        return PiecedProduct(self.plan, grid.shape, grid.coordinates, workspace, self._moves, whole)

    def scatter_c(self, partial: Array) -> Array:
        """C summed along z and scattered to its layout. Words: (Z−1)·own."""
        moves = self._moves["c"]
        return partial if moves.alone else moves.scatter.of(partial).run(partial)

    def start_scatter_a(self, partial: Array) -> Pending:
        """Start summing dA along y and scattering it to A's layout. Words: (Y−1)·own."""
        return self._start_scatter("a", partial)

    def start_scatter_b(self, partial: Array) -> Pending:
        """Start summing dB along x and scattering it to B's layout. Words: (X−1)·own."""
        return self._start_scatter("b", partial)

    def _start_scatter(self, operand: str, partial: Array) -> Pending:
        moves = self._moves[operand]
        return Completed(partial) if moves.alone else moves.scatter.of(partial).start(partial)

    def _gathered(self, operand: str, block: Array, view: bool) -> Array:
        """An operand's block gathered along its axis, counted as workspace."""
        moves = self._moves[operand]
        if moves.alone:
            return block
        return self._tracked(moves.axis, (moves.gather_view if view else moves.gather).of(block).run(block))

    def _tracked(self, axis: Axis, array: Array) -> Array:
        """Count `array` as workspace, unless the axis has one member and it is the caller's own block."""
        return array if axis.size == 1 else self.ledger.track(array)
