"""Convert an array between numpy, CuPy and torch, without a copy where both can read its memory."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..errors import ConfigError
from .device.arrays import DEVICES, Array, dtype_name, is_on_device, is_torch, numpy_dtype, to_host

LIBRARIES = ("numpy", "torch", "cupy")


def converted(array: Array, library: str, device: str | None = None) -> Array:
    """`array` as one of `library`, on `device`: where it lies, unless numpy (cpu) or CuPy (cuda) says otherwise.

    Shares the memory of `array` where it stays on one side: numpy ↔ torch on the host, CuPy ↔ torch on a device. Any memory
    order is kept. bfloat16 goes through its 16 bits, for which numpy and CuPy need ml_dtypes.
    Raises ConfigError for a library or a device that does not exist, that do not go together, or that cannot be imported.
    """
    target = _target(array, library, device)
    here = "cuda" if is_on_device(array) else "cpu"
    if library == "torch":
        torch = _imported("torch")
        share = torch.from_dlpack if here == "cuda" else torch.from_numpy
        tensor = array if is_torch(array) else _shared(array, torch.bfloat16, np.int16, share)
        return tensor if target == here else tensor.to(target)
    if library == "numpy":
        if is_torch(array):
            return _shared(array.detach().cpu(), _brain(array), _imported("torch").int16, lambda tensor: tensor.numpy())
        return to_host(array)
    cupy = _imported("cupy")
    if is_torch(array) and here == "cuda":
        return _shared(array.detach(), _brain(array), _imported("torch").int16, cupy.from_dlpack)
    return array if here == "cuda" else cupy.asarray(converted(array, "numpy"))


def _target(array: Array, library: str, device: str | None) -> str:
    """Device on which the result is placed."""
    if library not in LIBRARIES:
        raise ConfigError(f"library {library!r} does not exist. Libraries: {', '.join(LIBRARIES)}.")
    if device is not None and device not in DEVICES:
        raise ConfigError(f"device {device!r} does not exist. Devices: {', '.join(DEVICES)}.")
    fixed = {"numpy": "cpu", "cupy": "cuda"}.get(library)
    if fixed is not None and device not in (None, fixed):
        raise ConfigError(f"{library} has no arrays on {device}; its arrays lie on {fixed}. torch has both.")
    return fixed or device or ("cuda" if is_on_device(array) else "cpu")


def _shared(array: Array, brain: Any, whole: Any, share: Any) -> Array:
    """share(array), or for bfloat16, which not every way knows, of the whole numbers that have its bits."""
    return share(array.view(whole)).view(brain) if dtype_name(array) == "bfloat16" else share(array)


def _brain(array: Array) -> Any:
    """numpy's bfloat16, where `array` needs it."""
    return numpy_dtype("bfloat16") if dtype_name(array) == "bfloat16" else None


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} cannot be imported here: {error}. Install it, or name another library.") from error
