"""A bounded cache of what a method of a layer makes, which a deep copy of the layer does not share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import lru_cache
from types import MethodType
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class LayerCache(Generic[T]):
    """The results of the bound method `make` by its arguments, at most `size` of them, least recently used dropped first.

    functools.lru_cache alone returns itself as its deep copy: a copied layer would go on asking the original's method. The
    deep copy of this one is empty, and asks the copied layer's.
    """

    def __init__(self, make: Callable[..., T], size: int | None) -> None:
        self._make, self._size = make, size
        self._cached = lru_cache(size)(make)

    def __call__(self, *key: Hashable) -> T:
        return self._cached(*key)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerCache[T]:
        method = cast(MethodType, self._make)
        return LayerCache(MethodType(method.__func__, copy.deepcopy(method.__self__, memo)), self._size)
