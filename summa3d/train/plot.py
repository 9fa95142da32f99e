"""The plot of a run: training and validation loss over the steps. matplotlib is imported at the first plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw_loss(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves of `entries`, the lines of metrics.jsonl, into the PNG file `path`.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    trained = [entry for entry in entries if entry["loss"] is not None]
    axes.plot([entry["step"] for entry in trained], [entry["loss"] for entry in trained], linewidth=1, label="training")
    validated = [entry for entry in entries if "validation_loss" in entry]
    axes.plot(
        [entry["step"] for entry in validated],
        [entry["validation_loss"] for entry in validated],
        "o-",
        linewidth=1.5,
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
