"""Benchmark of the switches of `overlap`: transformer blocks with and without each switch, in turn on the same ranks."""

from __future__ import annotations

from typing import Any

from common import itself, options, save
from ranks import started, tell

RANKS = 8
SIZES = {"layers": 2, "hidden": 512, "heads": 8, "sequence": 256}
BATCH = 8
GRIDS = [
    ("cuboid", {"x": 8, "y": 1, "z": 1}),
    ("cuboid", {"x": 4, "y": 2, "z": 1}),
    ("cuboid", {"x": 2, "y": 2, "z": 2}),
    ("oned-sp", {"x": 1, "y": 8, "z": 1}),
    ("oned", {"y": 8}),
]
SWITCHES: list[dict[str, Any]] = [{}, {"gather": 1}, {"input_gradient": False}]


def main() -> None:
    """Run the benchmark on 8 ranks, and print the time of each entry, absolute and relative to the entry without switches."""
    args = options(__doc__, 5).parse_args()
    if args.on_ranks:
        return measure(args.rounds)
    rows = itself(RANKS)
    width = max(len(label) for label, _ in rows)
    for label, seconds in rows:
        if " " not in label.split(" ", 1)[1]:
            base = seconds
        print(f"{label:<{width}}  {1e3 * seconds:7.1f} ms  {seconds / base:5.2f}×")
    save({"kind": "overlap", "rows": rows}, args.json)


def measure(rounds: int) -> None:
    """Run on every rank; rank 0 prints each entry's median time of a forward and backward as JSON."""
    world = started()
    from summa3d.bench.blocks import BlockEntry, BlockRunner, Case, timed
    from summa3d.nn import ModelConfig
    from summa3d.nn.overlap import Overlap

    case, rows = Case(ModelConfig(**SIZES), BATCH), []
    for name, grid in GRIDS:
        runners = [BlockRunner(BlockEntry(name, grid, overlap=Overlap(**switches)), case, world) for switches in SWITCHES]
        taken = timed(runners, rounds, world)
        rows += [(runner.entry.label, seconds["both"]["median"]) for runner, seconds in zip(runners, taken, strict=True)]
        for runner in runners:
            runner.free()
    tell(world, rows)


if __name__ == "__main__":
    main()
