# torch's streams, as CuPy takes them over: so that what both queue is in one order. Imports nothing.
# Next: load.py, ../summa3d/comm/device/cupy.py, ../summa3d/gemm/cublas.py.
from __future__ import annotations

from typing import Any


class TorchStream:
    """A stream of torch's by CUDA's stream protocol, which torch's own have since 2.10."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def taken_over(cuda: Any, pointer: int) -> Any:
    """CuPy's stream for torch's at `pointer`; `cuda` is `cupy.cuda`."""
    return cuda.Stream.from_external(TorchStream(pointer))
