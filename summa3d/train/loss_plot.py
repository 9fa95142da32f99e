"""The plots of runs: training and validation loss over steps and tokens; the load of experts over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from math import isnan, nan, prod
from pathlib import Path
from textwrap import fill as wrapped
from typing import Any

import torch

from ..comm.grid import Place
from ..errors import DataError, printable
from ..figures import CAPTION, COLUMN, draw, look
from ..nn.context import scheme
from ..nn.models.registry import build
from ..parallel.states import named_parameters
from . import metrics, toml
from .config import Config, GridConfig, load, read_table, to_table

WINDOW = 50
"""The smooth line of the training loss is the mean over the last 1/WINDOW of a run's steps."""
COLUMNS = 400
"""The most columns of the picture of loads, each the mean of some steps."""
CHARACTERS = 78
"""Characters of a line of text below or above the panels."""


@dataclass(frozen=True)
class LossCurve:
    """A run: its folder's name, model, number of parameters, schemes and grids in one line; its metrics; what it reads.

    `corpus` and `tokenizer` are those of its configuration.
    """

    title: str
    entries: Sequence[dict[str, Any]]
    corpus: tuple[str | None, ...]
    tokenizer: str

    @property
    def has_smooth(self) -> bool:
        """Return whether the smooth line differs from the loss of each step."""
        return len(self.entries) >= WINDOW

    @classmethod
    def of(cls, folder: Path) -> LossCurve:
        """The curve of the run in a folder. Raises DataError where there is no run, or no step of it."""
        entries = metrics.read(folder / "metrics.jsonl")
        if not entries:
            raise DataError(f"{folder} holds no run: there is no metrics.jsonl with a step. Give the folder of --run.")
        config = load(str(folder / "config.toml"))
        with torch.device("meta"):
            model = build(config.model, scheme(config.scheme, Place(config.grid.axes)))
        count = sum(prod(parameter.sharding.shape) for _, parameter in named_parameters(model))
        sizes = f"{config.model.family}, {count:,} parameters"
        title = f"{printable(folder.resolve().name)}: {sizes}, {_grids(folder, config)}, {config.dtype}"
        return cls(title, entries, (config.data.path, config.data.validation), config.data.tokenizer)

    def values(self, name: str) -> list[float]:
        """A value of each step; NaN where a step lacks it."""
        result = (entry.get(name) for entry in self.entries)
        return [nan if value is None else value for value in result]

    @property
    def tokens(self) -> list[float]:
        """The tokens of training up to each step."""
        rates, seconds = self.values("tokens_per_second"), self.values("seconds")
        steps = (rate * second for rate, second in zip(rates, seconds, strict=True))
        return [*accumulate(0.0 if isnan(step) else float(round(step)) for step in steps)]

    @property
    def smooth(self) -> list[float]:
        """The mean loss of each step and of those before it within the window."""
        losses, window = self.values("loss"), 1 + len(self.entries) // WINDOW
        parts = (losses[max(0, end - window) : end] for end in range(1, len(losses) + 1))
        return [sum(part) / len(part) for part in parts]


def _grids(folder: Path, config: Config) -> str:
    """The schemes and grids of a run in order: those that `config-N.toml` keeps, and its last."""
    older = {int(file.stem.partition("-")[2]): file for file in folder.glob("config-[0-9]*.toml")}
    tables = [*(read_table(str(older[step])) for step in sorted(older)), to_table(config)]
    names = (f"{table['scheme']} {toml.build(GridConfig, table['grid'], 'grid.')}" for table in tables)
    return " → ".join(name for name, _ in groupby(names))


def draw_loss(folders: Sequence[Path], paths: Sequence[Path]) -> None:
    """Draw the losses of the runs in `folders` into one plot; the endings of `paths` select the formats.

    Runs with equal tokens per step share a panel with two axes, others have a panel over steps and one over tokens.

    Raises DataError where a folder holds no run, and ImportError where matplotlib is not installed.
    """
    draw(partial(fill, curves=[LossCurve.of(folder) for folder in folders]), paths)


def draw_load(folder: Path, paths: Sequence[Path]) -> None:
    """Draw how many tokens each expert of a run took over its steps, and how evenly; the endings of `paths` select the formats.

    Raises DataError where the folder holds no step of a mixture of experts, and ImportError where matplotlib is not installed.
    """
    entries = [entry for entry in metrics.read(folder / "metrics.jsonl") if "expert_tokens" in entry]
    if not entries:
        raise DataError(f"{folder} holds no step of a mixture of experts: its metrics.jsonl has no expert_tokens.")
    draw(partial(fill_load, entries=entries), paths)


