"""Descriptions of clusters: a device, its kernels, and nested levels of links, each number with its source."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

from .dtypes import DTYPES, NARROW
from .errors import ClusterError, nearest
from .files import from_toml, replace_text, text_of

FOLDER = Path(__file__).with_name("clusters")
HERE, VARIABLE = "here", "SUMMA3D_CLUSTER"
"""The name of the cluster that `summa3d bench calibrate --write` has measured, and the variable that says where it lies."""
SOURCES = ("datasheet", "measured", "fitted", "assumed")
FITTED = 3
"""The most numbers of a cluster that may be fitted to the times that the cluster is to predict."""


class Range(NamedTuple):
    """What a number may be, its unit, and what it means. `default` is assumed where a file leaves the number out.

    whole : whether it must be an integer.
    """

    least: float
    most: float
    unit: str
    meaning: str
    default: float | None = None
    whole: bool = False


DEVICE = {
    "device.memory": Range(1e8, 1e13, "bytes", "memory of a device"),
    "device.memory_bandwidth": Range(1e8, 1e14, "bytes per second", "read or written in a device's memory"),
    "product.efficiency": Range(0.01, 1, "parts of the peak", "rate of a large product"),
    "product.half": Range(0, 1e4, "elements", "the smallest side at which a product has half its rate", 0.0),
    "product.launch": Range(0, 0.1, "seconds", "start of a product", 0.0),
    "attention.forward": Range(0, 2, "parts of the peak", "rate of fused attention, less left-out scores; 0: a product", 0.0),
    "attention.backward": Range(0, 2, "parts of the peak", "the same of its backward", 0.0),
    "attention.half": Range(0, 1e5, "keys", "the number of keys at which it has half its rate", 0.0),
    "attention.flash2": Range(0.01, 1, "parts of that rate", "rate of FlashAttention-2's kernel", 1.0),
    "attention.flash1": Range(0.01, 1, "parts of that rate", "rate of FlashAttention-1's kernel", 1.0),
    "nodes.spread": Range(0, 0.5, "parts of a step", "standard deviation of a node's step: all wait for the slowest", 0.0),
    "elements.efficiency": Range(0.01, 1, "parts of the memory bandwidth", "rate of element-wise kernels"),
    "elements.launch": Range(0, 0.1, "seconds", "start of an element-wise kernel", 0.0),
    "elements.function": Range(0, 1e-6, "seconds", "of an element of GELU and the like, beside its bytes", 0.0),
    "layers.launch": Range(0, 0.1, "seconds", "Python of a product or an element-wise operation of a layer", 0.0),
    "collectives.launch": Range(0, 0.1, "seconds", "start of a collective"),
    "collectives.chunk": Range(1, 1e9, "bytes", "what a broadcast's chain forwards at a time", 524288.0),
    "host.slots": Range(0, 1e6, "ranks", "ranks of a node that have a core each; more share them; 0 for devices", 0.0, True),
    "host.shared": Range(
        0, 1, "1 (yes) or 0 (no)", "ranks of a node communicate by copies in its memory, as a trace has", 0.0, True
    ),
    "band.percent": Range(0, 100, "percent", "the error to expect of a predicted time"),
}
"""Key → what it may be, of all numbers but peaks and links."""
PEAK = Range(1e7, 1e17, "operations per second", "the most of products of a dtype")
LINKS = {
    "size": Range(1, 1e6, "ranks", "consecutive ranks that a level joins; the outermost level joins all and has none", 0.0),
    "ports": Range(1, 1024, "ports", "ports of a unit of the level below, which its ranks share; a rank has one", 1.0),
    "bandwidth": Range(1e6, 1e14, "bytes per second", "of a port, in each direction"),
    "duplex": Range(1, 2, "times the bandwidth", "what a port carries in both directions together", 2.0),
    "latency": Range(0, 0.1, "seconds", "of a message between two neighbours"),
}
"""Key of a level of links → what it may be."""
LONGEST_NAME = 100
TEMPLATE = "`summa3d plan cluster --template` prints a complete file."
ABOUT = ("name", "note", "measured")
"""Keys that are no numbers; `measured` says when, where and with which libraries."""


class Number(NamedTuple):
    """A number of a description: its value, source, and where it was found."""

    value: float
    source: str
    origin: str = ""


@dataclass(frozen=True)
class Level:
    """Links between `size` consecutive ranks (0 for all), through `ports` ports of each unit of the level below."""

    name: str
    size: int
    ports: int
    bandwidth: float
    duplex: float
    latency: float


LARGEST_HOST = 16
"""Devices of the largest host: larger groups of links are racks."""


@dataclass(frozen=True)
class Cluster:
    """A cluster: key → number, as its file has them. Levels go from the innermost to the outermost.

    >>> load("selene")["device.memory"]
    80000000000.0
    """

    name: str
    level_names: tuple[str, ...]
    numbers: Mapping[str, Number]

    def __getitem__(self, key: str) -> float:
        return self._values[key]

    @cached_property
    def _values(self) -> dict[str, float]:
        return {key: number.value for key, number in self.numbers.items()}

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels of links, innermost first."""
        return tuple(self._level(name) for name in self.level_names)

    def _level(self, name: str) -> Level:
        size, ports, bandwidth, duplex, latency = (self[f"{name}.{key}"] for key in LINKS)
        return Level(name, int(size), int(ports), bandwidth, duplex, latency)

    @property
    def node(self) -> int:
        """Ranks of the innermost level."""
        return self.levels[0].size

    def filled(self, ranks: int) -> Cluster:
        """The cluster as a job of `ranks` ranks uses its racks: as many ranks of each, where up to a quarter more racks allow it.

        Of a rack of 72 that is 64, for a job of 128, and 64 of its 72 ports. Any other job fills one rack after the other, as it
        does hosts, and groups whose links are no faster than those between them.
        """
        values: dict[str, float] = {}
        for inner, rack, outside in zip(self.levels, self.levels[1:], self.levels[2:], strict=False):
            if rack.size <= LARGEST_HOST or ranks <= rack.size or rack.bandwidth <= 2 * outside.bandwidth:
                continue
            fewest = -(-ranks // rack.size)
            parts = (ranks // many for many in range(fewest, fewest * 5 // 4 + 1) if ranks % many == 0)
            part = next((size for size in parts if size % inner.size == 0 and size > inner.size), rack.size)
            if part != rack.size and outside.size % part == 0:
                values[f"{rack.name}.size"] = part
                values[f"{outside.name}.ports"] = max(1, outside.ports * part // rack.size)
        return self.replaced(values, "assumed") if values else self

    def ranks_per_node(self, ranks: int) -> int:
        """Number of the `ranks` ranks that communicate in a node's memory, as a dry run's `Setting` takes it; 1 where none do."""
        return min(ranks, self.node or ranks) if self["host.shared"] else 1

    def crowding(self, ranks: int) -> float:
        """By how much ranks slow each other down: the most ranks of a node on one of its slots, at least 1."""
        slots = self["host.slots"]
        return float(max(1, ceil(min(ranks, self.node or ranks) / slots))) if slots else 1.0

    def link(self, ranks: int) -> tuple[float, float]:
        """Seconds per byte and per message of the level that joins `ranks` ranks, of a rank's share while all communicate."""
        index = next((number for number, level in enumerate(self.levels) if level.size >= ranks), len(self.levels) - 1)
        level = self.levels[index]
        sharing = self.levels[index - 1].size if index else 1
        return max(1.0, sharing / level.ports) / level.bandwidth, level.latency

    def flop_time(self, dtype: str, side: float) -> float:
        """Seconds of an operation of a product whose smallest side is `side`."""
        return (side + self["product.half"]) / side / (self.peak(dtype) * self["product.efficiency"])

    def byte_time(self) -> float:
        """Seconds of a byte that is read or written in a device's memory."""
        return 1 / (self["device.memory_bandwidth"] * self["elements.efficiency"])

    def peak(self, dtype: str) -> float:
        """Operations per second of products of a dtype. Raises ClusterError where the cluster has no such number."""
        key = f"peak.{dtype}"
        if key not in self.numbers:
            known = ", ".join(name.partition(".")[2] for name in self.numbers if name.startswith("peak."))
            raise ClusterError(f"cluster {self.name} has no peak of {dtype}; it has those of {known}.")
        return self[key]

    @property
    def fitted(self) -> tuple[str, ...]:
        """The keys of fitted numbers."""
        return tuple(key for key, number in self.numbers.items() if number.source == "fitted")

    def replaced(self, values: Mapping[str, float], source: str = "fitted") -> Cluster:
        """The cluster with other values of some numbers. Raises ClusterError for an unknown key and a value that cannot be."""
        for key in values:
            if key not in self.numbers:
                raise _unknown(self.name, key, self.numbers)
        changed = {key: Number(value, source, "replaced") for key, value in values.items()}
        return _checked(self.name, self.level_names, {**self.numbers, **changed})


def names() -> list[str]:
    """The clusters that are described here."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def here_file() -> Path:
    """The description of this machine: SUMMA3D_CLUSTER, else summa3d/here.toml in the user's folder of configurations (XDG)."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get(VARIABLE) or Path(folder, "summa3d", "here.toml"))


def load(name: str) -> Cluster:
    """The cluster of a name, of a TOML file's path, or, by "here", of this machine as it was measured (`here_file`).

    Raises ClusterError for an unknown name, naming the nearest; for unknown or missing keys, numbers without a source, values
    that cannot be, levels that do not nest, and more than three fitted numbers.
    """
    file = here_file() if name == HERE else Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    try:
        text = text_of(file)
    except FileNotFoundError:
        if name == HERE:
            write = "`summa3d launch -n N bench calibrate --write` measures this machine"
            raise ClusterError(f"there is no file {file}: {write}, or {VARIABLE} names a file.") from None
        if name.endswith(".toml"):
            raise ClusterError(f"there is no file {name}.") from None
        near = nearest(name, names())
        raise ClusterError(f"unknown cluster {name!r}; the nearest is {near}. Known: {', '.join(names())}.") from None
    except (OSError, ValueError) as error:
        raise ClusterError(f"{file} cannot be read: {error}") from None
    return read_text(text, file.stem)


def read_text(text: str, name: str) -> Cluster:
    """The cluster of a file's text; raises as `load` does."""
    try:
        table = from_toml(text)
    except ValueError as error:
        raise ClusterError(f"cluster {name} is no TOML: {error}") from None
    return read(table, name)


def read(table: Mapping[str, Any], name: str) -> Cluster:
    """The cluster of a parsed TOML table; raises as `load` does."""
    levels = table.get("level", [])
    named = isinstance(levels, list) and all(
        isinstance(level, Mapping) and isinstance(level.get("name"), str) for level in levels
    )
    flat = dict(_flat({key: value for key, value in table.items() if key not in ("level", *ABOUT)}))
    if not levels or not named:
        more = f" It lacks {', '.join(lacking)} too. {TEMPLATE}" if (lacking := _lacking(flat, ())) else ""
        raise ClusterError(f"cluster {name} needs tables [[level]], each with a name: its links, from the innermost.{more}")
    level_names = tuple(level["name"] for level in levels)
    for key, text in (("name", table.get("name", name)), *(("level.name", name) for name in level_names)):
        if not (isinstance(text, str) and text.isprintable() and 0 < len(text) <= LONGEST_NAME):
            raise ClusterError(
                f"cluster {name}: {key} = {text!r} is no name; it takes one line of at most {LONGEST_NAME} printable characters."
            )
    for item in level_names:
        if level_names.count(item) > 1:
            raise ClusterError(f"cluster {name}: two levels are named {item}; each needs a name of its own.")
    for level in levels:
        flat |= {f"{level['name']}.{key}": value for key, value in level.items() if key != "name"}
    limits = _limits(level_names)
    for key in flat.keys() - limits.keys():
        raise _unknown(name, key, limits)
    if lacking := _lacking(flat, level_names):
        raise ClusterError(f"cluster {name} lacks {', '.join(lacking)}. {TEMPLATE}")
    numbers = _numbers(name, flat, limits)
    defaults = {key: limit.default for key, limit in limits.items() if limit.default is not None}
    numbers |= {key: Number(value, "assumed", "default") for key, value in defaults.items() if key not in numbers}
    return _checked(table.get("name", name), level_names, numbers)


def write(cluster: Cluster, file: Path, about: str) -> None:
    """Write the TOML file of a cluster, which `load` reads as the same numbers, with a comment; raises OSError."""
    lines = [f"# {about}", f"name = {json.dumps(cluster.name, ensure_ascii=False)}"]
    replace_text(file, "\n".join([*lines, *tables_of(cluster.numbers, cluster.level_names, 17), ""]))


def tables_of(numbers: Mapping[str, Number], level_names: Sequence[str], digits: int) -> Iterator[str]:
    """Yield the lines of the TOML tables of numbers by their dotted keys, with so many digits; the levels come last."""
    links = {level: [key for key in (f"{level}.{name}" for name in LINKS) if key in numbers] for level in level_names}
    others = [key for key in numbers if not any(key in keys for keys in links.values())]
    sections = {name: [key for key in others if key.startswith(f"{name}.")] for name in (key.partition(".")[0] for key in others)}
    titled = [(f"[{name}]", keys) for name, keys in sections.items()]
    titled += [(f"[[level]]\nname = {json.dumps(level, ensure_ascii=False)}", keys) for level, keys in links.items() if keys]
    for title, keys in titled:
        yield from ("", title)
        for key in keys:
            number = numbers[key]
            origin = f", from = {json.dumps(number.origin, ensure_ascii=False)}" if number.origin else ""
            name = key.rpartition(".")[2]
            yield f'{name} = {{value = {number.value:.{digits}g}, source = "{number.source}"{origin}}}'


def _limits(level_names: tuple[str, ...]) -> dict[str, Range]:
    links = {f"{level}.{key}": limit for level in level_names for key, limit in LINKS.items()}
    return DEVICE | {f"peak.{dtype}": PEAK for dtype in (*DTYPES, *NARROW)} | links


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested tables; a table with a value is a number."""
    for key, value in table.items():
        if isinstance(value, Mapping) and "value" not in value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _lacking(flat: Mapping[str, Any], level_names: Sequence[str]) -> list[str]:
    """The keys that a description needs and does not have, a peak of some dtype among them."""
    needed = [key for key, limit in _limits(tuple(level_names)).items() if limit.default is None and not key.startswith("peak.")]
    needed += [f"{level}.size" for level in level_names[:-1]]
    peak = [] if any(key.startswith("peak.") for key in flat) else ["peak.float32"]
    return [key for key in needed if key not in flat] + peak


def _numbers(name: str, flat: Mapping[str, Any], limits: Mapping[str, Range]) -> dict[str, Number]:
    """The numbers of a file; raises one ClusterError for all that are none."""
    result, wrong = {}, []
    for key, given in flat.items():
        table = given if isinstance(given, Mapping) else {}
        value, source = table.get("value"), table.get("source")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or source not in SOURCES or set(table) - {"value", "source", "from", "date"}:
            why = f" (a number of {limits[key].unit}, not text)" if isinstance(value, str) else ""
            wrong.append(f"{key} = {given!r}{why}")
            continue
        try:
            number = float(table["value"])
        except OverflowError:  # an integer of hundreds of digits
            number = inf
        result[key] = Number(number, str(source), str(table.get("from", "")))
    if wrong:
        takes = f'{"takes" if len(wrong) == 1 else "take"} {{value = …, source = …, from = "…"}}'
        raise ClusterError(f"cluster {name}: {', '.join(wrong)} {takes} with a source of {', '.join(SOURCES)}.")
    return result


def _checked(name: str, level_names: tuple[str, ...], numbers: Mapping[str, Number]) -> Cluster:
    limits = _limits(level_names)
    for key, number in numbers.items():
        limit = limits.get(key)
        if limit is None:
            raise _unknown(name, key, limits)
        is_size, outermost = key.endswith(".size"), key == f"{level_names[-1]}.size"
        within = limit.least <= number.value <= limit.most and not (limit.whole and number.value % 1)
        if not within and not (is_size and number.value == 0):
            raise ClusterError(
                f"cluster {name}: {key} = {number.value:g} cannot be: {limit.meaning}, in {limit.unit}, "
                f"from {limit.least:g} to {limit.most:g}{', whole' if limit.whole else ''}."
            )
        if (is_size and (number.value == 0) != outermost) or (key.endswith((".size", ".ports")) and number.value % 1):
            raise ClusterError(
                f"cluster {name}: {key} = {number.value:g}; sizes and ports are whole; all levels but the outermost have one."
            )
    cluster = Cluster(name, level_names, dict(numbers))
    if len(cluster.fitted) > FITTED:
        many = f"{len(cluster.fitted)} fitted numbers, {', '.join(cluster.fitted)}"
        raise ClusterError(f"cluster {name} has {many}; at most {FITTED}.")
    sizes = [level.size for level in cluster.levels[:-1]]
    if any(outer % inner or outer == inner for inner, outer in pairwise(sizes)):
        raise ClusterError(f"cluster {name}: levels of {sizes} ranks do not nest; each must be a multiple of the one before.")
    return cluster


def _unknown(name: str, key: str, known: Any) -> ClusterError:
    return ClusterError(f"cluster {name}: unknown key {key!r}; the nearest is {nearest(key, list(known))!r}.")
