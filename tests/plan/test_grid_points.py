"""Words against bytes on every grid: the points are those of dry runs, and the plot is written where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import jobs
import pytest

from summa3d.plan.grid_points import grid_points, write_points
from summa3d.train import config
from summa3d.train.dry_run import dry_run

SMALL = ["scheme=cuboid", "device=cpu", "model.layers=1", "train.batch=8", "grid.z=4"]


def test_there_is_a_point_for_each_grid_and_it_is_that_of_a_dry_run() -> None:
    loaded = config.load("demo", SMALL)
    points = list(grid_points(loaded))
    grids = [(point.grid["x"], point.grid["y"], point.grid["z"]) for point in points]
    assert sorted(grids) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    for point in points[:2]:
        alone = dry_run(loaded, point.grid)
        assert (point.words, point.peak, point.bound) == (alone.total_words, alone.peak, alone.bound)


def test_grids_that_the_sizes_do_not_fit_are_left_out_and_replicas_stay() -> None:
    narrow = config.load("demo", ["scheme=oned", "device=cpu", "model.layers=1", "grid.y=2", "grid.dp=2"])
    assert [point.grid for point in grid_points(narrow)] == [{"y": 2, "dp": 2}]
    few = config.load("demo", [*SMALL, "model.hidden=8", "model.heads=2"])
    points = list(grid_points(few))
    assert points and all(point.grid["y"] <= 2 for point in points)


def test_the_plot_is_written_in_the_format_of_its_ending(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    loaded = config.load("demo", ["scheme=oned", "device=cpu", "model.layers=1", "grid.y=2"])
    points = list(grid_points(loaded))
    for ending, begins in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        write_points(points, "a title", tmp_path / f"grids.{ending}")
        assert (tmp_path / f"grids.{ending}").read_bytes().startswith(begins)


def test_the_command_draws_beside_its_report_and_refuses_what_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    asked = ["-m", "summa3d", "train", "demo", "--set", "scheme=oned", "--set", "grid.y=2", "--set", "model.layers=1"]
    done = jobs.run_serial([*asked, "--dry-run", "--json", "--plot", "grids.svg"], cwd=tmp_path)
    assert done.status == 0 and json.loads(done.stdout)["ranks"] == 2 and (tmp_path / "grids.svg").stat().st_size > 1000
    for options, words in (
        (["--plot", "grids.svg"], "draws what --dry-run reports"),
        (["--dry-run", "--plot", "a.gif"], "no format"),
        (["--dry-run", "--plot", "a.svg", "--grids", "all", "--ranks", "2"], "--grids prints a table. Give one of them"),
    ):
        refused = jobs.run_serial([*asked, *options], cwd=tmp_path)
        assert refused.status != 0 and words in refused.stderr
