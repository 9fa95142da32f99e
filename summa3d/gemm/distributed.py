"""The data of a distributed matrix, without algebra: block, layout, grid and global shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from ..comm.device.arrays import Array, array_problem, kind_of
from ..comm.grid import BaseGrid
from ..errors import LayoutError, ShapeError
from ..layout.cyclic import ownership
from ..layout.redistribute import Ownership
from .algorithms.checks import is_whole

Matrix = TypeVar("Matrix", bound="Distributed")


@dataclass(eq=False, repr=False)
class Distributed:
    """`block` is this rank's part of the global matrix of `shape`, as `layout` says. Raises ShapeError for another block."""

    block: Array
    layout: Ownership
    grid: BaseGrid
    shape: tuple[int, int]
    is_transposed: bool = False
    """Whether this is known to be the .T of a matrix with C-ordered blocks; the same on all ranks."""

    def __post_init__(self) -> None:
        check_sizes(self.shape)
        self.layout = ownership(self.layout)
        self.shape = (self.shape[0], self.shape[1])
        self.check_block()

    def check_block(self) -> None:
        """Raise ShapeError where the block is no array, or not of the shape that the layout gives here."""
        problem = array_problem(self.block, has_memory=False)
        if problem is not None:
            raise ShapeError(f"A block of a matrix: {problem}.")
        expected = self.layout.local_shape(self.shape, self.grid.shape, self.grid.coordinates)
        if tuple(self.block.shape) != expected:
            here = tuple(self.block.shape)
            raise ShapeError(f"{self.layout} of a {self.shape} matrix on {self.grid} gives blocks {expected} here, not {here}.")

    def with_block(
        self: Matrix, block: Array, layout: Ownership, shape: tuple[int, int] | None = None, is_transposed: bool = False
    ) -> Matrix:
        """A matrix on the same grid of a block that is known to fit `layout` and `shape`; by default this one's shape."""
        made = object.__new__(type(self))
        made.block, made.layout, made.grid = block, layout, self.grid
        made.shape, made.is_transposed = self.shape if shape is None else shape, is_transposed
        return made

    @property
    def T(self: Matrix) -> Matrix:
        """The transpose: the same memory seen the other way round. Moves and copies nothing."""
        return self.with_block(self.block.T, self.layout.transposed(), (self.shape[1], self.shape[0]), not self.is_transposed)


def check_kind(a: Distributed, b: Distributed, what: str, one_grid: bool = True) -> None:
    """Raise LayoutError or ShapeError unless both matrices live on one grid and are of one dtype, of one library.

    one_grid : False, they may live on two grids.
    """
    for matrix in (a, b):  # a program may have replaced the block, by one that numpy would broadcast
        matrix.check_block()
    if one_grid and a.grid is not b.grid:
        raise LayoutError(f"{what}: A lives on {a.grid} and B on another grid, {b.grid}. Both must live on one grid.")
    if a.block.dtype != b.block.dtype:
        raise ShapeError(f"{what}: A has dtype {a.block.dtype} and B {b.block.dtype}; both must have one dtype, of one library.")
    if kind_of(a.block) != kind_of(b.block):
        raise ShapeError(f"{what}: A is made of arrays of {kind_of(a.block)} and B of {kind_of(b.block)}; both must be of one.")


def check_sizes(shape: tuple[int, int]) -> None:
    """Raise ShapeError unless `shape` is two whole numbers of at least 0."""
    if len(shape) != 2 or any(not is_whole(size) or size < 0 for size in shape):
        raise ShapeError(f"A matrix cannot have the shape {tuple(shape)}; it takes two whole numbers of at least 0.")
