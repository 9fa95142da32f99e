"""The cache of executors that a grid keeps, so that a repeated product reuses its workspace."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..comm.device.arrays import Array, is_torch, kind_of
from ..comm.grid import BaseGrid
from .algorithms.executor import Executor
from .algorithms.plan import ProductPlan
from .algorithms.registry import algorithm_of

KEPT_BYTES = 1 << 28
"""Workspace that a rank keeps for products to come, per grid: that of a float64 product of 5792³ through MPI on a 2×2×2 grid."""
KEPT_EXECUTORS = 256
"""Executors without workspace cost memory too."""


class Executors:
    """Executors by plan, dtype and device, least recently used first; their workspace is at most `limit` bytes.

    An executor in use is not in the cache; a product of the same plan meanwhile gets another one.
    """

    def __init__(self, grid: BaseGrid, limit: int = KEPT_BYTES) -> None:
        self.grid, self.limit = grid, limit
        self.nbytes = 0
        self._kept: OrderedDict[int, tuple[Executor, int]] = OrderedDict()
        self._numbers: dict[tuple[ProductPlan, Any, str], int] = {}
        self._plans: list[ProductPlan] = []

    def __len__(self) -> int:
        return len(self._kept)

    def number_of(self, plan: ProductPlan, like: Array) -> int:
        """The number of the executor of `plan` for arrays of the kind and dtype of `like`, by which it is taken and kept."""
        key = (plan, like.dtype, str(like.device) if is_torch(like) else kind_of(like))
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._plans):
            self._plans.append(plan)
        return number

    def take(self, number: int) -> Executor:
        """The executor of this number, until it is kept again; another one where it is in use.

        One whose product raises is not kept. Raises what the executor of a new plan raises.
        """
        kept = self._kept.pop(number, None)
        if kept is None:
            plan = self._plans[number]
            return algorithm_of(plan).executor(plan, self.grid)
        self.nbytes -= kept[1]
        return kept[0]

    def keep(self, number: int, executor: Executor) -> None:
        """Keep an executor that was taken; those used longest ago go where all together are too many."""
        nbytes = executor.workspace.nbytes
        other = self._kept.pop(number, None)  # of a call that ended while this one ran
        self.nbytes += nbytes - (other[1] if other else 0)
        self._kept[number] = (executor, nbytes)
        while self._kept and (self.nbytes > self.limit or len(self._kept) > KEPT_EXECUTORS):
            _, (_, freed) = self._kept.popitem(last=False)
            self.nbytes -= freed


def executors_of(grid: BaseGrid) -> Executors:
    """The executors that `grid` keeps until it is freed."""
    result: Executors | None = grid.job.kept[grid].get(Executors)
    if result is None:
        result = grid.job.kept[grid][Executors] = Executors(grid)
    return result
