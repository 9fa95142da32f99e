"""The dtypes of the package in one table: bytes, cost of a multiply-add, BLAS letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import ConfigError


@dataclass(frozen=True)
class Dtype:
    """A dtype whose elements ranks can multiply, exchange and add.

    nbytes : of an element. flops : real operations of a multiply-add. letter : of its products in a BLAS (dgemm has d); None
    where a BLAS has none.
    """

    name: str
    nbytes: int
    flops: int
    letter: str | None = None


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", 8, 2, "d"),
        Dtype("float32", 4, 2, "s"),
        Dtype("float16", 2, 2),
        Dtype("bfloat16", 2, 2),
        Dtype("complex128", 16, 8, "z"),
        Dtype("complex64", 8, 8, "c"),
        Dtype("int32", 4, 2),
        Dtype("int64", 8, 2),
    )
}
FLOATS = ("float32", "float64", "bfloat16", "float16")
"""The dtypes of weights, the default first."""
HALVES = tuple(name for name in FLOATS if DTYPES[name].nbytes == 2)
"""The 16-bit floats, whose sums are accumulated in float32."""
NARROW = {"float8": 8, "float4": 4}
"""Dtype → bits of an element, of products of other programs on devices, which the planner prices and nothing here computes in."""
LETTERS = {name: dtype.letter for name, dtype in DTYPES.items() if dtype.letter}
"""Dtype → letter of its products in a BLAS."""


def dtype_of(dtype: Any) -> Dtype:
    """The entry of a dtype of numpy or torch, or of a dtype's name. Raises ConfigError, naming all, where there is none."""
    text = str(dtype).removeprefix("torch.")
    name = text if text in DTYPES or text == "None" else _numpys_name(dtype)
    if name not in DTYPES:
        raise ConfigError(f"dtype {name} is not supported by products; supported: {', '.join(DTYPES)}.")
    return DTYPES[name]


def _numpys_name(dtype: Any) -> str:
    import numpy as np  # here: the command line sets the threads of numerical libraries before it loads one

    try:
        return np.dtype(dtype).name
    except TypeError:
        return str(dtype)
