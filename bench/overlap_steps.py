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

from common import conclude, from_nodes, note, options, save
from ranks import in_turn, started, tell, training

from summa3d.columns import aligned

SIZES = ("model.hidden=512", "model.heads=8", "model.layers=4", "model.sequence=256", "train.batch=16", "train.accumulate=1")
STILL = ("train.steps=100000", "train.evaluate_every=0", "train.checkpoint_every=0", "train.keep=0", "replicas.bucket=4000000")
GRIDS = {"dp2": ("scheme=oned", "grid.dp=2"), "y2": ("scheme=oned-sp", "grid.y=2")}
PORTS = {"dp2": 250.0, "y2": 600.0}
"""Rates at which a step's messages take about as long as its arithmetic, in Mbit/s."""
HIDDEN, REACHED = 0.60, 0.80
"""Where all messages hidden would leave so little of a step, that overlap leaves no more than this of it."""
SWITCHES = {
    "off": ("replicas.overlap=false", "overlap.input_gradient=false", "overlap.pieces=1"),
    "on": ("replicas.overlap=true", "overlap.input_gradient=true", "overlap.pieces=8"),
}
HEADINGS = ("grid", "Mbit/s", "off, ms", "of it messages", "on, ms", "on ÷ off", "if all were hidden")


def main() -> None:
    """Measure each grid; print a row each."""
    parser = options(__doc__, 5)
    parser.add_argument("--grid", choices=GRIDS, action="append", help="Take this grid alone. May be repeated.")
    parser.add_argument("--port", type=float, help="Set the rate of a port, in Mbit/s, in place of each grid's own.")
    args = parser.parse_args()
    if args.on_ranks:
        return on_a_rank(args)
    rows = []
    for name in args.grid or GRIDS:
        arguments = __file__, "--on-ranks", "--grid", name, "--rounds", args.rounds
        port = args.port or PORTS[name]
        rows.append({"grid": name, "port": port, **from_nodes(2, f"{port:g}mbit", *arguments)})
        note("\n".join(aligned([HEADINGS, *map(cells, rows)])))
    save({"kind": "steps with and without overlap", "rows": rows}, args.json)
    conclude(claims(rows))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in milliseconds."""
    off, on, messages = (1e3 * value for value in (median(row["seconds"]["off"]), median(row["seconds"]["on"]), row["messages"]))
    reached, hidden = ratios(row)
    return row["grid"], f"{row['port']:g}", f"{off:.0f}", f"{messages:.0f}", f"{on:.0f}", f"{reached:.2f}", f"{hidden:.2f}"


def ratios(row: dict[str, Any]) -> tuple[float, float]:
    """A step with overlap ÷ one without, and what it would be if all of the messages, or of the rest, were hidden."""
    off, messages = median(row["seconds"]["off"]), row["messages"]
    return median(row["seconds"]["on"]) / off, max(messages, off - messages) / off


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return what must hold of steps of which overlap could hide much."""
    said = []
    for row in rows:
        reached, hidden = ratios(row)
        if hidden <= HIDDEN:
            claim = f"{row['grid']}: with overlap a step takes at most {REACHED} of one without: {reached:.2f}"
            said.append((claim, reached <= REACHED))
    return said


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
