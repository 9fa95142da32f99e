"""The one place that chooses between plain torch and the fused CUDA kernels: by the device of a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import reference


def kernels_for(x: Tensor) -> Any:
    """Return the functions for tensors on x's device: the module `reference` on the host, a `Fused` on a CUDA device.

    Both have the same functions with the same arguments; `reference` documents each, with its shapes.

    >>> import torch
    >>> kernels_for(torch.zeros(1)).__name__
    'summa3d.kernels.reference'
    """
    if not x.is_cuda:
        return reference
    from .load import fused

    return fused(x.device)
