"""Scaling series of products: rows of one algorithm, or of the library's choices, on several rank counts, with their baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from .statistics import Spread, ratio, times_of

ResultRow = Mapping[str, Any]
CHOSEN, SERIAL = "chosen", "serial"
SAME_WORK = 1.05  # largest quotient of the work per rank in weak scaling, whose sizes are rounded cube roots
OPERANDS = ("form", "dtype", "device")
PROBLEM = ("m", "n", "k", *OPERANDS)
IDENTITY = (*PROBLEM, "ranks", "threads", "label", "chosen")
"""Rows that agree in these are measurements of one product, by one algorithm, on one grid, with as many threads."""


@dataclass(frozen=True)
class Series:
    """Rows in the order of their ranks, then threads. What the chooser takes is one series, whichever algorithms it takes.

    baseline : what speed-ups are relative to: the product on one rank, the same for all series, else the first row
    """

    name: str
    rows: Sequence[ResultRow]
    baseline: ResultRow

    @property
    def baseline_name(self) -> str:
        """The baseline in words: "serial", or as "cannon on 4 ranks"."""
        return SERIAL if is_serial(self.baseline) else f"{self.name} on {in_ranks(self.baseline['ranks'])}"

    def speed_up(self, row: ResultRow) -> Spread | None:
        """Gflop/s of a row ÷ Gflop/s of the baseline; in strong scaling, the quotient of times.

        None on the host where the ranks of the row have other thread counts: the ratio would not be that of ranks.
        """
        if on_host(row) and row["threads"] != self.baseline["threads"]:
            return None
        return ratio(self.baseline["seconds"]["all"], row["seconds"]["all"]).times(work(row) / work(self.baseline))

    def efficiency(self, row: ResultRow) -> Spread | None:
        """Gflop/s per rank of a row ÷ those of the baseline; None where there is no speed-up."""
        speed_up = self.speed_up(row)
        return speed_up and speed_up.times(self.baseline["ranks"] / row["ranks"])


def work(row: ResultRow) -> float:
    """The products of numbers in a product, mnk."""
    return float(row["m"] * row["n"] * row["k"])


def in_ranks(count: int) -> str:
    """A number of ranks as text.

    >>> in_ranks(1), in_ranks(8)
    ('1 rank', '8 ranks')
    """
    return f"{count} rank{'s' if count > 1 else ''}"


def on_host(row: ResultRow) -> bool:
    """Return whether a product's operands lie on the host."""
    return bool(row.get("device", "cpu") == "cpu")


def is_serial(row: ResultRow) -> bool:
    """True if a row is the product on one rank, one call of the BLAS whatever the algorithm; options may divide that call."""
    return row["ranks"] == 1 and not row["options"]


def place(row: ResultRow) -> str:
    """Name of what ran in a row: "serial", or algorithm, grid and options."""
    return SERIAL if is_serial(row) else str(row["label"])


def series_of(rows: Iterable[ResultRow]) -> list[Series]:
    """The series of some rows: one of the library's choices, and one for each algorithm that was named.

    All serial rounds of the fewest threads are one baseline, so that equal times are equal speed-ups.
    """
    rows = sorted(rows, key=lambda row: (int(row["ranks"]), int(row["threads"])))
    serial = [row for row in rows if is_serial(row)]
    shared = [_joined(_by((*PROBLEM, "threads"), serial)[0])] if serial else []
    groups: dict[str, list[ResultRow]] = {}
    for row in rows:
        named = " ".join([row["algorithm"], *(f"{name}={value}" for name, value in row["options"].items())])
        groups.setdefault(CHOSEN if row["chosen"] else named, []).append(row)
    return [Series(name, own, *(shared or own[:1])) for name, own in groups.items()]


def grouped(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Rows as results: strong scaling where sizes are equal, weak where the work per rank is, the rest side by side by sizes."""
    rows = joined(rows)
    results: list[dict[str, Any]] = []
    taken: list[ResultRow] = []
    for kind, groups in (("strong", _by(PROBLEM, rows)), ("weak", _by_work(rows))):
        for group in groups:
            if len({row["ranks"] for row in group}) > 1:
                results.append({"kind": kind, "rows": group, "numpy": []})
                taken += group
    rest = [row for row in rows if not any(row is item for item in taken)]
    return results + [{"kind": "gemm", "rows": group, "numpy": []} for group in _by(PROBLEM, rest)]


def joined(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows, those of the same product on the same grid as one row with all their rounds; what comes twice counts once."""
    return [_joined(group) for group in _by(IDENTITY, rows)]


def _joined(group: Sequence[ResultRow]) -> ResultRow:
    group = [row for number, row in enumerate(group) if row["seconds"] not in [item["seconds"] for item in group[:number]]]
    if len(group) == 1:
        return group[0]
    seconds = times_of([second for row in group for second in row["seconds"]["all"]])
    return {**group[0], "seconds": seconds, "gflops": group[0]["gflops"] * group[0]["seconds"]["median"] / seconds["median"]}


def same_problem(row: ResultRow, other: ResultRow) -> bool:
    """Return whether two rows have the same sizes, form, dtype and device."""
    return all(row[name] == other[name] for name in PROBLEM)


def same_family(result: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two results of products are of one kind and problem: their rows may be one table.

    Weak scaling is of one problem where sizes ÷ the cube root of the ranks are equal, but for rounding. Products side by side
    must be on as many ranks.
    """
    kind, first, second = result["kind"], *(min(own["rows"], key=lambda row: row["ranks"]) for own in (result, other))
    if kind != other["kind"] or any(first[name] != second[name] for name in OPERANDS):
        return False
    if kind == "weak":
        sizes = ([row[name] / row["ranks"] ** (1 / 3) for name in ("m", "n", "k")] for row in (first, second))
        return all(isclose(*pair, rel_tol=SAME_WORK ** (1 / 3) - 1) for pair in zip(*sizes, strict=True))
    most = [max(row["ranks"] for row in own["rows"]) for own in (result, other)]
    return same_problem(first, second) and (kind == "strong" or most[0] == most[1])


def _by(names: Sequence[str], rows: Sequence[ResultRow]) -> list[list[ResultRow]]:
    """Groups of rows that agree in these columns."""
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(groups.values())


def _by_work(rows: Sequence[ResultRow]) -> list[list[ResultRow]]:
    """Groups of rows with the same work per rank and different sizes."""

    def of_rank(row: ResultRow) -> float:
        return work(row) / float(row["ranks"])

    groups: list[list[ResultRow]] = []
    for row in sorted(rows, key=lambda row: (*(row[name] for name in OPERANDS), of_rank(row))):
        first = groups[-1][0] if groups else row
        alike = all(row[name] == first[name] for name in OPERANDS) and of_rank(row) <= SAME_WORK * of_rank(first)
        if not groups or not alike:
            groups.append([])
        groups[-1].append(row)
    return [group for group in groups if len(_by(PROBLEM, group)) > 1]
