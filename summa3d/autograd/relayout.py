"""Redistribution of a tensor from one layout to another with gradient: the gradient is redistributed back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..comm.grid import BaseGrid
from ..layout.layout import Layout
from ..layout.redistribute import redistribute
from .collectives import conjugate


def relayout(block: Tensor, shape: Sequence[int], grid: BaseGrid, source: Layout, target: Layout) -> Tensor:
    """Redistribute a tensor from layout `source` to layout `target`, with gradient.

    Parameters
    ----------
    block : this rank's block in `source`
    shape : the global shape of the tensor
    grid : the grid whose axes the layouts name

    Returns this rank's block in `target`. Along an axis that a layout does not name, ranks hold equal copies of the tensor
    and of its gradient. Words: the words of the new block that the rank does not hold yet
    (`layout.Redistribution.words_of`), forward and backward; none where the layouts are equal.
    """

    def between(source: Layout, target: Layout) -> Callable[[Tensor], Tensor]:
        return lambda tensor: redistribute(tensor.detach(), tuple(shape), grid, source, target)

    return block if source == target else conjugate(block, between(source, target), between(target, source))
