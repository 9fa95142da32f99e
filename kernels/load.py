"""The CUDA launcher: compiles a family of kernels at its first use (NVRTC through CuPy) and launches it on torch's stream.

CuPy caches the compiled code on disk. Tensors are passed by pointer, without a copy.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .launch import Argument
from .rows import Fused
from .streams import taken_over

SOURCES = Path(__file__).parent / "cuda"
FAMILIES = ("activation", "adamw", "columns", "dropout", "loss", "norm", "rotary", "swiglu")
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)
KERNEL = re.compile(
    r"^(?:bias_)?(adamw|dropout|gelu|relu2|rotate|swiglu|sum_lanes|sum_parts)|(norm)_|^(row_maximum|cross_entropy)"
)
FAMILY = {"gelu": "activation", "relu2": "activation", "rotate": "rotary", "sum_lanes": "columns", "sum_parts": "columns"}
FAMILY |= {"row_maximum": "loss", "cross_entropy": "loss"}
OPTIONS = ("-std=c++17",)
MOST_BLOCKS = 2**31 - 1  # CUDA's limit of a launch grid's first dim


def family_of(kernel: str) -> str:
    """The family of a kernel: the stem of the .cu file that defines it. Raises KeyError for a name of no family."""
    match = KERNEL.search(kernel)
    if match is None:
        raise KeyError(f"no family of kernels has {kernel}; the families are {', '.join(FAMILIES)}.")
    name = next(filter(None, match.groups()))
    return FAMILY.get(name, name)


def source(family: str) -> str:
    """The source text of a family with its headers inlined, since CuPy's cache is keyed by the text alone."""
    placed: set[str] = set()

    def place(match: re.Match[str]) -> str:
        name = match[1]
        if name in placed:
            return ""
        placed.add(name)
        return expand((SOURCES / name).read_text(encoding="utf-8").replace("#pragma once\n", ""))

    def expand(text: str) -> str:
        return INCLUDE.sub(place, text)

    return expand((SOURCES / f"{family}.cu").read_text(encoding="utf-8"))


class CudaLauncher:
    """Launches kernels on one CUDA device, on torch's current stream there; nothing is copied and the host never waits.

    Kernels are compiled for the device's own architecture.
    Raises ImportError, with what to install, where CuPy is missing; ValueError for a tensor on another device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = cupy()
        self.device = device
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.most_blocks = MOST_BLOCKS
        self._module = cache(self._new_module)
        self._stream = lru_cache(maxsize=64)(self._new_stream)
        self._function = cache(lambda kernel: self._module(family_of(kernel)).get_function(kernel))

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        with self._cupy.cuda.Device(self.device.index), self._stream(stream):
            self._function(kernel)((blocks,), (threads,), tuple(map(self._passed, arguments)))

    def _new_module(self, family: str) -> Any:
        return self._cupy.RawModule(code=source(family), options=OPTIONS, backend="nvrtc")

    def _new_stream(self, pointer: int) -> Any:
        return taken_over(self._cupy.cuda, pointer)

    def _passed(self, argument: Argument) -> np.generic:
        """The 8 bytes of one kernel argument: an address, an int64 or a float64."""
        if argument is None:
            return np.uint64(0)
        if isinstance(argument, Tensor):
            if argument.device != self.device:
                raise ValueError(f"a kernel on {self.device} was given a tensor on {argument.device}; move it first.")
            return np.uint64(argument.data_ptr())
        return np.float64(argument) if isinstance(argument, float) else np.int64(argument)


def cupy() -> Any:
    """Import CuPy; raises ImportError, with what to install, where it is missing."""
    try:
        import cupy as module
    except ImportError as error:
        raise ImportError(
            "Tensors on a CUDA device need CuPy 14 or newer for the fused kernels: pip install 'summa3d[gpu]' "
            "(cupy-cuda13x; cupy-cuda12x for CUDA 12)."
        ) from error
    return module


@cache
def fused(device: torch.device) -> Fused:
    """The fused kernels of a CUDA device, one `Fused` per device and process."""
    return Fused(CudaLauncher(device))
