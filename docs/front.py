"""Draws docs/front.png, the figure of the README's first screen, from docs/front.json: `python docs/front.py`.

`python docs/front.py --measure` measures its panels anew before (minutes), or those that are named: losses of a small
GPT on five grids, words of products, predictions of the rows in papers/rows. `--out DIR` leaves alone what is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from summa3d.figures import draw, look
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.cost.mean import lower_bound

WIDTH, HEIGHT = 8.6, 2.9  # inches
DOCS = Path(__file__).resolve().parent
ROWS = DOCS.parent / "papers" / "rows"
GRIDS = {
    "1 rank": ("serial", {}),
    "1-D, y=3": ("oned", {"y": 3}),
    "2-D, x=2 y=2": ("summa", {"x": 2, "y": 2}),
    "3-D, x=2 y=2 z=2": ("cuboid", {"x": 2, "y": 2, "z": 2}),
    "3-D, y=2 z=2, pp=2": ("cuboid", {"y": 2, "z": 2, "pp": 2}),
}
"""A name in the legend: a scheme and the axes of its grid."""
MODEL = {"layers": 2, "hidden": 96, "heads": 6, "sequence": 64}
TRAIN = {"batch": 12, "warmup": 20, "learning_rate": 3e-3, "evaluate_every": 0, "checkpoint_every": 0, "sample_tokens": 0}
SIDE = 8192
"""m = n = k of the product whose words are counted."""
RANKS = tuple(4**power for power in range(1, 7))
BOUND = "lower bound"


def is_line(grid: dict[str, int]) -> bool:
    """Return whether it is 1-D: the ranks lie along y alone."""
    return grid["x"] == grid["z"] == 1


KINDS = {"1-D": ("cuboid", is_line), "2-D (SUMMA)": ("summa", None), "3-D": ("cuboid", None)}
"""An algorithm, and which of its grids count; of these the one that moves the fewest words does."""
PANELS = ("losses", "words", "rows")
FITTED = ("published", "nemo", "mosaicml", "blackwell", "nanotron", "bigscience")
"""Files of papers/rows that numbers of clusters and programs were fitted to; the others were read afterwards."""


def train(scheme: str, axes: dict[str, int], steps: int, folder: Path) -> list[float]:
    """The loss of each step of the small GPT on a grid."""
    keys = {"scheme": scheme, **{f"grid.{axis}": size for axis, size in axes.items()}}
    keys |= {f"model.{key}": value for key, value in MODEL.items()}
    keys |= {f"train.{key}": value for key, value in TRAIN.items()} | {"train.steps": steps}
    ranks = prod(axes.values())
    command = [sys.executable, "-m", "summa3d", "launch", "-n", str(ranks), "train", "demo", "--run", str(folder), "--overwrite"]
    for key, value in keys.items():
        command += ["--set", f"{key}={value}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


def count_words() -> dict[str, Any]:
    """The mean words that a rank receives in a product of three square matrices, by kind of grid, and the lower bound."""
    counted: dict[str, Any] = {"ranks": list(RANKS)}
    for name, (algorithm, counts) in KINDS.items():
        mean, grids = ALGORITHMS[algorithm].mean, [filter(counts or bool, ALGORITHMS[algorithm].grids(ranks)) for ranks in RANKS]
        counted[name] = [float(min(mean("nn", SIDE, SIDE, SIDE, grid).words for grid in of_ranks)) for of_ranks in grids]
    return counted | {BOUND: [lower_bound(SIDE, SIDE, SIDE, ranks) for ranks in RANKS]}


def predict_rows(files: str = "*") -> list[dict[str, Any]]:
    """Tokens per second and GPU of each row of papers/rows, as measured and as predicted."""
    lines = []
    for file in sorted(ROWS.glob(f"{files}.json")):
        command = [sys.executable, "-m", "summa3d", "plan", "--rows", str(file), "--json"]
        judged = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for row in judged["rows"]:
            if "refused" not in row:
                pair = {"measured": round(row["tokens_s_gpu"], 2), "predicted": round(row["predicted_tokens_s_gpu"], 2)}
                lines.append({"file": file.stem, **pair})
    return lines


def measure_losses(steps: int) -> dict[str, list[float]]:
    """The losses of the small GPT, by grid."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: train(*grid, steps, Path(folder) / str(place)) for place, (name, grid) in enumerate(GRIDS.items())}


