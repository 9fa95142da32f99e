# Where a run computes: the host, or the device that is this rank's; and the way of tensors there and back.
# Imports comm.device.select; torch. Everything else in this folder computes where its tensors lie.
# Next: prepare.py, which asks for a device before it builds the model; pieces.py, which brings blocks back one at a time.
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..comm.device.select import requested_device, take_device

if TYPE_CHECKING:
    from mpi4py import MPI

HOST = torch.device("cpu")


def open_device(name: str | None, comm: MPI.Intracomm, tf32: bool = False) -> torch.device:
    """The device called `name` (None: as SUMMA3D_DEVICE says, else the host), made this rank's current one; collective.

    Raises ConfigError, on every rank alike, for a device that does not exist or is not there.
    """
    return HOST if requested_device(name) == "cpu" else torch.device("cuda", take_device(comm, tf32))


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Host tensors where the model is: themselves, or copies through pinned memory, for which the host does not wait."""
    if device.type == "cpu":
        return dict(tensors)
    return {name: tensor.contiguous().pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}


def peak_device_memory(device: torch.device) -> int:
    """Bytes that this rank's tensors took at their peak on its device; 0 on the host."""
    return 0 if device.type == "cpu" else int(torch.cuda.max_memory_allocated(device))
