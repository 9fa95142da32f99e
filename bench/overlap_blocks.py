"""Benchmark of a block in pieces between emulated nodes: forward and backward with `overlap.pieces` beside one piece.

Where weights are gathered, those of products in pieces are so ahead (`overlap.gather`).

The ratio is predicted first: the dry run's trace of either, replayed on a description with this machine's measured rate and the
port. Needs root.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import from_nodes, from_ranks, note, options, save
from overlap_nodes import rate_of
from ranks import in_turn, on_machine, started, tell

from summa3d.cluster import Cluster, load
from summa3d.columns import aligned

PIECES = (1, 2, 4, 8)
GRIDS: dict[str, tuple[str, dict[str, int], int]] = {
    "y2": ("oned-sp", {"y": 2}, 0),
    "x2": ("cuboid", {"x": 2}, 2),
    "z2": ("cuboid", {"z": 2}, 0),
}
"""Scheme, grid, and how many weights are gathered ahead beside pieces."""
SIZES = {"hidden": 512, "heads": 8, "sequence": 512, "vocabulary": 64}
BATCH = 8


def main() -> None:
    """Predict and measure each grid; print a row each."""
    parser = options(__doc__, 5)
    parser.add_argument("--grid", choices=GRIDS, action="append", help="Take this grid alone. May be repeated.")
    parser.add_argument("--port", type=float, default=500, help="Set the rate of a port, in Mbit/s.")
    args = parser.parse_args()
    if args.on_ranks:
        return on_a_rank(args)
    load_before, rate = os.getloadavg()[0], from_ranks(2, __file__, "--on-ranks")["rate"]
    note(f"load {load_before:.1f}; a rank multiply-adds {rate / 1e9:.1f} · 10⁹ times a second while another does")
    cluster, rows = described(rate, args.port * 1e6 / 8), []
    for name in args.grid or GRIDS:
        predicted = [seconds_of(name, pieces, cluster) for pieces in PIECES]
        note(f"{name} predicted: {', '.join(f'{1e3 * each:.0f} ms' for each in predicted)} for {PIECES} pieces")
        arguments = __file__, "--on-ranks", "--grid", name, "--rounds", args.rounds
        measured = from_nodes(2, f"{args.port:g}mbit", *arguments)
        rows.append({"grid": name, "predicted": dict(zip(map(str, PIECES), predicted, strict=True)), **measured})
        print("\n".join(aligned([HEADINGS, *map(cells, rows)])), flush=True)
    save({"kind": "blocks in pieces", "load": load_before, "rate": rate, "port": args.port, "rows": rows}, args.json)


HEADINGS = ("grid", "1 piece", "of it messages", "best", "pieces", "best ÷ 1", "predicted", "max ÷ best")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in milliseconds. max : of arithmetic and messages, as the ledger divides the seconds of one piece."""
    taken = {name: 1e3 * median(times) for name, times in row["seconds"].items()}
    best = min(taken, key=taken.__getitem__)
    alone = 1e3 * row["messages"]
    predicted = row["predicted"][best] / row["predicted"]["1"]
    ratios = taken[best] / taken["1"], predicted, max(alone, taken["1"] - alone) / taken[best]
    return row["grid"], f"{taken['1']:.0f}", f"{alone:.0f}", f"{taken[best]:.0f}", best, *(f"{ratio:.2f}" for ratio in ratios)


def described(rate: float, port: float) -> Cluster:
    """An assumed server with this rate of a core and this port, in bytes a second."""
    text = (Path(__file__).parents[1] / "summa3d" / "clusters" / "server.toml").read_text(encoding="utf-8")
    text = text.replace("float32 = {value = 100e9", f"float32 = {{value = {2 * rate}").replace(
        "value = 1e9, source", f"value = {port}, source"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "emulated.toml"
        path.write_text(text.replace('name = "server"', 'name = "emulated"'), encoding="utf-8")
        return load(str(path))


def entry(name: str, pieces: int) -> tuple[Any, Any]:
    """The block and its case."""
    from summa3d.bench.blocks import BlockEntry, Case
    from summa3d.nn.config import ModelConfig
    from summa3d.nn.overlap import Overlap

    scheme, grid, ahead = GRIDS[name]
    case = Case(ModelConfig(family="gpt2", layers=1, **SIZES), BATCH, "float32")
    axes = {axis: grid.get(axis, 1) for axis in "xyz" if scheme == "cuboid" or axis == "y"}
    return BlockEntry(scheme, axes, True, Overlap(ahead if pieces > 1 else 0, pieces=pieces)), case


def seconds_of(name: str, pieces: int, cluster: Cluster) -> float:
    """Predicted seconds of forward and backward."""
    from summa3d.bench.predicted import of_block

    return of_block(*entry(name, pieces), cluster)


def on_a_rank(args: Any) -> None:
    """Run on every rank: the rate of a core, or a grid; rank 0 prints JSON."""
    if not args.grid:
        world, _ = on_machine()
        return tell(world, {"rate": rate_of(world, 1)})
    world = started()
    from summa3d.bench.blocks import BlockRunner

    runners = {str(pieces): BlockRunner(*entry(args.grid[-1], pieces), world) for pieces in PIECES}
    times = in_turn({name: (lambda runner=runner: sum(runner.seconds())) for name, runner in runners.items()}, args.rounds, 1)
    ledger = runners["1"].grid.ledger
    with ledger.watch() as moved:
        for _ in range(args.rounds):
            runners["1"].seconds()
    spent = sum(row.amounts.seconds for row in moved.rows)
    tell(world, {"seconds": times, "messages": spent / args.rounds})


if __name__ == "__main__":
    main()
