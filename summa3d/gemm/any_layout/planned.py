"""From layouts and grids to the plan of a product: the request that is searched, and its checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...comm.grid import BaseGrid
from ...dtypes import dtype_of
from ...errors import ConfigError, LayoutError, ShapeError
from ...layout.cyclic import BlockCyclic, Ownership, ownership
from ...layout.redistribute import Placement
from ..algorithms.checks import is_whole
from ..cost.machine import Machine
from ..local.blas import OPS
from .plan import AnyPlan, Owned
from .search import OBJECTIVES, AnyRequest, cheapest
from .subscripts import Subscripts
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
    workspace: int | None = None,
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
    workspace : bytes of workspace of each rank at most: A and B then come in panels of k, where they must. `AnyPlan.workspace_of`
        each rank is exact; of more than 256 ranks that which receives most words is looked at

    Raises ShapeError for a form or sizes that cannot be; LayoutError for an axis that its grid lacks, or grids of other numbers
    of ranks; ConfigError for another objective, a dtype that is not supported, an out_grid without out_layout, or a workspace
    that no plan does with: it names the least that works.

    >>> from summa3d.comm.grid import Place
    >>> print(plan_any("m k:(y,x)", "k n:x", 64, 48, 96, Place({"x": 2, "y": 2})).summary)
    A m k:(y,x) → m:y k (9,216 words), B k n:x stays, C in m:y n:x
    """
    _check(m, n, k, form, objective)
    extents = {"m": int(m), "n": int(n), "k": int(k)}  # numpy's whole numbers may be of few bits
    letters = Subscripts("mk" if form[0] == "n" else "km", "kn" if form[1] == "n" else "nk", "mn")
    layouts, grids = (a_layout, b_layout, out_layout), (grid, b_grid, out_grid)
    return _planned(letters, form, extents, layouts, grids, dtype, objective, machine, workspace)


def plan_einsum(
    subscripts: str,
    a_layout: Ownership | str,
    b_layout: Ownership | str,
    extents: Mapping[str, int],
    grid: BaseGrid,
    out_layout: Ownership | str | None = None,
    dtype: Any = "float64",
    objective: str = "seconds",
    b_grid: BaseGrid | None = None,
    machine: Machine | None = None,
    workspace: int | None = None,
) -> AnyPlan:
    """The cheapest plan of `summa3d.einsum` for A and B as they lie, whatever their layouts. Moves nothing.

    Each axis of the grid is given to one of the letters, or to none: all such compute layouts are compared, with the exact words
    of each rank. Of more than 4,096 ways to give them, those that give an axis to a letter that it splits, or to the longest
    letter of the batch, of A's own, of B's own, or of those summed over.

    Parameters
    ----------
    subscripts : the letters of A, B and C, such as ``bmk,bkn->bmn``
    extents : the size of each letter
    a_layout, b_layout, grid, out_layout, dtype, objective, b_grid, machine, workspace : as `plan_any` takes them; panels are
        of the longest letter that is summed over

    Raises what `plan_any` raises, and ShapeError for letters that are no product of two operands, or without a size.

    >>> from summa3d.comm.grid import Place
    >>> sizes = {"b": 4, "m": 8, "n": 5, "k": 6}
    >>> print(plan_einsum("bmk,bkn->bmn", "b:x m k", "b k:x n", sizes, Place({"x": 2})).summary)
    A b:x m k stays, B b k:x n → b:x k n (60 words), C in b:x m n
    """
    letters = Subscripts.read(subscripts)
    for letter in letters.letters:
        size = extents.get(letter)
        if size is None or not is_whole(size) or size < 0:
            raise ShapeError(f"{letters}: {letter} is {size!r}; each letter has a size, a whole number of at least 0.")
    check_objective(objective)
    sizes = {letter: int(extents[letter]) for letter in letters.letters}
    layouts, grids = (a_layout, b_layout, out_layout), (grid, b_grid, None)
    return _planned(letters, "", sizes, layouts, grids, dtype, objective, machine, workspace)


def _planned(
    letters: Subscripts,
    form: str,
    extents: dict[str, int],
    layouts: tuple[Ownership | str, Ownership | str, Ownership | str | None],
    grids: tuple[BaseGrid, BaseGrid | None, BaseGrid | None],
    dtype: Any,
    objective: str,
    machine: Machine | None,
    workspace: int | None,
) -> AnyPlan:
    """The plan of a product whose sizes are checked; layouts and grids of A, B and C, of which A's grid stands for None."""
    first, _, last = grids
    check_workspace(workspace)
    if last is not None and layouts[2] is None:
        raise ConfigError(f"out_grid is {last}, and there is no out_layout of C on it. Pass both.")
    places = [first, *(grid or first for grid in grids[1:])]
    distinct = list(dict.fromkeys(places))
    spaces = tuple(RankSpace.on(first) if len(distinct) == 1 else RankSpace.among_everyone(item) for item in distinct)
    if len({len(space) for space in spaces}) > 1:
        raise LayoutError(
            f"{' and '.join(map(str, distinct))} are not of the same ranks: a product needs grids of one communicator."
        )
    located = []
    for names, layout, grid in zip(letters, layouts, places, strict=True):
        at, shape = distinct.index(grid), tuple(extents[letter] for letter in names)
        located.append(None if layout is None else Owned(_checked(layout, spaces[at], grid, len(names)), shape, names, at))
    a, b, c = located
    assert a is not None and b is not None
    machine = machine or Machine()
    return cheapest(AnyRequest(form, letters, extents, dtype_of(dtype), spaces, a, b, c, machine, objective, workspace))


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


def check_workspace(workspace: int | None) -> None:
    """Raise ConfigError for a limit that is no number of bytes."""
    if workspace is not None and (not is_whole(workspace) or workspace < 0):
        raise ConfigError(f"workspace is {workspace!r}; it is bytes of each rank, a whole number of at least 0, or None.")


def _checked(layout: Ownership | str, space: RankSpace, grid: BaseGrid, dims: int) -> Ownership:
    """The ownership. Raises LayoutError unless it is one of so many dims, and its axes and indices are the grid's."""
    result = ownership(layout)
    if isinstance(result, BlockCyclic) and dims != 2:
        raise LayoutError(f"{result!r} is block-cyclic, which matrices alone can be; a tensor of {dims} dims takes a Layout.")
    Placement(result, grid.shape, ())
    point = next(point for point in space.points if point)
    result.local_shape((1,) * dims, grid.shape, point)
    return result
