"""Collectives that are prepared when the first array of a dtype comes: what executors of products hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from .axis import Axis
from .collective import Collective
from .device.arrays import Array, place_of


class Prepared:
    """A collective over an axis for blocks of one shape, prepared for each dtype, library and memory when the first such comes.

    axis, kind, options : as of `Axis.prepare`
    """

    def __init__(self, axis: Axis, kind: str, **options: Any) -> None:
        self.axis, self.kind, self._options = axis, kind, options
        self._collectives: dict[Any, Collective] = {}

    def of(self, array: Array) -> Collective:
        """Return the collective for arrays like this one; collective, with check=True, where it is the first."""
        key = array.dtype if type(array) is np.ndarray else (array.dtype, place_of(array))
        collective = self._collectives.get(key)
        if collective is None:
            collective = self._collectives[key] = self.axis.prepare(self.kind, array, **self._options)
        return collective