def largest_difference(losses: dict[str, list[float]]) -> float:
    """Of all steps and grids, relative to the first grid's loss."""
    first, *others = losses.values()
    return max(abs(other / loss - 1) for line in others for loss, other in zip(first, line, strict=True))


def draw_losses(axes: Any, losses: dict[str, list[float]]) -> None:
    """One curve, and marks of each grid at steps of its own, so that all can be seen."""
    for number, (name, line) in enumerate(losses.items()):
        steps = range(1, len(line) + 1)
        axes.plot(steps, line, label=name, markevery=(3 * number, 3 * len(losses)), linewidth=0.8, **look(number))
    axes.set(title="The same loss on every grid", xlabel="step", ylabel="loss, nats per byte")
    axes.legend(title=f"largest difference {largest_difference(losses):.0e} of the loss", title_fontsize=6)


def draw_words(axes: Any, words: dict[str, list[float]]) -> None:
    """A line for each kind of grid, logarithmic."""
    names = [name for name in words if name != "ranks"]
    for number, name in enumerate(names):
        style = {"color": "0.4", "linestyle": "--"} if name == BOUND else look(number)
        axes.plot(words["ranks"], words[name], label=name, **style)
    axes.set(title="Words known before the run", xlabel="ranks P", ylabel=f"words that a rank receives, {SIDE:,}³")
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.set_xticks(words["ranks"], [f"{ranks:,}" for ranks in words["ranks"]])
    axes.minorticks_off()
    axes.legend()


def draw_rows(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A mark for each published step, and the diagonal."""
    later = [row for row in rows if row["file"] not in FITTED]
    groups = {"of the fits": [row for row in rows if row["file"] in FITTED], "read later": later}
    for number, (name, group) in enumerate(groups.items()):
        errors = [abs(row["predicted"] / row["measured"] - 1) for row in group]
        label = f"{len(group)} {name}, median error {100 * median(errors):.0f} %"
        pairs = ([row["measured"] for row in group], [row["predicted"] for row in group])
        axes.plot(*pairs, linestyle="none", label=label, markersize=2.5, alpha=0.7, **look(number))
    ends = [min(row["measured"] for row in rows), max(row["measured"] for row in rows)]
    axes.plot(ends, ends, color="0.4", linewidth=0.6)
    axes.set(title="Published training steps, predicted", xlabel="tokens/s a GPU, measured", ylabel="predicted")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(loc="lower right")


def page(figure: Any, data: dict[str, Any]) -> None:
    """The three panels."""
    figure.set_size_inches(WIDTH, HEIGHT)
    losses, words, rows = figure.subplots(1, 3)
    draw_losses(losses, data["losses"])
    draw_words(words, data["words"])
    draw_rows(rows, data["rows"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figure of the README's first screen.")
    parser.add_argument("--measure", nargs="*", choices=PANELS, help="the panels to measure anew, all where none is named")
    parser.add_argument("--steps", type=int, default=150, help="steps of the small GPT on each grid")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of front.json and front.png")
    args = parser.parse_args()
    kept = args.out / "front.json"
    data = json.loads((kept if kept.exists() else DOCS / "front.json").read_text(encoding="utf-8"))
    panels = {"losses": partial(measure_losses, args.steps), "words": count_words, "rows": predict_rows}
    if args.measure is not None:
        data |= {name: panels[name]() for name in args.measure or PANELS}
        kept.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")
    draw(partial(page, data=data), [args.out / "front.png"])


if __name__ == "__main__":
    main()
