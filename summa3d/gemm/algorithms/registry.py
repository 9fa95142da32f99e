"""Every algorithm by name. `matmul`, the chooser, the gradients, the command line and the tests read this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, GridError
from ..cost import per_rank, volume
from .agarwal import Agarwal, AgarwalPlan
from .ca25d import Ca25d, Ca25dPlan
from .cannon import Cannon, CannonPlan
from .cuboid import Cuboid, CuboidPlan
from .oned import OnedColumn, OnedColumnPlan, OnedRow, OnedRowPlan
from .plan import counts_near
from .summa import Summa, SummaPlan
from .tesseract import Tesseract, TesseractPlan


@dataclass(frozen=True)
class Algorithm:
    """One way to multiply.

    `plan(form, m, n, k, **options)` is plain data with layouts and shapes; `executor(plan, grid).run(a, b, out, alpha, beta)`
    multiplies this rank's blocks; `volume(plan, grid_shape, dtype, device=False)` is what that costs on every rank;
    `grids(ranks)` lists the grids of exactly that many ranks it can use; `options` are the plan's keywords that are no axes;
    `variants` are the settings of them that give operands other layouts, tried where operands are already laid out.
    """

    name: str
    axes: tuple[str, ...]
    plan: Callable[..., Any]
    executor: Callable[..., Any]
    volume: Callable[..., volume.Volume]
    grids: Callable[[int], list[dict[str, int]]]
    options: tuple[str, ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ({},)


PANELS = ("panel", "lookahead")
FINE = ("a_fine", "b_fine", "c_fine")
FINE_OPERANDS: tuple[Mapping[str, Any], ...] = ({}, {"b_fine": 1}, {"a_fine": 1}, {"a_fine": 1, "b_fine": 1})
SEQUENCE: tuple[tuple[str, ...], tuple[Mapping[str, Any], ...]] = (("sequence",), ({}, {"sequence": True}))
CUBOID = Algorithm("cuboid", ("x", "y", "z"), CuboidPlan, Cuboid, volume.of_plan, CuboidPlan.grids, FINE, FINE_OPERANDS)
ROW = Algorithm("oned-row", ("y",), OnedRowPlan, OnedRow, per_rank.volume, OnedRowPlan.grids, *SEQUENCE)

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        CUBOID,
        Algorithm("agarwal", ("x", "y", "z"), AgarwalPlan, Agarwal, per_rank.volume, AgarwalPlan.grids),
        Algorithm("summa", ("x", "y"), SummaPlan, Summa, per_rank.volume, SummaPlan.grids, PANELS),
        Algorithm("cannon", ("x", "y"), CannonPlan, Cannon, per_rank.volume, CannonPlan.grids),
        Algorithm("tesseract", ("x", "y", "d"), TesseractPlan, Tesseract, per_rank.volume, TesseractPlan.grids, PANELS),
        Algorithm("ca25d", ("x", "y", "d"), Ca25dPlan, Ca25d, per_rank.volume, Ca25dPlan.grids, PANELS),
        Algorithm("oned-column", ("y",), OnedColumnPlan, OnedColumn, per_rank.volume, OnedColumnPlan.grids, *SEQUENCE),
        ROW,
    )
}
ALIASES = {"oned": "oned-row"}


def algorithm(name: str, ranks: int | None = None) -> Algorithm:
    """The algorithm of this name.

    Raises ConfigError, naming all, where there is none; GridError where it cannot use `ranks` ranks, naming the rank counts near
    it that it can use and the algorithms that can use this one.
    """
    found = ALGORITHMS.get(ALIASES.get(name, name))
    if found is None:
        raise ConfigError(f"Algorithm {name!r} is not known. Algorithms: {', '.join([*ALGORITHMS, *ALIASES])}.")
    if ranks is not None and not found.grids(ranks):
        counts = ", ".join(map(str, counts_near(ranks, found.grids)))
        raise GridError(
            f"{found.name} cannot use {ranks} ranks. Rank counts near it that it can use: {counts}.\n"
            f"  Algorithms that can use {ranks}: {', '.join(other.name for other in ALGORITHMS.values() if other.grids(ranks))}."
        )
    return found
