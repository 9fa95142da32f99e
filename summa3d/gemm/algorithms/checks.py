"""What a product accepts beside shapes: dtypes that ranks can exchange and add, factors that a dtype can hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...comm.arrays import Array, dtype_name, overlap
from ...errors import ShapeError
from ..cost.machine import KINDS


def is_whole(value: Any) -> bool:
    """Whether it is a whole number, Python's or numpy's."""
    return isinstance(value, int | np.integer)


def check_dtype(array: Array) -> None:
    """Raise ShapeError for a dtype whose sums over ranks are not defined: the same on every grid, one rank included."""
    name = dtype_name(array)
    if name not in KINDS:
        raise ShapeError(f"dtype {name} has no product here. Those that have: {', '.join(KINDS)}.")


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


def check_apart(out: Array, operand: Array, name: str) -> None:
    """Raise ShapeError where `out` and an operand have elements in common: one would be overwritten before it is read."""
    if overlap(out, operand):
        raise ShapeError(
            f"out shares memory with {name}, which is read while C is written. Pass an out of its own, or a copy of {name}."
        )
