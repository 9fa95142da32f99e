"""Benchmark of training steps between two emulated nodes: all that overlaps on, beside all off, in turn on the same ranks.

Off, nothing is in flight while ranks compute, so its messages as the ledger times them are what could be hidden. Needs root.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import from_nodes, note, options, save
from ranks import in_turn, started, tell, training

from summa3d.columns import aligned

SIZES = ("model.hidden=512", "model.heads=8", "model.layers=4", "model.sequence=256", "train.batch=16", "train.accumulate=1")
STILL = ("train.steps=100000", "train.evaluate_every=0", "train.checkpoint_every=0", "train.keep=0", "replicas.bucket=4000000")
GRIDS = {
    "dp2": ("scheme=oned", "grid.dp=2"),
    "dp2, ZeRO-2": ("scheme=oned", "grid.dp=2", "replicas.zero=2"),
    "y2": ("scheme=oned-sp", "grid.y=2"),
}
SWITCHES = {
    "off": ("replicas.overlap=false", "overlap.input_gradient=false", "overlap.pieces=1"),
    "on": ("replicas.overlap=true", "overlap.input_gradient=true", "overlap.pieces=8"),
}
HEADINGS = ("grid", "off, ms", "of it messages", "on, ms", "on ÷ off", "if all were hidden")


def main() -> None:
    """Measure each grid; print a row each."""
    parser = options(__doc__, 5)
    parser.add_argument("--grid", choices=GRIDS, action="append", help="Take this grid alone. May be repeated.")
    parser.add_argument("--port", type=float, default=250, help="Set the rate of a port, in Mbit/s.")
    args = parser.parse_args()
    if args.on_ranks:
        return on_a_rank(args)
    rows = []
    for name in args.grid or GRIDS:
        arguments = __file__, "--on-ranks", "--grid", name, "--rounds", args.rounds
        rows.append({"grid": name, **from_nodes(2, f"{args.port:g}mbit", *arguments)})
        note("\n".join(aligned([HEADINGS, *map(cells, rows)])))
    save({"kind": "steps with and without overlap", "port": args.port, "rows": rows}, args.json)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in milliseconds."""
    off, on, messages = (1e3 * value for value in (median(row["seconds"]["off"]), median(row["seconds"]["on"]), row["messages"]))
    hidden = max(messages, off - messages)
    return row["grid"], f"{off:.0f}", f"{messages:.0f}", f"{on:.0f}", f"{on / off:.2f}", f"{hidden / off:.2f}"


def on_a_rank(args: Any) -> None:
    """Run on every rank: a grid with and without; rank 0 prints JSON."""
    world, name = started(), args.grid[-1]
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(world.bcast(folder))
        runs = {how: training([*SIZES, *GRIDS[name], *keys, *STILL], world, parts / how) for how, keys in SWITCHES.items()}
        times = in_turn({how: partial(timed, step, world) for how, (_, step) in runs.items()}, args.rounds, 2)
        run, step = runs["off"]
        with run.grid.ledger.watch() as moved:
            for _ in range(args.rounds):
                step()
    spent = sum(row.amounts.seconds for row in moved.rows)
    tell(world, {"seconds": times, "messages": spent / args.rounds})


def timed(step: Callable[[], Any], world: Any) -> float:
    """The seconds of a step of all ranks."""
    world.Barrier()
    start = time.perf_counter()
    step()
    world.Barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
