"""The linear layer, written once for every scheme."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from summa3d.kernels import dispatch, reference

from ...autograd.collectives import sum_gradient
from ...autograd.differentiable import Product
from ...autograd.matmul import matmul
from ...errors import ShapeError
from ...gemm.algorithms.checks import is_whole
from ...layout.layout import Layout
from ..context import Context
from ..parameter import ShardedModule, new_parameter
from ..schemes.registry import row_axes
from ..schemes.scheme import UnevenRows
from .joint_sums import VectorSum
from .product_cache import ProductCache

KEPT_PRODUCTS = 8
"""Products of other numbers of rows that a layer keeps."""


class Linear(ShardedModule):
    """Y = X·W + b with X [b, s, k] in `layout`, W [k, n] in the scheme's weight layout, and b along Y's last dim.

    Parameters
    ----------
    k, n : the global numbers of input and output features
    scheme : how tensors are split over the grid: what `nn.scheme` returns
    layout : the layout of X, or its text; default the residual stream's. Y has `output_layout`; pass it to the next layer.
    bias : whether to add b
    std : the deviation of W's first values
    dtype : of the parameters
    transposed : whether the product is of form nt with Wᵀ. In the 2-D scheme it moves Y's words instead of X's, fewer where
        n < k. The parameter is W in both cases; its block is transposed in each product.
    together : how many of Y's columns stay together, such as those of a head, where axes split them unevenly

    ``forward(x)`` takes this rank's block of X and returns its block of Y, [b/(XY), s, k/Z] → [b/(XZ), s, n/Y] in the cuboid.
    After backward, W's gradient is complete on each rank, and b's is summed over the axes that split rows.
    Call `initialise(module, scheme, seed)` once before use. Words: `gemm.volume.of_plan` and `gradients`.
    Raises ShapeError where x is not a block of a batch that the scheme can split.
    """

    transposed_in_torch = ("weight",)

    def __init__(
        self,
        k: int,
        n: int,
        scheme: Context,
        layout: Layout | str | None = None,
        bias: bool = True,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
        together: int = 1,
    ) -> None:
        super().__init__()
        layouts, self.context = scheme.scheme, scheme
        self.k, self.n, self.transposed, self.together = k, n, transposed, together
        self.input_layout = layouts.residual if layout is None else Layout.of(layout)
        self.output_layout = layouts.after_linear(self.input_layout, together)
        stored = layouts.weight(self.input_layout, transposed, together)
        self.weight = new_parameter(scheme, stored, (k, n), ("normal", std), dtype, decay=True)
        vector = layouts.vector(self.output_layout)
        self.bias = new_parameter(scheme, vector, (n,), ("constant", 0.0), dtype, decay=False) if bias else None
        self.vector_sum = VectorSum(scheme.vector_rows(self.output_layout))
        self._row_shards = prod(scheme.grid.shape[axis] for axis in row_axes(self.input_layout))
        self._source = scheme.prefetch_source(self._weights)
        self._product = ProductCache(self._new_product, KEPT_PRODUCTS)
        self._agreed: set[object] | None = None

    def _weights(self) -> tuple[Tensor]:
        return (self.weight,)

    def _new_product(self, rows: int | UnevenRows) -> Product:
        form, layout = "nt" if self.transposed else "nn", self.input_layout
        result = self.context.product(layout, form, rows, self.n, self.k, self._source, self.transposed, self.together)
        return result if self._agreed is None else result.agreeing_with(self._agreed)

    def compare_once(self) -> None:
        """Compare calls between ranks at the first number of rows alone: they know of another that it is the same on all.

        Else they are compared, for a message, at the first call of each number of rows.
        """
        self._agreed = set()

    def forward(
        self, x: Tensor, rows: int | UnevenRows | None = None, skip_bias_add: bool = False
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """This rank's block of Y for its block of X; with `skip_bias_add` a pair, so that the next kernel adds b (bias fusion).

        Parameters
        ----------
        rows : the global number of rows, where the blocks of X may be uneven, in whole sequences as `Scheme.rows` has them;
            default local · num_shards
        skip_bias_add : return (X·W, b), with b [n/Y], whose gradient backward all-reduces: the words are the same. On the host,
            whose product adds b in place, and without a bias, the pair is (Y, None).
        """
        bias = None if self.bias is None else self.context.broadcast_vector(self.bias, self.output_layout, self.n)
        if not skip_bias_add:
            return self._times(x, rows, bias)
        if bias is None or dispatch.kernels_for(x) is reference:
            return self._times(x, rows, bias), None
        return self._times(x, rows, None), bias if self.vector_sum.joint else sum_gradient(bias, self.vector_sum.rows)

    def _times(self, x: Tensor, rows: int | UnevenRows | None, bias: Tensor | None) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 2:
            what = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ShapeError(f"Linear takes a tensor [rows…, {self.k}] with at least 2 dims; it was given {what}.")
        if self.input_layout.root_only and (rows is None or x.dim() > 2):
            raise ShapeError(
                f"The {self.context.scheme.name} scheme leaves ranks without a block, so Linear takes a block of a matrix "
                f"[rows, {self.k}] and the global number of rows; it was given {tuple(x.shape)} and rows={rows}."
            )
        if rows is not None and not isinstance(rows, UnevenRows) and not is_whole(rows):
            raise ShapeError(f"Linear takes the global number of rows as a whole number; it was given {rows!r}.")
        rows = x.shape[:-1].numel() * self._row_shards if rows is None else rows
        weight = self.weight.t() if self.transposed and not self.context.sharded else self.weight
        try:
            return matmul(x, weight, self._product(rows), bias, sums_bias=not self.vector_sum.joint)
        except ShapeError as error:
            raise ShapeError(
                f"{error}\n  A is the input of Linear({self.extra_repr()}), a block in {self.input_layout}. "
                "For the output of another layer, give Linear that layer's output_layout."
            ) from error

    def extra_repr(self) -> str:
        """The sizes and layouts that torch prints for the module."""
        return f"{self.k} → {self.n}, {self.input_layout} → {self.output_layout}, bias={self.bias is not None}"
