"""The device of a run: the host or this rank's GPU, and host-to-device (H2D) copies of inputs."""

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
    """Make the device `name` this rank's current device and return it; collective.

    Parameters
    ----------
    name : "cpu" or "cuda"; None takes SUMMA3D_DEVICE, else cpu
    tf32 : whether float32 products on the device may use TF32

    Raises ConfigError, on every rank alike, for an unknown name and where there is no CUDA device.
    """
    return HOST if requested_device(name) == "cpu" else torch.device("cuda", take_device(comm, tf32))


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Host tensors on `device`: on the host the tensors themselves, on a GPU asynchronous H2D copies from pinned memory."""
    if device.type == "cpu":
        return dict(tensors)
    return {name: tensor.contiguous().pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}


def peak_device_memory(device: torch.device) -> int:
    """Peak bytes of torch's tensors on this rank's device; 0 on the host."""
    return 0 if device.type == "cpu" else int(torch.cuda.max_memory_allocated(device))
