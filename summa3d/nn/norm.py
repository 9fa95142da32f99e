"""Layer norm and root-mean-square norm over a dim that grid axes may split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from summa3d.kernels import dispatch, reference

from ..comm.axis import Axis
from ..layout.layout import Layout
from .config import ModelConfig
from .parameter import ShardedParameter, new_parameter
from .schemes import Scheme


class _Norm(nn.Module):
    """The base of both norms: γ, the plane of axes that splits the normalised dim, and the plane that splits the rows."""

    def __init__(
        self, n: int, scheme: Scheme, layout: Layout | str | None = None, eps: float = 1e-5, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.n, self.eps = n, eps
        self.layout = scheme.stream if layout is None else Layout.of(layout)
        self.scheme, self.columns, self.rows = scheme, scheme.columns(self.layout), scheme.vector_rows(self.layout)
        self.weight = self._vector(1.0, dtype)

    def _vector(self, value: float, dtype: torch.dtype) -> ShardedParameter:
        return new_parameter(self.scheme, self.scheme.vector(self.layout), (self.n,), ("constant", value), dtype, decay=False)

    def extra_repr(self) -> str:
        return f"{self.n}, eps={self.eps}, {self.layout}"


def _torchs_own_serves(x: Tensor, columns: Axis) -> bool:
    """Whether torch's layer norm can be used: no axis splits a row, statistics have x's dtype, and x is on the host."""
    return columns.size == 1 and x.dtype in (torch.float32, torch.float64) and dispatch.kernels_for(x) is reference


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, columns: Axis, rows: Axis, n: int, eps: float) -> Tensor:
        ctx.columns, ctx.rows, ctx.n = columns, rows, n
        if _torchs_own_serves(x, columns):
            y, mean, inverse = torch.native_layer_norm(x, (n,), gamma, beta, eps)
            ctx.save_for_backward(x, gamma, mean, inverse)
            return y
        sums = columns.all_reduce(dispatch.kernels_for(x).norm_sums(x))
        mean, inverse = dispatch.kernels_for(sums).norm_statistics(sums, n, eps, x.dtype)
        ctx.save_for_backward(x, gamma, mean, inverse)
        return dispatch.kernels_for(x).layer_norm(x, mean, inverse, gamma, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, inverse = ctx.saved_tensors
        if _torchs_own_serves(x, ctx.columns):
            gradient, wanted = torch.ops.aten.native_layer_norm_backward, [True] * 3
            grad_x, *of_vectors = gradient(grad, x, (ctx.n,), mean, inverse, gamma, gamma, wanted)
            vectors = torch.stack(of_vectors)
        else:
            summed = ctx.columns.start_all_reduce
            grad_x, vectors = dispatch.kernels_for(grad).layer_norm_gradient(grad, x, gamma, mean, inverse, ctx.n, summed)
        grad_gamma, grad_beta = ctx.rows.all_reduce(vectors).unbind()
        return grad_x, grad_gamma, grad_beta, None, None, None, None


class LayerNorm(_Norm):
    """y = γ·(x − mean)/√(variance + eps) + β over the last dim of x.

    Parameters
    ----------
    n : the global size of the last dim
    layout : the layout of x; default the residual stream's

    Words: one all-reduce of 2 words a row over the axes that split the last dim, forward and backward; in backward one
    all-reduce of γ's and β's gradients over the axes that split the rows (vectors "copied"). Memory kept: x and 2 words a row.
    """

    def __init__(
        self, n: int, scheme: Scheme, layout: Layout | str | None = None, eps: float = 1e-5, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(n, scheme, layout, eps, dtype)
        self.bias = self._vector(0.0, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's block of y for its block of x, in the same layout."""
        gamma, beta = (self.scheme.spread(vector, self.layout, self.n) for vector in (self.weight, self.bias))
        return _LayerNorm.apply(x, gamma, beta, self.columns, self.rows, self.n, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, columns: Axis, rows: Axis, n: int, eps: float) -> Tensor:
        sums = columns.all_reduce(dispatch.kernels_for(x).rms_sums(x))
        inverse = dispatch.kernels_for(sums).rms_inverse(sums, n, eps, x.dtype)
        ctx.save_for_backward(x, gamma, inverse)
        ctx.columns, ctx.rows, ctx.n = columns, rows, n
        return dispatch.kernels_for(x).rms_norm(x, inverse, gamma)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, inverse = ctx.saved_tensors
        grad_x, vector = dispatch.kernels_for(grad).rms_norm_gradient(
            grad, x, gamma, inverse, ctx.n, ctx.columns.start_all_reduce
        )
        return grad_x, ctx.rows.all_reduce(vector), None, None, None, None


class RMSNorm(_Norm):
    """y = γ·x/√(mean(x²) + eps) over the last dim of x.

    Parameters
    ----------
    n : the global size of the last dim
    layout : the layout of x; default the residual stream's

    Words: one all-reduce of 1 word a row over the axes that split the last dim, forward and backward; in backward one
    all-reduce of γ's gradient over the axes that split the rows (vectors "copied"). Memory kept: x and 1 word a row.
    """

    def forward(self, x: Tensor) -> Tensor:
        """This rank's block of y for its block of x, in the same layout."""
        gamma = self.scheme.spread(self.weight, self.layout, self.n)
        return _RMSNorm.apply(x, gamma, self.columns, self.rows, self.n, self.eps)


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}


def new_norm(config: ModelConfig, scheme: Scheme, layout: Layout | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Create the norm of the model's family over the hidden dim."""
    return NORMS[config.traits.norm](config.hidden, scheme, layout, config.eps, dtype)
