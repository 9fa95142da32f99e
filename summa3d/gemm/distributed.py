"""The data of a distributed tensor, without algebra: block, layout, grid and global shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

from ..comm.device.arrays import Array, array_problem, kind_of, permuted
from ..comm.grid import BaseGrid
from ..errors import LayoutError, ShapeError
from ..layout.cyclic import ownership
from ..layout.redistribute import Ownership
from .algorithms.checks import is_whole

Matrix = TypeVar("Matrix", bound="Distributed")


class Shown(NamedTuple):
    """A matrix that another one shows, its block and the other's `own` when that was made, and how it is shown."""

    matrix: Distributed
    block: Array
    own: Array | None
    transposed: bool
    conjugated: bool


@dataclass(eq=False, repr=False)
class Distributed:
    """`block` is this rank's part of the global tensor of `shape`, as `layout` says. Raises ShapeError for another block."""

    block: Array
    layout: Ownership
    grid: BaseGrid
    shape: tuple[int, ...]
    is_transposed: bool = False
    """Whether this is known to be the .T of a tensor with C-ordered blocks; the same on all ranks."""
    view_of: Shown | None = field(default=None, init=False)
    """Of a transpose or a conjugate: the tensor whose elements it shows; the same on all ranks."""
    DIMS: ClassVar[int | None] = None
    """The dims that such a tensor has; None, any number."""

    def __post_init__(self) -> None:
        check_sizes(self.shape, self.DIMS)
        self.layout = ownership(self.layout)
        self.shape = tuple(self.shape)
        self.check_block()

    def check_block(self) -> None:
        """Raise ShapeError where the block is no array, or not of the shape that the layout gives here."""
        problem = array_problem(self.block, has_memory=False)
        if problem is not None:
            raise ShapeError(f"A block of a tensor: {problem}.")
        expected = self.layout.local_shape(self.shape, self.grid.shape, self.grid.coordinates)
        if tuple(self.block.shape) != expected:
            here = tuple(self.block.shape)
            raise ShapeError(f"{self.layout} of {self.shape} on {self.grid} gives blocks {expected} here, not {here}.")

    def with_block(
        self: Matrix, block: Array, layout: Ownership, shape: tuple[int, ...] | None = None, is_transposed: bool = False
    ) -> Matrix:
        """A tensor on the same grid of a block that is known to fit `layout` and `shape`; by default this one's shape."""
        made = object.__new__(type(self))
        made.block, made.layout, made.grid = block, layout, self.grid
        made.shape, made.is_transposed = self.shape if shape is None else shape, is_transposed
        made.view_of = None
        return made

    def view(self: Matrix, block: Array, transposes: bool) -> Matrix:
        """A matrix of a view of this one's block, of whose transpose where it `transposes`; it is known to be one with this."""
        layout, shape = (self.layout.transposed(), self.shape[::-1]) if transposes else (self.layout, self.shape)
        made, seen = self.with_block(block, layout, shape, self.is_transposed != transposes), self.shown
        made.view_of = seen._replace(own=block, transposed=seen.transposed != transposes)
        return made

    @property
    def shown(self) -> Shown:
        """The matrix whose elements this one shows: itself, where a program has replaced either block since."""
        seen = self.view_of
        if seen is None or seen.own is not self.block or seen.matrix.block is not seen.block:
            return Shown(self, self.block, self.block, False, False)
        return seen

    @property
    def T(self: Matrix) -> Matrix:
        """The transpose, dims in reverse order: the same memory seen the other way round. Moves and copies nothing."""
        dims = tuple(range(len(self.shape)))[::-1]
        return self.view(self.block.T if len(dims) == 2 else permuted(self.block, dims), True)


def resolved(matrix: Matrix) -> Matrix:
    """The matrix; of a conjugate, one whose block is a copy of it."""
    if not isinstance(matrix, Distributed) or matrix.view_of is None or not matrix.view_of.conjugated:
        return matrix
    return matrix.with_block(matrix.block, matrix.layout, matrix.shape, matrix.is_transposed)


def check_kind(a: Distributed, b: Distributed, what: str, one_grid: bool = True) -> None:
    """Raise LayoutError or ShapeError unless both tensors live on one grid and are of one dtype, of one library.

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


def check_sizes(shape: tuple[int, ...], dims: int | None = None) -> None:
    """Raise ShapeError unless `shape` is whole numbers of at least 0: one or more, or as many as `dims`."""
    listed = isinstance(shape, Sequence) and not isinstance(shape, str)
    if not listed or len(shape) != (dims or max(1, len(shape))) or any(not is_whole(size) or size < 0 for size in shape):
        takes = "whole numbers of at least 0, one a dim" if dims is None else f"{dims} whole numbers of at least 0"
        given = tuple(shape) if listed else shape
        raise ShapeError(f"A {'tensor' if dims is None else 'matrix'} cannot have the shape {given}; it takes {takes}.")
