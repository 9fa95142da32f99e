# A linear layer, written once for every scheme. Imports schemes, parameter, autograd, kernels.dispatch.
# Next: norm.py, mlp.py, attention.py.
from __future__ import annotations

import torch
from torch import Tensor, nn

from summa3d.kernels import dispatch, reference

from ..autograd.collectives import sum_gradient
from ..autograd.matmul import matmul
from ..autograd.products import Product
from ..errors import ShapeError
from ..layout.layout import Layout
from .layer_cache import LayerCache
from .parameter import new_parameter
from .schemes import Scheme


class Linear(nn.Module):
    """Y = X·W + b with X [b, s, k] in `layout` and W [k, n] in the scheme's weight layout; b along Y's last dim.

    Parameters
    ----------
    k, n : global input and output features
    scheme : how tensors are split
    layout : the layout of X, or its text; default the residual stream. Y's is `output_layout`; give it to the layer that follows.
    bias : whether to add b
    std : deviation of W's first values
    transposed : whether the product is with Wᵀ as it lies (form nt) instead of W; in the 2-D scheme it moves Y's words instead
        of X's, fewer where n < k. The parameter is W all the same; its block is transposed once a product.

    ``forward(x)`` takes this rank's block of X and returns its block of Y, [b/(XY), s, k/Z] → [b/(XZ), s, n/Y] in the
    cuboid. Gradients need no further step: W's is complete on each rank, b's is summed over the axes that split rows.
    Call `initialise(module, scheme, seed)` once before use. Words: `gemm.volume.of_plan` and `gradients`.
    Raises ShapeError where x is not the block of a batch that the scheme can split.
    """

    def __init__(
        self,
        k: int,
        n: int,
        scheme: Scheme,
        layout: Layout | str | None = None,
        bias: bool = True,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        self.k, self.n, self.scheme, self.transposed = k, n, scheme, transposed
        self.input_layout = scheme.stream if layout is None else Layout.of(layout)
        self.output_layout = scheme.after_linear(self.input_layout)
        stored = scheme.weight(self.input_layout, transposed)
        self.weight = new_parameter(scheme, stored, (k, n), ("normal", std), dtype, decay=True)
        self.bias = (
            new_parameter(scheme, scheme.vector(self.output_layout), (n,), ("constant", 0.0), dtype, decay=False)
            if bias
            else None
        )
        self._source = scheme.source(self._weights)
        self._product = LayerCache(self._new_product, 8)

    def _weights(self) -> tuple[Tensor]:
        return (self.weight,)

    def _new_product(self, rows: int) -> Product:
        return self.scheme.product(self.input_layout, "nt" if self.transposed else "nn", rows, self.n, self.k, self._source)

    def forward(self, x: Tensor, rows: int | None = None, skip_bias_add: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """Y's block for X's, or with `skip_bias_add` (X·W, b), so that the next kernel fuses the addition (bias fusion).

        rows : the global number of rows, where the blocks of X may be uneven; default local · num_shards.
        skip_bias_add : return a pair. On the host, whose product adds b in place, and without a bias the pair is (Y, None);
            with fused kernels it is X·W and b [n/Y], whose gradient is all-reduced in backward: the words are the same.
        """
        bias = None if self.bias is None else self.scheme.spread(self.bias, self.output_layout, self.n)
        if not skip_bias_add:
            return self._times(x, rows, bias)
        if bias is None or dispatch.kernels_for(x) is reference:
            return self._times(x, rows, bias), None
        return self._times(x, rows, None), sum_gradient(bias, self.scheme.vector_rows(self.output_layout))

    def _times(self, x: Tensor, rows: int | None, bias: Tensor | None) -> Tensor:
        if x.dim() < 2:
            raise ShapeError(f"Linear takes a block [rows…, {self.k}] with at least 2 dims; it was given {tuple(x.shape)}.")
        if self.input_layout.hosted and (rows is None or x.dim() > 2):
            raise ShapeError(
                f"The {self.scheme.name} scheme leaves ranks without a block, so Linear takes a block of a matrix "
                f"[rows, {self.k}] and the global number of rows; it was given {tuple(x.shape)} and rows={rows}."
            )
        rows = x.shape[:-1].numel() * self.scheme.rows(self.input_layout).size if rows is None else rows
        weight = self.weight.t() if self.transposed else self.weight
        return matmul(x, weight, self._product(rows), bias)

    def extra_repr(self) -> str:
        return f"{self.k} → {self.n}, {self.input_layout} → {self.output_layout}, bias={self.bias is not None}"
