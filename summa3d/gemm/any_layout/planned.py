"""From layouts and grids to the plan of a product: the request that is searched, and its checks."""

from __future__ import annotations

from typing import Any

from ...comm.grid import BaseGrid
from ...dtypes import dtype_of
from ...errors import ConfigError, LayoutError, ShapeError
from ...layout.cyclic import Ownership, ownership
from ...layout.redistribute import Placement
from ..algorithms.checks import is_whole
from ..cost.machine import Machine
from ..local.blas import OPS
from .plan import AnyPlan, Owned
from .search import OBJECTIVES, AnyRequest, cheapest
from .vectors import RankSpace


def plan_any(
    a_layout: Ownership | str,
    b_layout: Ownership | str,
    m: int,
    n: int,
    k: int,
    grid: BaseGrid,
    out_layout: Ownership | str | None = None,
    form: str = "nn",
    dtype: Any = "float64",
    objective: str = "seconds",
    b_grid: BaseGrid | None = None,
    out_grid: BaseGrid | None = None,
    machine: Machine | None = None,
) -> AnyPlan:
    """The cheapest plan of C (m×n) = op(A)·op(B) for A and B as they lie, whatever their layouts. Moves nothing.

    Each axis of the grid is given to m, n, k or none: all such compute layouts are compared, with the exact words of each rank.

    Parameters
    ----------
    a_layout, b_layout : where A and B lie, as they are stored: with form t, A is k×m
    grid : of A; b_grid, out_grid : of B and of C, by default the same one. Others are of the same ranks of a communicator, and
        ranks are then numbered as there; C lies on A's grid where nothing else is said
    out_layout : the output layout of C; None, the cheapest
    objective : "seconds", the fewest that are predicted; or "words", the fewest of all layouts that divide the work evenly
    machine : what seconds are predicted for; the default is `Machine()`, and must be the same on all ranks

    Raises ShapeError for a form or sizes that cannot be; LayoutError for an axis that its grid lacks, or grids of other numbers
    of ranks; ConfigError for another objective, a dtype that is not supported, or an out_grid without out_layout.

    >>> from summa3d.comm.grid import Place
    >>> print(plan_any("m k:(y,x)", "k n:x", 64, 48, 96, Place({"x": 2, "y": 2})).summary)
    A m k:(y,x) → m:y k (9,216 words), B k n:x stays, C in m:y n:x
    """
    _check(m, n, k, form, objective)
    if out_grid is not None and out_layout is None:
        raise ConfigError(f"out_grid is {out_grid}, and out_layout says nothing of where C shall lie on it. Pass both.")
    m, n, k = int(m), int(n), int(k)  # numpy's whole numbers may be of few bits
    grids = list(dict.fromkeys([grid, b_grid or grid, out_grid or grid]))
    spaces = tuple(RankSpace.on(grid) if len(grids) == 1 else RankSpace.among_everyone(one) for one in grids)
    if len({len(space) for space in spaces}) > 1:
        raise LayoutError(
            f"{' and '.join(map(str, grids))} are not of the same ranks: a product needs grids of one communicator."
        )

    def located(layout: Ownership | str, names: str, of: BaseGrid | None) -> Owned:
        place = grids.index(of or grid)
        extents = {"m": m, "n": n, "k": k}
        found = Owned(_checked(layout, spaces[place], of or grid), (extents[names[0]], extents[names[1]]), names, place)
        return found

    a = located(a_layout, "mk" if form[0] == "n" else "km", grid)
    b = located(b_layout, "kn" if form[1] == "n" else "nk", b_grid)
    c = None if out_layout is None else located(out_layout, "mn", out_grid)
    request = AnyRequest(form, {"m": m, "n": n, "k": k}, dtype_of(dtype), spaces, a, b, c, machine or Machine(), objective)
    return cheapest(request)


def _check(m: int, n: int, k: int, form: str, objective: str) -> None:
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not is_whole(size) or size < 0:
            raise ShapeError(f"{name} is {size!r}; sizes are whole numbers of at least 0.")
    if not isinstance(form, str) or len(form) != 2 or any(letter not in OPS for letter in form):
        raise ShapeError(f"form {form!r} is not two of the letters n, t and c, such as nt.")
    check_objective(objective)


def check_objective(objective: str) -> None:
    """Raise ConfigError for an objective that there is not."""
    if objective not in OBJECTIVES:
        raise ConfigError(f"objective {objective!r} is not known; objectives: {', '.join(OBJECTIVES)}.")


def _checked(layout: Ownership | str, space: RankSpace, grid: BaseGrid) -> Ownership:
    """The ownership. Raises LayoutError unless it is one of matrices, and its axes and indices are the grid's."""
    found = ownership(layout)
    Placement(found, grid.shape, ())
    point = next(point for point in space.points if point)
    found.local_shape((1, 1), grid.shape, point)
    return found
