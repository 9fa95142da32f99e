# A tensor-parallel scheme on a grid: which axes split the activations and the parameters, and which product joins them.
# Imports layout, gemm, autograd. Layers ask the scheme and never name an axis.
# Next: scheme_kinds.py (the schemes, as data), linear.py (the first layer written against one).
from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mpi4py import MPI
from torch import Tensor

from ..autograd.collectives import scatter_from
from ..autograd.products import Product, product
from ..comm.collectives import Axis
from ..comm.grid import Grid
from ..errors import GridError, LayoutError
from ..gemm.plan import ProductPlan
from ..gemm.workspace import Workspace
from ..layout.layout import Layout, split_sizes
from .config import ModelConfig
from .scheme_check import check_grid, check_sizes
from .scheme_kinds import KINDS, Kind, is_sequence_fine, row_axes

SCHEMES = tuple(KINDS)


@dataclass(frozen=True)
class Lookup:
    """How rows of a table [v, h] become the stream.

    tokens : the layout [b, s] of the tokens a rank looks up. gathered : the axis along which the table is gathered first, or
    none. part : the axes that then still split v, over which what was found is summed. copies : the axes that split the
    tokens but not the table, over which its gradient is summed.
    """

    tokens: Layout
    gathered: tuple[str, ...]
    part: tuple[str, ...]
    copies: tuple[str, ...]


