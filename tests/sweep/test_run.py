"""Sweeps of blocks and training steps on ranks: words, predictions, tables and plots; job scripts and arrays."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import pytest
from small_runs import shared_corpus

from summa3d.cli.main import main as cli
from summa3d.cli.main import without_mpi
from summa3d.launcher.runtime import SHARE_VARIABLE, THREAD_VARIABLES, usable_cores

BLOCKS = """
kind = "strong"
what = "block"
ranks = [1, 2]
base = {model = {hidden = 24, heads = 6, sequence = 8, layers = 1}, train.batch = 4, grid = "fewest"}
vary.scheme = ["oned", "cuboid"]
rounds = 2
cluster = "frontera-rtx"
published = "points.toml"
"""
POINTS = 'source = "a page"\nseries.oned = [[1, 1.0], [2, 1.5]]\n'
STEPS = """
kind = "grid"
what = "train"
config = "demo"
ranks = [2]
x = "train.accumulate"
rounds = 2
cluster = "host"

[base]
scheme = "oned"
model = {hidden = 24, heads = 6, sequence = 16, layers = 2}
train = {batch = 4, peak_tflops = 0.05}
data.path = "CORPUS"

[[series]]
name = "stages"
base = {grid.pp = 2, train.accumulate = 2}

[[series]]
name = "rows"
base = {grid.dp = 2, train.accumulate = 1}

