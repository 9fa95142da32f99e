"""The one place that chooses between plain torch and the fused CUDA kernels: by the device of a tensor."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor

from . import reference

of_meta: ContextVar[Any] = ContextVar("of_meta", default=reference)
"""What has the functions below for tensors without memory: a dry run of a device sets kernels that compute nothing."""


def kernels_for(x: Tensor) -> Any:
    """Return the functions for tensors on x's device: the module `reference` on the host, a `Fused` on a CUDA device.

    Both have the same functions with the same arguments; `reference` documents each, with its shapes.

    >>> import torch
    >>> kernels_for(torch.zeros(1)).__name__
    'summa3d.kernels.reference'
    """
    if not x.is_cuda:
        return of_meta.get() if x.is_meta else reference
    from .load import fused

    return fused(x.device)
