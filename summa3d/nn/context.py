"""The context of a model's layers: a scheme on a grid, with all that a pass needs of communication."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

from mpi4py import MPI
from torch import Tensor

from ..autograd.collectives import all_gather, broadcast_from, scatter_from
from ..autograd.deferred import DeferredWeightGradient, MicroBatchKey, PassState
from ..autograd.differentiable import InFlight, Product, ShardedProduct, product
from ..autograd.prefetch import Prefetcher, PrefetchSource
from ..comm.axis import Axis
from ..comm.grid import BaseGrid, Grid
from ..comm.topology import OUTER
from ..dtypes import dtype_of
from ..errors import GridError, LayoutError
from ..gemm.algorithms.registry import algorithm_of
from ..gemm.algorithms.workspace import Workspace
from ..gemm.cost.machine import Machine
from ..gemm.pieces.timing import pieces_on
from ..layout.copies import Copies
from ..layout.layout import Layout, split_sizes
from .config import ModelConfig
from .context_parallel.options import DEFAULT as GATHERED
from .context_parallel.options import ContextOptions
from .context_parallel.positions import part_of
from .context_parallel.split import WHOLE, ContextSplit
from .overlap import DEFAULT, Overlap
from .schemes.registry import row_axes
from .schemes.scheme import Scheme, UnevenRows, spec_of
from .stages import Stages


@dataclass(frozen=True)
class Context:
    """A scheme on a grid, and what the layers that are made with it share: axes, products, prefetch, and the pass that runs.

    Attributes
    ----------
    scheme : the layouts of activations and parameters
    grid : the inner grid, on which this rank's replica of its pipeline stage lies
    regather : whether backward gathers operands again (memory 1/P) or keeps those that forward gathered (fewer words)
    overlap : what may be in flight while layers compute
    state : which pass the layers run
    workspace : of all products of the model: those that use it are complete before the next one begins
    prefetcher : the prefetch of gathered weights; None where the overlap prefetches nothing
    at : outer axis → the indices of the job's grid that hold the parameters (`on`); elsewhere their blocks are empty
    stages : the stages of the job's pipeline (axis pp); None, every rank holds the whole model
    sharded : the axes of replicas that hold shards of the weights, by rows (ZeRO-3): layers gather a weight where they use it,
        and reduce-scatter its gradient
    contexts : which positions of the sequences the ranks of axis cp hold; the layers compute with this rank's alone
    """

    scheme: Scheme
    grid: BaseGrid
    regather: bool
    overlap: Overlap
    state: PassState
    workspace: Workspace
    prefetcher: Prefetcher | None
    at: tuple[tuple[str, tuple[int, ...]], ...] = ()
    stages: Stages | None = None
    sharded: tuple[str, ...] = ()
    contexts: ContextSplit = WHOLE

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        """Return the context of a copied model: on the same grid, with a state, a prefetch and a workspace of its own.

        A copy of the workspace, as torch's copy of a module makes it, would count its buffers in a ledger that nobody reads.
        """
        state, prefetcher = copy.deepcopy((self.state, self.prefetcher), memo)
        workspace: Workspace = memo.setdefault(id(self.workspace), Workspace(self.grid))
        return replace(self, state=state, workspace=workspace, prefetcher=prefetcher)

    @contextmanager
    def run_pass(
        self, key: MicroBatchKey, deferred: list[DeferredWeightGradient] | None = None, forward: bool = False
    ) -> Iterator[None]:
        """Within the with-block, layers run the forward or the backward of a micro-batch.

        deferred : where its weight gradients are left for later; None, backward takes them. A forward and its backward, and one
            that recomputes it, are given the same list, or none.
        """
        with self.state.of(key, deferred):
            if self.prefetcher is None:
                yield
                return
            with self.prefetcher.forward_pass() if forward else self.prefetcher.backward_pass():
                yield

    def on(self, **at: Sequence[int]) -> Context:
        """Return the context of a pipeline stage: parameters made with it are held at these indices of outer axes alone.

        ``context.on(pp=(2,))`` is that of stage 2. It shares the prefetch and the workspace of the others. An axis of size 1, or
        one that the job lacks, has the index 0 alone. Moves nothing. Raises LayoutError for an inner axis, or a missing index.
        """
        for axis, of_axis in at.items():
            size = self.whole.shape.get(axis, 1)
            if axis not in OUTER or not of_axis or not all(0 <= index < size for index in of_axis):
                raise LayoutError(
                    f"Parameters cannot be held at {axis}={tuple(of_axis)}: axis {axis} has the indices 0 to {size - 1}, and "
                    f"parameters are held at indices of {', '.join(OUTER)}."
                )
        indices = {**dict(self.at), **{axis: tuple(sorted(set(of_axis))) for axis, of_axis in at.items()}}
        return replace(self, at=tuple((axis, indices[axis]) for axis in indices if self.whole.shape.get(axis, 1) > 1))

    def on_layer(self, layer: int) -> Context:
        """Return the context of the stage that has this layer."""
        return self if self.stages is None else self.on(pp=(self.stages.home_of(layer),))

    def on_ends(self, first: bool = False, last: bool = False) -> Context:
        """Return the context of the first stage, of the last one, or of what both hold."""
        if self.stages is None:
            return self
        return self.on(pp=[self.stages.homes[end] for end, wanted in ((0, first), (-1, last)) if wanted])

    @property
    def whole(self) -> BaseGrid:
        """The grid of the whole job: the inner grid, times the replicas (dp) and the pipeline stages (pp)."""
        return self.grid.whole

    @property
    def residual(self) -> Layout:
        """The layout of the residual stream [b, s, h]."""
        return self.scheme.residual

    def broadcast_vector(self, stored: Tensor, layout: Layout, n: int) -> Tensor:
        """Return a stored vector of n elements as a layer uses it: split as the last dim of an activation in `layout`.

        A copied vector is returned unchanged. A root-only vector is broadcast by its root; a diagonal one is broadcast
        and then all-gathered along the rows' coarse axis. Backward reduce-scatters and reduces the gradient the same way.
        """
        if self.sharded:  # else no layout is made, once a vector and step
            stored = self.gathered(stored, self.scheme.vector(layout), (n,))
        if self.scheme.vectors == "copied":
            return stored
        grid, at, shape = self.grid, self.grid.coordinates, (n,)
        own, vector = self.scheme.vector(layout), stored
        for axis in own.root_only:
            block = Layout(*own.dims, grains=own.grains).local_shape(shape, grid.shape, at)
            vector = broadcast_from(vector, grid[axis], own.root_index(axis, at), block)
        for axis in own.dims[0][len(layout.dims[-1]) :]:
            (whole,) = Layout(layout.dims[-1], grains=layout.grains[-1:]).local_shape(shape, grid.shape, at)
            vector = all_gather(vector, grid[axis], 0, split_sizes(whole, grid[axis].size))
        return vector

    def gathered(self, stored: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's block of a parameter of global `shape` and inner `layout`, from the shards that replicas hold of it.

        Where they hold copies, `stored` itself. Backward reduce-scatters the gradient over the replicas.
        """
        if not self.sharded:
            return stored
        return all_gather(stored, self.whole[self.sharded], 0, self._shard_sizes(layout, shape))

    def _shard_sizes(self, layout: Layout, shape: tuple[int, ...]) -> list[int]:
        """The rows of each replica's shard of this rank's block."""
        sizes = [layout.local_shape(shape, self.grid.shape, self.grid.coordinates)[0]]
        for axis in self.sharded:
            sizes = [part for size in sizes for part in split_sizes(size, self.whole.shape[axis])]
        return sizes

    def vector_rows(self, layout: Layout) -> Axis:
        """The plane over which a layer sums its vector's gradient: the rows' axes; no axis where `broadcast_vector` sums it."""
        return self.rows(layout) if self.scheme.vectors == "copied" else self.grid[()]

    def rows(self, layout: Layout) -> Axis:
        """The plane of axes that split the rows (b, s) of an activation."""
        return self.grid[row_axes(layout)]

    def columns(self, layout: Layout) -> Axis:
        """The plane of axes that split the last dim of an activation, over which row statistics are summed."""
        return self.grid[layout.dims[-1]]

    @property
    def copies(self) -> Copies:
        """The ranks that hold equal copies of the residual stream: along axes that do not split it."""
        split = self.scheme.residual.axes
        return Copies(self.grid[tuple(axis for axis, size in self.grid.shape.items() if size > 1 and axis not in split)])

    def product(
        self,
        layout: Layout,
        form: str,
        m: int | UnevenRows,
        n: int,
        k: int,
        source: PrefetchSource | None = None,
        transposed: bool = False,
        together: int = 1,
    ) -> Product:
        """Bind the product C (m×n) of an activation in `layout` with a weight ("nn") or a table ("nt"), with its gradients.

        together : columns of C that stay together
        source : the layer's prefetch source, from the method `prefetch_source`; None for no prefetch
        transposed : whether replicas hold shards of the transpose of the product's right operand
        """
        rows = self.vector_rows(self.scheme.after_linear(layout))
        plan: Any = self.scheme.plan(layout, form, m, n, k, together)
        if "pieces" in algorithm_of(plan).options:
            plan = replace(plan, pieces=self._pieces(plan))
        in_flight = InFlight(None if self.sharded else source, self.overlap.input_gradient, self.state)
        bound = product(plan, self.grid, self.regather, rows, self.workspace, in_flight)
        if not self.sharded:
            return bound
        stored, shape = (plan.b_layout.transposed(), plan.b_shape[::-1]) if transposed else (plan.b_layout, plan.b_shape)
        return ShardedProduct(bound, self.whole[self.sharded], self._shard_sizes(stored, shape), transposed, source)

    def _pieces(self, plan: Any) -> int:
        """In how many pieces a product moves: what the overlap says, or its rule."""
        pieces = self.overlap.pieces
        return pieces_on(plan, self.grid, dtype_of("float32"), Machine()) if isinstance(pieces, str) else pieces

    def prefetch_source(
        self, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor] = itemgetter(0)
    ) -> PrefetchSource | None:
        """Create the prefetch source of a layer's weight; None where the overlap prefetches nothing.

        parts : returns the parameters that the weight is made of; make : computes this rank's block of the weight from them
        """
        return PrefetchSource(self.prefetcher, parts, make) if self.prefetcher is not None else None

    @property
    def head_axis(self) -> Axis:
        """The contexts among which heads are exchanged for positions."""
        return self.whole.contiguous_sub_axis(("cp",), self.contexts.heads)

    @property
    def ring_axis(self) -> Axis:
        """The contexts that hold the blocks of a sequence: those at the same place of each group that exchanges heads."""
        heads, size = self.contexts.heads, self.contexts.size
        ring = self.whole.sub_axis("cp", range(self.contexts.index % heads, size, heads))
        assert ring is not None
        return ring

    def batch_first(self, x: Tensor) -> Tensor:
        """View a stored activation, [b, s, n] or (sequence-first schemes) [s, b, n], as [b, s, n]."""
        return x.transpose(0, 1) if self.scheme.spec.sequence_first else x

    def as_stored(self, x: Tensor) -> Tensor:
        """Return an activation [b, s, n] (or tokens [b, s]) contiguous in the scheme's order; the inverse of `batch_first`."""
        return self.batch_first(x).contiguous()

    def block_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's block of a global [b, s] tensor (tokens, labels, masks), split as the rows of an activation in `layout`."""
        return inner_block(self.grid, part_of(whole, self.contexts), layout)

    def tokens_at(self, x: Tensor, position: int = 0, sequence: int = 1) -> Tensor:
        """Select one position of every sequence of the residual stream, with gradient.

        Parameters
        ----------
        x : this rank's block of the residual stream, as stored
        position : the position among those of this context; default the first
        sequence : s of this context; not read for the first position

        Returns this rank's block of [b, h] in the scheme's layout `pooled`. Where an axis splits s, the member that holds the
        position scatters the rows of b over the axis.
        """
        if not self.scheme.residual.dims[1]:
            return self.batch_first(x)[:, position].contiguous()
        axis = self.columns(Layout(self.scheme.residual.dims[1]))
        starts = list(accumulate(split_sizes(sequence, axis.size), initial=0))
        owner = bisect_right(starts, position) - 1
        rows = x[position - starts[owner] if axis.index == owner else 0]  # [b/X, h/Z], on all members: all need gradients
        return scatter_from(rows, axis, owner, split_sizes(len(rows), axis.size))


