# A tensor-parallel scheme on a grid: which axes split the activations and the parameters, and which product joins them.
# Imports layout, gemm, autograd. Layers ask the scheme and never name an axis.
# Next: scheme_kinds.py (the schemes, as data), linear.py (the first layer written against one).
from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

from mpi4py import MPI
from torch import Tensor

from ..autograd.ahead import Ahead, Source
from ..autograd.collectives import all_gather, broadcast_from, scatter_from
from ..autograd.products import Flights, Product, product
from ..comm.axis import Axis
from ..comm.grid import Grid
from ..errors import GridError, LayoutError
from ..gemm.algorithms.plan import ProductPlan
from ..gemm.algorithms.workspace import Workspace
from ..layout.layout import Layout, split_sizes
from .config import ModelConfig
from .overlap import DEFAULT, Overlap
from .scheme_check import check_grid, check_sizes, check_vectors
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
    `regather` says whether backward gathers operands again (memory 1/P) or keeps what forward gathered (fewer words); `vectors`
    how γ, β and biases are stored; `overlap` what is in flight while layers compute.
    `grid` may be a `Place`, for layouts and closed forms of any rank of any grid.
    """

    kind: Kind
    grid: Grid
    regather: bool = True
    vectors: str = "copied"
    overlap: Overlap = DEFAULT

    def __deepcopy__(self, memo: dict[int, Any]) -> Scheme:
        """A copied model's own: on the same grid, with a prefetch and a workspace that the original does not use."""
        copied = memo[id(self)] = replace(self)
        if "ahead" in vars(self):  # known to hooks as well, which are copied with the module
            vars(copied)["ahead"] = copy.deepcopy(self.ahead, memo)
        return copied

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def stream(self) -> Layout:
        """The layout of the residual stream [b, s, h]."""
        return self.kind.stream

    @property
    def down_form(self) -> str:
        """The form of the product that narrows a feed-forward layer: nn, or nt with its weight's transpose."""
        return "nt" if self.kind.transposed_down else "nn"

    def plan(self, layout: Layout, form: str, m: int, n: int, k: int) -> ProductPlan:
        """The plan of C (m×n) = an activation in `layout` times a weight ("nn") or a table ("nt")."""
        return self.kind.plan(layout, form, m, n, k)

    def after_linear(self, layout: Layout) -> Layout:
        """The layout of a linear's output."""
        c_layout = self.plan(layout, "nn", 1, 1, 1).c_layout
        rows, columns = c_layout.dims
        names = layout.names and (*layout.names[:-1], "n")
        if is_sequence_fine(layout):
            return Layout(rows[:1], rows[1:], columns, names=names)
        return Layout(rows, *((),) * (len(layout.dims) - 2), columns, hosted=c_layout.hosted, names=names)

    def weight(self, layout: Layout, transposed: bool = False) -> Layout:
        """The layout of a linear's weight [k, n] whose input has `layout`; `transposed`: that of a product with its transpose."""
        return self.table(layout).transposed() if transposed else self.plan(layout, "nn", 1, 1, 1).b_layout

    def table(self, layout: Layout) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form NT) for a stream in `layout`."""
        return self.plan(layout, "nt", 1, 1, 1).b_layout

    def vector(self, layout: Layout) -> Layout:
        """The layout of a vector along the last dim of an activation in `layout`, as it is stored."""
        rows, columns = row_axes(layout), layout.dims[-1]
        if self.vectors == "hosted":
            return Layout(columns, hosted=rows)
        if self.vectors == "diagonal":
            return Layout((*columns, rows[0]), hosted=rows[1:], follows={rows[1]: columns[0]})
        return Layout(columns, hosted=layout.hosted)

    def spread(self, stored: Tensor, layout: Layout, n: int) -> Tensor:
        """A vector of n as a layer uses it, with gradient: what is `stored`, split as the last dim of an activation in `layout`.

        Copied vectors are used as they are. Hosted ones are broadcast by their host, diagonal ones then gathered along the
        rows' coarse axis; what the layer finds as their gradient on its rows is scattered and summed the same way back.
        """
        if self.vectors == "copied":
            return stored
        grid, at, shape = self.grid, self.grid.coordinates, (n,)
        own, vector = self.vector(layout), stored
        for axis in own.hosted:
            block = Layout(*own.dims).local_shape(shape, grid.shape, at)
            vector = broadcast_from(vector, grid[axis], own.host(axis, at), block)
        for axis in own.dims[0][len(layout.dims[-1]) :]:
            (whole,) = Layout(layout.dims[-1]).local_shape(shape, grid.shape, at)
            vector = all_gather(vector, grid[axis], 0, split_sizes(whole, grid[axis].size))
        return vector

    def vector_rows(self, layout: Layout) -> Axis:
        """The plane over which a layer sums the gradient of its vector itself: none, where `spread` does."""
        return self.rows(layout) if self.vectors == "copied" else self.grid[()]

    def rows(self, layout: Layout) -> Axis:
        """The plane of axes that split the rows (b, s) of an activation."""
        return self.grid[row_axes(layout)]

    def columns(self, layout: Layout) -> Axis:
        """The plane of axes that split the last dim of an activation: over it statistics and softmax denominators are summed."""
        return self.grid[layout.dims[-1]]

    def product(self, layout: Layout, form: str, m: int, n: int, k: int, source: Source | None = None) -> Product:
        """The product C (m×n) of an activation in `layout` with a weight ("nn") or a table ("nt"), with its gradients.

        source : where the layer finds that weight, as `source` makes one.
        """
        rows = self.vector_rows(self.after_linear(layout))
        flights = Flights(source, self.overlap.input_gradient)
        return product(self.plan(layout, form, m, n, k), self.grid, self.regather, rows, self._workspace, flights)

    def source(
        self, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    ) -> Source | None:
        """Where a layer's products find their weight, for gathers ahead of it: the tensors it is made of, and how."""
        return Source(self.ahead, parts, make) if self.ahead is not None else None

    @cached_property
    def ahead(self) -> Ahead | None:
        """What gathers weights ahead of their layers; None where the overlap asks for none."""
        return Ahead(self.overlap.gather) if self.overlap.gather else None

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
        if self.kind.limits:
            raise LayoutError(
                f"The {self.name} scheme runs single layers, such as nn.MLP, not whole models: {self.kind.limits}.\n"
                f"  Schemes for models: {', '.join(kind.name for kind in KINDS.values() if not kind.limits)}."
            )
        inner = self.after_linear(self.stream)
        check_sizes(self.kind, inner, self.grid.shape, config, batch, config.sequence if sequence is None else sequence)


