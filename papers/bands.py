"""The bands of `summa3d plan`, from the rows of papers/rows, as TOML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path

from summa3d.plan.programs.programs import PROGRAMS
from summa3d.plan.programs.rows import MeasuredStep, read
from summa3d.plan.programs.step import step

ROWS = Path(__file__).parent / "rows"
FILES = (
    *("nemo", "mosaicml", "published", "dgxc", "others", "bridge", "blackwell", "torchtitan", "nanotron", "experts"),
    *("bigscience", "mlperf", "reports"),
)
WITHIN = 0.875
"""Of the rows, how many lie inside the band that they make: a little more of others lie outside, and four in five should not."""
LEAST = 0.05
"""No band is narrower: a fifth of BLOOM's plans were measured twice within 3 %, and rows of one page have errors in common."""
FEWEST = 8
"""Rows of a program on a device that make a band."""
BEFORE = {
    "H100-SXM": {"product.efficiency": 0.65, "product.half": 150.0, "attention.flash1": 0.3, "peak.float8": 1979e12},
    "A100-SXM-80GB": {"product.efficiency": 0.764, "product.half": 40.0, "attention.flash1": 0.5},
    "A100-SXM-40GB": {"product.efficiency": 0.764, "product.half": 40.0, "attention.flash1": 0.5},
    "H100-96GB": {"product.efficiency": 0.68, "attention.forward": 0.36, "attention.backward": 0.3, "peak.float8": 1979e12},
    "GB200": {"product.efficiency": 0.65, "peak.float8": 4900e12, "peak.float4": 8330e12},
    "GB300": {"product.efficiency": 0.62, "peak.float4": 12495e12},
    "B200": {"product.efficiency": 0.65, "peak.float8": 4500e12},
}
"""Device → what was assumed of it before its own rows were seen: with that, they are rows of a machine left out. FlashAttention-1
is half as fast as its second version, as the paper of that says (arXiv 2307.08691)."""
NOT_LEFT_OUT = ("ptdp:", "github vinjn/nanotron-ultrascale-playbook", "github bigscience-workshop/bigscience, train/tr11")
"""Rows that numbers of their machine are fitted to, and those that a program is what it is by."""


def text() -> str:
    """The bands, as TOML."""
    return "\n".join(as_toml([row for name in FILES for row in rows_of(name)])) + "\n"


def rows_of(name: str) -> list[MeasuredStep]:
    """The rows of a file of papers/rows."""
    return read(ROWS / f"{name}.json")


def as_toml(rows: Sequence[MeasuredStep]) -> Iterator[str]:
    """The lines of the bands: pooled over machines that were left out, and of each program on a device with rows enough."""
    left_out: dict[tuple[str, str], list[float]] = {}
    of_experts: dict[tuple[str, str], list[float]] = {}
    groups: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        error = off(row)
        groups.setdefault(row.kind, {}).setdefault(row.device, []).append(error)
        if row.given.get("experts"):
            of_experts.setdefault((row.kind, row.device), []).append(error)
        elif not row.source.startswith(NOT_LEFT_OUT):
            left_out.setdefault((row.program, row.device), []).append(off(row, left_out=True))
    yield "# Half-widths of bands of predicted seconds, made by `python -m papers bands`: seven in eight rows lie inside."
    yield f"# pooled: of {len(left_out)} programs on machines whose own rows were left out, each of which counts as much."
    yield f"pooled = {half_width(*left_out.values())}"
    yield "# experts: of all rows of models with experts, to which nothing is fitted."
    yield f"experts = {half_width(*of_experts.values())}"
    for kind, devices in groups.items():
        enough = {device: errors for device, errors in devices.items() if len(errors) >= FEWEST}
        if enough:
            yield f'\n[validated."{kind}"]'
            yield from (f'"{device}" = {half_width(errors)}  # {len(errors)} rows' for device, errors in enough.items())


def off(row: MeasuredStep, left_out: bool = False) -> float:
    """Return how far the measured seconds lie from the predicted ones, as a part of these.

    left_out : with the numbers from before the rows of its machine were seen
    """
    values = dict(BEFORE.get(row.device, {})) if left_out else {}
    kernel = values.pop("attention.flash1", 0.0)
    if kernel and PROGRAMS[row.program].kernel == "flash1":
        times = kernel / row.cluster["attention.flash1"]
        values |= {key: min(1.0, times * row.cluster[key]) for key in ("attention.forward", "attention.backward")}
    cluster = row.cluster.replaced(values, "assumed") if values else row.cluster
    return abs(row.seconds / step(row.given).seconds(cluster) - 1)


def half_width(*groups: Sequence[float]) -> float:
    """The error that a part WITHIN of them does not exceed, each group of which counts as much; in whole percents upwards."""
    weighted = sorted((error, 1 / len(errors)) for errors in groups for error in errors)
    reached = 0.0
    for error, weight in weighted:
        reached += weight
        if reached >= WITHIN * len(groups) - 1e-9:
            return max(LEAST, ceil(100 * error) / 100)
    return max(LEAST, weighted[-1][0])
