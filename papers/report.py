"""The report of a paper: printed, corrected and predicted numbers, errors, predictions of rows without themselves; its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from summa3d.columns import aligned

from .fit import ReportedNumber, error, fit, held_out, out_of_fold
from .paper import MARKS, Paper

COLUMNS = ("", "row", "reported", "corrected", "predicted", "error")


def report(paper: Paper) -> dict[str, Any]:
    """Return what `python -m papers NAME --json` prints: rows, and a summary of their errors, as fractions.

    Rows are predicted with the numbers of the clusters' files. leave_one_out is the median error of each fitted row by a fit to
    the others; null where nothing is fitted.
    """
    rows = [_line(row) for row in paper.rows]
    summary = {"n": len(rows), "fitted": len(paper.ranges), **_sizes([row["error"] for row in rows]), "leave_one_out": None}
    found: dict[str, Any] = {"paper": paper.name, "unit": paper.table["unit"], "rows": rows, "summary": summary}
    if paper.ranges:
        found |= _refitted(paper, summary)
    if paper.table.get("ordering"):
        found["orderings"] = _orderings(paper, rows)
    return found


def _line(row: ReportedNumber) -> dict[str, Any]:
    printed = {"name": row.name, "reported": row.reported, "corrected": row.corrected}
    return {**printed, "predicted": row.predict(row.cluster), "error": error(row, row.cluster), "use": row.use}


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    """Median, mean and largest size of errors."""
    absolute = [abs(one) for one in errors]
    return {"median": median(absolute), "mean": mean(absolute), "max": max(absolute)}


def _refitted(paper: Paper, summary: dict[str, Any]) -> dict[str, Any]:
    """The fit to all fitted rows, leave-one-out, which goes into the summary, and the extrapolations."""
    rows = [row for row in paper.rows if row.use == "fitted"]
    cluster = rows[0].cluster
    whole = fit(rows, cluster, paper.ranges)
    alone = out_of_fold(rows, cluster, paper.ranges)
    errors = _sizes([predicted / row.target - 1 for predicted, row in zip(alone, rows, strict=True)])
    summary["leave_one_out"] = errors["median"]
    found: dict[str, Any] = {
        "fit": {key: whole.cluster[key] for key in paper.ranges},
        "at_bound": list(whole.at_bound),
        "leave_one_out": errors,
        "extrapolations": [],
    }
    for given in paper.table.get("extrapolation", ()):
        ranks, series = given.get("ranks"), given.get("series")
        train = [row for row in rows if (not ranks or row.ranks in ranks) and (not series or row.series in series)]
        errors = _sizes(held_out([row for row in rows if row not in train], train, cluster, paper.ranges))
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
    """Return which of two series is faster on the same number of ranks: as reported, and as predicted."""
    of = {(row.series, row.ranks): (row.target, line["predicted"], row.name) for row, line in zip(paper.rows, rows, strict=True)}
    pairs = [
        (of[first, ranks], of[second, ranks])
        for first, second in (given["series"] for given in paper.table["ordering"])
        for series, ranks in of
        if series == first
    ]
    missed = [f"{one[2]} against {other[2]}" for one, other in pairs if (one[0] < other[0]) != (one[1] < other[1])]
    return {"right": len(pairs) - len(missed), "of": len(pairs), "missed": missed}


def as_text(paper: Paper, found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `report`."""
    table = paper.table
    yield f"{table['title']}\n{table['source']}\n{found['unit']}\n"
    yield from aligned([COLUMNS, *(_cells(row) for row in found["rows"])], left=(0, 1))
    yield "\n● fitted to  ○ predicted only  × never fitted to"
    yield from _summary(found)
    yield ""
    yield from (f"erratum: {row['name']}: {row['erratum']}" for row in table["row"] if "erratum" in row)
    yield from (f"note: {note}" for note in table.get("notes", ()))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    corrected = "" if row["corrected"] is None else f"{row['corrected']:.4g}"
    return MARKS[row["use"]], row["name"], f"{row['reported']:.4g}", corrected, f"{row['predicted']:.4g}", f"{row['error']:+.1%}"


def _summary(found: Mapping[str, Any]) -> Iterator[str]:
    summary = found["summary"]
    yield f"{summary['n']} rows, {summary['fitted']} fitted numbers: error {_errors(summary)}"
    if "fit" in found:
        yield f"each row by a fit to the others: {_errors(found['leave_one_out'])}"
        for one in found["extrapolations"]:
            yield f"{one['name']}: {one['n']} rows, median {one['median']:.1%}, max {one['max']:.1%}"
        ends = dict.fromkeys(found["at_bound"], " (at an end of its range)")
        yield "fit: " + ", ".join(f"{key} = {value:g}{ends.get(key, '')}" for key, value in found["fit"].items())
    if "orderings" in found:
        orderings = found["orderings"]
        missed = f"; missed: {', '.join(orderings['missed'])}" if orderings["missed"] else ""
        yield f"which of two is faster: {orderings['right']} of {orderings['of']} right{missed}"
    if "choices" in found:
        yield from _choice_lines(found["choices"])


def _choice_lines(choices: Mapping[str, Any]) -> Iterator[str]:
    yield f"order of all rows by such fits: Spearman {choices['spearman']:.2f}; the fastest of each group by such fits:"
    yield from (f"  {one['group']}: {one['regret']:.1%} slower than the best of {one['of']}" for one in choices["groups"])
    regret = choices["regret"]
    yield f"  median {regret['median']:.1%}, mean {regret['mean']:.1%}, max {regret['max']:.1%}"


def _errors(of: Mapping[str, float]) -> str:
    return f"median {of['median']:.1%}, mean {of['mean']:.1%}, max {of['max']:.1%}"
