"""Layer norm and root-mean-square norm over a dim that grid axes may split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from summa3d.kernels import dispatch, reference

from ...autograd.function import Function, once_differentiable
from ...comm.axis import Axis
from ...layout.layout import Layout
from ..config import ModelConfig
from ..context import Context
from ..parameter import ShardedModule, ShardedParameter, new_parameter
from .joint_sums import VectorSum


def _uses_torch_layer_norm(x: Tensor, columns: Axis) -> bool:
    """Return whether torch's layer norm can be used: no axis splits a row, statistics have x's dtype, and x is on the host."""
    return columns.size == 1 and x.dtype in (torch.float32, torch.float64) and dispatch.kernels_for(x) is reference


class _Normalise(Function):
    """Layer norm, or without β root-mean-square norm."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, columns: Axis, rows: Axis | None, n: int, eps: float
    ) -> Tensor:
        ctx.columns, ctx.rows, ctx.n = columns, rows, n
        if beta is not None and _uses_torch_layer_norm(x, columns):
            y, mean, inverse = torch.native_layer_norm(x, (n,), gamma, beta, eps)
            ctx.save_for_backward(x, gamma, mean, inverse)
            return y
        sums = columns.all_reduce(dispatch.kernels_for(x).norm_sums(x, beta is not None))
        mean, inverse = dispatch.kernels_for(sums).norm_statistics(sums, n, eps, x.dtype)
        ctx.save_for_backward(x, gamma, mean, inverse)
        return dispatch.kernels_for(x).norm(x, mean, inverse, gamma, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, mean, inverse = ctx.saved_tensors
        if mean is not None and _uses_torch_layer_norm(x, ctx.columns):
            gradient, wanted = torch.ops.aten.native_layer_norm_backward, [True] * 3
            grad_x, *of_vectors = gradient(grad, x, (ctx.n,), mean, inverse, gamma, gamma, wanted)
            vectors = torch.stack(of_vectors)
        else:
            summed = ctx.columns.start_all_reduce
            grad_x, vectors = dispatch.kernels_for(grad).norm_gradient(grad, x, gamma, mean, inverse, ctx.n, summed)
        grad_gamma, *grad_beta = (vectors if ctx.rows is None else ctx.rows.all_reduce(vectors)).unbind()
        return grad_x, grad_gamma, grad_beta[0] if grad_beta else None, None, None, None, None


class _Norm(ShardedModule):
    """The base of both norms: γ and β, the plane of axes that splits the normalised dim, and the plane that splits the rows."""

    centred: bool

    def __init__(
        self,
        n: int,
        scheme: Context,
        layout: Layout | str | None = None,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
        offset: float = 0.0,
        vectors: Sequence[str] = ("weight", "bias"),
    ) -> None:
        super().__init__()
        self.n, self.eps, self.offset = n, eps, offset
        self.layout = scheme.residual if layout is None else Layout.of(layout)
        self.context, self.columns = scheme, scheme.columns(self.layout)
        self.vector_sum = VectorSum(scheme.vector_rows(self.layout))
        self.weight = self._vector(1.0 - offset, dtype) if "weight" in vectors else None
        self.bias = self._vector(0.0, dtype) if self.centred and "bias" in vectors else None

    def _vector(self, value: float, dtype: torch.dtype) -> ShardedParameter:
        layout = self.context.scheme.vector(self.layout)
        return new_parameter(self.context, layout, (self.n,), ("constant", value), dtype, decay=False)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's block of y for its block of x, in the same layout."""
        gamma = self._used(self.weight, x, 1.0)
        gamma = gamma + self.offset if self.offset else gamma
        beta = self._used(self.bias, x, 0.0) if self.centred else None
        rows = None if self.vector_sum.joint else self.vector_sum.rows
        is_torchs = beta is not None and beta is self.bias and (rows is None or rows.size == 1) and not x.is_meta
        if is_torchs and _uses_torch_layer_norm(x, self.columns):  # it keeps β too, which is no more where β is the parameter
            return functional.layer_norm(x, (self.n,), gamma, beta, self.eps)
        return _Normalise.apply(x, gamma, beta, self.columns, rows, self.n, self.eps)

    def _used(self, stored: ShardedParameter | None, x: Tensor, value: float) -> Tensor:
        """A vector as x needs it: `value` where the norm has none."""
        if stored is None:
            return x.new_full(x.shape[-1:], value)
        return self.context.broadcast_vector(stored, self.layout, self.n)

    def extra_repr(self) -> str:
        return f"{self.n}, eps={self.eps}, {self.layout}"


class LayerNorm(_Norm):
    """y = γ·(x − mean)/√(variance + eps) + β over the last dim of x.

    Parameters
    ----------
    n : the global size of the last dim
    layout : the layout of x, or its text; default the residual stream's
    offset : what is added to the stored γ, such as Gemma's 1
    vectors : those of γ ("weight") and β ("bias") that the norm has; without, they are 1 and 0

    Words: one all-reduce of 2 words a row over the axes that split the last dim, forward and backward; in backward one
    all-reduce of γ's and β's gradients over the axes that split the rows (vectors "copied"; a block joins the sums of its
    vectors). Memory kept: x and 2 words a row.
    """

    centred = True


class RMSNorm(_Norm):
    """y = γ·x/√(mean(x²) + eps) over the last dim of x.

    Parameters
    ----------
    n : the global size of the last dim
    layout : the layout of x, or its text; default the residual stream's
    offset : what is added to the stored γ, such as Gemma's 1
    vectors : those of γ ("weight") and β ("bias") that the norm has; without, they are 1 and 0

    Words: one all-reduce of 1 word a row over the axes that split the last dim, forward and backward; in backward one
    all-reduce of γ's gradient over the axes that split the rows (vectors "copied"; a block joins the sums of its vectors).
    Memory kept: x and 1 word a row.
    """

    centred = False


NORMS: dict[str, type[LayerNorm | RMSNorm]] = {"layer": LayerNorm, "rms": RMSNorm}


def new_norm(
    config: ModelConfig, context: Context, layout: Layout | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Create the norm of the model's family over the hidden dim."""
    return NORMS[config.architecture.norm](config.hidden, context, layout, config.eps, dtype)
