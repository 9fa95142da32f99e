"""Feed-forward layers of a block: with GELU or squared ReLU, or gated with SiLU (SwiGLU)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from summa3d.kernels import dispatch

from ...autograd.function import Function, once_differentiable
from ...layout.layout import Layout
from ..config import ModelConfig
from ..context import Context
from ..schemes.scheme import UnevenRows
from .bias_fusion import bias_activation
from .fused_linear import FusedLinear
from .linear import Linear


class MLP(nn.Module):
    """Y = f(X·W1 + b1)·W2 + b2: [b/(XY), s, h/Z] → [b/(XZ), s, f/Y] → [b/(XY), s, h/Z] in the cuboid.

    Parameters
    ----------
    hidden, width : the global h and f
    std, out_std : deviations of the first values of W1 and W2
    activation : f: "gelu_tanh", GELU's tanh form (GPT-2); "gelu", the exact form (BERT, ViT); "relu2", max(0, x)² (Nemotron)

    f is local: words are those of the two linear layers.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        scheme: Context,
        std: float = 0.02,
        out_std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        activation: str = "gelu_tanh",
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(hidden, width, scheme, std=std, dtype=dtype)
        transposed = scheme.scheme.spec.transposed_down
        self.down = Linear(width, hidden, scheme, self.up.output_layout, std=out_std, dtype=dtype, transposed=transposed)

    def forward(
        self, x: Tensor, rows: int | UnevenRows | None = None, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's block of Y for its block of X, or with `skip_bias_add` the pair (Y without b2, b2), as in Linear."""
        return self.down(bias_activation(*self.up(x, rows, skip_bias_add=True), form=self.activation), rows, skip_bias_add)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return dispatch.kernels_for(gate).swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return dispatch.kernels_for(grad).swiglu_gradient(grad, *ctx.saved_tensors)


class GatedMLP(nn.Module):
    """Y = (SiLU(X·W_gate) ∘ X·W_up)·W_down without biases (SwiGLU).

    Parameters
    ----------
    hidden, width : the global h and f
    std, out_std : deviations of the first values of W_gate and W_up, and of W_down
    layout : the layout of X and Y; default the residual stream's
    fused : whether X·W_gate and X·W_up are one product (`FusedLinear`), which gathers X once, and keeps a copy of both weights

    The activation keeps its two outputs and nothing else.
    """

    def __init__(
        self,
        hidden: int,
        width: int,
        scheme: Context,
        std: float = 0.02,
        out_std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        layout: Layout | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.gate = Linear(hidden, width, scheme, layout, bias=False, std=std, dtype=dtype)
        self.up = Linear(hidden, width, scheme, layout, bias=False, std=std, dtype=dtype)
        inner, transposed = self.up.output_layout, scheme.scheme.spec.transposed_down
        self.down = Linear(width, hidden, scheme, inner, bias=False, std=out_std, dtype=dtype, transposed=transposed)
        self.joined = FusedLinear(self.gate, self.up) if fused else None

    def forward(
        self, x: Tensor, rows: int | UnevenRows | None = None, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's block of Y for its block of X, or with `skip_bias_add` the pair (Y, None).

        rows : as in `Linear.forward`
        """
        if self.joined is None:
            gate, up = self.gate(x, rows), self.up(x, rows)
        else:
            gate, up = self.joined(x, rows)  # [b/(XZ), s, f/Y] each
        return self.down(_SwiGLU.apply(gate, up), rows, skip_bias_add)

    def compare_once(self) -> None:
        """As `Linear.compare_once`."""
        for item in (self.gate, self.up) if self.joined is None else (self.joined,):
            item.compare_once()
        self.down.compare_once()


def new_mlp(config: ModelConfig, context: Context, out_std: float, dtype: torch.dtype) -> MLP | GatedMLP:
    """Create the feed-forward layer of the model's family."""
    if config.activation_function == "swiglu":
        return GatedMLP(config.hidden, config.ffn_dim, context, out_std=out_std, dtype=dtype)
    activation = config.activation_function
    return MLP(config.hidden, config.ffn_dim, context, out_std=out_std, dtype=dtype, activation=activation)