def inner_block(grid: BaseGrid, whole: Tensor, layout: Layout) -> Tensor:
    """This rank's block of a [b, s] tensor of the positions that its context holds, or of whole sequences, on the inner grid."""
    return whole[Layout(*layout.dims[:2]).slices(whole.shape, grid.shape, grid.coordinates)]


def check_split(contexts: ContextSplit, layouts: Scheme, config: ModelConfig, batch: int, sequence: int | None = None) -> None:
    """Raise LayoutError, and ConfigError for a family, where contexts and scheme cannot split whole sequences of a batch."""
    whole = config.sequence if sequence is None else sequence
    if contexts.size > 1:
        contexts.check_family(config.family, config.attention_dropout)
        contexts.check(whole, config.heads, layouts.after_linear(layouts.residual).num_shards(2, layouts.shape))
    layouts.check(config, batch, contexts.local(whole))


def scheme(
    name: str,
    grid: BaseGrid | None = None,
    regather: bool = True,
    vectors: str = "copied",
    overlap: Overlap = DEFAULT,
    contexts: ContextOptions = GATHERED,
) -> Context:
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
    contexts : how the ranks of axis cp, each with a part of every sequence, attend to the others' parts

    Raises LayoutError for an unknown name or an unsupported storage of vectors; GridError, naming the grids that fit, where the
    scheme does not support the grid. Moves nothing.
    """
    spec = spec_of(name)
    if grid is None and name != "serial":
        ranks = next(ranks for ranks in (4, 8) if spec.grids(ranks))
        raise GridError(
            f"The {name} scheme needs a grid, such as summa3d.Grid(MPI.COMM_WORLD, {spec.grids(ranks)[0]}) on {ranks} ranks."
        )
    grid = grid or Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    layouts = Scheme.of(name, grid.shape, vectors)
    grid.add_axes(*spec.axes)
    inner, state = grid.part(*layouts.shape), PassState()
    prefetcher = Prefetcher(overlap.ahead, state) if overlap.ahead else None
    split = ContextSplit(grid.shape.get("cp", 1), grid.whole.coordinates.get("cp", 0), contexts)
    return Context(layouts, inner, regather, overlap, state, Workspace(inner), prefetcher, contexts=split)
