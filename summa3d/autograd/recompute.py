"""Activation recomputation: a stretch of layers keeps only its input, and backward runs its forward a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..layout.copies import Copies
from .function import Function, once_differentiable

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
WeightPlace = tuple[nn.Module, str]
"""Where a weight is stored: the module and the parameter's name in it."""


def places_of(modules: Sequence[nn.Module]) -> list[WeightPlace]:
    """List where the weights of `modules` are stored; a shared weight is listed at every place."""
    parts = [part for module in modules for part in module.modules()]
    return [(part, name) for part in parts for name, weight in part._parameters.items() if weight is not None]


@contextmanager
def weights_in(places: Sequence[WeightPlace], weights: Sequence[Tensor]) -> Iterator[None]:
    """Store `weights` at `places` within the with-block; restore the former weights afterwards."""
    before = [module._parameters[name] for module, name in places]
    _put(places, weights)
    try:
        yield
    finally:
        _put(places, before)


def _put(places: Sequence[WeightPlace], weights: Sequence[Any]) -> None:
    for (module, name), weight in zip(places, weights, strict=True):
        module._parameters[name] = weight


class _Recompute(Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Result], places: list[WeightPlace], copies: Copies | None, inputs: int, *tensors: Tensor
    ) -> Result:
        kept = tensors[:inputs] if copies is None else [copies.part(tensor) for tensor in tensors[:inputs]]
        ctx.save_for_backward(*kept, *tensors[inputs:])
        ctx.run, ctx.places, ctx.copies, ctx.shapes = run, places, copies, [tensor.shape for tensor in tensors[:inputs]]
        return run(*tensors[:inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs, saved, shapes = ctx.needs_input_grad[4:], ctx.saved_tensors, ctx.shapes
        kept = saved[: len(shapes)]
        if ctx.copies is not None:
            kept = [ctx.copies.whole(part, shape) for part, shape in zip(kept, shapes, strict=True)]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(need) for x, need in zip(kept, needs, strict=False)]
            weights = [
                weight.view_as(weight) for weight in saved[len(shapes) :]
            ]  # one a place; deferred gradients continue after them
            with weights_in(ctx.places, weights):
                ends = _edges(ctx.run(*inputs))
        wanted = [tensor for tensor, need in zip((*inputs, *weights), needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(ends, wanted, grads, allow_unused=True))  # this graph has no postponed weights
        return None, None, None, None, *(next(gradients) if need else None for need in needs)


def _edges(outputs: Result) -> list[GradientEdge]:
    """The ends of a graph: only these are needed, and the outputs are freed."""
    return [get_gradient_edge(item) for item in (outputs if isinstance(outputs, tuple) else (outputs,))]


def recompute(
    run: Callable[..., Result], inputs: Sequence[Tensor], modules: Sequence[nn.Module] = (), copies: Copies | None = None
) -> Result:
    """Return `run(*inputs)` and keep only the inputs; backward runs it again first. The gradients are bitwise the same.

    Parameters
    ----------
    run : a function from the inputs to one tensor, or a tuple of tensors, which must compute the same a second time.
        Counter-based dropout masks do; so do collectives, which every rank repeats in the same order.
    inputs : this rank's blocks. Each rank keeps its own shard, and nothing is gathered in order to be kept (the distributed
        checkpointed activations of Xu et al. 2021, §3.2.3, without their buffer).
    modules : the modules whose weights `run` uses. Backward runs with the weights of forward (16-bit copies, for example).
    copies : the ranks that hold equal copies of the inputs: each keeps its part, and backward gathers the whole first
        (Megatron-LM's --distribute-saved-activations); None, each keeps all

    Words: forward those of `run`; backward those of `run` again, those of the gradients, and n − n_r of each input of n elements
    of which `copies` keeps a part. Memory kept: the inputs, or their parts.
    Source: Chen et al. 2016, §3.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    places = places_of(modules)
    weights: list[Any] = [module._parameters[name] for module, name in places]
    result: Result = _Recompute.apply(run, places, copies, len(inputs), *inputs, *weights)
    return result
