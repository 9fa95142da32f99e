# A tensor-parallel scheme as data: which grid axes split the activations and the parameters, and which product joins them.
# Imports layout, gemm, autograd. Layers ask the scheme and never name an axis.
# Next: linear.py, the first layer written against it.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from mpi4py import MPI
from torch import Tensor

from ..autograd.matmul import Product
from ..comm.collectives import Axis
from ..comm.grid import Grid, describe, grids_of
from ..errors import GridError, LayoutError
from ..gemm.cuboid import Cuboid, CuboidPlan
from ..layout.layout import Layout
from .config import ModelConfig


@dataclass(frozen=True)
class Scheme:
    """Layouts of a transformer on a grid.

    `stream` is the layout of the residual stream [b, s, h]. A linear maps a layout to the next: b:(x,y) h:z to b:(x,z) n:y
    and back, so two of them return to the stream; layers carry the layout of their input and output, and no global does.
    `regather` says whether backward gathers operands again (memory 1/P) or keeps what forward gathered (fewer words).
    """

    name: str
    grid: Grid
    stream: Layout
    regather: bool = True

    def roles(self, layout: Layout) -> tuple[str, str, str]:
        """The axes in the roles x (coarse rows), y (fine rows), z (columns) of an activation in this layout."""
        (x, y), (z,) = layout.dims[0], layout.dims[-1]
        return x, y, z

    def after_linear(self, layout: Layout) -> Layout:
        """The layout of a linear's output: y and z have changed places."""
        x, y, z = self.roles(layout)
        return Layout((x, z), *layout.dims[1:-1], (y,))

    def weight(self, layout: Layout) -> Layout:
        """The layout of a linear's weight [k, n] whose input has `layout`: k:(z,x), n:y."""
        x, y, z = self.roles(layout)
        return Layout((z, x), (y,))

    def table(self, layout: Layout) -> Layout:
        """The layout of an embedding table [v, h] (the tied head, form NT) for a stream in `layout`: v:(y,x), h:z."""
        x, y, z = self.roles(layout)
        return Layout((y, x), (z,))

    def vector(self, layout: Layout) -> Layout:
        """The layout of a vector along the last dim of an activation in `layout`."""
        return Layout(layout.dims[-1])

    def rows(self, layout: Layout) -> Axis:
        """The plane of axes that split the rows (b, s) of an activation: over it a vector's gradient is summed."""
        return self.grid[tuple(axis for axes in layout.dims[:-1] for axis in axes)]

    def columns(self, layout: Layout) -> Axis:
        """The axis that splits the last dim of an activation: over it statistics and softmax denominators are summed."""
        return self.grid[layout.dims[-1]]

    def product(self, layout: Layout, form: str, m: int, n: int, k: int) -> Product:
        """The product C (m×n) of an activation in `layout` with a weight ("nn") or a table ("nt")."""
        plan = CuboidPlan(form, m, n, k, *self.roles(layout))
        return Product(Cuboid(plan, self.grid), self.regather, self.rows(self.after_linear(layout)))

    @property
    def pooled(self) -> Layout:
        """The layout of one row per sequence, [b, h]: what `first_tokens` returns."""
        return Layout(self.stream.dims[0], self.stream.dims[-1])

    def batch_first(self, x: Tensor) -> Tensor:
        """An activation as stored, [b, s, n] or [s, b, n] as the scheme has it, seen as [b, s, n]."""
        return x

    def as_stored(self, x: Tensor) -> Tensor:
        """An activation [b, s, n] in the order the scheme stores: the inverse of `batch_first`, contiguous."""
        return x.contiguous()

    def block_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """This rank's block of a global [b, s] tensor (tokens, labels, masks) beside an activation in `layout`, as [b, s]."""
        return whole[Layout(*layout.dims[:2]).slices(whole.shape, self.grid.shape, self.grid.coordinates)]

    def first_tokens(self, x: Tensor) -> Tensor:
        """The first position of every sequence of the stream, with gradient: this rank's block of [b, h] in layout `pooled`."""
        return self.batch_first(x)[:, 0].contiguous()

    def last_tokens(self, x: Tensor) -> Tensor:
        """The last position of every sequence of the stream, as `first_tokens`."""
        return self.batch_first(x)[:, -1].contiguous()

    def check(self, config: ModelConfig, batch: int) -> None:
        """Raise LayoutError where a dim cannot be split as the scheme needs: on every rank alike, before any communication.

        `batch` is b of one micro-batch. Attention needs whole sequences and whole heads: b % XY, b % XZ, a % Y, h % Z.
        Every other dim may be uneven.
        """
        for need in self._needs(config, batch):
            if need.size % need.ways(self.grid.shape):
                raise LayoutError(self._misfit(need, config, batch))

    @cached_property
    def _axes(self) -> tuple[str, str, str]:
        return self.roles(self.stream)

    def _needs(self, config: ModelConfig, batch: int) -> list[_Need]:
        x, y, z = self._axes
        stream = "The residual stream holds whole sequences, split by {} then {} (batch-fine cuboid)."
        return [
            _Need("batch", batch, (x, y), stream.format(x, y)),
            _Need("batch", batch, (x, z), f"Attention holds whole sequences, split by {x} then {z} (batch-fine cuboid)."),
            _Need("heads", config.heads, (y,), f"Attention holds whole heads, split by {y}."),
            _Need("hidden", config.hidden, (z,), f"The residual stream's hidden dim is split evenly by {z}."),
        ]

    def _misfit(self, need: _Need, config: ModelConfig, batch: int) -> str:
        ways = need.ways(self.grid.shape)
        below = need.size - need.size % ways
        values = [value for value in (below - ways, below, below + ways, below + 2 * ways) if value > 0][:3]

        def fits(shape: dict[str, int]) -> bool:
            return all(other.size % other.ways(shape) == 0 for other in self._needs(config, batch))

        grids = [shape for shape in grids_of(self.grid.size, self._axes) if fits(shape)]
        plural = {"batch": "Batches"}.get(need.dim, f"Values of {need.dim}")
        fitting = " · ".join(describe(shape) for shape in grids[:6]) or "none; change the sizes or the number of ranks"
        return (
            f"{need.dim} {need.size} cannot be split over {'·'.join(need.axes)} = {ways} (grid {describe(self.grid.shape)}).\n"
            f"  {need.why}\n"
            f"  {plural} that fit: {', '.join(map(str, values))}. "
            f"Grids of {self.grid.size} ranks that fit batch {batch}, heads {config.heads}, hidden {config.hidden}: {fitting}."
        )


