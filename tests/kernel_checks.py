"""What tests of kernels share: operands, how close a result must be, and sums over ranks that are simulated by blocks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if os.environ.get("SUMMA3D_DEVICE") == "cuda" else "cpu"
# Relative norm of the difference from float64: 16-bit results are right up to their own rounding, at most 2⁻¹¹ and 2⁻⁸ of one
# element, as they are computed in float32.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Odd and prime, narrower than a 16-byte access, wider than a block's threads reach, one row, one column; and none.
SHAPES = [(1, 1), (3, 7), (13, 1), (61, 17), (129, 8), (2, 4099), (37, 1024), (0, 5), (5, 0)]


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers of `dtype`, the same on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return drawn.to(dtype).to(DEVICE)


def leaf(x: Tensor) -> Tensor:
    """A float64 copy that collects its gradient."""
    return x.double().clone().requires_grad_()


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """`got` is `want`, a float64 result of the same operands, but for rounding in `dtype`."""
    assert got.shape == want.shape
    difference = torch.linalg.vector_norm(got.double() - want)
    assert difference <= times * TOLERANCE[dtype] * torch.linalg.vector_norm(want), float(difference)


@dataclass
class Waited:
    """A sum over ranks that has been taken."""

    value: Tensor

    def wait(self) -> Tensor:
        return self.value


def instead(value: Tensor) -> Callable[[Tensor], Waited]:
    """A sum over ranks whose result is `value`, whatever this rank adds."""
    return lambda _: Waited(value.clone())
