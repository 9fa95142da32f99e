"""A tensor-parallel scheme on a grid: the layouts of activations and parameters, and the products that connect them.

Layers ask the scheme and never name an axis.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

from mpi4py import MPI
from torch import Tensor

from ...autograd.collectives import all_gather, broadcast_from, scatter_from
from ...autograd.debts import Debts
from ...autograd.differentiable import InFlight, Product, Sharded, product
from ...autograd.prefetch import Prefetcher, PrefetchSource
from ...comm.axis import Axis
from ...comm.grid import BaseGrid, Grid
from ...comm.topology import OUTER
from ...errors import GridError, LayoutError
from ...gemm.algorithms.plan import ProductPlan
from ...gemm.algorithms.workspace import Workspace
from ...layout.copies import Copies
from ...layout.layout import Layout, split_sizes
from ..config import ModelConfig
from ..overlap import DEFAULT, Overlap
from ..stages import Stages
from .registry import SCHEME_SPECS, SchemeSpec, is_sequence_fine, row_axes
from .validate import check_grid, check_sizes, check_vectors

SCHEMES = tuple(SCHEME_SPECS)


@dataclass(frozen=True)
class Lookup:
    """How an embedding looks up rows of a table [v, h] to form the residual stream.

    Attributes
    ----------
    tokens : the layout of the tokens [b, s] that a rank looks up
    gathered : the axis along which the table is all-gathered first, if any
    part : the axes that then still split v, over which the found rows are summed
    copies : the axes that split the tokens but not the table, over which the table's gradient is summed
    """

    tokens: Layout
    gathered: tuple[str, ...]
    part: tuple[str, ...]
    copies: tuple[str, ...]


class Shared:
    """What the schemes of one model share, those of all its pipeline stages: prefetch, workspace and debts of products."""

    def __init__(self, grid: BaseGrid, overlap: Overlap) -> None:
        self.grid, self.overlap, self.debts = grid, overlap, Debts()

    @cached_property
    def prefetcher(self) -> Prefetcher | None:
        """The prefetch of gathered weights; None where the overlap prefetches nothing."""
        return Prefetcher(self.overlap.gather) if self.overlap.gather else None

    @cached_property
    def workspace(self) -> Workspace:
        """One workspace for all products of the model: those that use it are complete before the next one begins."""
        return Workspace(self.grid)


@dataclass(frozen=True)
class Scheme:
    """The layouts and products of a transformer on a grid.

    A linear layer maps the layout of its input to another one, and two linear layers return to the residual stream's layout.
    Each layer holds the layouts of its own input and output. Every layout is that of an operand of the spec's product.

    Attributes
    ----------
    spec : the scheme as data
    grid : the inner grid, on which this rank's replica of its pipeline stage lies; or that of a `Place`, for the layouts and
        closed forms of any rank of any grid
    regather : whether backward gathers operands again (memory 1/P) or keeps those that forward gathered (fewer words)
    vectors : how γ, β and biases are stored
    overlap : what may be in flight while layers compute
    at : outer axis → the indices of the job's grid that hold the parameters (`on`); elsewhere their blocks are empty
    stages : the stages of the job's pipeline (axis pp); None, every rank holds the whole model
    sharded : the axes of replicas that hold shards of the weights, by rows (ZeRO-3): layers gather a weight where they use it,
        and reduce-scatter its gradient
    """

    spec: SchemeSpec
    grid: BaseGrid
    regather: bool = True
    vectors: str = "copied"
    overlap: Overlap = DEFAULT
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    stages: Stages | None = None
    sharded: tuple[str, ...] = ()
    _shared: Shared = field(default=None, repr=False, compare=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if vars(self)["_shared"] is None:
            object.__setattr__(self, "_shared", Shared(self.grid, self.overlap))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scheme:
        """Return the scheme of a copied model: on the same grid, with its own prefetch and workspace."""
        shared: Shared = memo.setdefault(id(self._shared), Shared(self.grid, self.overlap))
        copied = memo[id(self)] = replace(self, _shared=shared)
        if "prefetcher" in vars(self._shared) and "prefetcher" not in vars(shared):
            # The module's hooks hold it too, and are copied with the module.
            vars(shared)["prefetcher"] = copy.deepcopy(self._shared.prefetcher, memo)
        return copied

    def on(self, **at: Sequence[int]) -> Scheme:
        """The scheme of a pipeline stage: parameters made with it are held at these indices of outer axes alone.

        ``scheme.on(pp=(2,))`` is that of stage 2. It shares the prefetch and the workspace of the others. An axis of size 1, or
        one that the job lacks, has the index 0 alone. Moves nothing. Raises LayoutError for an inner axis, or a missing index.
        """
        for axis, indices in at.items():
            size = self.job.shape.get(axis, 1)
            if axis not in OUTER or not indices or not all(0 <= index < size for index in indices):
                raise LayoutError(
                    f"Parameters cannot be held at {axis}={tuple(indices)}: axis {axis} has the indices 0 to {size - 1}, and "
                    f"parameters are held at indices of {', '.join(OUTER)}."
                )
        found = {**dict(self.at), **{axis: tuple(sorted(set(indices))) for axis, indices in at.items()}}
        return replace(self, at=tuple((axis, found[axis]) for axis in found if self.job.shape.get(axis, 1) > 1))

    def on_layer(self, layer: int) -> Scheme:
        """The scheme of the stage that has this layer."""
        return self if self.stages is None else self.on(pp=(self.stages.home_of(layer),))

    def on_ends(self, first: bool = False, last: bool = False) -> Scheme:
        """The scheme of the first stage, of the last one, or of what both hold."""
        if self.stages is None:
            return self
        return self.on(pp=[self.stages.homes[end] for end, held in ((0, first), (-1, last)) if held])

    @property
    def name(self) -> str:
        """The scheme's name, a key of `SCHEME_SPECS`."""
        return self.spec.name

    @property
    def job(self) -> BaseGrid:
        """The grid of the whole job: the inner grid, times the replicas (dp) and the pipeline stages (pp)."""
        return self.grid.whole

    @property
    def residual(self) -> Layout:
        """The layout of the residual stream [b, s, h]."""
        return self.spec.residual

    @property
    def down_form(self) -> str:
        """The form of a feed-forward layer's down projection: "nn", or "nt" with its weight's transpose."""
        return "nt" if self.spec.transposed_down else "nn"

    def plan(self, layout: Layout, form: str, m: int, n: int, k: int) -> ProductPlan:
        """The plan of C (m×n): the product of an activation in `layout` with a weight ("nn") or a table ("nt").

        Raises LayoutError where the scheme has no product for that layout.
        """
        try:
            return self.spec.plan(layout, form, m, n, k)
        except ValueError as error:  # an axis more or less than those of its activations
            raise LayoutError(
                f"The {self.name} scheme has no product for an activation in layout {layout}; its residual stream has "
                f"{self.residual}."
            ) from error

    def after_linear(self, layout: Layout) -> Layout:
        """The layout of a linear layer's output for an input in `layout`."""
        c_layout = self.plan(layout, "nn", 1, 1, 1).c_layout
        rows, columns = c_layout.dims
        names = layout.names and (*layout.names[:-1], "n")
        if is_sequence_fine(layout):
            return Layout(rows[:1], rows[1:], columns, names=names)
        return Layout(rows, *((),) * (len(layout.dims) - 2), columns, root_only=c_layout.root_only, names=names)

    def weight(self, layout: Layout, transposed: bool = False) -> Layout:
        """The layout of the weight [k, n] of a linear layer whose input has `layout`.

        transposed : whether the product is with the weight's transpose (form nt)
        """
        return self.table(layout).transposed() if transposed else self.plan(layout, "nn", 1, 1, 1).b_layout

    def table(self, layout: Layout) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form nt) for a residual stream in `layout`."""
        return self.plan(layout, "nt", 1, 1, 1).b_layout

    def vector(self, layout: Layout) -> Layout:
        """The stored layout of a vector along the last dim of an activation in `layout`."""
        rows, columns = row_axes(layout), layout.dims[-1]
        if self.vectors == "root-only":
            return Layout(columns, root_only=rows)
        if self.vectors == "diagonal":
            return Layout((*columns, rows[0]), root_only=rows[1:], follows={rows[1]: columns[0]})
        return Layout(columns, root_only=layout.root_only)

    def broadcast_vector(self, stored: Tensor, layout: Layout, n: int) -> Tensor:
        """Return a stored vector of n elements as a layer uses it: split as the last dim of an activation in `layout`.

        A copied vector is returned unchanged. A root-only vector is broadcast by its root; a diagonal one is broadcast
        and then all-gathered along the rows' coarse axis. Backward reduce-scatters and reduces the gradient the same way.
        """
        if self.sharded:  # else no layout is made, once a vector and step
            stored = self.gathered(stored, self.vector(layout), (n,))
        if self.vectors == "copied":
            return stored
        grid, at, shape = self.grid, self.grid.coordinates, (n,)
        own, vector = self.vector(layout), stored
        for axis in own.root_only:
            block = Layout(*own.dims).local_shape(shape, grid.shape, at)
            vector = broadcast_from(vector, grid[axis], own.root_index(axis, at), block)
        for axis in own.dims[0][len(layout.dims[-1]) :]:
            (whole,) = Layout(layout.dims[-1]).local_shape(shape, grid.shape, at)
            vector = all_gather(vector, grid[axis], 0, split_sizes(whole, grid[axis].size))
        return vector

    def gathered(self, stored: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's block of a parameter of global `shape` and inner `layout`, from the shards that replicas hold of it.

        Where they hold copies, `stored` itself. Backward reduce-scatters the gradient over the replicas.
        """
        if not self.sharded:
            return stored
        return all_gather(stored, self.job[self.sharded], 0, self._shard_sizes(layout, shape))

    def _shard_sizes(self, layout: Layout, shape: tuple[int, ...]) -> list[int]:
        """The rows of each replica's shard of this rank's block."""
        sizes = [layout.local_shape(shape, self.grid.shape, self.grid.coordinates)[0]]
        for axis in self.sharded:
            sizes = [part for size in sizes for part in split_sizes(size, self.job.shape[axis])]
        return sizes

    def vector_rows(self, layout: Layout) -> Axis:
        """The plane over which a layer sums its vector's gradient: the rows' axes; no axis where `broadcast_vector` sums it."""
        return self.rows(layout) if self.vectors == "copied" else self.grid[()]

    def rows(self, layout: Layout) -> Axis:
        """The plane of axes that split the rows (b, s) of an activation."""
        return self.grid[row_axes(layout)]

    def columns(self, layout: Layout) -> Axis:
        """The plane of axes that split the last dim of an activation, over which row statistics are summed."""
        return self.grid[layout.dims[-1]]

    @property
    def copies(self) -> Copies:
        """The ranks that hold equal copies of the residual stream: along axes that do not split it."""
        split = self.residual.axes
        return Copies(self.grid[tuple(axis for axis, size in self.grid.shape.items() if size > 1 and axis not in split)])

    def connect(self) -> list[Axis]:
        """Make and return the axes over which layers and gradient norm communicate, else made at first use; collective."""
        inner, at_token = self.after_linear(self.residual), self.after_linear(self.pooled)
        layouts, lookup = (self.residual, inner, self.pooled, at_token, Layout(self.residual.dims[1])), self.lookup
        planes = [self.grid[axes] for axes in (lookup.gathered, lookup.part, lookup.copies)]
        planes += [of(layout) for layout in layouts for of in (self.rows, self.columns)]
        return [*planes, self.copies.axis, self.grid.world, self.grid.ranked, self.job.world, self.job[self.sharded]]

    def product(
        self, layout: Layout, form: str, m: int, n: int, k: int, source: PrefetchSource | None = None, transposed: bool = False
    ) -> Product:
        """Bind the product C (m×n) of an activation in `layout` with a weight ("nn") or a table ("nt"), with its gradients.

        source : the layer's prefetch source, from the method `prefetch_source`; None for no prefetch
        transposed : whether replicas hold shards of the transpose of the product's right operand
        """
        rows, plan = self.vector_rows(self.after_linear(layout)), self.plan(layout, form, m, n, k)
        in_flight = InFlight(None if self.sharded else source, self.overlap.input_gradient, self.debts)
        found = product(plan, self.grid, self.regather, rows, self._shared.workspace, in_flight)
        if not self.sharded:
            return found
        stored, shape = (plan.b_layout.transposed(), plan.b_shape[::-1]) if transposed else (plan.b_layout, plan.b_shape)
        return Sharded(found, self.job[self.sharded], self._shard_sizes(stored, shape), transposed, source)

    def prefetch_source(
        self, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    ) -> PrefetchSource | None:
        """Create the prefetch source of a layer's weight; None where the overlap prefetches nothing.

        parts : returns the parameters that the weight is made of; make : computes this rank's block of the weight from them
        """
        return PrefetchSource(self.prefetcher, parts, make) if self.prefetcher is not None else None

    @property
    def prefetcher(self) -> Prefetcher | None:
        """The prefetch of gathered weights; None where the overlap prefetches nothing."""
        return self._shared.prefetcher

    @property
    def debts(self) -> Debts:
        """Whether the products of all layers postpone their weight gradients."""
        return self._shared.debts

    @property
    def lookup(self) -> Lookup:
        """How an embedding looks up its table: the table's fine axis is all-gathered where it splits the tokens as well."""
        split, rows = self.table(self.residual).dims[0], row_axes(self.residual)
        gathered = split[-1:] if split[-1] in rows else ()
        part = split[: len(split) - len(gathered)]
        tokens = Layout(*([axis for axis in axes if axis not in part] for axes in self.residual.dims[:2]))
        return Lookup(tokens, gathered, part, tuple(axis for axis in rows if axis not in split))

    @property
    def pooled(self) -> Layout:
        """The layout of one token per sequence, [b, h], which `tokens_at` returns."""
        return Layout(row_axes(self.residual), self.residual.dims[-1])

    def batch_first(self, x: Tensor) -> Tensor:
        """View a stored activation, [b, s, n] or (sequence-first schemes) [s, b, n], as [b, s, n]."""
        return x.transpose(0, 1) if self.spec.sequence_first else x

    def as_stored(self, x: Tensor) -> Tensor:
        """Return an activation [b, s, n] (or tokens [b, s]) contiguous in the scheme's order; the inverse of `batch_first`."""
        return self.batch_first(x).contiguous()

    def block_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's block of a global [b, s] tensor (tokens, labels, masks), split as the rows of an activation in `layout`."""
        return whole[Layout(*layout.dims[:2]).slices(whole.shape, self.grid.shape, self.grid.coordinates)]

    def tokens_at(self, x: Tensor, position: int, sequence: int) -> Tensor:
        """Select one position of every sequence of the residual stream, with gradient.

        Parameters
        ----------
        x : this rank's block of the residual stream, as stored
        position : the global position
        sequence : the global s

        Returns this rank's block of [b, h] in the layout `pooled`. Where an axis splits s, the member that holds the position
        scatters the rows of b over the axis.
        """
        if not self.residual.dims[1]:
            return self.batch_first(x)[:, position].contiguous()
        axis = self.columns(Layout(self.residual.dims[1]))
        starts = list(accumulate(split_sizes(sequence, axis.size), initial=0))
        owner = bisect_right(starts, position) - 1
        rows = x[position - starts[owner] if axis.index == owner else 0]  # [b/X, h/Z], on all members: all need gradients
        return scatter_from(rows, axis, owner, split_sizes(len(rows), axis.size))

    def first_tokens(self, x: Tensor) -> Tensor:
        """The first token of every sequence, as `tokens_at` returns it."""
        return self.tokens_at(x, 0, 1)

    def check(self, config: ModelConfig, batch: int, sequence: int | None = None) -> None:
        """Raise LayoutError where a dim cannot be split as the scheme needs: on every rank alike, before any communication.

        `batch` and `sequence` are the global b and s of one micro-batch; s defaults to the model's. Batch, heads and the dims
        that the residual stream splits must split evenly; all other dims may be uneven.
        """
        if self.spec.limits:
            raise LayoutError(
                f"The {self.name} scheme runs single layers, such as nn.MLP, not whole models: {self.spec.limits}.\n"
                f"  Schemes for models: {', '.join(spec.name for spec in SCHEME_SPECS.values() if not spec.limits)}."
            )
        inner = self.after_linear(self.residual)
        check_sizes(self.spec, inner, self.grid.shape, config, batch, config.sequence if sequence is None else sequence)


