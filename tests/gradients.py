"""Operands of a product and its gradient, the same on every rank, and the comparison of blocks with a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from summa3d.layout import collect


def operands(plan: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B, a bias and dC of a plan's shapes; all but dC with gradient."""
    generator = torch.Generator().manual_seed(11)
    a, b, bias, dc = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (plan.a_shape, plan.b_shape, (plan.n,), plan.c_shape)
    )
    return a.requires_grad_(), b.requires_grad_(), bias.requires_grad_(), dc


def close(block: Tensor, grid: Any, layout: Any, want: Tensor) -> bool:
    """Return whether the blocks together are `want`, to rounding."""
    return bool((collect(block.detach(), grid, layout, want.shape) - want).norm() <= 1e-13 * want.norm())
