"""The text of a paper's report: its rows, a summary of the errors, the fit, errata and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...columns import aligned
from .paper import MARKS, Paper

COLUMNS = ("", "row", "reported", "corrected", "predicted", "error")


def as_text(paper: Paper, found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `papers.report`."""
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
    for one in found.get("variants", ()):
        yield f"{one['name']}: error {_errors(one)}"
    if "choices" in found:
        yield from _choices(found["choices"])


def _choices(choices: Mapping[str, Any]) -> Iterator[str]:
    yield f"order of all rows by such fits: Spearman {choices['spearman']:.2f}; the fastest of each group by such fits:"
    yield from (f"  {one['group']}: {one['regret']:.1%} slower than the best of {one['of']}" for one in choices["groups"])
    regret = choices["regret"]
    yield f"  median {regret['median']:.1%}, mean {regret['mean']:.1%}, max {regret['max']:.1%}"


def _errors(of: Mapping[str, float]) -> str:
    return f"median {of['median']:.1%}, mean {of['mean']:.1%}, max {of['max']:.1%}"
