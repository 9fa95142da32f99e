"""The kernels of a device in a dry run: outputs are allocated without memory, launches are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from summa3d.kernels import dispatch
from summa3d.kernels.launch import Argument
from summa3d.kernels.rows import Fused

from ..comm.device.arrays import meta_on_device

PROCESSORS = 132
"""Multiprocessors of the simulated device (an H100): they set how many partial sums kernels leave, some MB on any device."""


class DryLauncher:
    """Starts no kernel; calls `launched` with the name and the tensors of each launch."""

    device = torch.device("meta")
    most_blocks = 2**31 - 1

    def __init__(self, launched: Callable[[str, Sequence[Tensor]], None]) -> None:
        self._launched, self.processors = launched, PROCESSORS

    def __call__(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        self._launched(kernel, [argument for argument in arguments if isinstance(argument, Tensor)])


@contextmanager
def kernels(launched: Callable[[str, Sequence[Tensor]], None]) -> Iterator[None]:
    """Within the block, meta tensors count as device tensors, and the fused kernels accept them."""
    token = dispatch.of_meta.set(Fused(DryLauncher(launched)))
    try:
        with meta_on_device():
            yield
    finally:
        dispatch.of_meta.reset(token)
