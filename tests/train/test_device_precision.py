# What products on a device may round: set once, when a rank takes its device.
# May import summa3d.comm.device.select, summa3d.train; torch.
# Next: test_device_run.py.
from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from mpi4py import MPI

from summa3d.comm.device import select as places
from summa3d.errors import ConfigError
from summa3d.train import config
from summa3d.train.device import HOST, open_device


class Device:
    def __init__(self, number: int) -> None:
        self.number = number

    def use(self) -> None:
        Device.used = self.number

    used = -1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with two GPUs: what CuPy and torch are told there."""
    calls: list[Any] = []
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 2, CUDARuntimeError=RuntimeError),
        Device=Device,
        get_cublas_handle=lambda: 9,
        cublas=types.SimpleNamespace(setMathMode=lambda *mode: calls.append(("cublas", mode))),
        PythonFunctionAllocator=lambda malloc, free: types.SimpleNamespace(malloc=malloc),
        set_allocator=lambda malloc: calls.append("one pool"),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: calls.append(("torch", number)))
    precision, matmul = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul
    half = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    yield calls
    torch.set_float32_matmul_precision(precision)
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = half


@pytest.mark.parametrize("tf32", [False, True])
def test_a_device_rounds_float32_operands_only_where_that_is_asked_for(asked: list[Any], tf32: bool) -> None:
    torch.set_float32_matmul_precision("highest" if tf32 else "high")
    device = open_device("cuda", MPI.COMM_SELF, tf32)
    assert device == torch.device("cuda", 0) and Device.used == 0
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    only_wide_sums, on_11_bits = 16, 3  # cublasMath_t
    assert asked == [("cublas", (9, only_wide_sums | on_11_bits if tf32 else only_wide_sums)), ("torch", 0), "one pool"]


def test_a_torch_without_cuda_is_an_error_that_names_it(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch .*, built (without|for) CUDA.* sees no GPU where CuPy does"):
        open_device("cuda", MPI.COMM_SELF)


def test_sums_of_16_bit_floats_are_taken_in_float32(asked: list[Any]) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    open_device("cuda", MPI.COMM_SELF)
    assert not matmul.allow_bf16_reduced_precision_reduction and not matmul.allow_fp16_reduced_precision_reduction


def test_the_configuration_names_the_device_or_leaves_it_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.load("demo").device is None and not config.load("demo").tf32
    assert config.load("demo", ["device=cuda", "tf32=true"]).device == "cuda"
    with pytest.raises(ConfigError, match=r"device = 'cudo' is not known\. Nearest: 'cuda'\. All: cpu, cuda"):
        config.load("demo", ["device=cudo"])
    monkeypatch.setenv(places.VARIABLE, "cuda")
    assert open_device("cpu", MPI.COMM_SELF) is HOST
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="needs CuPy"):
        open_device(None, MPI.COMM_SELF)
