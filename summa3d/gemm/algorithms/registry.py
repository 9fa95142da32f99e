"""The table of algorithms by name, which `matmul`, the chooser, the gradients, the cost model and the command line read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...errors import ConfigError, GridError
from ...layout.layout import Coordinates
from ..cost import mean, per_rank
from ..cost.mean import MeanOf
from ..cost.per_rank import CostOf, transposition
from ..cost.steps import Conditions, Cost, GridShape, Volume, block_words, combined
from .agarwal import Agarwal, AgarwalPlan
from .ca25d import Ca25d, Ca25dPlan
from .cannon import Cannon, CannonPlan
from .cuboid import Cuboid, CuboidPlan
from .oned import OnedColumn, OnedColumnPlan, OnedRow, OnedRowPlan
from .plan import ProductPlan, counts_near
from .summa import Summa, SummaPlan
from .tesseract import Tesseract, TesseractPlan


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of a distributed product: its plan, executor and costs.

    plan : `plan(form, m, n, k, **options)` is plain data with layouts and shapes; operands that have these layouts, the axes in
        any roles, are the algorithm's
    executor : `executor(plan, grid).run(a, b, out, alpha, beta)` multiplies this rank's blocks
    cost : words, messages and workspace of one rank, ``(plan, grid_shape, coordinates, conditions) → Cost``
    mean : words, messages and local products of an average rank, ``(form, m, n, k, grid_shape) → Mean``
    variants : option values that give operands other layouts, tried when operands already have layouts
    reads_in_place : whether gathered operands are read where the node's memory holds them
    """

    name: str
    plan: type[Any]
    executor: Callable[..., Any]
    cost: CostOf
    mean: MeanOf
    variants: tuple[Mapping[str, Any], ...] = ({},)
    reads_in_place: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The roles of the grid's axes, which are also their names where nothing else is said."""
        return tuple(self.plan.roles())

    @property
    def options(self) -> tuple[str, ...]:
        """The plan's keywords that are no axes, whose names are longer than those of roles and sizes."""
        return tuple(field.name for field in fields(self.plan) if len(field.name) > 1 and field.name not in ("form", "grains"))

    def grids(self, ranks: int) -> list[dict[str, int]]:
        """The grids of exactly this many ranks that it can use."""
        result: list[dict[str, int]] = self.plan.grids(ranks)
        return result

    def volume(
        self, plan: ProductPlan, grid_shape: GridShape, dtype: str = "float64", staged: Collection[str] = (), device: bool = False
    ) -> Volume:
        """Cost of a product on every rank (`volume.of_plan`).

        A transposed product adds its exchange; 16-bit floats add operands and C in float32, on a `device` C alone, unless the
        plan sums it on one rank.
        """
        plan.check_grid(grid_shape)
        conditions = Conditions.of(str(dtype), staged, device)
        inner = plan.swapped() if plan.by_transpose else plan
        exchanged = transposition(plan, grid_shape, conditions) if plan.by_transpose else None
        summed = conditions.wide > 1 and not (device and plan.no_reduction(grid_shape))

        def cost_of(at: Coordinates) -> Cost:
            own = block_words(plan.c_layout, plan.c_shape, grid_shape, at) if summed else 0
            parts = [self.cost(inner, grid_shape, at, conditions), Cost(0, 0, conditions.wide * own)]
            return combined(*parts, *([] if exchanged is None else [exchanged(at)]))

        return Volume(grid_shape, cost_of)


FINE_VARIANTS: tuple[Mapping[str, Any], ...] = ({}, {"b_fine": 1}, {"a_fine": 1}, {"a_fine": 1, "b_fine": 1})
SEQUENCE_VARIANTS: tuple[Mapping[str, Any], ...] = ({}, {"sequence": True})

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("cuboid", CuboidPlan, Cuboid, per_rank.cuboid, mean.cuboid, FINE_VARIANTS, reads_in_place=True),
        Algorithm("agarwal", AgarwalPlan, Agarwal, per_rank.agarwal, mean.agarwal),
        Algorithm("summa", SummaPlan, Summa, per_rank.summa, mean.summa),
        Algorithm("cannon", CannonPlan, Cannon, per_rank.cannon, mean.cannon),
        Algorithm("tesseract", TesseractPlan, Tesseract, per_rank.tesseract, mean.tesseract),
        Algorithm("ca25d", Ca25dPlan, Ca25d, per_rank.ca25d, mean.ca25d),
        Algorithm("oned-column", OnedColumnPlan, OnedColumn, per_rank.oned_column, mean.oned_column, SEQUENCE_VARIANTS),
        Algorithm("oned-row", OnedRowPlan, OnedRow, per_rank.oned_row, mean.oned_row, SEQUENCE_VARIANTS),
    )
}
ALIASES = {"oned": "oned-row"}
_BY_PLAN = {algorithm.plan: algorithm for algorithm in ALGORITHMS.values()}


def algorithm_of(plan: ProductPlan) -> Algorithm:
    """The algorithm that a plan belongs to."""
    return _BY_PLAN[type(plan)]


def algorithm(name: str, ranks: int | None = None) -> Algorithm:
    """The algorithm of this name.

    Raises ConfigError, naming all, if no algorithm has this name; GridError if it cannot use `ranks` ranks, naming the rank
    counts near it that it can use and the algorithms that can use this one.
    """
    result = ALGORITHMS.get(ALIASES.get(name, name))
    if result is None:
        raise ConfigError(f"Algorithm {name!r} is not known. Algorithms: {', '.join([*ALGORITHMS, *ALIASES])}.")
    if ranks is not None and not result.grids(ranks):
        counts = ", ".join(map(str, counts_near(ranks, result.grids)))
        raise GridError(
            f"{result.name} cannot use {ranks} ranks. Rank counts near it that it can use: {counts}.\n"
            f"  Algorithms that can use {ranks}: {', '.join(other.name for other in ALGORITHMS.values() if other.grids(ranks))}."
        )
    return result
