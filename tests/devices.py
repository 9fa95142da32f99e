"""Where tests compute, as SUMMA3D_DEVICE says: cpu; cuda, each rank's GPU; or pretended, the device of pretended.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

NAME = os.environ.get("SUMMA3D_TESTED_DEVICE") or os.environ.get("SUMMA3D_DEVICE") or "cpu"
"""The first is conftest.py's own: what is pretended here is the host to any other process."""


def why_not() -> str | None:
    """Return why tests cannot run where SUMMA3D_DEVICE says, in one line."""
    if NAME in ("cpu", "pretended"):
        return None
    from summa3d.comm.device.select import requested_device, visible_devices
    from summa3d.errors import ConfigError

    try:
        requested_device()
        visible_devices()
    except ConfigError as error:
        return f"SUMMA3D_DEVICE={NAME}: {' '.join(str(error).split())}"
    return None


@contextmanager
def taken(comm: Any, monkeypatch: Any) -> Iterator[None]:
    """The device, for one test."""
    if NAME == "cpu":
        yield
        return
    if NAME == "cuda":
        from summa3d.comm.device.select import take_device

        take_device(comm)
        yield
        return
    import host_kernels
    import pretended

    if comm.rank == 0:
        host_kernels.built()
    comm.Barrier()
    monkeypatch.setenv("SUMMA3D_DEVICE", "cuda")
    with pretended.pretended(monkeypatch, host_kernels.built()):
        yield


def place() -> Any:
    """The torch device, as a context too: what is made within it lies there."""
    import torch

    return torch.device("cpu" if NAME == "cpu" else "cuda")


def on_device(value: Any) -> Any:
    """Host arrays, or a table of them, where tests compute."""
    if isinstance(value, dict):
        return {name: on_device(one) for name, one in value.items()}
    if NAME == "cpu":
        return value
    if not isinstance(value, np.ndarray):
        return value.to(place())
    if NAME == "pretended":
        return value  # it has torch tensors only
    import cupy

    return cupy.asarray(value)


def to_host(value: Any) -> Any:
    """An array from where tests compute: numpy's or a torch tensor."""
    if hasattr(type(value), "data_ptr"):
        return value.cpu()
    return value if isinstance(value, np.ndarray) else value.get()
