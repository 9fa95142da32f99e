"""Several linear layers of one input as one product, so that the input is gathered once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...autograd.differentiable import Product
from ...autograd.matmul import matmul
from ...comm.topology import describe
from ...errors import LayoutError
from .linear import KEPT_PRODUCTS, Linear
from .product_cache import ProductCache


class FusedLinear:
    """Computes Y₁, Y₂, … = X·W₁, X·W₂, … as one product X·[W₁ W₂ …], for linear layers of one input; all have biases, or none.

    Parameters
    ----------
    what : the name of the layers' width in an error
    linears : the layers

    The blocks of the weights are interleaved as finely as Y's columns are split, so that each rank's block of Y is its own
    blocks of Y₁, Y₂, … side by side. Words: those of one linear layer of n₁ + n₂ + … columns; no weight leaves its rank.
    Workspace: a copy of the local weights. Raises LayoutError where a layer's columns cannot be split evenly.
    """

    def __init__(self, what: str, *linears: Linear) -> None:
        first = linears[0]
        self.linears, self.context, self.layout = linears, first.context, first.input_layout
        shape = self.context.grid.shape
        num_shards = first.output_layout.num_shards(-1, shape)
        for linear in linears:
            if linear.n % num_shards:
                raise LayoutError(_misfit(what, linear, num_shards))
        self._widths = [linear.n // num_shards for linear in linears]
        self._runs = num_shards // first.weight.sharding.layout.num_shards(1, shape)
        self._ways = self.context.rows(self.layout).size
        self._source = self.context.prefetch_source(self._parts, self._side_by_side)
        self._product = ProductCache(self._new_product, KEPT_PRODUCTS)
        self._agreed: set[object] | None = None

    def _new_product(self, rows: int) -> Product:
        n = sum(linear.n for linear in self.linears)
        found = self.context.product(self.layout, "nn", rows, n, self.linears[0].k, self._source)
        return found if self._agreed is None else found.agreeing_with(self._agreed)

    def compare_once(self) -> None:
        """As `Linear.compare_once`."""
        self._agreed = set()

    def __call__(self, x: Tensor, rows: int | None = None) -> tuple[Tensor, ...]:
        """This rank's blocks of Y₁, Y₂, … for its block of X.

        rows : the global number of rows, where the blocks of X may be uneven
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
        return torch.cat([weight.unflatten(1, (self._runs, -1)) for weight in weights], 2).flatten(1)


def _misfit(what: str, linear: Linear, num_shards: int) -> str:
    axes = "·".join(linear.output_layout.dims[-1])
    below = linear.n - linear.n % num_shards
    fits = [value for value in (below, below + num_shards, below + 2 * num_shards) if value]
    return (
        f"{what} {linear.n} cannot be split evenly over {axes} = {num_shards} (grid {describe(linear.context.grid.shape)}).\n"
        f"  Two linear layers share one product here, so each must split into equal blocks of columns.\n"
        f"  Values that fit: {', '.join(map(str, fits))}."
    )