[[series]]
name = "no x in 1-D"
base = {grid.x = 2}
"""


def written(folder: Path) -> dict[str, str]:
    """Name → path of the files of both sweeps; the corpus beside them."""
    texts = {"blocks": BLOCKS, "steps": STEPS.replace("CORPUS", str(folder / "corpus.txt"))}
    for name, text in {**texts, "points": POINTS}.items():
        (folder / f"{name}.toml").write_text(text)
    return {name: str(folder / f"{name}.toml") for name in texts}


def measured(comm: Any, folder: Path, name: str) -> list[dict[str, Any]]:
    """Measure a sweep on the ranks of `comm` and on fewer; its lines on rank 0, and none on the others."""
    from summa3d.sweep.file import load
    from summa3d.sweep.measure import measure
    from summa3d.sweep.points import expand

    shared_corpus(comm, folder)
    if comm.rank == 0:
        written(folder)
    comm.Barrier()
    sweep = load(str(folder / f"{name}.toml"))
    points, _ = expand(sweep)
    assert measure(sweep, points, comm, folder / name, True, 0.0, lambda text: None) == len(points)
    assert measure(sweep, points, comm, folder / name, True, 0.0, lambda text: None) == 0  # all have a line
    if comm.rank:
        return []
    return [json.loads(line) for file in (folder / name).rglob("points.jsonl") for line in file.read_text().splitlines()]


def sound(line: dict[str, Any]) -> bool:
    assert line["words"] == line["words_formula"] and (line["words"] > 0) == (line["ranks"] > 1), line["label"]
    assert len(line["seconds"]["all"]) == 2 and line["seconds"]["min"] > 0 and sum(line["split"].values()) > 0
    assert line["machine"]["commit"] and line["machine"]["hosts"] and line["machine"]["load"] >= 0
    return line["race"] == 2  # both in turn


@pytest.mark.mpi(sizes=(2,))
def test_blocks_move_the_words_of_their_dry_run_and_are_shown_beside_the_prediction(comm: Any, shared_tmp_path: Path) -> None:
    lines = measured(comm, shared_tmp_path, "blocks")
    assert all(sound(line) and line["predicted"] > 0 and line["row"]["relative_difference"] < 1e-5 for line in lines)
    if comm.rank:
        return
    assert sorted((line["series"], line["ranks"]) for line in lines) == [("cuboid", 1), ("cuboid", 2), ("oned", 1), ("oned", 2)]
    folder = shared_tmp_path / "blocks"
    assert cli(["sweep", "report", str(folder), "--format", "csv", "--format", "png"]) == 0
    rows = list(csv.DictReader(folder.with_suffix(".csv").open()))
    by = {(row["point"].split()[0], row["ranks"]): row for row in rows}
    for scheme in ("oned", "cuboid"):
        one, two = by[scheme, "1"], by[scheme, "2"]
        ratio = float(one["median ms"]) / float(two["median ms"])
        assert float(two["speed-up"]) == pytest.approx(ratio) and float(two["efficiency"]) == pytest.approx(ratio / 2)
        assert two["words/rank"] == two["formula"] and float(two["predicted ms"]) > 0
    assert folder.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.mpi(sizes=(2,))
def test_steps_move_the_words_of_their_dry_run_however_they_are_divided(comm: Any, shared_tmp_path: Path) -> None:
    lines = measured(comm, shared_tmp_path, "steps")
    assert all(sound(line) for line in lines)
    if comm.rank:
        return
    assert sorted((line["series"], line["x"]) for line in lines) == [("rows", 1), ("stages", 2)]
    assert all(line["predicted"] > 0 for line in lines)
    assert len({round(line["loss"], 3) for line in lines}) == 1  # the same steps
    assert cli(["sweep", "report", str(shared_tmp_path / "steps"), "--format", "csv"]) == 0
    rows = list(csv.DictReader((shared_tmp_path / "steps.csv").open()))
    assert "efficiency" not in rows[0] and {row["train.accumulate"] for row in rows} == {"1", "2"}


def test_published_points_are_read_from_beside_the_sweep_or_from_where_a_word_says(tmp_path: Path) -> None:
    from summa3d.sweep.file import load
    from summa3d.sweep.report import published, source

    (tmp_path / "points.toml").write_text(POINTS)
    (tmp_path / "one.toml").write_text(BLOCKS)
    sweep = load(str(tmp_path / "one.toml"))
    other = load("product-strong", [f"published={tmp_path / 'points.toml'}"])
    for found in (sweep, other):
        assert published({"published": dict(found.published)}) == {"oned": [(1, 1.0), (2, 1.5)]}
    assert source({"published": dict(sweep.published)}) == "hollow: published (a page), relative to its own first point"
    old = {"published": {"paper": "optimus", "series": {"oned": "strong, 1-D"}}}
    assert published(old) == {} and "not drawn" in str(source(old))


@pytest.mark.parametrize(
    "text", ["series.a = [[1, 1.0]]", 'source = "a"\nseries.a = [[1]]', 'source = "a"\nseries.a = [[1, 0]]', "source = 'a'"]
)
def test_a_file_without_published_points_is_told_what_to_hold(tmp_path: Path, text: str) -> None:
    from summa3d.errors import ConfigError
    from summa3d.sweep.file import load

    (tmp_path / "points.toml").write_text(text)
    with pytest.raises(ConfigError, match="has no published points; write source"):
        load("product-strong", [f"published={tmp_path / 'points.toml'}"])
    with pytest.raises(ConfigError, match="cannot read the published points"):
        load("product-strong", ["published=/nonexistent.toml"])


def test_products_of_a_sweep_are_shown_as_those_of_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "run", "product-strong", "--dir", str(tmp_path / "s"), "--fewer", "--set", "ranks=1,2"]
    words += ["--set", "m=24", "--set", "n=24", "--set", "k=24", "--set", "rounds=2"]
    done = jobs.run(["-m", "summa3d", *words], 2)
    assert done.status == 0 and "1/1: 1, 2 ranks: chosen" in done.stderr
    assert cli(["sweep", "status", "product-strong", "--dir", str(tmp_path / "s")]) == 0
    assert "the folder holds 2 points of other settings" in capsys.readouterr().out  # the --set of the run is not given
    assert cli(["report", str(tmp_path / "s"), "--format", "csv"]) == 0
    assert "Strong scaling of 24×24×24 nn float32; speed-up and efficiency over serial" in capsys.readouterr().out
    assert cli(["sweep", "collect", str(tmp_path), "-o", str(tmp_path / "all.jsonl")]) == 0
    assert cli(["report", str(tmp_path / "all.jsonl"), "--format", "csv"]) == 0
    one, two = csv.DictReader((tmp_path / "all.csv").open()), csv.DictReader((tmp_path / "s.csv").open())
    assert list(one) == list(two)
    assert cli(["sweep", "collect", str(tmp_path), "-o", str(tmp_path / "all.csv"), "--csv"]) == 0
    assert [row["ranks"] for row in csv.DictReader((tmp_path / "all.csv").open())] == ["1", "2"]


def test_plan_tells_points_predictions_and_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path)
    assert cli(["sweep", "plan", files["blocks"], "--dir", str(tmp_path), "--set", "ranks=2"]) == 0
    said = capsys.readouterr().out
    assert "2 points, " in said and "node-hours of rounds as predicted for frontera-rtx (±10 %)" in said
    assert cli(["sweep", "status", files["steps"], "--dir", str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert found.out.splitlines()[1].split() == ["2", "2", "0", "0", "2"]
    assert found.err.count("refused: no x in 1-D") == 1 and "oned" in found.err
    assert cli(["sweep", "plan", files["steps"], "--json"]) == 0
    assert len({json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()}) == 2


def test_a_sweep_of_which_every_point_is_refused_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--dir", str(tmp_path), "--set", "algorithm=cannon", "--set", "ranks=2,3"]
    for act in ("plan", "run"):
        assert cli(["sweep", act, "product-strong", *settings]) == 1
        said = capsys.readouterr().err
        assert said.count("cannon cannot use") == 2 and "product-strong has no points: 2 refused" in said


@pytest.mark.parametrize("threads", [pytest.param("equal", marks=pytest.mark.wide), "each"])
def test_rank_counts_have_equal_threads_unless_told_otherwise_and_then_a_speed_up(tmp_path: Path, threads: str) -> None:
    cores, folder = usable_cores(), tmp_path / "s"
    words = ["summa3d", "sweep", "run", "product-strong", "--dir", str(folder)]
    settings = ["m=48", "n=48", "k=48", "ranks=1,2", "rounds=6", f"threads={threads}"]
    bare = {name: value for name, value in jobs.environment().items() if name not in (*THREAD_VARIABLES, SHARE_VARIABLE)}
    program = [sys.executable, "-m", *words, *(word for one in settings for word in ("--set", one))]
    ended = subprocess.run(program, env=bare, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for file in folder.rglob("points.jsonl") for line in file.read_text().splitlines()]
    shares = {line["ranks"]: line["row"]["threads"] for line in lines}
    equal = max(1, cores // 2)
    assert shares == {1: equal if threads == "equal" else cores, 2: equal}
    before, _, _ = ended.stderr.partition("1 rank on")
    assert (f"{shares[1]} BLAS thread" in before) == (threads != "each") and ("as 2 on" in before) == (threads == "equal")
    assert cli(["sweep", "report", str(folder), "--format", "csv", "--no-plots"]) == 0
    one, two = csv.DictReader(folder.with_suffix(".csv").open())
    medians = {line["ranks"]: line["row"]["seconds"]["median"] for line in lines}
    if shares[1] == shares[2]:
        assert float(two["speed-up"]) == pytest.approx(medians[1] / medians[2]) and one["speed-up"] == "1.0"
    else:
        assert two["speed-up"] == ""


def test_points_that_no_sweep_has_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--ranks", "1,7"], "--ranks 7: "), (["--only", "abc"], "--only abc: ")):
        assert cli(["sweep", "run", "product-strong", "--dir", str(tmp_path), "--set", "ranks=1,2", *words]) == 1
        assert f"{message}product-strong has no such point; it has " in capsys.readouterr().err
    assert cli(["sweep", "submit", "product-strong", "--dir", "/proc/none"]) == 1
    assert "/proc/none cannot be written" in capsys.readouterr().err


def test_a_job_is_written_for_each_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "ranks=1,2,4,8,16", "--set", "ranks_per_node=4", "--set", "limit=01:00:00"]
    assert cli(["sweep", "submit", "product-strong", "--dir", str(tmp_path), *settings]) == 0
    assert capsys.readouterr().out.split() == [word for nodes in (1, 2, 4) for word in ("sbatch", f"{tmp_path}/job-{nodes}.sh")]
    text = (tmp_path / "job-1.sh").read_text()
    assert {"#SBATCH --array=0-2", "#SBATCH --nodes=1", "#SBATCH --ntasks-per-node=4"} <= set(text.splitlines())
    assert text.splitlines()[-1].endswith("--set limit=01:00:00 --ranks 1,2,4 --array")
    assert "#SBATCH --array=0-0" in (tmp_path / "job-4.sh").read_text()


@pytest.mark.parametrize(("task", "counts"), [("0", [1]), ("2", [4])])
def test_a_task_of_an_array_runs_the_rank_count_of_its_place(
    task: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from summa3d.cli.main import parser_of
    from summa3d.cli.sweep import TASK, chosen_counts
    from summa3d.errors import ConfigError

    args = parser_of("sweep").parse_args(["run", "product-strong", "--ranks", "1,2,4", "--array"])
    with pytest.raises(ConfigError, match="is not set"):
        chosen_counts(args, [1])
    monkeypatch.setenv(TASK, task)
    assert chosen_counts(args, [1]) == counts
    monkeypatch.setenv(TASK, "3")
    with pytest.raises(ConfigError, match="SLURM_ARRAY_TASK_ID is 3"):
        chosen_counts(args, [1])


def test_only_run_on_ranks_of_a_launcher_starts_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_SIZE", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert without_mpi("sweep", ["run", "x"]) and without_mpi("sweep", ["plan", "x"]) and not without_mpi("gemm", [])
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    assert not without_mpi("sweep", ["run", "x"]) and without_mpi("sweep", ["plan", "x"])
