"""NVTX ranges around phases and communications, for a profiler; off unless requested."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ...errors import ConfigError

LIBRARIES = (("cupy.cuda.nvtx", "RangePush", "RangePop"), ("torch.cuda.nvtx", "range_push", "range_pop"))


class Ranges:
    """Ranges of this thread that a profiler shows; they nest."""

    def __init__(self, push: Callable[[str], Any], pop: Callable[[], Any]) -> None:
        self._push, self._pop = push, pop

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """A range `name` around the with-block."""
        self._push(name)
        try:
            yield
        finally:
            self._pop()


def nvtx() -> Ranges:
    """NVTX ranges by CuPy, or else by torch. Raises ConfigError where neither has them."""
    reasons = []
    for name, push, pop in LIBRARIES:
        try:
            module = importlib.import_module(name)
            ranges = Ranges(getattr(module, push), getattr(module, pop))
            with ranges.around("summa3d"):  # a torch without CUDA has the functions, and they fail
                return ranges
        except (ImportError, AttributeError, RuntimeError) as error:
            reasons.append(f"{name}: {str(error).splitlines()[0]}")
    raise ConfigError(f"NVTX ranges need CuPy, or a torch with CUDA; neither has them here ({'; '.join(reasons)}).")


def nvtx_or_none() -> Ranges | None:
    """NVTX ranges where a library has them."""
    with suppress(ConfigError):
        return nvtx()
    return None
