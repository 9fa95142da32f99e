"""`DistMatrix`: this rank's block, the layout, the grid and the global shape; and `matmul` of such matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..comm.device.arrays import Array, dtype_name, numpy_dtype
from ..comm.grid import BaseGrid
from ..errors import ShapeError
from ..layout.cyclic import BlockCyclic, Ownership, ownership
from . import describe
from .distributed import Shown, check_sizes
from .elements import reductions, slices
from .elements.drawn import drawn
from .elements.elementwise import refused_operand
from .files import hdf5, npy, raw
from .local.triangle import conjugate
from .matmul import matmul
from .tensor import DistTensor


class DistMatrix(DistTensor):
    """A matrix split over a grid: `block` is this rank's part of the global matrix of `shape`, as `layout` says.

    `layout` is a Layout, or a BlockCyclic as ScaLAPACK has it; methods take their text too (``m:x k:y``).
    A block may have any memory order: `.T` is a view. Products take two matrices in any layouts (`matmul`), and so does the
    arithmetic of elements (`Elementwise`): ``A + B`` brings B to A's layout where it lies elsewhere.
    On a rank outside the grid the block has no elements: redistribution, products, arithmetic, sums over a dim and files are
    called there too; norms, numbers (`sum()`, `trace()`, …), `diagonal` and `to_global` belong to the grid's ranks.
    """

    DIMS = 2
    shape: tuple[int, int]

    # -- from and to ------------------------------------------------------------------------------------------------------

    @classmethod
    def zeros(
        cls, shape: tuple[int, int], grid: BaseGrid, layout: Ownership | str, dtype: np.typing.DTypeLike = np.float64
    ) -> DistMatrix:
        """A matrix of zeros, as `from_function`. Moves nothing."""
        return cls.from_function(lambda rows, columns: 0, shape, grid, layout, dtype)

    @classmethod
    def ones(
        cls, shape: tuple[int, int], grid: BaseGrid, layout: Ownership | str, dtype: np.typing.DTypeLike = np.float64
    ) -> DistMatrix:
        """A matrix of ones, as `from_function`. Moves nothing."""
        return cls.from_function(lambda rows, columns: 1, shape, grid, layout, dtype)

    @classmethod
    def eye(
        cls, shape: tuple[int, int], grid: BaseGrid, layout: Ownership | str, dtype: np.typing.DTypeLike = np.float64
    ) -> DistMatrix:
        """A matrix with ones on its diagonal, as `from_function`. Moves nothing."""
        return cls.from_function(np.equal, shape, grid, layout, dtype)

    @classmethod
    def random(
        cls,
        shape: tuple[int, int],
        grid: BaseGrid,
        layout: Ownership | str,
        dtype: np.typing.DTypeLike = np.float64,
        seed: int = 0,
        normal: bool = False,
    ) -> DistMatrix:
        """A random matrix, the same in all layouts: uniform in [0, 1), or normal of mean 0 and deviation 1. Moves nothing.

        Element (i, j) is a function of the seed, i, j and the number of columns (Philox4x64-10). A rank draws its own block.
        Raises ShapeError for a dtype without fractions.
        """
        check_sizes(shape)
        layout = ownership(layout)
        block = drawn(seed, shape, layout.runs(shape, grid.shape, grid.coordinates), numpy_dtype(dtype), normal)
        return cls(block, layout, grid, (shape[0], shape[1]))

    @classmethod
    def from_file(cls, path: str | Path, grid: BaseGrid, layout: Ownership | str) -> DistMatrix:
        """A matrix from a .npy file, each rank reading its own part. Moves nothing. Raises DataError on all ranks."""
        layout = ownership(layout)
        block, shape = npy.read(Path(path), grid, layout)
        return cls(block, layout, grid, shape)

    @classmethod
    def from_raw(
        cls,
        path: str | Path,
        shape: tuple[int, int],
        grid: BaseGrid,
        layout: Ownership | str,
        dtype: np.typing.DTypeLike = np.float64,
        offset: int = 0,
        order: str = "C",
    ) -> DistMatrix:
        """A matrix from a file of bare elements behind `offset` bytes, by rows (order C) or by columns (F). Moves nothing.

        The file ends with the last element. dtype may have the other byte order (">f8"). Each rank reads its own part; of order F
        the result is a transpose, whose blocks are F-ordered. Raises DataError on all ranks where the file has another size or
        cannot be read, ShapeError for another order.
        """
        check_sizes(shape)
        _check_order(order)
        if order == "F":
            return cls.from_raw(path, shape[::-1], grid, ownership(layout).transposed(), dtype, offset).T
        layout = ownership(layout)
        return cls(raw.read(Path(path), (shape[0], shape[1]), numpy_dtype(dtype), offset, grid, layout), layout, grid, shape)

    @classmethod
    def from_hdf5(cls, path: str | Path, dataset: str, grid: BaseGrid, layout: Ownership | str) -> DistMatrix:
        """A matrix from a dataset of an HDF5 file, each rank reading its own hyperslabs. Moves nothing. Needs the extra hdf5.

        Raises DataError on all ranks, and ConfigError where h5py is missing.
        """
        layout = ownership(layout)
        block, shape = hdf5.read(Path(path), dataset, grid, layout)
        return cls(block, layout, grid, shape)

    @classmethod
    def from_scalapack(
        cls,
        local: Array,
        shape: tuple[int, int],
        grid: BaseGrid,
        rows: tuple[str | tuple[str, ...], int],
        columns: tuple[str | tuple[str, ...], int],
    ) -> DistMatrix:
        """ScaLAPACK's local array of a matrix, uncopied: rows=(axis, MB), columns=(axis, NB), F- or C-ordered."""
        return cls(local, BlockCyclic(rows, columns), grid, shape)

    def to_scalapack(
        self, rows: tuple[str | tuple[str, ...], int], columns: tuple[str | tuple[str, ...], int], grid: BaseGrid | None = None
    ) -> DistMatrix:
        """The matrix dealt out in blocks, its block F-ordered; `layout.descriptor` describes it to ScaLAPACK."""
        return self.redistribute(BlockCyclic(rows, columns), grid, order="F")

    def to_file(self, path: str | Path) -> None:
        """Write a .npy file that all ranks can reach. Raises DataError on all ranks."""
        npy.write(self.block, self.shape, self.grid, self.layout, Path(path))

    def to_raw(self, path: str | Path, order: str = "C") -> None:
        """Write the bare elements by rows (order C) or columns (F) to a file that all ranks reach. DataError on all ranks."""
        _check_order(order)
        item = self if order == "C" else self.T
        raw.write(item.block, item.shape, item.grid, item.layout, Path(path))

    def to_hdf5(self, path: str | Path, dataset: str) -> None:
        """Write a dataset of an HDF5 file that all ranks can reach, rank after rank; other datasets of the file stay.

        The file is written anew, and takes the place of the old one. Raises DataError on all ranks, and ConfigError without h5py.
        """
        hdf5.write(self.block, self.shape, self.grid, self.layout, Path(path), dataset)

    def conj(self) -> DistMatrix:
        """The conjugate. Moves nothing; of complex numbers a `Conjugated`, which reads this matrix's own block."""
        return Conjugated(self) if dtype_name(self.block).startswith("complex") else self.view(self.block, False)

    @property
    def H(self) -> DistMatrix:
        """The conjugate transpose: ``A @ A.H`` reads A's block alone. Moves and copies nothing."""
        return self.conj().T

    def __getitem__(self, key: Any) -> Any:
        """``A[i:j, k:l]``, with steps of either sign: a new matrix in A's layout, split evenly anew; ``A[i:j]`` has all columns.

        A whole number keeps its dim, 1 wide, as a matrix has two: ``A[3]`` is 1×n. ``A[3, 4]`` is the element, a number on every
        rank, for one word. Moves, per rank, the words of its new block that it does not hold (`Redistribution`), in one
        all-to-all. Raises ShapeError for an index that A lacks, and for keys of other kinds.
        """
        return slices.part(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """``A[i:j, k:l] = B``, B in any layout, on any grid of the communicator, or a number: overwrites A's block in place.

        B moves to where A has the part, as in a redistribution; a number moves nothing. Ranks agree first that all can write
        their block. Raises ShapeError for other sizes or dtypes, and where a block is read-only.
        """
        slices.put_part(self, key, value)

    def __matmul__(self, other: Any) -> DistMatrix:
        return matmul(self, other) if isinstance(other, DistMatrix) else refused_operand(other, "@")

    def __rmatmul__(self, other: Any) -> Any:
        return refused_operand(other, "@")

    # -- reductions -------------------------------------------------------------------------------------------------------

    def sum(self, dim: int | None = None) -> Any:
        """Σ of all elements, a number, the same on every rank; with a dim over it, a matrix of 1 row (dim 0) or column (dim 1).

        That matrix lies as this one does, on all ranks of the axes that split the dim. Sums are taken in float64, complex128 or
        int64 and rounded once to the dtype; those of whole numbers stay int64. Moves a word, or an all-reduce of this rank's part
        of the row or column, over the axes that split the elements that are summed. Raises ShapeError for no numbers or dim.
        """
        return reductions.total(self) if dim is None else reductions.sum_along(self, dim)

    def mean(self, dim: int | None = None) -> Any:
        """`sum` ÷ the number of elements; of whole numbers float64. Raises ShapeError where there is no element."""
        return reductions.mean(self) if dim is None else reductions.mean_along(self, dim)

    def max(self, dim: int | None = None) -> Any:
        """The largest element, as `sum`; nan where one is nan. A word of each rank, or, of floats, twice the words of `sum`."""
        return reductions.extreme(self, "max") if dim is None else reductions.extreme_along(self, dim, "max")

    def min(self, dim: int | None = None) -> Any:
        """The smallest element, as `max`."""
        return reductions.extreme(self, "min") if dim is None else reductions.extreme_along(self, dim, "min")

    def trace(self) -> Any:
        """Σ of the diagonal, a number, the same on every rank; of a matrix that is not square too. Moves a word."""
        return reductions.trace(self)

    def diagonal(self) -> Array:
        """The diagonal, an array of one dim, on every rank. Moves, per rank, the elements of it that come from others."""
        return reductions.diagonal(self)

    def __repr__(self) -> str:
        return "\n".join([self.summary, *describe.table(self)])


class Conjugated(DistMatrix):
    """The conjugate of `plain`, a complex matrix, whose block it reads at each use: what is written there is seen here.

    `block` is a copy, read-only where the library knows such arrays; products of the matrix with itself make none.
    """

    def __init__(self, plain: DistMatrix) -> None:
        self.plain, self.layout, self.grid, self.shape = plain, plain.layout, plain.grid, plain.shape
        self.is_transposed, seen = plain.is_transposed, plain.shown
        self.view_of = seen._replace(own=None, conjugated=True)

    def __getattr__(self, name: str) -> Array:
        """The block, which is no attribute of its own."""
        if name != "block":
            raise AttributeError(f"a conjugated matrix has no {name}")
        block = conjugate(self.plain.block)
        if isinstance(block, np.ndarray):
            block.flags.writeable = False
        return block

    @property
    def shown(self) -> Shown:
        """The matrix whose elements this one shows, conjugated."""
        return self.plain.shown._replace(conjugated=True)

    @property
    def T(self) -> DistMatrix:  # type: ignore[override]
        """The transpose, conjugated too."""
        return Conjugated(self.plain.T)

    def conj(self) -> DistMatrix:
        """`plain`."""
        return self.plain

    def with_block(  # type: ignore[override]
        self, block: Array, layout: Ownership, shape: tuple[int, int] | None = None, is_transposed: bool = False
    ) -> DistMatrix:
        """A matrix of its own."""
        return self.plain.with_block(block, layout, shape, is_transposed)


def _check_order(order: str) -> None:
    if order not in ("C", "F"):
        raise ShapeError(f"order {order!r} is none of C, by rows, and F, by columns.")
