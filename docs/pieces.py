"""Prints docs/pieces.svg: one product between two emulated nodes in one piece and in eight, from the traces of rank 0.

Run `python docs/pieces.py > docs/pieces.svg` as root, which emulated nodes need; of some runs the median is drawn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

PIECES, RUNS = (1, 8), 9
NETWORK = "nodes=2,port=100mbit"
SIZES = {"m": 4096, "n": 3072, "k": 1024}
WIDTH, LEFT, ROW, GAP = 940, 150, 26, 46
FONT = 'font-family="sans-serif"'
COLOURS = {"multiplies": "#8ecae6", "receives": "#ffb703"}


class Timeline(NamedTuple):
    """Seconds of a product, and of what is in it: name of a row → (start, end) of each span."""

    seconds: float
    spans: dict[str, list[tuple[float, float]]]


def measured() -> None:
    """Run on both ranks: rank 0 prints a `Timeline` of each number of pieces, the median of all runs."""
    import numpy as np
    from mpi4py import MPI

    from summa3d import Grid
    from summa3d.gemm import Cuboid, CuboidPlan

    world, found = MPI.COMM_WORLD, {}
    with Grid(world, {"x": 1, "y": 2, "z": 1}) as grid:
        for pieces in PIECES:
            cuboid = Cuboid(CuboidPlan("nn", **SIZES, pieces=pieces), grid)
            a, b, out = (np.ones(block, np.float32) for block in (cuboid.a_block, cuboid.b_block, cuboid.c_block))
            runs = []
            for _ in range(RUNS):
                world.Barrier()
                trace, start = grid.ledger.start_trace(), time.perf_counter()
                cuboid.run(a, b, out)
                seconds = time.perf_counter() - start
                grid.ledger.stop_trace()
                runs.append(Timeline(seconds, spans_of(trace, start)))
            found[pieces] = sorted(runs)[RUNS // 2]
    if world.rank == 0:
        print(json.dumps(found))


def spans_of(trace: Any, origin: float) -> dict[str, list[tuple[float, float]]]:
    """The products of a trace, and its receives, each from the end of the one before it, behind which it travels."""
    products = [(work.start - origin, work.start + work.seconds - origin) for work in trace.work if work.kind == "products"]
    received, before = [], 0.0
    for one in (one for one in trace.communications if one.words):
        end = max(one.end, one.start + one.issue) - origin
        received.append((max(before, one.start - origin), end))
        before = end
    return {"multiplies": products, "receives": received}


def drawn(found: dict[str, Timeline]) -> Iterator[str]:
    """The lines of the picture: for each number of pieces a row of products and one of what is received."""
    longest = max(one.seconds for one in found.values())
    height = len(found) * (2 * ROW + GAP) + 30
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    for place, (pieces, one) in enumerate(found.items()):
        top = 14 + place * (2 * ROW + GAP)
        said = f"{pieces} piece{'s' * (pieces != '1')}: {1e3 * one.seconds:.0f} ms"
        yield text(LEFT, top + 10, said, "start")
        for row, (name, spans) in enumerate(one.spans.items()):
            y = top + 20 + row * ROW
            yield text(LEFT - 10, y + 15, name, "end")
            for start, end in spans:
                x, width = LEFT + (WIDTH - LEFT - 20) * start / longest, (WIDTH - LEFT - 20) * (end - start) / longest
                size = f'x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{ROW - 6}"'
                yield f'<rect {size} fill="{COLOURS[name]}" stroke="#444" stroke-width="0.5"/>'
    m, n, k = SIZES.values()
    about = f"rank 0 of 2 emulated nodes, 100 Mbit/s; A [{m}×{k}] gathered along y, B {k}×{n}, float32"
    yield text(LEFT, height - 10, about, "start")
    yield "</svg>"


def text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {FONT} font-size="13" text-anchor="{anchor}" fill="#222">{words}</text>'


def main() -> None:
    if "--on-ranks" in sys.argv:
        return measured()
    command = [sys.executable, "-m", "summa3d", "launch", "--emulate", NETWORK, "-n", "2", __file__, "--on-ranks"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {pieces: Timeline(*one) for pieces, one in json.loads(output.splitlines()[-1]).items()}
    print("\n".join(drawn(found)))


if __name__ == "__main__":
    main()
