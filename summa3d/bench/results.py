"""Benchmark results in files: JSON of `summa3d bench`, lines of `summa3d gemm --json`, several files joined."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from .series import IDENTITY, grouped, same_problem

PRODUCTS = ("gemm", "strong", "weak")
ROWS = {
    **dict.fromkeys(PRODUCTS, (*IDENTITY, "algorithm", "options", "threads", "cores", "gflops", "seconds", "words_per_rank")),
    "versus": ("case", "dtype", "ranks", "numpy_seconds", "seconds", "fractions", "quotients", "noted"),
    "block": ("scheme", "label", "seconds", "saved_bytes", "peak_bytes", "relative_difference"),
}
"""Kinds of results, and the keys of their rows by which a file is recognised."""
HEAD = {**dict.fromkeys(PRODUCTS, ("numpy",)), "versus": ("peers", "quotients"), "block": ("case", "ranks", "torch")}
PLACED = ("nodes", "hosts", "ranks_per_node", "cores_per_node", "cores")
OF_THE_MOMENT = ("load", "gflops_per_core")
MACHINE = (*PLACED, *OF_THE_MOMENT, "threads_per_rank", "processor", "gpu", "commit")


def read(file: Path) -> list[dict[str, Any]]:
    """The results in a file: one of `summa3d bench`, or those that the lines of `summa3d gemm --json` form.

    Lines are strong scaling where sizes are equal, weak scaling where the work per rank is equal, else products side by side.
    Raises DataError where the file cannot be read or holds no result of this version.
    """
    entries = _entries(file)
    if len(entries) == 1 and "kind" in entries[0]:
        return [_checked(entries[0], file)]
    for entry in entries:
        _require(entry, (*ROWS["gemm"], "machine"), f"A line of {file} is not one of `summa3d gemm --json`")
        _require(entry["machine"], MACHINE, f"The machine in a line of {file} is of another version")
    return _from(entries, [entry["machine"] for entry in entries])


def merge(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of products as one pool of rows, formed anew; rows of one product on one grid join their rounds.

    Raises DataError for results of other kinds.
    """
    other = [result["kind"] for result in results if result["kind"] not in PRODUCTS]
    if other:
        raise DataError(
            f"--merge joins results of {', '.join(PRODUCTS)}; one is of {other[0]}. Leave it out, or leave out --merge."
        )
    on = [machine for result in results for machine in result.get("machines") or [result["machine"]]]
    rows = {id(row): row for result in results for row in result["rows"]}  # the serial row of a file may be of two results
    merged = _from(list(rows.values()), on)
    for result in merged:
        result["numpy"] = [
            own for one in results for own in one["numpy"] if any(same_problem(own, row) for row in result["rows"])
        ]
    return merged


def _from(rows: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as results on these machines; jobs of a sweep that differ in their nodes only are one machine."""
    machines: dict[str, dict[str, Any]] = {}
    for machine in on:
        alike = json.dumps({name: fact for name, fact in machine.items() if name not in (*PLACED, *OF_THE_MOMENT)})
        known = machines.setdefault(alike, machine)
        unions = {name: list(dict.fromkeys([*known[name], *machine[name]])) for name in ("hosts", "ranks_per_node")}
        largest = {name: max(known[name], machine[name]) for name in ("nodes", "cores")}
        machines[alike] = {**known, **unions, **largest}
    return [{**result, "machines": list(machines.values())} for result in grouped(rows)]


def _entries(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one per line."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"There is no file {file}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from None
    try:
        entries = [json.loads(text)]
    except json.JSONDecodeError as error:
        try:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        except json.JSONDecodeError:
            raise DataError(f"{file} is neither JSON ({error}) nor lines of JSON.") from None
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{file} is not a result of `summa3d bench` or `summa3d gemm --json`.")
    return entries


def _checked(result: dict[str, Any], file: Path) -> dict[str, Any]:
    kind = result["kind"]
    if kind not in ROWS or not result.get("rows"):
        raise DataError(f"{file} is not a result of `summa3d bench` (a JSON object with kind {', '.join(ROWS)} and rows).")
    _require(result, HEAD[kind], f"{file} is a {kind} result of another version")
    for row in result["rows"]:
        _require(row, ROWS[kind], f"{file} is a {kind} result of another version")
    if result.get("machine"):
        _require(result["machine"], MACHINE, f"{file} is a {kind} result of another version")
    return result


def _require(entry: dict[str, Any], keys: Sequence[str], complaint: str) -> None:
    missing = [key for key in keys if key not in entry]
    if missing:
        raise DataError(f"{complaint}: it lacks {', '.join(missing)}. Run the benchmark again.")
