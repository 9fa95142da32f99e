"""Sums, differences, Hadamard products and quotients of distributed matrices and scalars, and what acts on one alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from numbers import Number
from typing import Any, NoReturn

import numpy as np

from ...comm.device.arrays import Array, array_problem, cast, dtype_name, is_half, is_torch, numpy_dtype, quiet
from ...errors import ShapeError
from ...layout.redistribute import redistribute
from ..distributed import Distributed, Matrix, check_kind
from .counting import wide_dtype, without

SYMBOLS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"}
Operation = Callable[[Any, Any], Any]


class Elementwise(Distributed):
    """The arithmetic of a distributed matrix, element by element: local, where both operands lie alike.

    ``A + B``, ``A - B``, ``A * B`` (Hadamard) and ``A / B`` take a matrix of A's shape, or of 1 row or 1 column, which meets each
    of A's; the result lies as A does. A B elsewhere, in another layout or on another grid of one communicator, is brought to A's
    layout first, and B alone moves: the words of `Redistribution`. Both have one dtype and library, which the result keeps.
    A scalar meets each element, and moves nothing. What the dtype cannot hold is a ShapeError; a division by zero is inf or nan.
    """

    __array_ufunc__ = None  # so that numpy's scalars leave 2 * matrix to the matrix
    __iter__ = None  # a matrix has __getitem__, from which Python would make an iterator

    @property
    def dtype(self) -> Any:
        """The dtype of the elements, as the block's library names it."""
        return self.block.dtype

    def __add__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.add, self, other)

    def __radd__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.add, self, other, swapped=True)

    def __sub__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.sub, self, other)

    def __rsub__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.sub, self, other, swapped=True)

    def __mul__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.mul, self, other)

    def __rmul__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.mul, self, other, swapped=True)

    def __truediv__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.truediv, self, other)

    def __rtruediv__(self: Matrix, other: Any) -> Matrix:
        return combined(operator.truediv, self, other, swapped=True)

    def __neg__(self: Matrix) -> Matrix:
        return _each(self, operator.neg, "-A")

    def __abs__(self: Matrix) -> Matrix:
        """The magnitudes: of complex numbers real ones. Local."""
        return _each(self, abs, "abs(A)")

    @property
    def real(self: Matrix) -> Matrix:
        """The real parts, a view; of a real matrix itself. Local."""
        return _each(self, lambda block: block.real, "A.real")

    @property
    def imag(self: Matrix) -> Matrix:
        """The imaginary parts, a view; of a real matrix zeros. Local."""
        return _each(self, lambda block: block.imag if dtype_name(block).startswith("complex") else block * 0, "A.imag")

    def astype(self: Matrix, dtype: Any) -> Matrix:
        """A copy in another dtype: a name such as bfloat16, numpy's or torch's. Local. Raises ShapeError for complex to real."""
        return _each(self, lambda block: _as_dtype(block, dtype), "astype")

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Raise TypeError for another matrix: Python would compare which object it is, and numpy elements."""
        if isinstance(other, Elementwise) and other is not self:
            raise TypeError(
                "A == B of distributed matrices is not defined. abs(A - B).max() is how far they differ, A is B the object."
            )
        return NotImplemented

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("A distributed matrix is no array: each rank has a block of it, A.block. A.to_global() is the whole.")


def combined(apply: Operation, a: Matrix, b: Any, swapped: bool = False) -> Any:
    """``apply(a, b)``, with `swapped` ``apply(b, a)``, of a matrix and a matrix or scalar; NotImplemented for what is neither."""
    if isinstance(b, Elementwise):
        if a.shape != b.shape and _covers(b.shape, a.shape):
            return _combined(apply, b, a, not swapped)
        return _combined(apply, a, b, swapped)
    if not isinstance(b, Number):
        return refused_operand(b, SYMBOLS[apply])
    a.check_block()
    scalar = scalar_of(a, b, SYMBOLS[apply])
    return _each(a, lambda block: apply(scalar, block) if swapped else apply(block, scalar), f"A {SYMBOLS[apply]} {b}")


def refused_operand(other: Any, symbol: str) -> Any:
    """NotImplemented, of which Python makes a TypeError. Raises one of ours, with the cure, for arrays."""
    if array_problem(other, has_memory=False) is not None:
        return NotImplemented
    kind, shape = f"{type(other).__module__.partition('.')[0]}.{type(other).__name__}", tuple(other.shape)
    cure = "DistMatrix.from_global(array, A.grid, A.layout) makes a matrix of an array that every rank holds"
    if not shape:
        cure = "array.item() makes a number of it"
    raise TypeError(f"A {symbol} array: A is a DistMatrix, the other a {kind} of shape {shape}. {cure}.")


def _combined(apply: Operation, a: Matrix, b: Matrix, swapped: bool) -> Matrix:
    """``apply(a, b)`` of two matrices, in the layout of `a`, whose shape covers that of `b`."""
    check_kind(a, b, f"No A {SYMBOLS[apply]} B", one_grid=False)
    if not _covers(a.shape, b.shape):
        shapes = f"{b.shape} and {a.shape}" if swapped else f"{a.shape} and {b.shape}"
        raise ShapeError(f"A {SYMBOLS[apply]} B of matrices of shapes {shapes}: sizes are equal, or 1 in one of them.")
    if apply is operator.truediv:
        _check_quotient(a)
    target = a.layout
    for dim in range(len(a.shape)):
        target = without(target, dim) if b.shape[dim] != a.shape[dim] else target
    is_there = b.layout == target and b.grid is a.grid
    other = b.block if is_there else redistribute(b.block, b.shape, b.grid, b.layout, target, a.grid)
    is_transposed = a.is_transposed and b.is_transposed and is_there and a.shape == b.shape
    if not a.layout.holds_block(a.grid.coordinates):
        return a.with_block(a.block, a.layout, is_transposed=is_transposed)
    return _each(a, lambda block: apply(other, block) if swapped else apply(block, other), f"A {SYMBOLS[apply]} B", is_transposed)


@quiet
def _each(a: Matrix, function: Callable[[Array], Array], what: str, is_transposed: bool | None = None) -> Matrix:
    """The matrix whose block is a function of this one's, 16-bit as it is. Raises ShapeError where numbers do not allow it."""
    a.check_block()
    try:
        block = function(a.block)
    except (TypeError, OverflowError, RuntimeError) as error:  # numpy's, Python's and torch's
        wide_dtype(a.block)  # which raises an error of its own for what is no number
        raise ShapeError(f"{what} of a {dtype_name(a.block)} matrix: {error}.") from error
    if is_half(a.block) and what != "astype":  # those of ml_dtypes grow to float32
        block = cast(block, a.block)
    return a.with_block(block, a.layout, is_transposed=a.is_transposed if is_transposed is None else is_transposed)