@dataclass(frozen=True)
class _Need:
    """A dim that axes must divide evenly."""

    dim: str
    size: int
    axes: tuple[str, ...]
    why: str

    def ways(self, shape: dict[str, int]) -> int:
        product = 1
        for axis in self.axes:
            product *= shape[axis]
        return product


def _cuboid(grid: Grid, regather: bool) -> Scheme:
    missing = [axis for axis in ("x", "y", "z") if axis not in grid.shape]
    if missing:
        raise GridError(
            f"The cuboid scheme needs the axes x, y, z; the grid has {', '.join(grid.shape)}. Give {missing[0]} size 1."
        )
    return Scheme("cuboid", grid, Layout(("x", "y"), (), ("z",)), regather)


def _serial(grid: Grid | None, regather: bool) -> Scheme:
    grid = grid or Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    if grid.size != 1:
        raise GridError(f"The serial scheme runs on 1 rank; the grid has {grid.size}. Use the cuboid scheme, or start 1 rank.")
    return Scheme("serial", grid, Layout(("x", "y"), (), ("z",)), regather)


SCHEMES: dict[str, Callable[..., Scheme]] = {"serial": _serial, "cuboid": _cuboid}


def scheme(name: str, grid: Grid | None = None, regather: bool = True) -> Scheme:
    """The scheme called `name` on `grid`: "serial" (one rank; the cuboid of 1×1×1) or "cuboid" (any X×Y×Z, batch-fine).

    Raises GridError where the grid lacks an axis that the scheme needs or has too many ranks, LayoutError for an unknown name.
    """
    if name not in SCHEMES:
        raise LayoutError(f"Scheme {name!r} is not known. Schemes: {', '.join(SCHEMES)}.")
    if grid is None and name != "serial":
        raise GridError(f"The {name} scheme needs a grid: summa3d.Grid(MPI.COMM_WORLD, {{'x': 2, 'y': 2, 'z': 2}}).")
    return SCHEMES[name](grid, regather)
