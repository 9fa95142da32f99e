"""The choice between plain torch and the fused kernels: by the device of a tensor, and nowhere else."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import Tensor

from . import reference

of_meta: ContextVar[Any] = ContextVar("of_meta", default=reference)
"""What has the functions below for tensors without memory: a dry run of a device sets kernels that compute nothing."""


def kernels_for(x: Tensor) -> Any:
    """The functions that compute on tensors like x: the module `reference` on the host, `Fused` on a CUDA device.

    Both have the same functions with the same arguments; `reference` says what each does, with its shapes.
    """
    if not x.is_cuda:
        return of_meta.get() if x.is_meta else reference
    from .load import fused

    return fused(x.device)
