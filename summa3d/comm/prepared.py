"""Collectives that are prepared when the first array of a dtype comes: what executors of products hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .axis import Axis
from .collective import Collective
from .device.arrays import Array, place_of


class Prepared:
    """A collective over an axis for blocks of one shape, prepared for each dtype, library and memory when the first such comes.

    axis, kind, dim, sizes, op, root, view : as of `Axis.prepare`
    """

    def __init__(
        self,
        axis: Axis,
        kind: str,
        dim: int | None = None,
        sizes: Sequence[int] | None = None,
        op: str | None = None,
        root: int | None = None,
        view: bool | None = None,
    ) -> None:
        self.axis, self.kind = axis, kind
        self._options = {"dim": dim, "sizes": sizes, "op": op, "root": root, "view": view}
        self._collectives: dict[Any, Collective] = {}

    def of(self, array: Array) -> Collective:
        """Return the collective for arrays like this one; collective, with check=True, where it is the first."""
        key = array.dtype if type(array) is np.ndarray else (array.dtype, place_of(array))
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = self.axis.prepare(self.kind, array, **self._options)  # type: ignore[arg-type]
        return collective
