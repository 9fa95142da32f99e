"""Several linear layers of one input as one product, so that the input is gathered once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...autograd.differentiable import Product
from ...autograd.matmul import matmul
from ...comm.topology import describe
from ...errors import LayoutError
from ...layout.layout import Layout, split_sizes
from ..schemes.scheme import UnevenRows
from .linear import KEPT_PRODUCTS, Linear
from .product_cache import ProductCache


class FusedLinear:
    """Computes Y₁, Y₂, … = X·W₁, X·W₂, … as one product X·[W₁ W₂ …], for linear layers of one input; all have biases, or none.

    The blocks of the weights are interleaved as finely as Y's columns are split, so that each rank's block of Y is its own
    blocks of Y₁, Y₂, … side by side: their items, such as heads, where axes split these unevenly. Words: those of one linear
    layer of n₁ + n₂ + … columns; no weight leaves its rank. Workspace: a copy of the local weights.
    Raises LayoutError where a layer's columns cannot be split evenly and the layers have unlike numbers of items.
    """

    def __init__(self, *linears: Linear) -> None:
        first = linears[0]
        self.linears, self.context, self.layout = linears, first.context, first.input_layout
        shape, at = self.context.grid.shape, self.context.grid.coordinates
        num_shards = first.output_layout.num_shards(-1, shape)
        if not can_join(*linears):
            raise LayoutError(_misfit(linears, num_shards))
        self.together = 1 if _are_even(linears) else sum(linear.together for linear in linears)
        columns = (Layout(linear.output_layout.dims[-1], grains=linear.output_layout.grains[-1:]) for linear in linears)
        blocks = (layout.local_shape((linear.n,), shape, at) for layout, linear in zip(columns, linears, strict=True))
        self._widths = [width for (width,) in blocks]
        self._runs = num_shards // first.weight.sharding.layout.num_shards(1, shape)
        self._ways = self.context.rows(self.layout).size
        self._source = self.context.prefetch_source(self._parts, self._side_by_side)
        self._product = ProductCache(self._new_product, KEPT_PRODUCTS)
        self._agreed: set[object] | None = None

    def _new_product(self, rows: int | UnevenRows) -> Product:
        n, k = sum(linear.n for linear in self.linears), self.linears[0].k
        result = self.context.product(self.layout, "nn", rows, n, k, self._source, together=self.together)
        return result if self._agreed is None else result.agreeing_with(self._agreed)

    def compare_once(self) -> None:
        """As `Linear.compare_once`."""
        self._agreed = set()

    def __call__(self, x: Tensor, rows: int | UnevenRows | None = None) -> tuple[Tensor, ...]:
        """This rank's blocks of Y₁, Y₂, … for its block of X.

        rows : as in `Linear.forward`
        """
        rows = x.shape[:-1].numel() * self._ways if rows is None else rows
        joint = self.linears[0].vector_sum.joint
        return matmul(x, self.weight(), self._product(rows), self._bias(), sums_bias=not joint).split(self._widths, -1)

    def weight(self) -> Tensor:
        """This rank's block of the joined weight."""
        return self._side_by_side(self._parts())

    def _bias(self) -> Tensor | None:
        """This rank's blocks of the biases, side by side as those of Y."""
        layers = [(linear, linear.bias) for linear in self.linears if linear.bias is not None]
        vectors = [self.context.broadcast_vector(bias, linear.output_layout, linear.n) for linear, bias in layers]
        return torch.cat(vectors) if vectors else None

    def _parts(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    def _side_by_side(self, weights: Sequence[Tensor]) -> Tensor:
        if self.together == 1:
            return torch.cat([weight.unflatten(1, (self._runs, -1)) for weight in weights], 2).flatten(1)
        if self._runs == 1:
            return torch.cat([*weights], 1)
        parts = zip(weights, self.linears, strict=True)
        runs = [weight.split(split_sizes(weight.shape[1], self._runs, linear.together), 1) for weight, linear in parts]
        return torch.cat([part for run in zip(*runs, strict=True) for part in run], 1)


def can_join(*linears: Linear) -> bool:
    """Tell whether the columns of linear layers of one input can be split so that they are one product."""
    return _are_even(linears) or have_like_items(*linears)


def _are_even(linears: Sequence[Linear]) -> bool:
    num_shards = linears[0].output_layout.num_shards(-1, linears[0].context.grid.shape)
    return not any(linear.n % (num_shards * linear.together) for linear in linears)


def have_like_items(*linears: Linear) -> bool:
    """True if the outputs of linear layers have as many items that stay together, so that any split of one splits the others."""
    return len({linear.n // linear.together for linear in linears}) == 1


def _misfit(linears: Sequence[Linear], num_shards: int) -> str:
    first = linears[0]
    axes, columns = "·".join(first.output_layout.dims[-1]), " and ".join(str(linear.n) for linear in linears)
    return (
        f"Linear layers of {columns} columns cannot be split over {axes} = {num_shards} "
        f"(grid {describe(first.context.grid.shape)}).\n"
        "  They share one product here, so each must split into equal blocks of columns, or all have as many.\n"
        f"  Values that fit: multiples of {num_shards}."
    )
