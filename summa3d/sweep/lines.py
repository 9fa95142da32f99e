"""The lines of a sweep: one JSON object a point, appended and synchronized, read again by their ids."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..files import check_no_link, from_json, named_text, no_follow
from .file import flat
from .points import Point

NAME = "points.jsonl"
RUNNING = "running.json"
SweepLine = dict[str, Any]
Say = Callable[[str], None]
NEEDED = ("id", "sweep", "what", "ranks", "config", "time")
COLUMNS = ("id", "name", "what", "ranks", "series", "seconds.min", "seconds.median", "seconds.max", "predicted", "words")
"""The first columns of CSV; those of the configuration and the error follow."""


def folder_of(directory: Path, ranks: int) -> Path:
    """The folder of what starts of `ranks` ranks write."""
    return directory / f"ranks-{ranks}"


def append(folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to the folder's file, and wait until each of them is on disk."""
    made = not (folder / NAME).exists()
    with open(folder / NAME, "ab", opener=no_follow) as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    if made:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)  # the name of a new file
        os.close(descriptor)


def mend(folder: Path, say: Say) -> None:
    """Cut off an incomplete last line, of a writer that was killed; the caller holds the folder's lease."""
    file = folder / NAME
    check_no_link(file)
    text = file.read_bytes() if file.exists() else b""
    end = text.rfind(b"\n") + 1
    if end < len(text):
        say(f"{file}: the last line is torn and was dropped ({len(text) - end} bytes); its point is measured again.")
        os.truncate(file, end)


def read(file: Path, say: Say) -> list[SweepLine]:
    """The lines of a file. An incomplete last line is reported and dropped. Raises DataError for what is no line of a sweep."""
    result = []
    rows = named_text(file).splitlines(keepends=True)
    for number, row in enumerate(rows, 1):
        try:
            line = from_json(row)
            incomplete = not row.endswith("\n")
        except ValueError:
            line, incomplete = None, number == len(rows)
        if incomplete:
            say(f"{file}: the last line is torn and was dropped.")
        elif not isinstance(line, dict) or any(key not in line for key in NEEDED):
            raise DataError(f"{file}, line {number}: this is no line of a sweep (a JSON object with {', '.join(NEEDED)}).")
        else:
            result.append(line)
    return result


def collect(places: Sequence[Path], say: Say) -> list[SweepLine]:
    """The lines of files, and of all sweeps in folders: of each id the newest, in the order of their first measurement.

    Raises DataError where there are none, and as `read` does.
    """
    files = [file for place in places for file in (sorted(place.rglob(NAME)) if place.is_dir() else [place])]
    newest: dict[str, SweepLine] = {}
    for line in (line for file in files for line in read(file, say)):
        known = newest.get(line["id"])
        if known is None or line["time"] >= known["time"]:
            newest[line["id"]] = line
    if not newest:
        raise DataError(f"There are no points of sweeps in {', '.join(map(str, places))}.")
    return list(newest.values())


def known_in(directory: Path, say: Say) -> dict[str, SweepLine]:
    """id → the newest line, of all that is in the folder of a sweep; nothing before its first run."""
    return {line["id"]: line for line in collect([directory], say)} if any(directory.rglob(NAME)) else {}


def missing(points: Sequence[Point], known: Mapping[str, SweepLine], retry_before: float = 0.0) -> list[Point]:
    """The points without a line, and those whose line is an error of an earlier time than `retry_before`."""

    def is_left(line: SweepLine | None) -> bool:
        return line is None or ("error" in line and line["time"] < retry_before)

    return [point for point in points if is_left(known.get(point.id))]


def as_csv(lines: Sequence[SweepLine]) -> str:
    """The lines as CSV: a row a point, a column for every key of a configuration."""
    rows = [{**flat({key: line[key] for key in line if key != "config"}), **flat(line["config"])} for line in lines]
    for row, line in zip(rows, lines, strict=True):
        row["name"] = line["sweep"]["name"]
    keys = dict.fromkeys([*COLUMNS, *(key for line in lines for key in flat(line["config"])), "words_formula", "error"])
    out = StringIO()
    writer = csv.DictWriter(out, list(keys), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
