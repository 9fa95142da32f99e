"""Checks of a product beside shapes: dtypes, scale factors, and an output that does not overlap an operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ...comm.device.arrays import Array, dtype_name, kind_of, overlap
from ...comm.health.agreement import agree_on_error
from ...dtypes import DTYPES
from ...errors import ShapeError
from .workspace import is_like


def is_whole(value: Any) -> bool:
    """Return whether it is a whole number, Python's or numpy's."""
    return isinstance(value, int | np.integer)


def check_pieces(pieces: Any) -> None:
    """Raise ShapeError unless it is a number of pieces into which a message can be cut."""
    if not is_whole(pieces) or pieces < 1:
        raise ShapeError(f"pieces is {pieces!r}; a message is cut into a whole number of at least 1.")


def check_dtype(array: Array) -> str:
    """The name of its dtype. Raises ShapeError for one whose sums over ranks are not defined: the same on every grid."""
    name = dtype_name(array)
    if name not in DTYPES:
        raise ShapeError(f"dtype {name} is not supported by products; supported: {', '.join(DTYPES)}.")
    return name


def check_factor(name: str, factor: Any, dtype: str) -> None:
    """Raise ShapeError unless `factor` is a number by which elements of `dtype` can be multiplied and stay such."""
    if type(factor) is int:  # most calls' 1 and 0
        return
    value = factor.item() if getattr(factor, "ndim", None) == 0 else factor
    if not isinstance(value, int | float | complex):
        raise ShapeError(f"{name} is {factor!r}; it must be a number.")
    if isinstance(value, complex) and not dtype.startswith("complex"):
        raise ShapeError(f"{name} = {factor} is complex; a product of {dtype} takes real numbers.")
    if dtype.startswith("int") and isinstance(value, float) and not value.is_integer():
        raise ShapeError(f"{name} = {factor} is not a whole number; a product of {dtype} takes whole numbers.")


def check_operands(
    blocks: Sequence[tuple[str, Array | None, tuple[int, ...]]],
    check_block: Callable[[str, Array, tuple[int, ...]], None],
    alpha: Any,
    beta: Any,
) -> None:
    """Raise ShapeError unless A, B and C are blocks of one dtype, library and memory, and α and β suit it.

    blocks : the name of each, its block (None for a C that is made), and its shape, which `check_block` compares
    """
    (_, a, _), *_, (_, out, _) = blocks
    assert a is not None
    name_of_dtype = check_dtype(a)
    for name, array, expected in blocks:
        if array is None:
            continue
        check_block(name, array, expected)
        if array.dtype != a.dtype:
            raise ShapeError(f"{name} has dtype {array.dtype}, A has {a.dtype}; a product takes one dtype, of one library.")
        if not is_like(array, a):
            kinds = f"{name} is an array of {kind_of(array)}, A of {kind_of(a)}"
            raise ShapeError(f"{kinds}; a product takes one library and memory.")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        check_factor(name, factor, name_of_dtype)
    if out is None and beta != 0:
        raise ShapeError(f"beta = {beta} needs the block of C that it scales: pass out.")


def agree_on_out(comm: MPI.Comm, out: Array, a: Array, b: Array) -> None:
    """`check_out` of every rank of `comm`, raised on all of them where one cannot write its block (collective).

    Whether memory can be written, or is shared, is known on its rank alone: a block without elements shares none. Costs one
    all-reduce of a byte, and after an error a second collective with the message.
    """
    if comm == MPI.COMM_NULL:  # of a grid without processes
        return check_out(out, a, b)
    error: ShapeError | None = None
    try:
        check_out(out, a, b)
    except ShapeError as result:
        error = result
    failed = np.array([error is not None])
    if comm.size > 1:
        comm.Allreduce(MPI.IN_PLACE, failed, MPI.LOR)
    if failed[0]:
        agree_on_error(comm, error)


def check_out(out: Array, a: Array, b: Array) -> None:
    """Raise ShapeError unless this rank's block of C can be written, and lies apart from those of A and B."""
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ShapeError("out is read-only, and C is written into it. Pass an array that can be written, or none.")
    for name, operand in (("A", a), ("B", b)):
        if overlap(out, operand):
            raise ShapeError(
                f"out shares memory with {name}, which is read while C is written. Pass an out of its own, or a copy of {name}."
            )