def fill_load(figure: Any, entries: Sequence[dict[str, Any]]) -> None:
    """Draw the experts' loads, in layers' sums, as colours over steps, and the layers' entropies below."""
    tokens = torch.tensor([entry["expert_tokens"] for entry in entries], dtype=torch.float64).sum(1)  # [steps, E]
    parts = (tokens / tokens.mean(1, keepdim=True)).tensor_split(min(len(entries), COLUMNS))
    load, steps = torch.stack([part.mean(0) for part in parts], 1), [entry["step"] for entry in entries]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    figure.set_size_inches(COLUMN, 3.2)
    extent = (steps[0] - 0.5, steps[-1] + 0.5, len(load) - 0.5, -0.5)
    heat = above.imshow(load, aspect="auto", interpolation="nearest", extent=extent, vmin=0.0, vmax=max(2.0, load.max().item()))
    above.set(ylabel="expert")
    above.grid(visible=False)
    figure.colorbar(heat, ax=above, label="tokens / mean")
    for layer, entropies in enumerate(zip(*(entry["expert_entropy"] for entry in entries), strict=True)):
        below.plot(steps, entropies, color=look(layer)["color"])
    below.set(xlabel="step", ylabel="entropy", ylim=(None, 1.02))
    about = "colour: an expert's tokens, of all layers, over the mean; lines: entropy of each layer's shares, 1 where even"
    figure.supxlabel(wrapped(about, CHARACTERS), x=0.01, ha="left", **CAPTION)


def fill(figure: Any, curves: Sequence[LossCurve]) -> None:
    """Draw the panels, the titles of the runs above them, and below them what the lines mean."""
    from matplotlib.ticker import EngFormatter

    rates = {after - before for curve in curves for before, after in zip([0.0, *curve.tokens], curve.tokens, strict=False)}
    panels = figure.subplots(1 if len(rates) == 1 else 2, 1, squeeze=False)[:, 0]
    figure.set_size_inches(COLUMN, 2.0 * len(panels) + 0.6)
    for number, curve in enumerate(curves):
        lines(panels[0], curve, curve.values("step"), look(number))
        if len(rates) > 1:
            lines(panels[1], curve, curve.tokens, look(number))
    for panel, over in zip(panels, ("step", "tokens"), strict=False):
        panel.set(xlabel=over, ylabel="loss (nats)")
    over_tokens = panels[-1]
    if len(rates) == 1:
        (rate,) = rates
        over_tokens = panels[0].secondary_xaxis("top", functions=(lambda step: step * rate, lambda tokens: tokens / rate))
        over_tokens.set_xlabel("tokens")
    over_tokens.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left")
    both = "thin: loss of each step; thick: its mean over the last 2 % of the steps"
    about = f"{both if any(curve.has_smooth for curve in curves) else 'line: loss of each step'}; marks: validation"
    about += "; dotted: resumed" * any(entry.get("resumed") for curve in curves for entry in curve.entries)
    kinds = {"tokenizers": len({curve.tokenizer for curve in curves}), "corpora": len({curve.corpus for curve in curves})}
    if differ := [name for name, number in kinds.items() if number > 1]:
        about += f"; nats per token: {' and '.join(differ)} differ"
    figure.supxlabel(wrapped(about, CHARACTERS), x=0.01, ha="left", **CAPTION)


def lines(panel: Any, curve: LossCurve, places: Sequence[float], look: Mapping[str, Any]) -> None:
    """Draw a run's losses at these places, and a dotted line behind each step after which it was resumed."""
    own = {"color": look["color"]}
    if curve.has_smooth:
        panel.plot(places, curve.values("loss"), linewidth=0.4, alpha=0.5, **own)
    panel.plot(places, curve.smooth, label=wrapped(curve.title, CHARACTERS - 8), **own)
    panel.plot(places, curve.values("validation_loss"), linestyle="none", markeredgecolor="white", markersize=4.5, **look)
    for place, entry in zip(places, curve.entries, strict=True):
        if entry.get("resumed"):
            panel.axvline(place, linestyle=":", linewidth=0.8, zorder=0, **own)
