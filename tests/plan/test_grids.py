"""Grids of one configuration in one table: each row is its dry run, in the order of predicted seconds, or says why not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jobs
import pytest

from summa3d.cluster import load as cluster
from summa3d.errors import ConfigError
from summa3d.plan.grids import asked_grids, compare
from summa3d.plan.pick import pick
from summa3d.plan.search.memory import fitting
from summa3d.train import config as configuration
from summa3d.train import progress
from summa3d.train.config import SCHEMES
from summa3d.train.dry_run import dry_run

SMALL = ["model.layers=1", "model.hidden=48", "model.heads=6", "model.sequence=32", "device=cpu"]
HOST = cluster("host")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> configuration.Config:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    return configuration.load("demo", SMALL)


def test_each_row_is_its_dry_run_and_rows_are_in_the_order_of_seconds(config: configuration.Config) -> None:
    asked = asked_grids("x=2;dp=2;scheme=oned,y=2;scheme=summa,y=3;scheme=oned,y=2,dp=2", config, 2, True)
    found = compare(config, asked, 2, 2, HOST)
    *numbers, three, four = found.rows
    assert [(one.scheme, one.reason) for one in (three, four)] == [
        ("summa", "it has 3 ranks, not 2"),
        ("oned", "it has 4 ranks, not 2"),
    ]
    assert [one.seconds for one in numbers] == sorted(one.seconds for one in numbers) and len(numbers) == 3
    for one in numbers:
        dry = dry_run(config, one.grid, ranks_per_node=2, scheme=one.scheme)
        assert (one.words, one.messages) == (dry.total_words, sum(sum(axes.values()) for axes in dry.messages.values()))
        assert one.peak == dry.need and one.held == sum(dry.bytes[term] for term in ("parameters", "gradients", "optimizer"))
    picked = pick(config, 2, ["oned"], HOST)
    assert picked.grid["y"] == 2 and found.limit is None  # the memory of an assumed host is no limit


def test_all_names_every_grid_once_with_every_number_of_replicas(config: configuration.Config) -> None:
    every = asked_grids("all", config, 6, True)
    assert len({(name, tuple(sizes.items())) for name, sizes in every}) == len(every)
    sizes = [sizes for _, sizes in every]
    assert all(one["x"] * one["y"] * one["z"] * one.get("d", 1) * one["dp"] == 6 for one in sizes)
    assert {one["dp"] for one in sizes} == {1, 2, 3, 6}
    cuboids = {(one["x"], one["y"], one["z"]) for name, one in every if name == "cuboid" and one["dp"] == 1}
    assert cuboids >= {(1, 2, 3), (2, 3, 1), (6, 1, 1), (1, 1, 6)} and {name for name, _ in every} <= {*SCHEMES}
    assert {name for name, _ in asked_grids("all", config, 6, False)} == {"cuboid"}


def test_what_a_memory_cannot_hold_and_what_sizes_do_not_divide_is_said(config: configuration.Config) -> None:
    asked = asked_grids("x=2;scheme=oned,y=4", config, 2, True)
    roomy, tight = (compare(config, asked[:1], 2, 2, None, memory).rows[0] for memory in (4e9, 1.345e9))
    assert roomy.reason == "" and roomy.seconds is None and "MiB of" in tight.reason and tight.words == roomy.words
    (other,) = compare(config, [("oned", {"x": 4})], 4, 4, None).rows
    assert other.words is None and other.reason.startswith("The oned scheme cannot use the grid x=4")


@pytest.mark.parametrize("text", ["", "x", "x=2;", "scheme=oned", "scheme=one,y=2", "x=2.5"])
def test_what_names_no_grid_is_refused(config: configuration.Config, text: str) -> None:
    with pytest.raises(ConfigError, match="is no grid; write all"):
        asked_grids(text, config, 2, True)


def test_a_memory_less_its_reserve_holds_what_fits() -> None:
    room = 40e9 - 0.04 * 40e9 - 1.2 * 2**30
    assert fitting(room, 40e9).fits and not fitting(room + 1, 40e9).fits
    assert str(fitting(30 * 2**30, 40e9)) == "fits 37.25 GiB: 30.00 GiB on a rank, and 2.69 GiB kept free"
    with pytest.raises(ConfigError, match="hold no model"):
        fitting(1, 1e9)


def test_the_command_prints_a_table_or_json_and_its_options_are_of_dry_runs() -> None:
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        command = [jobs.python(), "-m", "summa3d", "train", "demo", *[part for one in SMALL for part in ("--set", one)], *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    grids = ["--dry-run", "--grids", "x=2;dp=2;x=3", "--memory", "2GB"]
    text, lines = said(*grids), json.loads(said(*grids, "--json", "--cluster", "selene").stdout)
    assert text.returncode == 0 and text.stderr == ""
    rows = text.stdout.splitlines()
    assert rows[0].startswith("2 ranks, 2 a node; seconds by cluster ") and "it has 3 ranks, not 2" in rows[-1]
    assert lines["cluster"] == "selene" and lines["limit"] == 2e9 * 0.96 - 1.2 * 2**30 and len(lines["rows"]) == 3
    one = json.loads(said("--dry-run", "--json", "--memory", "2GB").stdout)
    assert one["memory"]["fits"] and one["memory"]["need"] == max(one["bytes"]["peak"], 0) + one["bytes"]["node"]
    assert "--grids is for --dry-run" in said("--grids", "all").stderr
    assert "give --ranks N" in said("--dry-run", "--grids", "all").stderr


def test_a_long_command_says_how_far_it_is_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    tell = progress.Pulse("train").of("grid")
    for done in range(13):
        tell(done, 48)
        now[0] += 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines() == [
        f"summa3d train: grid {done + 1} of 48, about {left} left, {so_far} so far"
        for done, left, so_far in ((4, "2:12", "0:12"), (8, "2:00", "0:24"), (12, "1:48", "0:36"))
    ]
    silent = progress.Pulse("train", speak=False)
    now[0] += 100
    silent.say("nothing")
    assert capsys.readouterr().err == ""