@dataclass(frozen=True)
class Scheme:
    """The layouts of a transformer on a grid.

    A linear maps a layout to the next, and two of them return to the residual stream's; layers carry the layout of their
    input and output, and no global does. Every layout is that of an operand of the kind's product.
    `regather` says whether backward gathers operands again (memory 1/P) or keeps what forward gathered (fewer words).
    `grid` may be a `Place`, for layouts and closed forms of any rank of any grid.
    """

    kind: Kind
    grid: Grid
    regather: bool = True

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def stream(self) -> Layout:
        """The layout of the residual stream [b, s, h]."""
        return self.kind.stream

    def plan(self, layout: Layout, form: str, m: int, n: int, k: int) -> ProductPlan:
        """The plan of C (m×n) = an activation in `layout` times a weight ("nn") or a table ("nt")."""
        return self.kind.plan(layout, form, m, n, k)

    def after_linear(self, layout: Layout) -> Layout:
        """The layout of a linear's output."""
        rows, columns = self.plan(layout, "nn", 1, 1, 1).c_layout.dims
        if is_sequence_fine(layout):
            return Layout(rows[:1], rows[1:], columns)
        return Layout(rows, *((),) * (len(layout.dims) - 2), columns)

    def weight(self, layout: Layout) -> Layout:
        """The layout of a linear's weight [k, n] whose input has `layout`."""
        return self.plan(layout, "nn", 1, 1, 1).b_layout

    def table(self, layout: Layout) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form NT) for a stream in `layout`."""
        return self.plan(layout, "nt", 1, 1, 1).b_layout

    def vector(self, layout: Layout) -> Layout:
        """The layout of a vector along the last dim of an activation in `layout`."""
        return Layout(layout.dims[-1])

    def rows(self, layout: Layout) -> Axis:
        """The plane of axes that split the rows (b, s) of an activation: over it a vector's gradient is summed."""
        return self.grid[row_axes(layout)]

    def columns(self, layout: Layout) -> Axis:
        """The plane of axes that split the last dim of an activation: over it statistics and softmax denominators are summed."""
        return self.grid[layout.dims[-1]]

    def product(self, layout: Layout, form: str, m: int, n: int, k: int) -> Product:
        """The product C (m×n) of an activation in `layout` with a weight ("nn") or a table ("nt"), with its gradients."""
        rows = self.rows(self.after_linear(layout))
        return product(self.plan(layout, form, m, n, k), self.grid, self.regather, rows, self._workspace)

    @cached_property
    def _workspace(self) -> Workspace:
        """One for all products of the model: none of those that use it is in flight when another begins."""
        return Workspace(self.grid)

    @property
    def lookup(self) -> Lookup:
        """How the stream is looked up in the table: the table's fine axis is gathered where it splits the tokens as well."""
        split, rows = self.table(self.stream).dims[0], row_axes(self.stream)
        gathered = split[-1:] if split[-1] in rows else ()
        part = split[: len(split) - len(gathered)]
        tokens = Layout(*([axis for axis in axes if axis not in part] for axes in self.stream.dims[:2]))
        return Lookup(tokens, gathered, part, tuple(axis for axis in rows if axis not in split))

    @property
    def pooled(self) -> Layout:
        """The layout of one row per sequence, [b, h]: what `tokens_at` returns."""
        return Layout(row_axes(self.stream), self.stream.dims[-1])

    def batch_first(self, x: Tensor) -> Tensor:
        """An activation as stored, [b, s, n] or [s, b, n] as the scheme has it, seen as [b, s, n]."""
        return x.transpose(0, 1) if self.kind.sequence_first else x

    def as_stored(self, x: Tensor) -> Tensor:
        """An activation [b, s, n] (or tokens [b, s]) in the order the scheme stores: the inverse of `batch_first`, contiguous."""
        return self.batch_first(x).contiguous()

    def block_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's block of a global [b, s] tensor (tokens, labels, masks) beside an activation in `layout`, as [b, s]."""
        return whole[Layout(*layout.dims[:2]).slices(whole.shape, self.grid.shape, self.grid.coordinates)]

    def tokens_at(self, x: Tensor, position: int, sequence: int) -> Tensor:
        """Position `position` of every sequence of the stream x, with gradient: this rank's block of [b, h] in `pooled`.

        `sequence` is the global s. Where an axis splits s, its member that holds the position sends each its rows of b.
        """
        if not self.stream.dims[1]:
            return self.batch_first(x)[:, position].contiguous()
        axis = self.columns(Layout(self.stream.dims[1]))
        starts = list(accumulate(split_sizes(sequence, axis.size), initial=0))
        owner = bisect_right(starts, position) - 1
        rows = x[position - starts[owner] if axis.index == owner else 0]  # [b/X, h/Z]; every rank's, so that all need gradients
        return scatter_from(rows, axis, owner, split_sizes(len(rows), axis.size))

    def first_tokens(self, x: Tensor) -> Tensor:
        """`tokens_at` position 0."""
        return self.tokens_at(x, 0, 1)

    def check(self, config: ModelConfig, batch: int, sequence: int | None = None) -> None:
        """Raise LayoutError where a dim cannot be split as the scheme needs: on every rank alike, before any communication.

        `batch` and `sequence` are b and s of one micro-batch; s is the model's if it is not given. Attention needs whole
        sequences and whole heads; every dim that is not named may be uneven.
        """
        inner = self.after_linear(self.stream)
        check_sizes(self.kind, inner, self.grid.shape, config, batch, config.sequence if sequence is None else sequence)


def scheme(name: str, grid: Grid | None = None, regather: bool = True) -> Scheme:
    """The scheme called `name` on `grid`.

    Parameters
    ----------
    name : serial (one rank), oned (Megatron's 1-D), oned-sp (and sequence parallel), summa (2-D, any R×C), tesseract (2.5-D,
        q×q×d), cuboid (any X×Y×Z, whole sequences), cuboid-sequence (any X×Y×Z, split sequences in the residual stream)
    grid : its axes x, y, z, d as the scheme needs them. An axis that the scheme needs and the grid lacks is added to the grid,
        with size 1; axes of size 1 that it does not need do no harm.
    regather : whether backward gathers operands again; for the schemes that gather

    Raises LayoutError for an unknown name; GridError, naming the grids that fit, for one that the scheme cannot use.
    """
    if name not in KINDS:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(KINDS)}.")
    kind = KINDS[name]
    if grid is None and name != "serial":
        example = ", ".join(f"'{axis}': {size}" for axis, size in kind.grids(4)[0].items())
        raise GridError(f"The {name} scheme needs a grid, such as summa3d.Grid(MPI.COMM_WORLD, {{{example}}}) on 4 ranks.")
    grid = grid or Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    check_grid(kind, grid.shape)
    grid.add_axes(*kind.axes)
    return Scheme(kind, grid, regather)
