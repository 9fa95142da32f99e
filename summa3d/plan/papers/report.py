"""The report of a paper: printed, corrected and predicted numbers, errors, and predictions of rows without themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from .fit import PROGRAM, ReportedNumber, error, fit, held_out, out_of_fold
from .paper import Paper


def report(paper: Paper) -> dict[str, Any]:
    """What `summa3d plan --paper NAME --json` prints: rows, and a summary of their errors, as fractions.

    Rows are predicted with the numbers of the clusters' files. leave_one_out is the median error of each fitted row by a fit to
    the others; null where nothing is fitted.
    """
    rows = [_line(row) for row in paper.rows]
    summary = {"n": len(rows), "fitted": len(paper.ranges), **_sizes([row["error"] for row in rows]), "leave_one_out": None}
    found: dict[str, Any] = {"paper": paper.name, "unit": paper.table["unit"], "rows": rows, "summary": summary}
    if paper.ranges:
        found |= _refitted(paper, summary)
    if "variant" in paper.table:
        found["variants"] = [_variant(paper, given) for given in paper.table["variant"]]
    if paper.table.get("ordering"):
        found["orderings"] = _orderings(paper, rows)
    return found


def _variant(paper: Paper, given: Mapping[str, Any]) -> dict[str, Any]:
    """The errors by other numbers of the program."""
    values = {f"{PROGRAM}{key}": value for key, value in given["program"].items()}
    return {"name": given["name"], **_sizes([error(row, row.numbers.replaced(values)) for row in paper.rows])}


def _line(row: ReportedNumber) -> dict[str, Any]:
    printed = {"name": row.name, "reported": row.reported, "corrected": row.corrected}
    return {**printed, "predicted": row.predict(row.numbers), "error": error(row, row.numbers), "use": row.use}


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    """Median, mean and largest size of errors."""
    absolute = [abs(one) for one in errors]
    return {"median": median(absolute), "mean": mean(absolute), "max": max(absolute)}


def _refitted(paper: Paper, summary: dict[str, Any]) -> dict[str, Any]:
    """The fit to all fitted rows, leave-one-out, which goes into the summary, and the extrapolations."""
    rows = [row for row in paper.rows if row.use == "fitted"]
    numbers = rows[0].numbers
    whole = fit(rows, numbers, paper.ranges)
    alone = out_of_fold(rows, numbers, paper.ranges)
    errors = _sizes([predicted / row.target - 1 for predicted, row in zip(alone, rows, strict=True)])
    summary["leave_one_out"] = errors["median"]
    found: dict[str, Any] = {
        "fit": {key: whole.numbers.value(key) for key in paper.ranges},
        "at_bound": list(whole.at_bound),
        "leave_one_out": errors,
        "extrapolations": [],
    }
    for given in paper.table.get("extrapolation", ()):
        ranks, series = given.get("ranks"), given.get("series")
        train = [row for row in rows if (not ranks or row.ranks in ranks) and (not series or row.series in series)]
        errors = _sizes(held_out([row for row in rows if row not in train], train, numbers, paper.ranges))
        found["extrapolations"].append({"name": given["name"], "n": len(rows) - len(train), **errors})
    if any(row.group for row in rows):
        found["choices"] = _choices(rows, alone)
    return found


def _choices(rows: Sequence[ReportedNumber], predicted: Sequence[float]) -> dict[str, Any]:
    """Of each group the row that is predicted to be the fastest, and by how much it is slower than the fastest.

    spearman : the correlation of ranks of all rows' seconds, as predicted and as reported.
    """
    from scipy.stats import spearmanr

    groups: dict[str, list[tuple[float, ReportedNumber]]] = {}
    for seconds, row in zip(predicted, rows, strict=True):
        groups.setdefault(row.group, []).append((seconds, row))
    found, regrets = [], []
    for name, members in groups.items():
        if len(members) > 1:
            picked = min(members, key=lambda one: one[0])[1]
            best = min((row for _, row in members), key=lambda row: row.target)
            regrets.append(picked.target / best.target - 1)
            names = {"group": name, "of": len(members), "picked": picked.name, "best": best.name}
            found.append({**names, "regret": regrets[-1]})
    columns = (predicted, [row.target for row in rows])
    per_sequence = [[seconds / row.batch for seconds, row in zip(column, rows, strict=True)] for column in columns]
    return {"spearman": float(spearmanr(*per_sequence)[0]), "groups": found, "regret": _sizes(regrets)}


def _orderings(paper: Paper, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which of two series is faster on the same number of ranks: as reported, and as predicted."""
    of = {(row.series, row.ranks): (row.target, line["predicted"], row.name) for row, line in zip(paper.rows, rows, strict=True)}
    pairs = [
        (of[first, ranks], of[second, ranks])
        for first, second in (given["series"] for given in paper.table["ordering"])
        for series, ranks in of
        if series == first
    ]
    missed = [f"{one[2]} against {other[2]}" for one, other in pairs if (one[0] < other[0]) != (one[1] < other[1])]
    return {"right": len(pairs) - len(missed), "of": len(pairs), "missed": missed}
