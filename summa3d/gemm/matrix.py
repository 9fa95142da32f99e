"""`DistMatrix`: this rank's block, the layout, the grid and the global shape; and `matmul` of such matrices."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

from ..comm.convert import converted
from ..comm.device.arrays import Array, array_problem, cast, copy_into, dtype_name, empty, is_half, numpy_dtype, quiet
from ..comm.grid import BaseGrid
from ..errors import ConfigError, LayoutError, ShapeError
from ..layout.cyclic import BlockCyclic, Ownership, ownership
from ..layout.distribute import collect
from ..layout.layout import Layout
from ..layout.redistribute import indices, redistribute, taken
from . import describe, files, norms
from .distributed import Distributed, Shown, check_kind, check_sizes
from .local.triangle import conjugate
from .matmul import matmul


class DistMatrix(Distributed):
    """A matrix split over a grid: `block` is this rank's part of the global matrix of `shape`, as `layout` says.

    `layout` is a Layout, or a BlockCyclic as ScaLAPACK has it; methods take their text too (``m:x k:y``).
    A block may have any memory order: `.T` is a view. Products take two matrices in any layouts (`matmul`); sums want both in one
    layout on one grid, and raise LayoutError or ShapeError on every rank alike, before anything moves, where they are not;
    `redistribute` brings them there.
    On a rank outside the grid the block has no elements: redistribution, products, scaling, sums and files are called there
    too; norms and `to_global` belong to the grid's ranks.
    """

    __array_ufunc__ = None  # so that numpy's scalars leave 2 * matrix to the matrix

    # -- from and to ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_global(cls, whole: Array, grid: BaseGrid, layout: Ownership | str) -> DistMatrix:
        """The part that this rank holds of a matrix that every rank holds; a copy. Moves nothing."""
        layout, problem = ownership(layout), array_problem(whole)
        if problem is not None or len(whole.shape) != 2:
            raise ShapeError(
                f"from_global takes a matrix that every rank holds: {problem or f'its shape is {tuple(whole.shape)}'}."
            )
        runs = layout.runs(tuple(whole.shape), grid.shape, grid.coordinates)
        part = taken(whole, runs)
        return cls(copy_into(empty(part.shape, part), part), layout, grid, (whole.shape[0], whole.shape[1]))

    @classmethod
    def from_function(
        cls,
        function: Callable[[np.ndarray, np.ndarray], Any],
        shape: tuple[int, int],
        grid: BaseGrid,
        layout: Ownership | str,
        dtype: np.typing.DTypeLike = np.float64,
        shared: None = None,
    ) -> DistMatrix:
        """A matrix given by its global indices, each rank computing its own block. Moves nothing.

        `function` is called once with the block's global row indices [r, 1] and column indices [1, c] and returns [r, c].
        `dtype` is one of numpy's, or the name bfloat16 where ml_dtypes is installed. `shared` is retired; giving it raises
        ConfigError, which names its successor.
        """
        if shared is not None:
            raise ConfigError(
                f"from_function no longer takes shared={shared}: a grid uses the memory of a node by itself. "
                "Leave shared out; Grid(comm, axes, node_memory=True) always uses the node's memory, node_memory=False never."
            )
        check_sizes(shape)
        layout = ownership(layout)
        dtype = numpy_dtype(dtype)
        rows, columns = (indices(runs) for runs in layout.runs(shape, grid.shape, grid.coordinates))
        values = np.broadcast_to(function(rows[:, None], columns[None, :]), (len(rows), len(columns)))
        if np.iscomplexobj(values) and dtype.kind != "c":
            raise ShapeError(f"The function's values are complex, and dtype {dtype} is not. Give it a complex dtype.")
        block = np.empty(values.shape, dtype)
        block[...] = values
        return cls(block, layout, grid, (shape[0], shape[1]))

    @classmethod
    def from_file(cls, path: str | Path, grid: BaseGrid, layout: Ownership | str) -> DistMatrix:
        """A matrix from a .npy file, each rank reading its own part. Raises DataError on all ranks."""
        layout = ownership(layout)
        block, shape = files.read(path, grid, layout)
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

    def to_global(self) -> Array:
        """The whole matrix, on every rank. Moves, per rank, the words it does not own."""
        if isinstance(self.layout, Layout):
            return collect(self.block, self.grid, self.layout, self.shape)
        return self.redistribute(Layout((), ())).block

    def to_file(self, path: str | Path) -> None:
        """Write a .npy file that all ranks can reach. Raises DataError on all ranks."""
        files.write(self, path)

    def redistribute(self, layout: Ownership | str, grid: BaseGrid | None = None, order: str = "C") -> DistMatrix:
        """The same matrix owned otherwise: a new one. One all-to-all; what a rank holds already does not move.

        `layout` is a Layout, a BlockCyclic, or the text of either: ``A.redistribute("m:x k:y")``, ``"m:x[64] k:y[64]"``.
        `grid` may be another grid made on the same communicator, of any number of its ranks (``Grid(comm, axes, ranks=…)``);
        all ranks of the communicator call. `order` is the new block's memory order, C or F.
        """
        layout = ownership(layout)
        block = redistribute(self.block, self.shape, self.grid, self.layout, layout, grid, order)
        return DistMatrix(block, layout, grid or self.grid, self.shape, order == "F")

    # -- algebra ----------------------------------------------------------------------------------------------------------

    def to(self, library: str, device: str | None = None) -> DistMatrix:
        """The same matrix in arrays of `library` (numpy, torch, cupy), on `device` (cpu, cuda) where torch has the choice.

        Moves nothing between ranks. Shares this matrix's memory where it stays on one side: numpy ↔ torch on the host, CuPy ↔
        torch on a device (DLPack); else copies the block. Raises ConfigError for what does not exist or cannot be imported.
        """
        return self._with(converted(self.block, library, device), self.is_transposed)

    def conj(self) -> DistMatrix:
        """The conjugate. Moves nothing; of complex numbers a `Conjugated`, which reads this matrix's own block."""
        return Conjugated(self) if dtype_name(self.block).startswith("complex") else self.view(self.block, False)

    @property
    def H(self) -> DistMatrix:
        """The conjugate transpose: ``A @ A.H`` reads A's block alone. Moves and copies nothing."""
        return self.conj().T

    def __matmul__(self, other: DistMatrix) -> DistMatrix:
        return matmul(self, other) if isinstance(other, DistMatrix) else NotImplemented

    @quiet
    def __add__(self, other: DistMatrix) -> DistMatrix:
        if not isinstance(other, DistMatrix):
            return NotImplemented
        return self._with(self.block + self._alike(other, "add").block, self.is_transposed and other.is_transposed)

    @quiet
    def __sub__(self, other: DistMatrix) -> DistMatrix:
        if not isinstance(other, DistMatrix):
            return NotImplemented
        return self._with(self.block - self._alike(other, "subtract").block, self.is_transposed and other.is_transposed)

    @quiet
    def __mul__(self, factor: complex) -> DistMatrix:
        if not isinstance(factor, Number):
            return NotImplemented
        self.check_block()
        factor = self._factor(factor)
        try:
            scaled = self.block * factor
        except TypeError as error:
            raise ShapeError(f"A factor is one of numbers; the block's dtype is {self.block.dtype}.") from error
        block = cast(scaled, self.block) if is_half(self.block) else scaled  # ml_dtypes' grow to float32
        return self._with(block, self.is_transposed)

    __rmul__ = __mul__

    def __truediv__(self, divisor: complex) -> DistMatrix:
        return self * (1 / divisor) if isinstance(divisor, Number) else NotImplemented

    def __neg__(self) -> DistMatrix:
        return self._with(-self.block, self.is_transposed)

    def norm(self, order: str | float = "fro") -> float:
        """‖A‖: "fro" (Frobenius), "max" (largest magnitude), 1 (column sums), inf (row sums); the same on every rank."""
        return norms.norm(self, order)

    def __repr__(self) -> str:
        return "\n".join([self.summary, *describe.table(self)])

    @property
    def summary(self) -> str:
        """One line: size, dtype, layout, grid, and this rank's part."""
        return describe.summary(self)

    def _with(self, block: Array, is_transposed: bool) -> DistMatrix:
        return self.with_block(block, self.layout, is_transposed=is_transposed)

    def _alike(self, other: DistMatrix, verb: str) -> DistMatrix:
        """`other`, if its elements lie where this matrix has its own."""
        check_kind(self, other, f"Cannot {verb}")
        if self.shape != other.shape:
            raise ShapeError(f"Cannot {verb} matrices of shapes {self.shape} and {other.shape}.")
        if self.layout != other.layout:
            wanted = f"bring the second there by redistribute({str(self.layout)!r})"
            raise LayoutError(f"Cannot {verb} a matrix in {self.layout} and one in {other.layout}: {wanted}.")
        return other

    def _factor(self, factor: Any) -> complex:
        """A scalar as Python's own, so that it does not change the dtype; refused where the dtype cannot hold the result."""
        value: complex = factor.item() if isinstance(factor, np.generic) else factor
        name = dtype_name(self.block)
        if isinstance(value, complex) and not name.startswith("complex"):
            raise ShapeError(f"{value} times a {name} matrix is not {name}. Make the matrix complex, or take a real factor.")
        if isinstance(value, float) and name.startswith("int"):
            raise ShapeError(f"{value} times a {name} matrix is not {name}. Make the matrix float64, or take a whole factor.")
        return value


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
