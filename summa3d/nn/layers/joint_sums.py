"""One sum for the gradients of a block's vectors that are split alike, where each layer would sum its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.function import Function, once_differentiable
from ...autograd.recompute import WeightPlace, weights_in
from ...comm.axis import Axis


class _Joint(Function):
    """Returns the vectors; backward sums their gradients over an axis, in one all-reduce."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        return vectors  # of which autograd makes views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        joined = torch.cat(given)
        sums = iter(ctx.axis.all_reduce(joined, into=joined).split([grad.shape[0] for grad in given]))
        return None, *[None if grad is None else next(sums) for grad in grads]


class VectorSum:
    """How the gradients of a layer's vectors are summed over the ranks that hold other rows.

    rows : the plane of those ranks. joint : whether a `JointSums` sums them, and not the layer
    """

    def __init__(self, rows: Axis) -> None:
        self.rows, self.joint = rows, False


class JointSums:
    """The joint sums of the vectors in `module`: of all that are summed over the same plane, one all-reduce a backward.

    A layer with vectors has a `vector_sum`.

    shape : axis → size of the grid

    Its words are those of the sums that the layers would take one by one, up to the rounding of an all-reduce's parts.
    """

    def __init__(self, shape: Mapping[str, int], module: nn.Module) -> None:
        groups: dict[tuple[str, ...], list[tuple[VectorSum, WeightPlace]]] = {}
        for layer in module.modules():
            summed: VectorSum | None = getattr(layer, "vector_sum", None)
            if summed is not None and summed.rows.size > 1:
                plane = tuple(axis for axis in summed.rows.names if shape[axis] > 1)
                vectors = (
                    name for name, parameter in layer._parameters.items() if parameter is not None and parameter.dim() == 1
                )
                groups.setdefault(plane, []).extend((summed, (layer, name)) for name in vectors)
        self._groups = [group for group in groups.values() if len(group) > 1]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block, the layers use vectors whose gradients are summed jointly, once all of them are complete."""
        if not self._groups or not torch.is_grad_enabled():
            yield
            return
        places, used = [place for group in self._groups for _, place in group], list[Tensor]()
        for group in self._groups:
            used += _Joint.apply(group[0][0].rows, *[module._parameters[name] for _, (module, name) in group])
        with weights_in(places, used):
            self._mark(True)
            try:
                yield
            finally:
                self._mark(False)

    def _mark(self, joint: bool) -> None:
        for group in self._groups:
            for vector_sum, _ in group:
                vector_sum.joint = joint
