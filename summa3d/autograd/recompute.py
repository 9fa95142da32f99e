"""Activation recomputation: a stretch of layers keeps only its input, and backward runs its forward a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

Place = tuple[nn.Module, str]
"""Where a weight is stored: the module and the parameter's name in it."""


def places_of(modules: Sequence[nn.Module]) -> list[Place]:
    """List where the weights of `modules` are stored; a shared weight is listed at every place."""
    parts = [part for module in modules for part in module.modules()]
    return [(part, name) for part in parts for name, weight in part._parameters.items() if weight is not None]


@contextmanager
def weights_in(places: Sequence[Place], weights: Sequence[Tensor]) -> Iterator[None]:
    """Store `weights` at `places` within the with-block; restore the former weights afterwards."""
    before = [module._parameters[name] for module, name in places]
    _put(places, weights)
    try:
        yield
    finally:
        _put(places, before)


def _put(places: Sequence[Place], weights: Sequence[Any]) -> None:
    for (module, name), weight in zip(places, weights, strict=True):
        module._parameters[name] = weight


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], places: list[Place], inputs: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.places, ctx.inputs = run, places, inputs
        return run(*tensors[:inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs, saved = ctx.needs_input_grad[3:], ctx.saved_tensors
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(need) for x, need in zip(saved[: ctx.inputs], needs, strict=False)]
            weights = [weight.view_as(weight) for weight in saved[ctx.inputs :]]  # one a place; debts continue behind them
            with weights_in(ctx.places, weights):
                end = get_gradient_edge(ctx.run(*inputs))  # only the graph is needed: the output is freed
        wanted = [tensor for tensor, need in zip((*inputs, *weights), needs, strict=True) if need]
        grads = iter(torch.autograd.grad(end, wanted, grad, allow_unused=True))  # this graph has no postponed weights
        return None, None, None, *(next(grads) if need else None for need in needs)


def recompute(run: Callable[..., Tensor], inputs: Sequence[Tensor], modules: Sequence[nn.Module] = ()) -> Tensor:
    """Return `run(*inputs)` and keep only the inputs; backward runs it again first. The gradients are bitwise the same.

    Parameters
    ----------
    run : a function from the inputs to one tensor, which must compute the same a second time. Counter-based dropout masks do;
        so do collectives, which every rank repeats in the same order.
    inputs : this rank's blocks. Each rank keeps its own shard, and nothing is gathered in order to be kept (the distributed
        checkpointed activations of Xu et al. 2021, §3.2.3, without their buffer).
    modules : the modules whose weights `run` uses. Backward runs with the weights of forward (16-bit copies, for example).

    Words: forward those of `run`; backward those of `run` again and those of the gradients. Memory kept: the inputs.
    Source: Chen et al. 2016, §3.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    places = places_of(modules)
    weights: list[Any] = [module._parameters[name] for module, name in places]
    return _Recompute.apply(run, places, len(inputs), *inputs, *weights)
