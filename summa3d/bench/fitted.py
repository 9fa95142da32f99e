"""The numbers of a cluster that explain measured times best, how well they do, and the file that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from math import ceil
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np

from ..cluster import DEVICE, LINKS, Number, tables_of
from ..dtypes import dtype_of
from ..table import Column, Table

WORST = 0.20
"""The largest median error of a fit that may describe a machine."""
LEVELS = ("node", "network")
ABOUT = ("hosts", "ranks_per_node", "threads_per_rank", "cores", "processor", "gpu", "load", "blas", "products", "mpi", "python",
         "numpy", "summa3d", "commit")  # fmt: skip
"""What a file says of the machine, beside its numbers."""
LEAST = 0.01
"""Nothing large is so many times quicker than the quickest that was measured."""
REWEIGHTED, NEAR = 20, 0.02
"""How often a fit is reweighted; logarithms of errors below this count alike."""


class MeasuredTime(NamedTuple):
    """A measured time. kind : product | elements | attention | layers | move. name : of what.

    seconds : as if every rank had its own core. dtype, m, n, k : of a product. bytes : read and written, or those that a rank
    receives, times the groups that share a port. level, hops : of a move; message : from one rank to another. functions :
    elements of a function. products, kernels : in layers; of attention's heads. wall : seconds that passed, on all ranks.
    """

    kind: str
    name: str
    seconds: float = 0.0
    dtype: str = ""
    m: int = 0
    n: int = 0
    k: int = 0
    bytes: int = 0
    level: str = ""
    hops: float = 0
    message: bool = False
    functions: int = 0
    products: int = 0
    kernels: int = 0
    wall: float = 0.0

    @property
    def flops(self) -> int:
        """Real operations of a product."""
        return dtype_of(self.dtype).flops * self.m * self.n * self.k

    @property
    def side(self) -> int:
        """The smallest side of a product."""
        return min(self.m, self.n, self.k)


@dataclass(frozen=True)
class Measured:
    """What was measured. ranks : of a node. nodes : how many. slots : ranks of a node that have cores of their own; 0 of devices.

    memory : bytes of a rank. shared : whether ranks of a node communicate through its memory.
    """

    ranks: int
    nodes: int
    slots: int
    memory: float
    shared: bool
    samples: tuple[MeasuredTime, ...]


@dataclass(frozen=True)
class Fit:
    """Key → number of a cluster, peaks first; and (sample, predicted ÷ measured − 1) of every time that was fitted to."""

    numbers: Mapping[str, float]
    residuals: Sequence[tuple[MeasuredTime, float]]

    @property
    def error(self) -> float:
        """The median error."""
        return median(abs(error) for _, error in self.residuals)

    @property
    def band(self) -> float:
        """The error that nine of ten times stay within, in percent."""
        return min(100.0, 100 * quantiles([abs(error) for _, error in self.residuals], n=10)[-1])

    def groups(self) -> dict[str, list[float]]:
        """The errors by what was measured: products, elements, and the moves and messages of each level."""
        result: dict[str, list[float]] = {}
        for sample, error in self.residuals:
            what = f"{sample.level} {'messages' if sample.message else 'collectives'}" if sample.level else sample.kind
            result.setdefault(what, []).append(abs(error))
        return result


def fit(samples: Sequence[MeasuredTime]) -> Fit:
    """The numbers by which samples are predicted best, none of them negative."""
    numbers, residuals = _products([sample for sample in samples if sample.kind == "product"])
    elements = [sample for sample in samples if sample.kind == "elements"]
    (byte, function, launch), errors = solved([[element.bytes, element.functions, 1.0] for element in elements], elements)
    quickest = max(element.bytes / element.seconds for element in elements if not element.functions)
    byte = max(byte, LEAST / quickest)
    bandwidth = max(1 / byte, quickest)
    numbers |= {"device.memory_bandwidth": bandwidth, "elements.efficiency": 1 / byte / bandwidth, "elements.launch": launch}
    numbers["elements.function"] = function
    attention = [sample for sample in samples if sample.kind == "attention"]
    if attention:
        numbers |= _attention(attention, numbers["peak.float32"], residuals)
    for item in (sample for sample in samples if sample.kind == "layers"):
        rest = item.seconds - item.products * numbers["product.launch"] - item.kernels * launch
        numbers["layers.launch"] = max(0.0, rest / (item.products + item.kernels))
    residuals += zip(elements, errors, strict=True)
    moves = [sample for sample in samples if sample.kind == "move"]
    levels = list(dict.fromkeys(move.level for move in moves))
    rows = [
        [part for level in levels for part in ((move.hops, move.bytes) if level == move.level else (0, 0))] + [1.0]
        for move in moves
    ]
    solution, errors = solved(rows, moves) if moves else ([0.0], [])
    for index, level in enumerate(levels):
        numbers |= {
            f"{level}.bandwidth": 1 / max(solution[2 * index + 1], 1 / LINKS["bandwidth"].most),
            f"{level}.latency": solution[2 * index],
        }
    numbers["collectives.launch"] = solution[-1]
    residuals += zip(moves, errors, strict=True)
    return Fit(numbers, residuals)


def _products(samples: Sequence[MeasuredTime]) -> tuple[dict[str, float], list[tuple[MeasuredTime, float]]]:
    """Peaks, efficiency, half and launch of products. A dtype that was measured once has the peak that explains this time."""
    dtypes = list(dict.fromkeys(sample.dtype for sample in samples))
    swept = [sample for sample in samples if sum(other.dtype == sample.dtype for other in samples) > 1]
    rates = {dtype: max(sample.flops / sample.seconds for sample in samples if sample.dtype == dtype) for dtype in dtypes}
    rows = [[item.flops / rates[item.dtype], item.flops / item.side / rates[item.dtype], 1.0] for item in swept]
    (slow, half, launch), errors = solved(rows, swept)
    slow = max(slow, LEAST)
    scale = max(1.0, 1 / slow)  # no product is faster than the peak
    once = {sample.dtype: slow + half / sample.side for sample in samples if sample not in swept}
    numbers = {f"peak.{dtype}": scale * rate * once.get(dtype, 1.0) for dtype, rate in rates.items()}
    numbers |= {
        "product.efficiency": 1 / slow / scale,
        "product.half": min(half / slow, DEVICE["product.half"].most),
        "product.launch": launch,
    }
    return numbers, list(zip(swept, errors, strict=True))


def _attention(samples: Sequence[MeasuredTime], peak: float, residuals: list[tuple[MeasuredTime, float]]) -> dict[str, float]:
    """Parts of the peak that fused attention and its backward reach, and the keys at which both have half of that."""
    passes = ("forward", "backward")

    def rows(*terms: Callable[[MeasuredTime], float]) -> list[list[float]]:
        return [
            [sample.flops * sample.products * term(sample) * (sample.name == name) for name in passes for term in terms]
            for sample in samples
        ]

    slow, _ = solved(rows(lambda item: 1.0, lambda item: 1 / item.n), samples)
    half = min(sum(slow[1::2]) / max(sum(slow[::2]), np.finfo(float).tiny), DEVICE["attention.half"].most)
    result, errors = solved(rows(lambda item: 1 + half / item.n), samples)
    residuals += zip(samples, errors, strict=True)
    parts = {key: 1 / (item * peak) for key, item in zip(("attention.forward", "attention.backward"), result, strict=True)}
    return {"attention.half": half} | {key: min(part, DEVICE[key].most) for key, part in parts.items()}


def solved(rows: Sequence[Sequence[float]], samples: Sequence[MeasuredTime]) -> tuple[list[float], list[float]]:
    """The unknowns ≥ 0 of rows·x = seconds with the least sum of |log(predicted ÷ measured)|, and predicted ÷ measured − 1.

    Least squares, reweighted: what other work on the machine has slowed counts as little as in a median.
    """
    seconds = np.array([sample.seconds for sample in samples])
    scaled = np.array(rows, float) / seconds[:, None]
    units = np.maximum(np.abs(scaled).max(axis=0), np.finfo(float).tiny)
    scaled /= units
    ratio, off = np.ones(len(samples)), np.ones(len(samples))
    for _ in range(REWEIGHTED):
        weights = 1 / np.sqrt(ratio * off)
        result = _not_negative(scaled * weights[:, None], weights)
        ratio = np.maximum(scaled @ result, 1e-3)
        off = np.maximum(np.abs(np.log(ratio)), NEAR)
    return [float(value) for value in result / units], [float(value) for value in scaled @ result - 1]


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares of a few unknowns ≥ 0: every choice of those that are positive is tried."""
    count = rows.shape[1]
    best, least = np.zeros(count), float("inf")
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
            miss = float(np.square(rows[:, chosen] @ part - wanted).sum())
            if part.min() >= 0 and miss < least:
                best, least = np.zeros(count), miss
                best[list(chosen)] = part
    return best


