"""Arrays of one library as another's: shared where they can be, equal in every dtype and memory order."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from kinds import DTYPES, array, numbers

from summa3d.comm import convert
from summa3d.comm.convert import converted
from summa3d.comm.device import arrays
from summa3d.errors import ConfigError


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
def test_numpy_and_torch_share_the_memory_on_the_host(dtype, turned):
    one = array("numpy", dtype, numbers(dtype, (3, 5), 1), transposed=turned)
    tensor = converted(one, "torch")
    assert str(tensor.dtype) == f"torch.{dtype}" and tuple(tensor.shape) == (3, 5)
    assert tensor.data_ptr() == one.__array_interface__["data"][0] and tensor.is_contiguous() != turned
    back = converted(tensor, "numpy")
    assert back.dtype == one.dtype and np.array_equal(back, one) and np.shares_memory(back, one)
    assert converted(one, "numpy") is one and converted(tensor, "torch", "cpu") is tensor


class CupyArray:
    """Of a CuPy that lies on the host: what is asked of it is what numpy has."""

    __cuda_array_interface__ = ()

    def __init__(self, values):
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def view(self, dtype):
        return CupyArray(self.values.view(dtype))

    def get(self):
        return self.values.copy()


@pytest.fixture
def cupy(monkeypatch):
    """CuPy, and a device on which torch's tensors are those named in `there`."""
    there = set()
    shared = types.SimpleNamespace(asarray=lambda values: CupyArray(values.copy()), from_dlpack=lambda t: CupyArray(t.numpy()))
    monkeypatch.setitem(sys.modules, "cupy", shared)
    on_device = lambda one: isinstance(one, CupyArray) or (arrays.is_torch(one) and one.data_ptr() in there)  # noqa: E731
    for module in (arrays, convert):
        monkeypatch.setattr(module, "is_on_device", on_device)
    monkeypatch.setattr(torch, "from_dlpack", lambda one: torch.from_numpy(one.values))
    return there


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_and_torch_share_the_memory_on_a_device_and_the_host_gets_a_copy(cupy, dtype):
    one = array("numpy", dtype, numbers(dtype, (3, 5), 1))
    there = converted(one, "cupy")
    assert isinstance(there, CupyArray) and not np.shares_memory(there.values, one)
    tensor = converted(there, "torch")
    assert str(tensor.dtype) == f"torch.{dtype}" and tensor.data_ptr() == there.values.__array_interface__["data"][0]
    cupy.add(tensor.data_ptr())
    back = converted(tensor, "cupy")
    assert back.dtype == one.dtype and np.shares_memory(back.values, there.values)
    for device_array in (there, tensor):
        home = converted(device_array, "numpy")
        assert home.dtype == one.dtype and np.array_equal(home, one)
    assert converted(there, "cupy") is there


@pytest.mark.parametrize(
    ("library", "device", "message"),
    [
        ("jax", None, "library 'jax' does not exist. Libraries: numpy, torch, cupy."),
        ("torch", "gpu", "device 'gpu' does not exist. Devices: cpu, cuda."),
        ("numpy", "cuda", "numpy has no arrays on cuda; its arrays lie on cpu."),
        ("cupy", "cpu", "cupy has no arrays on cpu"),
        ("cupy", None, "cupy cannot be imported here"),
    ],
)
def test_what_cannot_be_is_an_error(monkeypatch, library, device, message):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=message):
        converted(np.ones((2, 2)), library, device)
