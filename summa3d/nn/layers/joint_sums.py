"""One sum for the gradients of a block's vectors that are split alike, where each layer would sum its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.function import Function, once_differentiable
from ...autograd.recompute import weights_in
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


class JointSums:
    """The joint sums of the vectors in `module`: of all that are summed over the same plane, one all-reduce a backward.

    A layer with vectors has `vector_rows`, the plane over which their gradients are summed, and `vectors_summed`, whether this
    sums them and not the layer.

    shape : axis → size of the grid

    Its words are those of the sums that the layers would take one by one, up to the rounding of an all-reduce's parts.
    """

    def __init__(self, shape: Mapping[str, int], module: nn.Module) -> None:
        found: dict[tuple[str, ...], tuple[Axis, list[tuple[nn.Module, str]]]] = {}
        for layer in module.modules():
            rows: Axis | None = getattr(layer, "vector_rows", None)
            if rows is None or rows.size == 1:
                continue
            plane = tuple(axis for axis in rows.names if shape[axis] > 1)
            vectors = [(layer, name) for name, vector in layer._parameters.items() if vector is not None and vector.dim() == 1]
            found.setdefault(plane, (rows, []))[1].extend(vectors)
        self._groups = [(rows, places) for rows, places in found.values() if len(places) > 1]
        self._layers = list(dict.fromkeys(layer for _, places in self._groups for layer, _ in places))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block, the layers use vectors whose gradients are summed jointly, once all of them are complete."""
        if not self._groups or not torch.is_grad_enabled():
            yield
            return
        places, used = list[tuple[nn.Module, str]](), list[Tensor]()
        for rows, together in self._groups:
            places += together
            used += _Joint.apply(rows, *[module._parameters[name] for module, name in together])
        with weights_in(places, used):
            self._mark(True)
            try:
                yield
            finally:
                self._mark(False)

    def _mark(self, summed: bool) -> None:
        """Say to the layers whether something else sums their vectors; not through `nn.Module`, which looks at each for 2 µs."""
        for layer in self._layers:
            vars(layer)["vectors_summed"] = summed
