"""The text of judged rows: a table, and a line for all and for each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...columns import aligned

COLUMNS = ("row", "measured s", "predicted s", "error", "band", "")


def as_text(result: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `judge.judged`."""
    priced = [row for row in result["rows"] if "refused" not in row]
    yield from aligned([COLUMNS, *map(_cells, priced)], left=(0, 5))
    yield from (f"not priced: {row['name']}: {row['refused']}" for row in result["rows"] if "refused" in row)
    yield from dict.fromkeys(f"remark: {remark}" for row in priced for remark in row["remarks"])
    yield ""
    groups = {"all rows": result["summary"], **(result["devices"] if len(result["devices"]) > 1 else {})}
    for name, summary in groups.items():
        if summary is not None:
            yield from _summary(name, summary)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    held = "" if row["fits"] else f"{row['predicted_memory'] / 2**30:.0f} GiB, above the device's"
    marks = ("" if row["validated"] else "not validated", "" if row["inside"] else "outside", held)
    numbers = f"{row['seconds']:.4g}", f"{row['predicted']:.4g}", f"{row['error']:+.1%}", f"±{row['band']:.0%}"
    return row["name"], *numbers, ", ".join(mark for mark in marks if mark)


def _summary(name: str, summary: Mapping[str, Any]) -> Iterator[str]:
    yield f"{name}: {summary['n']} rows, error {_errors(summary)}, bias {summary['bias']:+.1%}"
    null = summary["null"]
    yield f"  null model, the median utilisation of a device's other rows: {_errors(null) if null else 'too few rows'}"
    yield f"  inside the band: {summary['inside']:.0%}, median half-width {summary['band']:.0%}"
    if summary["spearman"] is not None:
        chance = f"by chance below {summary['kendall_by_chance']:.2f} in 95 %"
        yield f"  order of utilisation: Spearman {summary['spearman']:.2f}, Kendall {summary['kendall']:.2f} ({chance})"
    if summary["memory"]:
        yield f"  memory: {summary['memory']['n']} rows, error {_errors(summary['memory'])}"


def _errors(of: Mapping[str, float]) -> str:
    return f"median {of['median']:.1%}, mean {of['mean']:.1%}, max {of['max']:.1%}"
