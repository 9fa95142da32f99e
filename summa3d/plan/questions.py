"""What users ask of a plan beyond its grid: tokens a batch, days, GPU-hours and money, how many ranks pay, and other machines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from ..cluster import Cluster, load
from ..columns import aligned, counted
from ..errors import ConfigError

TEMPLATE = Path(__file__).with_name("programs") / "template.toml"
"""A complete description of a cluster, which loads as it is."""
DAY = 86400.0
SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
NEAR = 0.05
"""How far a batch of tokens may be from what is asked for, to be a number that many grids divide."""
HALF = 0.5
"""The efficiency that is looked for, of what the first count of ranks would do if it scaled."""


class ScalingRow(NamedTuple):
    """The fastest plan on so many ranks, or why there is none."""

    ranks: int
    plan: str
    seconds: float
    reason: str = ""


def sequences(text: str, sequence: int) -> int:
    """The sequences of a batch: a number of them; or of tokens, as 4Mtokens: within NEAR of them the most even number there is.

    >>> sequences("250", 8192), sequences("4Mtokens", 8192)
    (250, 512)
    """
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kMGT]?)\s*tokens?\s*", text)
    try:
        number = _even(float(match[1]) * SCALES[match[2]] / sequence) if match else int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"--batch {text!r} is no batch: write sequences, as 256, or tokens of at least one, as 4Mtokens.")
    return number


def _even(wanted: float) -> int:
    """The whole number within NEAR of one that the largest power of two divides, the nearest of several."""
    near = range(ceil(wanted * (1 - NEAR)), int(wanted * (1 + NEAR)) + 1) or (int(wanted),)
    return max(near, key=lambda number: (number & -number, -abs(number - wanted)))


def rank_counts(text: str) -> list[int]:
    """The counts of ranks: one, or several with commas between them. Raises ConfigError for others."""
    try:
        counts = [int(item) for item in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or len(set(counts)) < len(counts):
        raise ConfigError(f"--ranks {text!r} is no number of ranks; write 64, or 64,128,256.")
    return counts


def cluster_with(name: str, changes: Sequence[str]) -> Cluster:
    """A cluster with other numbers: KEY=VALUE, or KEY=2x of what it has. Raises ConfigError and ClusterError for others."""
    cluster, values = load(name), {}
    for text in changes:
        key, equals, value = (part.strip() for part in text.partition("="))
        times = value.endswith("x")
        try:
            number = float(value.removesuffix("x"))
        except ValueError:
            number = float("nan")
        if not equals or not isfinite(number):
            raise ConfigError(f"--set {text!r} is not of the form KEY=NUMBER or KEY=2x, as in --set network.bandwidth=2x.")
        values[key] = number
        if times and key in cluster.numbers:  # `replaced` names an unknown key
            values[key] *= cluster[key]
    return cluster.replaced(values, "assumed") if values else cluster


def training(seconds: float, ranks: int, step_tokens: int, tokens: float, price: float | None) -> dict[str, float]:
    """Steps, days, GPU-hours and, by the price of one of these, the cost of training on so many tokens."""
    steps = ceil(tokens / step_tokens)
    hours = steps * seconds * ranks / 3600
    result = {"tokens": tokens, "steps": steps, "days": steps * seconds / DAY, "gpu_hours": hours}
    return result | ({"cost": hours * price} if price is not None else {})


def training_text(of: Mapping[str, float]) -> str:
    """`training` as a line."""
    cost = f", {of['cost']:,.0f} at the price given" if "cost" in of else ""
    return f"{of['tokens']:.4g} tokens: {of['steps']:,.0f} steps, {of['days']:.3g} days, {of['gpu_hours']:,.0f} GPU-hours{cost}"


def scaling(counts: Sequence[int], best: Callable[[int], tuple[str, float]]) -> list[ScalingRow]:
    """The fastest plan on each count of ranks; `best` gives a plan and its seconds, or raises ConfigError: there is none."""
    rows = []
    for ranks in counts:
        try:
            rows.append(ScalingRow(ranks, *best(ranks)))
        except ConfigError as error:
            rows.append(ScalingRow(ranks, "", 0.0, str(error)))
    if not any(row.plan for row in rows):
        raise ConfigError(f"no count of ranks has a plan. On {rows[0].ranks}: {rows[0].reason}")
    return rows


def scaling_json(rows: Sequence[ScalingRow], step_tokens: int, tokens: float | None, price: float | None) -> list[dict[str, Any]]:
    """Each count of ranks with its plan, seconds, tokens a second, and efficiency beside the first that has a plan."""
    first = next(row for row in rows if row.plan)
    result = []
    for row in rows:
        line: dict[str, Any] = {"ranks": row.ranks}
        if row.plan:
            efficiency = first.seconds * first.ranks / (row.seconds * row.ranks)
            line |= {"plan": row.plan, "seconds": row.seconds, "tokens_s": step_tokens / row.seconds, "efficiency": efficiency}
            line |= training(row.seconds, row.ranks, step_tokens, tokens, price) if tokens else {}
        else:
            line["reason"] = row.reason
        result.append(line)
    return result


def scaling_text(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """`scaling_json` as a table, and where the efficiency falls below HALF."""
    more = [(key, name) for key, name in (("days", "days"), ("gpu_hours", "GPU-hours"), ("cost", "cost")) if key in lines[-1]]
    table = [("ranks", "plan", "seconds", "tokens/s", "efficiency", *(name for _, name in more))]
    for line in lines:
        if "plan" in line:
            numbers = f"{line['seconds']:.4g}", f"{line['tokens_s']:,.0f}", f"{line['efficiency']:.0%}"
            table.append((str(line["ranks"]), line["plan"], *numbers, *(f"{line[key]:,.4g}" for key, _ in more)))
    yield from aligned(table, left=(1,))
    yield from (f"{counted(line['ranks'], 'rank')}: {line['reason']}" for line in lines if "reason" in line)
    below = next((line["ranks"] for line in lines if line.get("efficiency", 1.0) < HALF), None)
    yield f"below {HALF:.0%} from {below} ranks on" if below else f"nowhere below {HALF:.0%}"


def draw_scaling(lines: Sequence[Mapping[str, Any]], title: str, folder: Path) -> list[Path]:
    """Tokens a second and efficiency over ranks, as PNG and SVG in `folder`; raises ImportError without matplotlib."""
    from ..figures import BOTH_COLUMNS, draw, look

    rows = [line for line in lines if "plan" in line]
    ranks = [row["ranks"] for row in rows]

    def fill(figure: Any) -> None:
        figure.set_size_inches(BOTH_COLUMNS, 2.4)
        speed, efficiency = figure.subplots(1, 2)
        speed.loglog(ranks, [row["tokens_s"] for row in rows], **look(0), label="predicted")
        ideal = [rows[0]["tokens_s"] * count / ranks[0] for count in ranks]
        speed.loglog(ranks, ideal, color="0.6", linestyle="--", label="ideal")
        speed.set(xlabel="ranks", ylabel="tokens per second", title=title)
        speed.legend()
        efficiency.semilogx(ranks, [row["efficiency"] for row in rows], **look(0))
        efficiency.axhline(HALF, color="0.6", linestyle="--")
        efficiency.set(xlabel="ranks", ylabel="efficiency", ylim=(0, 1.1))

    files = [folder / f"ranks.{ending}" for ending in ("png", "svg")]
    folder.mkdir(parents=True, exist_ok=True)
    draw(fill, files)
    return files
