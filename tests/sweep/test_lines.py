"""The lines of sweeps: torn ones are told and dropped, each id comes once, and the newest wins."""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from summa3d.errors import DataError
from summa3d.sweep.lines import NAME, append, as_csv, collect, known_in, mend, missing
from summa3d.sweep.points import Point

POINTS = [Point("gemm", 1, {"m": size, "n": 2, "k": 2}) for size in (1, 2, 3)]


def line(point: Point, time: float, **more: Any) -> dict[str, Any]:
    about = {"id": point.id, "what": point.what, "ranks": point.ranks, "config": dict(point.config), "time": time}
    return {**about, "sweep": {"name": "s"}, "series": "a", "words": 5, **more}


def test_a_torn_last_line_is_told_and_dropped_and_its_point_is_missing(tmp_path: Path) -> None:
    append(tmp_path, [line(POINTS[0], 1.0), line(POINTS[1], 2.0)])
    text = (tmp_path / NAME).read_text()
    for cut in (1, 20, len(text.splitlines()[1])):  # without its newline a line may be whole, and is torn all the same
        (tmp_path / NAME).write_text(text[:-cut])
        said: list[str] = []
        assert [one["id"] for one in collect([tmp_path], said.append)] == [POINTS[0].id]
        assert len(said) == 1 and "torn" in said[0]
        mend(tmp_path, said.append)
        append(tmp_path, [line(POINTS[2], 3.0)])
        said.clear()
        assert missing(POINTS, known_in(tmp_path, said.append)) == [POINTS[1]] and not said


def test_of_several_lines_of_an_id_the_newest_is_taken_wherever_it_lies(tmp_path: Path) -> None:
    first, second = tmp_path / "a/ranks-1", tmp_path / "b/ranks-1"
    for folder in (first, second):
        folder.mkdir(parents=True)
    append(first, [line(POINTS[0], 5.0, words=1), line(POINTS[1], 5.0)])
    append(second, [line(POINTS[0], 4.0, words=2), line(POINTS[1], 6.0, error="died"), line(POINTS[2], 6.0)])
    found = {one["id"]: one for one in collect([tmp_path / "a", tmp_path / "b"], print)}
    assert set(found) == {point.id for point in POINTS}
    assert found[POINTS[0].id]["words"] == 1 and found[POINTS[1].id]["error"] == "died"
    assert missing(POINTS, found) == [] and missing(POINTS, found, retry_before=7.0) == [POINTS[1]]
    assert missing(POINTS, found, retry_before=6.0) == []


def test_csv_has_a_column_for_every_key(tmp_path: Path) -> None:
    append(tmp_path, [line(POINTS[0], 1.0, seconds={"min": 1.0, "median": 2.0, "max": 3.0, "all": [1.0, 2.0, 3.0]})])
    append(tmp_path, [line(POINTS[1], 1.0, error="died")])
    rows = list(csv.DictReader(StringIO(as_csv(collect([tmp_path], print)))))
    assert [(row["name"], row["m"], row["seconds.median"], row["error"]) for row in rows] == [
        ("s", "1", "2.0", ""),
        ("s", "2", "", "died"),
    ]


@pytest.mark.parametrize(("text", "message"), [("{}\n", "line 1: this is no line of a sweep"), ("x\n{}\n", "line 1: this is no")])
def test_what_is_no_line_of_a_sweep_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DataError, match=message):
        collect([tmp_path], print)


def test_a_folder_without_points_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There are no points of sweeps in"):
        collect([tmp_path], print)