def scheme(
    name: str,
    grid: Grid | None = None,
    regather: bool = True,
    vectors: str = "copied",
    overlap: Overlap = DEFAULT,
) -> Scheme:
    """The scheme called `name` on `grid`.

    Parameters
    ----------
    name : serial (one rank), oned (Megatron's 1-D), oned-sp (and sequence parallel), summa (2-D, any R×C), tesseract (2.5-D,
        q×q×d), cuboid (any X×Y×Z, whole sequences), cuboid-sequence (any X×Y×Z, split sequences in the residual stream),
        summa-transposed (2-D, of fewer words), agarwal (3-D as first published, q×q×q, for nn.MLP alone)
    grid : its axes x, y, z, d as the scheme needs them. An axis that the scheme needs and the grid lacks is added to the grid,
        with size 1; axes of size 1 that it does not need do no harm.
    regather : whether backward gathers operands again; for the schemes that gather
    vectors : how γ, β and biases are stored: copied; hosted on row 0 (summa, as Optimus has it); on the diagonal (cuboid with
        Y = Z, as the 3-D paper has it)
    overlap : what is in flight while layers compute; for the schemes that `Overlap` names

    Raises LayoutError for an unknown name, or a storage of vectors that the scheme has not; GridError, naming the grids that
    fit, for one that the scheme cannot use.
    """
    if name not in KINDS:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(KINDS)}.")
    kind = KINDS[name]
    if grid is None and name != "serial":
        ranks = next(ranks for ranks in (4, 8) if kind.grids(ranks))
        raise GridError(
            f"The {name} scheme needs a grid, such as summa3d.Grid(MPI.COMM_WORLD, {kind.grids(ranks)[0]}) on {ranks} ranks."
        )
    grid = grid or Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    check_grid(kind, grid.shape)
    check_vectors(kind, grid.shape, vectors)
    grid.add_axes(*kind.axes)
    return Scheme(kind, grid, regather, vectors, overlap)