def _covers(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(shape) == len(other) and all(there in (here, 1) for here, there in zip(shape, other, strict=True))


def scalar_of(a: Distributed, value: Any, symbol: str) -> complex:
    """A scalar as Python's own, so that it does not change the dtype; refused where the dtype cannot hold the result."""
    number: complex = value.item() if isinstance(value, np.generic) else value
    name = dtype_name(a.block)
    if isinstance(number, complex) and not name.startswith("complex"):
        raise ShapeError(f"A {symbol} {number} of a {name} matrix is not {name}. Take A.astype('complex128'), or a real number.")
    if isinstance(number, float) and "int" in name:
        raise ShapeError(f"A {symbol} {number} of a {name} matrix is not {name}. Take A.astype('float64'), or a whole number.")
    if symbol == "/":
        _check_quotient(a)
    return number


def _check_quotient(a: Distributed) -> None:
    name = dtype_name(a.block)
    if "int" in name or name == "bool":
        raise ShapeError(f"A quotient of {name} matrices is not {name}. Take A.astype('float64').")


def _as_dtype(block: Array, dtype: Any) -> Array:
    """The block in the dtype of a name, of numpy's or of torch's."""
    name = str(dtype).removeprefix("torch.")
    if name != "bfloat16" and not str(dtype).startswith("torch."):
        name = np.dtype(dtype).name
    if dtype_name(block).startswith("complex") and not name.startswith("complex"):
        raise ShapeError(f"astype of a {dtype_name(block)} matrix to {name} drops imaginary parts. Take A.real or abs(A) first.")
    if not is_torch(block):
        return block.astype(numpy_dtype(name))
    import torch

    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ShapeError(f"astype: torch has no dtype {name}.")
    return block.detach().to(getattr(torch, name), copy=True)
