"""Prints docs/grid.svg: the ranks of a 2×2×2 grid and the blocks of A, B and C that each holds, from the layouts themselves.

Run `python docs/picture.py > docs/grid.svg`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from summa3d.comm.grid import Place
from summa3d.gemm import CuboidPlan
from summa3d.layout import Layout

GRID = {"x": 2, "y": 2, "z": 2}
WIDTH, HEIGHT, CELL = 940, 330, 52
COLOURS = ("#8ecae6", "#ffb703", "#b7e4c7", "#f4a6b8", "#cdb4db", "#fdd9a0", "#a8dadc", "#d5d5d5")
FONT = 'font-family="sans-serif"'
MATRICES = (
    ("A", (4, 2), "a_layout", "gathered along y"),
    ("B", (4, 2), "b_layout", "gathered along x"),
    ("C", (4, 2), "c_layout", "summed along z"),
)


def text(x: float, y: float, words: str, size: int = 14, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" {FONT} font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="#222">'
        f"{words}</text>"
    )


def point(at: Mapping[str, int]) -> tuple[float, float]:
    """Return where a rank stands in the drawing of the cube: x to the right, z up, y to the back."""
    return 60 + 130 * at["x"] + 55 * at["y"], 250 - 130 * at["z"] - 45 * at["y"]


def cube() -> Iterator[str]:
    """The ranks as points, joined along the axes."""
    places = [Place(GRID, rank).coordinates for rank in range(8)]
    for at in places:
        for axis in GRID:
            if at[axis] == 0:
                (x1, y1), (x2, y2) = point(at), point({**at, axis: 1})
                yield f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#888"/>'
    for rank, at in reversed(list(enumerate(places))):
        x, y = point(at)
        yield f'<circle cx="{x:g}" cy="{y:g}" r="17" fill="{COLOURS[rank]}" stroke="#444"/>'
        yield text(x, y + 5, str(rank), weight="bold")
    yield text(125, 277, "x →")
    yield text(30, 190, "z ↑")
    yield text(262, 240, "y ↗")
    yield text(155, 312, "8 ranks, x=2, y=2, z=2")


def matrix(left: float, name: str, shape: tuple[int, int], layout: Layout, what: str) -> Iterator[str]:
    """The blocks of a matrix, each with the rank that holds it."""
    top = 62
    yield text(left + CELL, 24, name, 18, weight="bold")
    yield text(left + CELL, 46, str(layout), 13)
    for rank in range(8):
        rows, columns = layout.slices(shape, GRID, Place(GRID, rank).coordinates)
        x, y = left + CELL * columns.start, top + CELL * rows.start
        width, height = CELL * (columns.stop - columns.start), CELL * (rows.stop - rows.start)
        yield f'<rect x="{x:g}" y="{y:g}" width="{width}" height="{height}" fill="{COLOURS[rank]}" stroke="#444"/>'
        yield text(x + width / 2, y + height / 2 + 5, str(rank), weight="bold")
    yield text(left + CELL, top + 4 * CELL + 24, what, 13)


def page() -> str:
    """The whole picture."""
    plan = CuboidPlan("nn", 4, 2, 4)
    lines = [*cube()]
    for place, (name, shape, layout, what) in enumerate(MATRICES):
        lines += matrix(400 + 190 * place, name, shape, getattr(plan, layout), what)
    lines += [text(547, 170, "·", 30), text(737, 170, "=", 26)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
