"""A bounded cache of the results of a layer's method, which a deep copy of the layer does not share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import MethodType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class LayerCache(Generic[T]):
    """A least-recently-used cache of the bound method `make`, with at most `size` results (None: unbounded).

    The deep copy of functools.lru_cache is itself, so a copied layer would go on calling the original layer's method. The deep
    copy of a LayerCache is empty and calls the copied layer's method.
    """

    def __init__(self, make: Callable[..., T], size: int | None) -> None:
        self._make, self._size = make, size
        self._cached = lru_cache(size)(make)

    def __call__(self, *key: Hashable) -> T:
        return self._cached(*key)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache[T]:
        """An empty cache of the copied layer's method."""
        method = cast(MethodType, self._make)
        return LayerCache(MethodType(method.__func__, copy.deepcopy(method.__self__, memo)), self._size)
