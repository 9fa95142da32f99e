"""Benchmark results in files: JSON of `summa3d bench`, lines of `summa3d gemm --json`, several files joined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import from_json, named_text
from .series import IDENTITY, grouped, joined, same_family
from .tables import machines

PRODUCTS = ("gemm", "strong", "weak")
ROWS = {
    **dict.fromkeys(PRODUCTS, (*IDENTITY, "algorithm", "options", "threads", "cores", "gflops", "seconds", "words_per_rank")),
    "versus": ("case", "dtype", "ranks", "numpy_seconds", "seconds", "fractions", "quotients", "noted"),
    "block": ("scheme", "label", "seconds", "saved_bytes", "peak_bytes", "relative_difference"),
}
"""Kinds of results, and the keys of their rows by which a file is recognised."""
HEAD = {**dict.fromkeys(PRODUCTS, ("numpy",)), "versus": ("peers", "quotients"), "block": ("case", "ranks", "torch")}
PLACED = ("nodes", "hosts", "ranks_per_node", "cores_per_node", "cores")
OF_THE_MOMENT = ("load", "loads", "gflops_per_core")
MACHINE = (*PLACED, "load", "gflops_per_core", "threads_per_rank", "processor", "gpu", "commit")


def read(file: Path) -> list[dict[str, Any]]:
    """The results in a file: one of `summa3d bench`, or those that the lines of `summa3d gemm --json` form.

    Lines are strong scaling where sizes are equal, weak scaling where the work per rank is equal, else products side by side.
    Raises DataError where the file cannot be read or holds no result of this version.
    """
    results, lines = _split([file])
    return results + of_lines(lines)


def merge(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The results of products in several files; those of one kind and problem are one, and rows on one grid join their rounds.

    The lines of all files form results as those of one file do. A measurement that comes twice counts once.
    Raises DataError for results of other kinds, and where `read` does.
    """
    results, lines = _split(files)
    other = [result["kind"] for result in results if result["kind"] not in PRODUCTS]
    if other:
        raise DataError(
            f"--merge joins results of {', '.join(PRODUCTS)}; one is of {other[0]}. Leave it out, or leave out --merge."
        )
    families: list[list[dict[str, Any]]] = []
    for result in results + of_lines(lines):
        family = next((own for own in families if same_family(own[0], result)), None)
        if family is None:
            families.append([result])
        else:
            family.append(result)
    return [_joined(family) for family in families]


def _joined(family: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of one kind and problem as one."""
    numpys = [own for result in family for own in result["numpy"]]
    return {
        "kind": family[0]["kind"],
        "rows": joined([row for result in family for row in result["rows"]]),
        "numpy": [own for number, own in enumerate(numpys) if own not in numpys[:number]],
        "machines": alike([machine for result in family for machine in machines(result)]),
    }


def _split(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results of `summa3d bench` in the files, and the lines of `summa3d gemm --json`."""
    results, lines = [], []
    for file in files:
        entries = _entries(file)
        if len(entries) == 1 and "kind" in entries[0]:
            results.append(_checked(entries[0], file))
            continue
        for entry in entries:
            _require(entry, (*ROWS["gemm"], "machine"), f"A line of {file} is not one of `summa3d gemm --json`")
            _require(entry["machine"], MACHINE, f"The machine in a line of {file} is of another version")
        lines += entries
    return results, lines


def of_lines(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that lines form, each with the machines of its own lines."""
    results = grouped(lines)
    for result in results:
        products = [[row[name] for name in IDENTITY] for row in result["rows"]]
        own = [line["machine"] for line in lines if [line[name] for name in IDENTITY] in products]
        result["machines"] = alike(own)
    return results


def alike(on: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """These machines; jobs of a sweep that differ in their nodes and the load only are one machine, with all loads."""
    machines: dict[str, dict[str, Any]] = {}
    for machine in on:
        alike = json.dumps({name: fact for name, fact in machine.items() if name not in (*PLACED, *OF_THE_MOMENT)})
        known = machines.get(alike, {**machine, "loads": []})
        unions = {name: list(dict.fromkeys([*known[name], *machine[name]])) for name in ("hosts", "ranks_per_node")}
        largest = {name: max(known[name], machine[name]) for name in ("nodes", "cores")}
        machines[alike] = {**known, **unions, **largest, "loads": known["loads"] + machine.get("loads", [machine["load"]])}
    return list(machines.values())


def _entries(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one per line."""
    if file.is_dir():
        raise DataError(f"{file} is a folder without points of a sweep. Runs of `summa3d train` are drawn by `summa3d plot`.")
    text = named_text(file)
    try:
        entries = [from_json(text)]
    except ValueError as error:
        try:
            entries = [from_json(line) for line in text.splitlines() if line.strip()]
        except ValueError:
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
