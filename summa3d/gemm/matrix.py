"""`DistMatrix`: a distributed tensor of two dims, with products, files and ScaLAPACK's arrays."""

from __future__ import annotations

from pathlib import Path

from ..comm.device.arrays import Array
from ..comm.grid import BaseGrid
from ..layout.cyclic import BlockCyclic, Ownership, ownership
from . import describe, files
from .matmul import matmul
from .tensor import DistTensor


class DistMatrix(DistTensor):
    """A matrix split over a grid: `block` is this rank's part of the global matrix of `shape`, as `layout` says.

    `layout` is a Layout, or a BlockCyclic as ScaLAPACK has it; methods take their text too (``m:x k:y``).
    A block may have any memory order: `.T` is a view. Products take two matrices in any layouts (`matmul`); sums want both in one
    layout on one grid, and raise LayoutError or ShapeError on every rank alike, before anything moves, where they are not;
    `redistribute` brings them there.
    On a rank outside the grid the block has no elements: redistribution, products, scaling, sums and files are called there
    too; norms and `to_global` belong to the grid's ranks.
    """

    DIMS = 2

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

    def to_file(self, path: str | Path) -> None:
        """Write a .npy file that all ranks can reach. Raises DataError on all ranks."""
        files.write(self, path)

    def __matmul__(self, other: DistMatrix) -> DistMatrix:
        return matmul(self, other) if isinstance(other, DistMatrix) else NotImplemented

    def __repr__(self) -> str:
        return "\n".join([self.summary, *describe.table(self)])
