"""The choice between plain torch and the fused kernels: by the device of a tensor, and nowhere else."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import reference


def kernels_for(x: Tensor) -> Any:
    """The functions that compute on tensors like x: the module `reference` on the host, `Fused` on a CUDA device.

    Both have the same functions with the same arguments; `reference` says what each does, with its shapes.
    """
    if not x.is_cuda:
        return reference
    from .load import fused

    return fused(x.device)
