"""A bounded cache of the results of a layer's method, which a deep copy of the layer does not share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, TypeVar

T = TypeVar("T")


class ProductCache(Generic[T]):
    """A least-recently-used cache of the bound method `make`, with at most `size` results (None: unbounded).

    The deep copy of functools.lru_cache is itself, so a copied layer would go on calling the original layer's method. The deep
    copy of a ProductCache is empty and calls the copied layer's method.
    """

    def __init__(self, make: Callable[..., T], size: int | None) -> None:
        self._make, self._size = make, size
        self._cached = lru_cache(size)(make)

    def __call__(self, *key: Hashable) -> T:
        return self._cached(*key)

    def __reduce__(self) -> tuple[type[ProductCache[T]], tuple[Callable[..., T], int | None]]:
        """Return what a copy is made of: the method, which is the copied layer's in a deep copy, and no result."""
        return ProductCache, (self._make, self._size)