def numbers_of(measured: Measured, fit: Fit) -> dict[str, Number]:
    """Key → number of the cluster that was measured, with what follows from the number of ranks."""
    numbers = {key: Number(value, "measured") for key, value in fit.numbers.items()}
    facts = {"device.memory": measured.memory, "host.slots": measured.slots, "host.shared": float(measured.shared)}
    numbers |= {key: Number(value, "measured") for key, value in facts.items()}
    numbers["band.percent"] = Number(fit.band, "measured", "nine of ten of the times are within")
    for dtype, other in (("float16", "float32"), ("bfloat16", "float32" if measured.slots else "float16")):
        if f"peak.{dtype}" not in numbers:
            numbers[f"peak.{dtype}"] = numbers[f"peak.{other}"]._replace(source="assumed", origin=f"as {other}")
    if measured.ranks > 1 < measured.nodes:
        numbers["node.size"] = Number(measured.ranks, "measured")
    if measured.ranks * measured.nodes == 1:
        alone = "one rank was measured: a copy in its memory"
        numbers["node.bandwidth"] = numbers["device.memory_bandwidth"]._replace(source="assumed", origin=alone)
        numbers["node.latency"] = numbers["elements.launch"]._replace(source="assumed", origin=alone)
    return numbers


def described(measured: Measured, fit: Fit, machine: Mapping[str, Any]) -> str:
    """The file of the cluster; `machine` is what a benchmark says of it."""
    numbers = numbers_of(measured, fit)
    facts = {"date": date.today().isoformat(), "ranks_measured": measured.ranks * measured.nodes, "median_error": fit.error}
    facts |= {key: machine[key] for key in ABOUT if machine.get(key) is not None}
    lines = ["# Measured by `summa3d bench calibrate`.", 'name = "here"', "", "[measured]"]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items()]
    return "\n".join([*lines, *tables_of(numbers, LEVELS, 4), ""])


