"""Activation recomputation: a stretch of layers keeps only its input, and backward runs its forward a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from .later import Later, Mail

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
    def forward(
        ctx: Any, run: Callable[..., Tensor], places: list[Place], mails: list[Mail | None], inputs: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.run, ctx.places, ctx.mails, ctx.inputs = run, places, mails, inputs
        return run(*tensors[:inputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mails: list[Mail | None] = [None] * ctx.inputs + ctx.mails
        needs = [
            need and (mail is None or mail.wanted(node))
            for need, mail, (node, _) in zip(ctx.needs_input_grad[4:], mails, ctx.next_functions, strict=True)
        ]
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needs, strict=True)]
        for tensor, mail in zip(tensors, mails, strict=True):
            if mail is not None:
                tensor.mail = mail.forwarded()
        with torch.enable_grad(), weights_in(ctx.places, tensors[ctx.inputs :]):
            end = get_gradient_edge(ctx.run(*tensors[: ctx.inputs]))  # only the graph is needed: the output is freed
        wanted = [tensor for tensor, need in zip(tensors, needs, strict=True) if need]
        sent = any(mail is not None for mail in mails)  # then that of a weight may be in the mail, and none is left
        grads = iter(torch.autograd.grad(end, wanted, grad, allow_unused=sent))
        return None, None, None, None, *(next(grads) if need else None for need in needs)


def recompute(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], modules: Sequence[nn.Module] = (), later: Later | None = None
) -> Tensor:
    """Return `run(*inputs)` and keep only the inputs; backward runs it again first. The gradients are bitwise the same.

    Parameters
    ----------
    run : a function from the inputs to one tensor, which must compute the same a second time. Counter-based dropout masks do;
        so do collectives, which every rank repeats in the same order.
    inputs : this rank's blocks. Each rank keeps its own shard, and nothing is gathered in order to be kept (the distributed
        checkpointed activations of Xu et al. 2021, §3.2.3, without their buffer).
    modules : the modules whose weights `run` uses. Backward runs with the weights of forward (16-bit copies, for example).
    later : what waits for sums of weights' gradients later in backward; with it, those of `run` are waited for behind what
        follows the whole stretch, and not at its end.

    Words: forward those of `run`; backward those of `run` again and those of the gradients. Memory kept: the inputs.
    Source: Chen et al. 2016, §3.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    places = places_of(modules)
    weights: list[Any] = [module._parameters[name] for module, name in places]
    mails: list[Mail | None] = [None] * len(weights)
    if later is not None:
        weights, mails = map(list, zip(*later.take_out(weights), strict=True)) if weights else ([], [])
    return _Recompute.apply(run, places, mails, len(inputs), *inputs, *weights)
