"""Figures of closed forms: words of a rank against ranks, and which grid moves the fewest words where."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ...comm.topology import grids_of
from ...figures import look
from ...gemm.cost import mean
from .costs import LINEARS, forward
from .figures import drawn

AXES = ("x", "y", "z")
ROOTS = {"oned": 1, "summa": 2, "cuboid": 3}
"""Scheme → of which powers its ranks are."""
RANKS = tuple(2**power for power in range(1, 13))
TOKENS = tuple(2**power for power in range(4, 15))
"""Of a GPU: the batch's rows ÷ ranks."""
FAMILIES = {
    "": "one rank",
    "x": "x: weights gathered (FSDP)",
    "y": "y: 1-D, sequence parallel",
    "xy": "x·y",
    "yz": "y·z: 2-D",
    "xyz": "x·y·z: 3-D",
}
"""The axes that a cuboid grid has → what it is; y and z are exchanged from one linear to the next."""


def write(hidden: int, rows: int, folder: Path) -> list[Path]:
    """Write both figures of a layer of this hidden size; returns the files. Raises DataError where they cannot be written."""
    words = drawn(partial(_words, hidden=hidden, rows=rows), folder, "words")
    return words + drawn(partial(_winners, hidden=hidden), folder, "grids")


def _words(figure: Any, hidden: int, rows: int) -> None:
    axes = figure.subplots()
    for number, (name, root) in enumerate(ROOTS.items()):
        ranks = [side**root for side in range(2, 4097) if side**root <= 4096 and (root > 1 or side in RANKS)]
        axes.plot(ranks, [forward(name, one, rows, hidden) for one in ranks], label=name, markevery=0.1, **look(number))
    best = [min(words(grid, rows, hidden) for grid in grids_of(ranks, AXES)) for ranks in RANKS]
    axes.plot(RANKS, best, label="cuboid, its best grid", **look(len(ROOTS)))
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="words received by a rank, a layer's forward")
    axes.set_title(f"hidden {hidden:,}, {rows:,} rows")
    axes.legend()


def words(grid: dict[str, int], rows: int, hidden: int) -> float:
    """Words that a rank receives in the forward of a layer on a cuboid grid."""
    turned = {"x": grid["x"], "y": grid["z"], "z": grid["y"]}
    return sum(
        float(mean.cuboid("nn", rows, n * hidden, k * hidden, turned if number % 2 else grid).words)
        for number, (n, k) in enumerate(LINEARS)
    )


def winner(ranks: int, tokens: int, hidden: int) -> str:
    """The axes of the grid that moves the fewest words; of equal ones that with fewer axes."""

    def order(grid: dict[str, int]) -> tuple[float, int]:
        return words(grid, ranks * tokens, hidden), len(_axes(grid))

    return _axes(min(grids_of(ranks, AXES), key=order))


def _axes(grid: dict[str, int]) -> str:
    """The axes longer than 1; z alone and y alone are one family, as are x·z and x·y."""
    found = "".join(name for name, size in grid.items() if size > 1)
    return {"z": "y", "xz": "xy"}.get(found, found)


def _winners(figure: Any, hidden: int) -> None:
    axes, names = figure.subplots(), list(FAMILIES)
    found = [[winner(ranks, tokens, hidden) for ranks in RANKS] for tokens in TOKENS]
    for number, name in enumerate(names):
        points = [
            (RANKS[column], TOKENS[row]) for row, line in enumerate(found) for column, one in enumerate(line) if one == name
        ]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="none", label=FAMILIES[name], **look(number))
    axes.set(xlabel="ranks", ylabel="tokens of a GPU", title=f"fewest words of a layer's forward, hidden {hidden:,}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
