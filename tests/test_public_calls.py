"""`summa3d.dry_run` and `summa3d.find_plans`: what the commands print, as calls that start no MPI."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jobs
import pytest

import summa3d
from summa3d.cli.main import main as cli
from summa3d.errors import ConfigError, GridError, LayoutError

pytest.importorskip("torch")

from summa3d.nn import ModelConfig
from summa3d.train import config
from summa3d.train.dry_run import Report

MODEL = ModelConfig(layers=2, hidden=24, heads=6, sequence=8, vocabulary=40)
SEARCH = ("host", 4, 8)
FIX = {"pp": 1, "scheme": "cuboid"}


def test_no_module_takes_the_name_of_a_call() -> None:
    for module in pkgutil.walk_packages(summa3d.__path__, "summa3d."):
        if not module.name.endswith("__main__") and ".kernels." not in module.name:
            importlib.import_module(module.name)
    assert summa3d.dry_run(MODEL, "z=2").ranks == 2
    assert callable(summa3d.find_plans)


def test_a_dry_run_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["scheme=cuboid", "grid.x=2", "grid.z=2", "train.batch=8", "model.layers=2", "device=cpu"]
    words = [word for one in given for word in ("--set", one)]
    assert cli(["train", "demo", "--dry-run", "--json", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    step = summa3d.dry_run("demo", {"x": 2, "z": 2}, scheme="cuboid", train={"batch": 8}, device="cpu", **{"model.layers": 2})
    assert isinstance(step, Report) and json.loads(json.dumps(step.as_json())) == printed
    assert step.total_words == sum(words for axes in printed["words"].values() for words in axes.values()) > 0
    assert step.one_node is not None and step.one_node.node_axes == ["x", "z"] and step.one_node.peak < step.peak
    assert cli(["train", "demo", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == f"{step}\n"


def test_a_dry_run_takes_a_configuration_a_model_or_a_path_and_a_grid_in_place_of_theirs(tmp_path: Path) -> None:
    loaded = config.load("demo", ["scheme=oned", "grid.y=2", "grid.dp=2", "device=cpu"])
    config.write(config.to_table(loaded), tmp_path / "own.toml")
    same = [summa3d.dry_run(one, ranks_per_node=1) for one in (loaded, tmp_path / "own.toml", str(tmp_path / "own.toml"))]
    assert same[0] == same[1] == same[2] and same[0].grid["dp"] == 2 and same[0].one_node is None
    assert summa3d.dry_run(loaded, "y=4").grid == {"x": 1, "y": 4, "z": 1}  # its dp is gone
    assert summa3d.dry_run(MODEL, "y=3", scheme="oned", dtype="float64").parameters == summa3d.dry_run(MODEL).parameters
    assert summa3d.dry_run(loaded, "pp=2", scheme="serial", train={"accumulate": 2}, ranks_per_node=2).stages[1]["pp"] == 1


@pytest.mark.parametrize(
    ("grid", "settings", "error", "message"),
    [
        ("x=two", {}, ConfigError, "'x=two' is no grid"),
        ("y=2", {"schem": "oned"}, ConfigError, "scheme"),
        ("y=2", {"train": {"bath": 3}}, ConfigError, "train.batch"),
        ("y=2", {"ranks_per_node": 0}, ConfigError, "ranks per node is 0"),
        ("cp=2", {"model": {"sequence": 31}}, LayoutError, "sequence 31 cannot be split over cp"),
        ("z=2", {"scheme": "summa"}, GridError, "summa"),
    ],
)
def test_what_no_run_can_have_is_the_runs_own_error(grid: str, settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        summa3d.dry_run(MODEL, grid, **settings)


def test_plans_are_what_the_command_prints_and_their_configurations_run_dry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    cluster, ranks, batch = SEARCH
    plans = summa3d.find_plans(MODEL, cluster, ranks, batch, fix=FIX, top=2)
    sizes = [f"{name}={getattr(MODEL, name)}" for name in ("layers", "hidden", "heads", "sequence", "vocabulary")]
    words = ["plan", "--model", *sizes, "--cluster", cluster, "--ranks", str(ranks), "--batch", str(batch), "--top", "2"]
    fixed = [word for key, value in FIX.items() for word in ("--fix", f"{key}={value}")]
    assert cli([*words, *fixed, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(plans.as_json())) == printed | {"model": "gpt2"}
    assert len(plans) == 2 and plans[0].seconds == plans.seconds <= plans[1].seconds
    assert str(plans).count("\n") > 2 and plans.explain(2) and 0 < plans.band < 1
    step = summa3d.dry_run(plans.config())
    assert step.ranks == ranks and {axis: size for axis, size in step.grid.items() if size > 1} == plans.grid
    asked = summa3d.find_plans(sizes, cluster, ranks, batch, fix=fixed[1::2], top=1)
    assert str(asked.best) == str(plans.best)
    with pytest.raises(ConfigError, match="numbered from 1"):
        plans.explain(0)
    with pytest.raises(ConfigError, match="nearest is "):
        summa3d.find_plans(MODEL, cluster, ranks, batch, fix={"p": 2})


def test_notebooks_have_tables_and_frames_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    step = summa3d.dry_run(MODEL, "z=2", scheme="cuboid")
    assert step._repr_html_().count("<table>") == 2 and f"{step.total_words:,} words" in step._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"summa3d\[frame\]"):
        step.to_frame()
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    frame = step.to_frame()
    assert list(frame) == ["phase", "axis", "words", "messages", "bytes"] and sum(frame["words"]) == step.total_words


PROGRAM = """
import sys, summa3d
step = summa3d.dry_run("demo", "z=2")
plans = summa3d.find_plans("demo", "host", 2, 8, fix={"pp": 1, "scheme": "cuboid"}, top=1)
from mpi4py import MPI
print(MPI.Is_initialized(), step.ranks, plans.grid != {})
grid = summa3d.Grid(MPI.COMM_WORLD, {"x": 1})
print(MPI.Is_initialized(), grid.size)
"""


def test_neither_starts_mpi_and_a_grid_that_is_made_later_does(tmp_path: Path) -> None:
    alone = {name: value for name, value in jobs.environment().items() if not name.startswith("PMI")}
    alone |= {"SUMMA3D_CACHE": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}  # as in a batch script, which is no rank
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=alone, capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["False", "2", "True", "True", "1"], "")
