"""The base of the autograd functions, and the mark of a backward that has no backward itself: torch's, in fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


class Function(torch.autograd.Function):
    """torch's, whose `apply` looks at each argument in Python for what a transform (vmap, grad) of torch.func has left behind.

    Where no transform is active, that is passed by: it takes as long as the graph's own node.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """The result of `forward`, recorded for backward."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*arguments)  # which refuses, and says why
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's mark, which a backward without create_graph passes by: grad mode is off then, and nothing is recorded."""
    marked = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return marked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
