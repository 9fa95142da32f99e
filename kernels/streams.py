"""Handing torch's CUDA streams to CuPy, so that the work of both is queued in one order."""

from __future__ import annotations

from typing import Any


class TorchStream:
    """A torch stream under CUDA's stream protocol, which torch's own streams implement since 2.10."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol's version and the stream's address."""
        return 0, self._pointer


def taken_over(cuda: Any, pointer: int) -> Any:
    """CuPy's view of the torch stream at address `pointer`; `cuda` is the module `cupy.cuda`."""
    return cuda.Stream.from_external(TorchStream(pointer))
