"""`DistTensor`: this rank's block of a tensor of any dims, the layout, the grid and the global shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..comm.convert import converted
from ..comm.device.arrays import Array, array_problem, copy_into, empty, numpy_dtype, permuted
from ..comm.grid import BaseGrid
from ..errors import ConfigError, ShapeError
from ..layout.cyclic import Ownership, ownership
from ..layout.distribute import collect
from ..layout.layout import Layout
from ..layout.redistribute import indices, redistribute, taken
from . import describe
from .distributed import check_sizes
from .elements import norms
from .elements.elementwise import Elementwise

Own = TypeVar("Own", bound="DistTensor")


class DistTensor(Elementwise):
    """A tensor split over a grid: `block` is this rank's part of the global tensor of `shape`, as `layout` says.

    `layout` is a Layout, or of matrices a BlockCyclic; methods take their text too (``b:x m n:y``). A `DistMatrix` is one of two
    dims; `summa3d.einsum` multiplies tensors in any layouts, and the arithmetic of elements (`Elementwise`) takes them so too.
    A block may have any memory order.
    On a rank outside the grid the block has no elements: redistribution, products and arithmetic are called there too; norms and
    `to_global` belong to the grid's ranks.
    """

    # -- from and to ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_global(cls: type[Own], whole: Array, grid: BaseGrid, layout: Ownership | str) -> Own:
        """The part that this rank holds of a tensor that every rank holds; a copy. Moves nothing."""
        layout, problem = ownership(layout), array_problem(whole)
        if problem is not None:
            raise ShapeError(f"from_global takes an array that every rank holds: {problem}.")
        shape = tuple(whole.shape)
        check_sizes(shape, cls.DIMS)
        part = taken(whole, layout.runs(shape, grid.shape, grid.coordinates))
        return cls(copy_into(empty(part.shape, part), part), layout, grid, shape)

    @classmethod
    def from_function(
        cls: type[Own],
        function: Callable[..., Any],
        shape: tuple[int, ...],
        grid: BaseGrid,
        layout: Ownership | str,
        dtype: np.typing.DTypeLike = np.float64,
        shared: None = None,
    ) -> Own:
        """A tensor given by its global indices, each rank computing its own block. Moves nothing.

        `function` is called once with the block's global indices, an array for each dim, of a matrix the rows' [r, 1] and the
        columns' [1, c], and returns the block [r, c].
        `dtype` is one of numpy's, or the name bfloat16 where ml_dtypes is installed. `shared` is retired; giving it raises
        ConfigError, which names its successor.
        """
        if shared is not None:
            raise ConfigError(
                f"from_function no longer takes shared={shared}: a grid uses the memory of a node by itself. "
                "Leave shared out; Grid(comm, axes, node_memory=True) always uses the node's memory, node_memory=False never."
            )
        check_sizes(shape, cls.DIMS)
        layout = ownership(layout)
        dtype = numpy_dtype(dtype)
        held = [indices(runs) for runs in layout.runs(shape, grid.shape, grid.coordinates)]
        values = np.broadcast_to(function(*np.ix_(*held)), tuple(map(len, held)))
        if np.iscomplexobj(values) and dtype.kind != "c":
            raise ShapeError(f"The function's values are complex, and dtype {dtype} is not. Give it a complex dtype.")
        block = np.empty(values.shape, dtype)
        block[...] = values
        return cls(block, layout, grid, tuple(shape))

    def to_global(self) -> Array:
        """The whole tensor, on every rank. Moves, per rank, the words it does not own."""
        if isinstance(self.layout, Layout):
            return collect(self.block, self.grid, self.layout, self.shape)
        return self.redistribute(Layout(*([()] * len(self.shape)))).block

    def redistribute(self: Own, layout: Ownership | str, grid: BaseGrid | None = None, order: str = "C") -> Own:
        """The same tensor owned otherwise: a new one. One all-to-all; what a rank holds already does not move.

        `layout` is a Layout, a BlockCyclic, or the text of either: ``A.redistribute("m:x k:y")``, ``"m:x[64] k:y[64]"``.
        `grid` may be another grid made on the same communicator, of any number of its ranks (``Grid(comm, axes, ranks=…)``);
        all ranks of the communicator call. `order` is the new block's memory order, C or F.
        """
        layout = ownership(layout)
        block = redistribute(self.block, self.shape, self.grid, self.layout, layout, grid, order)
        return type(self)(block, layout, grid or self.grid, self.shape, order == "F")

    # -- algebra ----------------------------------------------------------------------------------------------------------

    def permuted(self: Own, *dims: int) -> Own:
        """The tensor with its dims in this order, as numpy's transpose: a view of the same memory. Moves and copies nothing."""
        if sorted(dims) != list(range(len(self.shape))):
            raise ShapeError(f"permuted{dims} of {len(self.shape)} dims: pass each of their numbers once, from 0.")
        if dims == tuple(range(len(dims)))[::-1]:
            return self.T
        shape = tuple(self.shape[dim] for dim in dims)
        return self.with_block(permuted(self.block, dims), self.layout.permuted(*dims), shape)

    def to(self: Own, library: str, device: str | None = None) -> Own:
        """The same tensor in arrays of `library` (numpy, torch, cupy), on `device` (cpu, cuda) where torch has the choice.

        Moves nothing between ranks. Shares this tensor's memory where it stays on one side: numpy ↔ torch on the host, CuPy ↔
        torch on a device (DLPack); else copies the block. Raises ConfigError for what does not exist or cannot be imported.
        """
        return self._with(converted(self.block, library, device), self.is_transposed)

    def norm(self, order: str | float = "fro") -> float:
        """‖A‖: "fro" (Frobenius), "max" (largest magnitude); of matrices 1 (column sums), inf (row sums); equal on all ranks."""
        return norms.norm(self, order)

    def __repr__(self) -> str:
        return self.summary

    @property
    def summary(self) -> str:
        """One line: size, dtype, layout, grid, and this rank's part."""
        return describe.summary(self)

    def _with(self: Own, block: Array, is_transposed: bool) -> Own:
        return self.with_block(block, self.layout, is_transposed=is_transposed)