def as_result(measured: Measured, fit: Fit, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a calibration: samples with their errors, the numbers, and the machine."""
    return {
        "kind": "calibration",
        "machine": machine,
        "numbers": {key: number.value for key, number in numbers_of(measured, fit).items()},
        "median_error": fit.error,
        "samples": [{**sample._asdict(), "error": error} for sample, error in fit.residuals],
    }


def as_table(measured: Measured, fit: Fit) -> Table:
    """A table of how well the numbers explain the times, by kind of measurement."""
    groups = fit.groups()
    columns = [
        Column("", list(groups), left=True),
        Column("times", [len(errors) for errors in groups.values()]),
        Column("median error", [median(errors) for errors in groups.values()], "{:.0%}".format),
        Column("largest", [max(errors) for errors in groups.values()], "{:.0%}".format),
    ]
    numbers = [f"{key} {value:.4g}" for key, value in fit.numbers.items()]
    notes = [f"median error {fit.error:.0%}", *numbers]
    crowd = ceil(measured.ranks / measured.slots) if measured.slots else 1
    if crowd > 1:
        ratios = [
            median([sample.wall / sample.seconds / crowd for sample in measured.samples if test(sample)] or [1.0])
            for test in (lambda item: item.kind == "product", lambda item: item.level == "node")
        ]
        notes += [
            f"{crowd} ranks share a core: their processor's time was measured, of which the wall's was {crowd} times "
            f"{ratios[0]:.2f} in products and {ratios[1]:.2f} in collectives of a node; messages in a node were not measured"
        ]
    return Table("measured on all ranks at once, and explained by", columns, notes)
