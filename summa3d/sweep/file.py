"""The description of a sweep: a TOML file, or one that is shipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import date, time
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ConfigError, nearest
from ..files import read_toml, titles, toml_value, whole
from ..train.toml import assign, describe_value, unknown_key

FOLDER = Path(__file__).with_name("files")
KINDS = ("strong", "weak", "grid")
SUBJECTS = ("gemm", "block", "train")
ORDERS = ("interleaved", "sequential")
EQUAL, EACH = "equal", "each"
MOST_POINTS = 100_000
"""The most points of a sweep; a list too many multiplies them."""
NAME = re.compile(r"[^\W_][\w.-]*")
"""What a sweep may be called: the name becomes that of a folder, and of jobs in their scripts."""
LIMIT = re.compile(r"UNLIMITED|INFINITE|[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")
"""Time limits as Slurm takes them."""
TEXT, TABLE, RULE = ("text", (str,)), ("a table", (Mapping,)), ("the name of a rule, or a table", (str, Mapping))
SERIES: dict[str, tuple[str, tuple[type, ...]]] = {"name": TEXT, "base": TABLE, "vary": TABLE, "weak": RULE}
"""Key of a series → the name of its type, and what its value may be."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, as its file has it.

    Attributes
    ----------
    name : of the sweep, its folder, jobs and plots: letters, digits, ".", "-" and "_"
    kind : "strong", the same work on several rank counts; "weak", work that grows with them; "grid", any product of values
    what : is measured: "gemm", a product; "block", forward and backward of transformer blocks; "train", a training step
    config : a shipped configuration that `base` changes (train only)
    ranks : rank counts
    base : keys of the configuration that all points share; of a product m, n, k, form, dtype, algorithm
    vary : keys with lists of values; grid is "planned", "fewest", "every", or a list such as ["x=2,y=2"]; a list of tables, under
        any name, has keys that vary together
    series : tables with name, base and vary of their own, for values that vary together
    weak : how sizes grow: the name of a rule, or key → a formula of base, ranks and first, or a list with a value for each count
    base_ranks : the rank count that `base` is meant for; 0 for the first
    rounds : rounds that are timed, after one that is not counted
    repeats : measurements of each point, each in a race of its own
    order : "interleaved", every round runs every point of a race; "sequential", each point by itself
    x : the key on the horizontal axis of plots
    published : a paper's points in the plot: the path of a TOML file, from the sweep's own folder, with source, and series, the
        name of a series here → [x, FLOP/s over the first point's] of each point; kept as read
    cluster : what predicts times; none if empty
    memory : bytes that a rank may take; 0 for those of the cluster's device, or no limit
    ranks_per_node : ranks of a node, in predictions and jobs
    threads : BLAS threads of a rank: "equal", on all rank counts as many as the most ranks leave each other on a node; "each", as
        many as those of its own count do; or a number. What the environment sets stays
    limit : time limit of a job, as Slurm takes it
    """

    name: str
    kind: str = "grid"
    what: str = "block"
    config: str = ""
    ranks: Sequence[int] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    vary: Mapping[str, Any] = field(default_factory=dict)
    series: Sequence[Mapping[str, Any]] = ()
    weak: str | Mapping[str, Any] = ""
    base_ranks: int = 0
    rounds: int = 7
    repeats: int = 1
    order: str = "interleaved"
    x: str = "ranks"
    published: Mapping[str, Any] = field(default_factory=dict)
    cluster: str = ""
    memory: float = 0
    ranks_per_node: int = 1
    threads: str | int = EQUAL
    limit: str = "00:30:00"

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name = {self.name!r} cannot name a sweep, its folder and its jobs: "
                "letters, digits, '.', '-' and '_' can, the first a letter or digit, as in name = \"product-strong\"."
            )
        if not LIMIT.fullmatch(self.limit):
            raise ConfigError(
                f"limit = {self.limit!r} is no time limit of Slurm; write minutes, hours:minutes:seconds or "
                'days-hours:minutes:seconds, as in limit = "00:30:00".'
            )
        for key, value, known in (("kind", self.kind, KINDS), ("what", self.what, SUBJECTS), ("order", self.order, ORDERS)):
            if value not in known:
                raise ConfigError(f"{key} = {value!r} is not known; it is one of {', '.join(known)}.")
        if not self.ranks or any(type(count) is not int or count < 1 for count in self.ranks):
            raise ConfigError(f"ranks = {list(self.ranks)!r} are no rank counts; write them as ranks = [1, 2, 4].")
        for key, least in (("rounds", 1), ("repeats", 1), ("ranks_per_node", 1), ("base_ranks", 0), ("memory", 0)):
            if not getattr(self, key) >= least:
                raise ConfigError(f"{key} is {getattr(self, key)}; it must be at least {least}.")
        if self.threads not in (EQUAL, EACH) and (whole(str(self.threads)) or 0) < 1:
            raise ConfigError(f"threads = {self.threads!r}; it is {EQUAL!r}, {EACH!r} or a number from 1 on.")
        if bool(self.weak) != (self.kind == "weak"):
            raise ConfigError(f"kind = {self.kind!r} with weak = {self.weak!r}: weak scaling alone has a rule.")
        if self.config and self.what != "train":
            raise ConfigError(f"config = {self.config!r} is for what = 'train'; this sweep is of {self.what}.")
        for number, item in enumerate(self.series, 1):
            _check_series(number, item)
        _check_values("", (self.base, self.vary, self.series, self.weak, self.published))
        self._check_vary()

    def _check_vary(self) -> None:
        """Raise ConfigError for a list without values, and for more combinations than anybody measures."""
        points = 0
        for _, _, vary, _ in self.parts:
            for key, values in vary.items():
                if values == []:
                    raise ConfigError(f"vary.{key} = [] has no values, so that the sweep has no points.")
            points += prod(len(values) for key, values in vary.items() if isinstance(values, list) and key != "grid")
        points *= len(self.ranks) * self.repeats
        if points > MOST_POINTS:
            raise ConfigError(f"vary, ranks and repeats make {points:,} points; a sweep has at most {MOST_POINTS:,}.")

    def threads_of_rank(self, cores: int, on_node: int) -> int | None:
        """BLAS threads of a rank in every start, the largest of which has `on_node` ranks on a node; None: each has its own."""
        if self.threads == EACH:
            return None
        return max(1, cores // on_node) if self.threads == EQUAL else int(self.threads)

    @property
    def parts(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str | Mapping[str, Any]]]:
        """Name, base, vary and weak of each series; of one without a name where none is given."""
        for own in self.series or ({},):
            base, vary = ({**flat(mine), **flat(own.get(key, {}))} for key, mine in (("base", self.base), ("vary", self.vary)))
            yield own.get("name", ""), base, vary, own.get("weak", self.weak)


def _check_values(key: str, value: Any) -> None:
    """Raise ConfigError for dates and times of TOML, which no key takes and no line of a sweep has."""
    if isinstance(value, (Mapping, list, tuple)):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_values(str(name) if isinstance(value, Mapping) else key, item)
    elif isinstance(value, (date, time)):  # a datetime is a date
        raise ConfigError(f"{key} = {value} of a sweep is a date or a time; write a text in quotes, or a number.")


def _check_series(number: int, own: Any) -> None:
    """Raise ConfigError for what cannot be a table of `series`."""
    if not isinstance(own, Mapping):
        raise ConfigError(f"series has {own!r}; it takes tables [[series]].")
    for key, value in own.items():
        if key not in SERIES:
            raise unknown_key(f"series.{key}", [f"series.{item}" for item in SERIES])
        words, fits = SERIES[key]
        if not isinstance(value, fits):
            raise ConfigError(f"{key} = {value!r} of series {number} is {describe_value(value)}; it takes {words}.")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one of dotted keys.

    >>> flat({"model": {"hidden": 8}, "dtype": "float32"})
    {'model.hidden': 8, 'dtype': 'float32'}
    """
    result: dict[str, Any] = {}
    for key, value in table.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return result


def nested(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of dotted keys as nested tables: the inverse of `flat`."""
    result: dict[str, Any] = {}
    for key, value in table.items():
        assign(result, key, value)
    return result


def shipped() -> dict[str, str]:
    """The sweeps that are shipped: name → what it is, the first line of its file."""
    return titles(FOLDER)


def load(source: str, assignments: Sequence[str] = ()) -> Sweep:
    """The sweep of a TOML file, or of a shipped one's name, with keys set by ``KEY=VALUE``; other names are keys of `base`.

    Raises ConfigError for a file that cannot be read, unknown keys, naming the nearest, and values that cannot be.
    """
    file = Path(source) if source.endswith(".toml") else FOLDER / f"{source}.toml"
    if not file.is_file():
        near = nearest(source, list(shipped()))
        raise ConfigError(
            f"there is no sweep {source!r}: neither a TOML file nor one of ({', '.join(shipped())}); the nearest is {near}."
        )
    try:
        table = read_toml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the sweep {file}: {error}") from error
    return changed(read({"name": file.stem, **table}, file.parent), assignments)


def read(table: Mapping[str, Any], folder: Path | None = None) -> Sweep:
    """The sweep of a parsed table, whose paths begin in `folder`, or where Python runs. Raises ConfigError as `load` does."""
    if isinstance(table.get("published"), str):
        table = {**table, "published": published_points((folder or Path()) / table["published"])}
    known = [field_.name for field_ in fields(Sweep)]
    for key, value in table.items():
        if key not in known:
            raise unknown_key(key, known)
        words, fits = TYPES[MORE.get(key) or type(getattr(SAMPLE, key))]
        if not isinstance(value, fits) or isinstance(value, bool):
            raise ConfigError(f"{key} = {value!r} of a sweep is {describe_value(value)}; it takes {words}.")
    return Sweep(**table)


def published_points(file: Path) -> dict[str, Any]:
    """The published points of a file: source and series. Raises ConfigError for a file without them."""
    try:
        table = read_toml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the published points of a sweep, {file}: {error}") from error
    series = table.get("series")
    points = [points for name in series for points in series[name]] if isinstance(series, Mapping) else [None]
    sound = all(
        isinstance(point, list) and len(point) == 2 and all(type(x) in (int, float) and x > 0 for x in point) for point in points
    )
    if set(table) != {"source", "series"} or not isinstance(table["source"], str) or not sound:
        raise ConfigError(
            f'{file} has no published points; write source = "where they are from", and below [series] '
            "name = [[4, 1.0], [16, 1.85]]: x, and FLOP/s over that of the first point."
        )
    return table


SAMPLE = Sweep("sample", ranks=(1,))
TYPES: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: TEXT,
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    tuple: ("a list", (list, tuple)),
    dict: TABLE,
    "weak": RULE,
    "threads": (f"{EQUAL}, {EACH} or a whole number", (str, int)),
}
"""Type of a key's default → its name, and what a file's value may be."""
MORE = {"weak": "weak", "memory": float, "threads": "threads"}
"""Keys that take more than the type of their default."""


def changed(sweep: Sweep, assignments: Sequence[str]) -> Sweep:
    """The sweep with keys set by ``KEY=VALUE``; lists need no brackets, text no quotes."""
    own = {field_.name for field_ in fields(Sweep)}
    given: dict[str, Any] = {}
    base: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r} is not of the form key=value, as in --set rounds=3.")
        (given if key in own else base)[key] = _value(key, text)
    table = {field_.name: getattr(sweep, field_.name) for field_ in fields(Sweep)}
    if not base:
        return read({**table, **given}) if given else sweep
    return replace(read({**table, **given}), base=nested({**flat(given.get("base", sweep.base)), **base}))


def _value(key: str, text: str) -> Any:
    """The value of a key's text: as TOML writes it, a list without its brackets, or text without quotes."""
    if type(getattr(SAMPLE, key, None)) is str and "{" not in text:
        return text
    return toml_value(f"[{text}]" if key == "ranks" and "[" not in text else text, text)
