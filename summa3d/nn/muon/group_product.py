"""Newton–Schulz of matrices on the ranks of a group, which hold a block each: what executes a `GroupPlan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.grid import BaseGrid
from ...gemm.any_layout.executor import AnyProduct
from ...gemm.any_layout.plan import AnyPlan
from ...gemm.symmetric.executor import SymmetricProduct
from ...gemm.symmetric.plan import SymmetricPlan
from .groups import GroupPlan
from .owners import OwnersPlan


class Square:
    """X·Xᵀ of one matrix by the plan that was chosen, symmetric or general."""

    def __init__(self, plan: SymmetricPlan | AnyPlan, grid: BaseGrid) -> None:
        self._half = SymmetricProduct(plan, grid) if isinstance(plan, SymmetricPlan) else None
        self._general = AnyProduct(plan, [grid]) if isinstance(plan, AnyPlan) else None

    def run(self, x: Tensor) -> Tensor:
        """This rank's block of X·Xᵀ from its block of X."""
        if self._half is not None:
            return self._half.run(x)
        assert self._general is not None
        return self._general.run(x, x)


class Iteration(NamedTuple):
    """The three products of an iteration, bound to the grid of a group."""

    gram: Square
    square: Square
    update: AnyProduct

    @classmethod
    def of(cls, plan: GroupPlan, grid: BaseGrid) -> Iteration:
        """Bind a plan's products; collective over the group."""
        return cls(Square(plan.gram, grid), Square(plan.square, grid), AnyProduct(plan.update, [grid]))

    def run(self, x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
        """This rank's block of aX + (bG + cG²)X, G = XXᵀ."""
        a, b, c = coefficients
        gram = self.gram.run(x)
        both = self.square.run(gram).mul_(c).add_(gram, alpha=b)
        del gram
        updated: Tensor = self.update.run(both, x)
        return updated.add_(x, alpha=a)


class GroupProduct:
    """What this rank computes of the matrices that its group owns; making it is collective over the group."""

    def __init__(self, plan: OwnersPlan, grid: BaseGrid, member: int) -> None:
        self._plan, whole = plan, grid.whole
        group = plan.groups[plan.group_of(member)]
        ranks = [whole.rank_of({**whole.coordinates, **plan.members[item]}) for item in group]
        self._bound: dict[tuple[int, int], Iteration] = {}
        for number in plan.owned_by(member):
            product = plan.products[number]
            if product is not None and product.shape not in self._bound:
                own = whole.regrouped(ranks, product.axes)
                self._bound[product.shape], self._axis = Iteration.of(product, own), own.ranked

    def orthogonalised(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """This rank's parts of the orthogonalised matrices, by number, from those of the matrices; collective over the group.

        The norms of all are added up in one all-reduce of a word for each.
        """
        how = self._plan.how
        squares = torch.stack([torch.linalg.vector_norm(part).double().square() for part in parts.values()])
        norms = self._axis.all_reduce(squares).sqrt().clamp(min=how.eps)
        result = dict[int, Tensor]()
        for (number, part), norm in zip(parts.items(), norms, strict=True):
            inputs, outputs = self._plan.matrices[number].shape
            is_wide = inputs <= outputs
            x = ((part if is_wide else part.mT) / norm.to(part.dtype)).contiguous()
            for _ in range(how.steps):
                x = self._bound[tuple(sorted((inputs, outputs)))].run(x, how.coefficients)  # type: ignore[index]
            result[number] = x if is_wide else x.mT
        return result
