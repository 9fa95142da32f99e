"""Validation losses of the demo with Muon and with AdamW, each the best of some learning rates; and Muon's on several grids."""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from common import conclude, from_ranks, options, save
from ranks import started, tell, training

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
GRIDS: dict[str, dict[str, Any]] = {
    "serial": {"scheme": "serial"},
    "oned y=2": {"scheme": "oned", "grid.y": 2},
    "cuboid x=2, both ranks together": {"scheme": "cuboid", "grid.x": 2, "train.muon.ranks": 2},
    "summa x=2,y=2": {"scheme": "summa", "grid.x": 2, "grid.y": 2},
    "cuboid z=2,dp=2, ZeRO-2, in pairs": {
        "scheme": "cuboid", "grid.z": 2, "grid.dp": 2, "replicas.zero": 2, "train.muon.ranks": 2
    },
}  # fmt: skip
NEAR = 1e-3
"""Of validation losses on all grids, the most that two of them are apart."""
SMALLER = {"model.layers": 2, "model.hidden": 96, "model.heads": 6, "model.sequence": 64, "train.batch": 16}
"""A model with which ten rates take minutes."""
TEXT = 4_000_000
"""Bytes of the demo's text, the sources of Python's standard library, that are read."""


def main() -> None:
    """Train with each optimizer and rate on one rank, then the best Muon on each grid, and print whether the claims hold."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=240, help="Train this many steps in each run.")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), metavar="R,…", help="Try these learning rates.")
    parser.add_argument("--full", action="store_true", help="Take the demo's own model, of 4 layers and hidden 256.")
    parser.add_argument("--runs", default="", help="JSON of the settings of runs, of a script that was started on ranks.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(json.loads(args.runs))
    rates, found = [*map(float, args.rates.split(","))], dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        settings = {**({} if args.full else SMALLER), "train.steps": args.steps, "train.peak_tflops": 0.1}
        settings |= {"train.sample_tokens": 0, "train.keep": 0, "data.path": str(_written(Path(folder) / "corpus.txt"))}
        tried = [
            {"train.optimizer": name, "train.learning_rate": rate, **GRIDS["serial"]}
            for name in ("adamw", "muon")
            for rate in rates
        ]
        losses = _losses([{**settings, **each} for each in tried])
        best = {}
        for name in ("adamw", "muon"):
            pairs = [(loss, each["train.learning_rate"]) for loss, each in zip(losses, tried, strict=True)]
            pairs = pairs[: len(rates)] if name == "adamw" else pairs[len(rates) :]
            print(f"{name:<6}" + "   ".join(f"{rate:g}: {loss:.4f}" for loss, rate in pairs), flush=True)
            best[name] = min(pairs)
        for name, grid in GRIDS.items():
            run = {**settings, "train.optimizer": "muon", "train.learning_rate": best["muon"][1], **grid}
            (found[name],) = _losses([run])
            print(f"muon   {name:<36} {found[name]:.5f}", flush=True)
    ours, other, apart = best["muon"][0], best["adamw"][0], max(found.values()) - min(found.values())
    said = f"the best of {len(rates)} rates each, {args.steps} steps in float32"
    conclude(
        [
            (f"Muon's validation loss {ours:.4f} is not above AdamW's {other:.4f}, {said}", ours <= other),
            (f"on {len(found)} grids Muon's are within {NEAR:g}: {apart:.1e} apart", apart <= NEAR),
        ]
    )
    save({"kind": "muon_demo", "steps": args.steps, "tried": tried, "losses": losses, "grids": found}, args.json)


def measure(runs: Sequence[Mapping[str, Any]]) -> None:
    """Run on every rank; rank 0 prints the validation loss of each run as JSON."""
    world, losses = started(), []
    from summa3d.train.loop import evaluate

    for settings in runs:
        with tempfile.TemporaryDirectory() as folder:
            folder = world.bcast(folder)
            run, step = training([f"{key}={value}" for key, value in settings.items()], world, Path(folder))
            for _ in range(run.config.train.steps):
                step()
            losses.append(evaluate(run))
            run.grid.free()
            world.Barrier()
    tell(world, losses)


def _losses(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """The validation losses of runs on one grid."""
    ranks = prod(size for key, size in runs[0].items() if key.startswith("grid."))
    found: list[float] = from_ranks(ranks, sys.argv[0], "--on-ranks", "--runs", json.dumps(runs))
    return found


def _written(path: Path) -> Path:
    """The file, with the beginning of the sources of Python's standard library."""
    sources, size = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), 0
    with path.open("w", encoding="utf-8") as file:
        for source in sources:
            if size < TEXT:
                size += file.write(source.read_text(encoding="utf-8", errors="replace"))
    return path


if __name__ == "__main__":
    main()
