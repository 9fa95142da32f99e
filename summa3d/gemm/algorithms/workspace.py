"""An executor's buffers, allocated at its first run and counted in the ledger; and its local products and copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np

from ...comm.device.arrays import Array, copy_into, dtype_name, empty, is_half, is_on_device, kind_of
from ...comm.grid import BaseGrid
from ...comm.transport.progress import IN_FLIGHT
from ..local import blas
from ..local.blas import accumulation_like, adds_in_place
from ..local.multiply import multiply
from ..pieces.behind import BehindQueue


class Workspace:
    """Named buffers that are allocated once, counted in the ledger, and live as long as the executor that owns them.

    An executor's products and copies go through it, so that a trace shows them as spans.

    stays : whether it lives from one product to the next, or is of one product alone
    """

    def __init__(self, grid: BaseGrid, stays: bool = True) -> None:
        self.ledger, self._grid, self._stays = grid.ledger, grid, stays
        self._buffers: dict[str, Array] = {}
        self._views: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}  # of numpy's buffers, in the shapes that come
        self.nbytes = 0
        """Bytes of all buffers."""

    @property
    def behind(self) -> BehindQueue:
        """Blocks gathered during the products of this workspace's job."""
        return BehindQueue.of(self._grid)

    def buffer(self, name: str, shape: Sequence[int], like: Array, capacity: int | None = None) -> Array:
        """A C-ordered array of `shape` and of `like`'s kind and dtype; `capacity` elements, its maximum, are allocated."""
        key = name, tuple(shape)
        view = self._views.get(key)
        if view is not None and view.dtype == like.dtype and type(like) is np.ndarray:
            return view
        held, count = self._buffers.get(name), prod(shape)
        if held is None or held.dtype != like.dtype or len(held) < count or not is_like(held, like):
            if held is not None:
                self.nbytes -= self._buffers.pop(name).nbytes
            del held
            held = self._buffers[name] = self.ledger.track(empty((max(count, capacity or 0),), like), stays=self._stays)
            self.nbytes += held.nbytes
            self._views = {kept: other for kept, other in self._views.items() if kept[0] != name}
        view = (held if len(held) == count else held[:count]).reshape(tuple(shape))
        if type(view) is np.ndarray:
            self._views[key] = view
        return view

    def widened(self, name: str, array: Array, capacity: int | None = None) -> Array:
        """`array` as products take it: itself, or for 16-bit floats on the host a copy in float32 in workspace `name`."""
        if not is_half(array) or is_on_device(array):
            return array
        return self.copy(self.buffer(f"wide {name}", array.shape, accumulation_like(array), capacity), array)

    def scratch(self, out: Array, capacity: int | None = None) -> Array | None:
        """A buffer of out's shape for a product that is added to out afterwards; None if the BLAS adds in place."""
        return None if adds_in_place(dtype_name(out)) else self.buffer("product", out.shape, out, capacity)

    def accumulate(
        self, a: Array, b: Array, form: str, out: Array, alpha: Any = 1, beta: Any = 0, scratch: Array | None = None
    ) -> None:
        """`blas.accumulate`: out = α·op(A)·op(B) + β·out; behind it, MPI moves what is in flight."""
        with self.ledger.product(a, b, form, out):
            blas.accumulate(a, b, form, out, alpha, beta, scratch, self._grid.job.blas)
        IN_FLIGHT.advance()

    def multiply(self, a: Array, b: Array, form: str, out: Array | None = None) -> Array:
        """`local.multiply`: op(A)·op(B), in `out` where it is given; behind it, MPI moves what is in flight."""
        with self.ledger.product(a, b, form, a if out is None else out) if self.ledger.by_steps else nullcontext():
            product = multiply(a, b, form, out, rule=self._grid.job.blas)
        IN_FLIGHT.advance()
        return product

    def copy(self, target: Array, source: Array) -> Array:
        """target = source; returns the target."""
        with self.ledger.copy(target):
            return copy_into(target, source)


def is_like(array: Array, like: Array) -> bool:
    """Return whether two arrays are of one library and both on the host or both on a device; fast for numpy."""
    return type(array) is type(like) is np.ndarray or kind_of(array) == kind_of(like)
