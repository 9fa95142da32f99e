"""Several linear layers of one input as one product, so that the input is gathered once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..autograd.matmul import matmul
from ..autograd.products import Product
from ..comm.topology import describe
from ..errors import LayoutError
from .layer_cache import LayerCache
from .linear import Linear


class Joined:
    """Computes Y₁, Y₂, … = X·W₁, X·W₂, … as one product X·[W₁ W₂ …], for linear layers of one input without biases.

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
        self.linears, self.scheme, self.layout = linears, first.scheme, first.input_layout
        shape = self.scheme.grid.shape
        ways = first.output_layout.ways(-1, shape)
        for linear in linears:
            if linear.n % ways:
                raise LayoutError(_misfit(what, linear, ways))
        self._widths = [linear.n // ways for linear in linears]
        self._runs = ways // first.weight.sharding.layout.ways(1, shape)
        self._ways = self.scheme.rows(self.layout).size
        self._source = self.scheme.source(self._parts, self._side_by_side)
        self._product = LayerCache(self._new_product, 8)

    def _new_product(self, rows: int) -> Product:
        n = sum(linear.n for linear in self.linears)
        return self.scheme.product(self.layout, "nn", rows, n, self.linears[0].k, self._source)

    def __call__(self, x: Tensor, rows: int | None = None) -> tuple[Tensor, ...]:
        """This rank's blocks of Y₁, Y₂, … for its block of X.

        rows : the global number of rows, where the blocks of X may be uneven
        """
        rows = x.shape[:-1].numel() * self._ways if rows is None else rows
        return matmul(x, self.weight(), self._product(rows)).split(self._widths, -1)

    def weight(self) -> Tensor:
        """This rank's block of the joined weight."""
        return self._side_by_side(self._parts())

    def _parts(self) -> list[Tensor]:
        return [linear.weight for linear in self.linears]

    def _side_by_side(self, weights: Sequence[Tensor]) -> Tensor:
        return torch.cat([weight.unflatten(1, (self._runs, -1)) for weight in weights], 2).flatten(1)


def _misfit(what: str, linear: Linear, ways: int) -> str:
    axes = "·".join(linear.output_layout.dims[-1])
    below = linear.n - linear.n % ways
    fits = [value for value in (below, below + ways, below + 2 * ways) if value]
    return (
        f"{what} {linear.n} cannot be split evenly over {axes} = {ways} (grid {describe(linear.scheme.grid.shape)}).\n"
        f"  Two linear layers share one product here, so each must split into equal blocks of columns.\n"
        f"  Values that fit: {', '.join(map(str, fits))}."
    )