def scheme(
    name: str,
    grid: BaseGrid | None = None,
    regather: bool = True,
    vectors: str = "copied",
    overlap: Overlap = DEFAULT,
) -> Scheme:
    """Bind the scheme called `name` to `grid`.

    Parameters
    ----------
    name : "serial" (one rank), "oned" (Megatron's 1-D), "oned-sp" (1-D with sequence parallelism), "summa" (2-D, any R×C),
        "summa-transposed" (2-D, fewer words), "tesseract" (2.5-D, q×q×d), "cuboid" (any X×Y×Z, whole sequences),
        "cuboid-sequence" (any X×Y×Z, the residual stream splits sequences), "agarwal" (3-D as first published, q×q×q, for
        nn.MLP only)
    grid : a grid with the axes x, y, z, d that the scheme needs. A needed axis that is absent is added to the grid with size 1;
        an axis of size 1 that the scheme does not need is ignored. The outer axes dp, pp, cp and ep may have any size: the
        scheme lies on the part without them. None: one rank (serial only)
    regather : whether backward gathers operands again; read by the schemes that gather
    vectors : how γ, β and biases are stored: "copied"; "root-only", on row 0 alone (summa, as in Optimus); "diagonal" (cuboid
        with Y = Z, as in the 3-D paper)
    overlap : what may be in flight while layers compute; read by the schemes that `Overlap` names

    Raises LayoutError for an unknown name or an unsupported storage of vectors; GridError, naming the grids that fit, where the
    scheme does not support the grid. Moves nothing.
    """
    if not isinstance(name, str) or name not in SCHEME_SPECS:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(SCHEME_SPECS)}.")
    spec = SCHEME_SPECS[name]
    if grid is None and name != "serial":
        ranks = next(ranks for ranks in (4, 8) if spec.grids(ranks))
        raise GridError(
            f"The {name} scheme needs a grid, such as summa3d.Grid(MPI.COMM_WORLD, {spec.grids(ranks)[0]}) on {ranks} ranks."
        )
    grid = grid or Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    inner = {axis: size for axis, size in grid.shape.items() if axis not in OUTER}
    check_grid(spec, inner)
    check_vectors(spec, inner, vectors)
    grid.add_axes(*spec.axes)
    return Scheme(spec, grid.part(*(axis for axis in grid.shape if axis not in OUTER)), regather, vectors, overlap)
