"""The mark of a backward that has no backward itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's mark, which a backward without create_graph passes by: grad mode is off then, and it would add seven calls."""
    marked = function.once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        return marked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
