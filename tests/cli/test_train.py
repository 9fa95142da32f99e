"""`summa3d train` and `summa3d generate` as a user starts them: what is printed, where, and how often.

Starts real processes; what the runs compute is tested in tests/train.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios
from math import prod
from pathlib import Path

import jobs
import pytest
from small_runs import assignments, metrics_of, write_corpus

from summa3d.cli.train import beside_prediction, report
from summa3d.plan.grids import seconds_of
from summa3d.plan.pick import host
from summa3d.train import config as configuration

PATIENCE = 300.0


def summa3d(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [jobs.python(), "-m", "summa3d", *map(str, arguments)]
    # os.environ by name: a pytest in which some module has initialised Open MPI holds more in the C library's environment
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ))


def settings(corpus: Path | str, **changes: object) -> list[str]:
    return [part for one in assignments(corpus, **changes) for part in ("--set", one)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a finished run, and what the command printed."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(folder / "corpus.txt")
    return folder, summa3d("train", "demo", "--run", folder / "run", *settings(corpus, train__sample_tokens=8))


def test_a_run_ends_with_a_sample_and_says_where_the_plot_is(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = trained
    assert done.returncode == 0, done.stderr
    assert "sample:\n  def " in done.stdout and f"plot: {folder}/run/loss.png" in done.stdout
    assert (folder / "run" / "loss.png").is_file()
    assert "step 6/6 100%" in done.stderr and "0 words moved" in done.stdout and "MFU" in done.stdout
    doing = ("encoding the corpus", "building the model", "13,800 parameters", "step 1/6", "sampling 8 tokens")
    places = [done.stderr.index(what) for what in doing]
    assert places == sorted(places) and max(map(len, (done.stderr + done.stdout).splitlines())) <= 100
    assert "communication" not in done.stderr + done.stdout  # one rank moves nothing, however long it sleeps
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics_of(folder) if "validation_loss" in line] == [3, 6]


def test_launch_tells_rank_0_of_its_terminal(tmp_path: Path) -> None:
    words = settings(write_corpus(tmp_path / "corpus.txt"), grid__y=2)
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    command = [jobs.python(), "-m", "summa3d", "launch", "-n", "2", "train", "demo", "--run", str(tmp_path / "run"), *words]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    said = bytearray()
    with contextlib.suppress(OSError):  # the terminal's end, on Linux
        while piece := os.read(master, 4096):
            said += piece
    assert job.wait(PATIENCE) == 0 and job.stdout is not None and b"step 6" in job.stdout.read()
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", said.decode()))
    shown = [line.rstrip() for line in lines if line.startswith("step ")]
    assert b"\x1b[2K" in said and len({line.split()[1] for line in shown}) == 6  # every step, and not one in ten seconds
    assert max(map(len, shown)) < 80


def test_resume_needs_no_configuration_and_json_is_one_line(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = trained
    before = metrics_of(folder)
    done = summa3d("train", "--run", folder / "run", "--resume", "--json", "--set", "train.steps=8")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["step"], summary["steps_taken"], summary["ranks"]) == (8, 2, 1)
    before[-1]["resumed"] = True  # the plot marks it
    assert metrics_of(folder)[:6] == before and len(metrics_of(folder)) == 8
    assert summary["validation_loss"] == metrics_of(folder)[-1]["validation_loss"]
    assert summary == json.loads((folder / "run" / "summary.json").read_text())
    low = report({**summary, "mfu": None, "model_flops_per_second": 2e9, "peak_flops_per_second": 1e9})
    assert "model FLOPs 2.0 Gflop/s, no MFU: the peak is too low, 1.0 Gflop/s, as stated" in low
    again = summa3d("train", "--run", folder / "run", "--resume", "--set", "train.steps=8")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == f"nothing to do: {folder / 'run'} has taken its 8 steps; raise train.steps to continue\n"
    named = summa3d("train", "demo", "--run", folder / "run", "--resume", "--set", "train.steps=8")  # of another size
    assert re.search(r"demo replaces settings of \S+: .*data.path \S+ → stdlib.*; without a configuration", named.stderr)


def test_a_runs_end_sets_the_predicted_beside_the_measured_step(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = trained
    summary = {**json.loads((folder / "run/summary.json").read_text()), "steps_taken": 8, "step_seconds": 4.0}
    config, long = configuration.load(str(folder / "run/config.toml")), {**summary, "training_seconds": 20.0}
    line, price = beside_prediction(config, long, 1, 2), seconds_of(config, host(1, 2, "measured"))
    assert line == f"a step took 0.5 s, predicted {price:.2g} s on cluster host, an assumed machine" and line in report(
        long, line
    )
    assert beside_prediction(config, {**long, "training_seconds": 19.0}, 1, 2) == ""
    assert "not predicted: no cluster describes this device" in beside_prediction(config, {**long, "device": "cuda"}, 1, 2)


def test_resume_without_a_run_names_the_runs_that_there_are(
    trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    for name in ("own", "jl", "none"):
        (tmp_path / name).mkdir()
    shutil.copy(trained[0] / "run/config.toml", tmp_path / "own")
    (tmp_path / "jl/checkpoints/step-4").mkdir(parents=True)
    for words in (["train"], ["train", "demo"], ["train", "demo", "--dry-run"]):
        (done,) = jobs.commands([[*words, "--run", tmp_path / "nosuch", "--resume"]], 2)
        assert done.status == 1 and done.stdout == ""
        listed = f"Runs in {tmp_path}: jl, own. --start-or-resume begins one where there is none.\n"
        assert done.stderr == f"ConfigError: {tmp_path}/nosuch holds no run. {listed}"
    assert not (tmp_path / "nosuch").exists()


def test_start_or_resume_starts_a_run_and_then_continues_it(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    line = ["train", "demo", "--run", tmp_path / "run", "--start-or-resume", "--json", *settings(corpus, train__sample_tokens=0)]
    first, then = (json.loads(done.stdout) for done in jobs.commands([line, [*line, "--set", "train.steps=8"]], 1))
    assert (first["steps_taken"], then["steps_taken"]) == (6, 2)


def test_generate_continues_the_prompt_the_same_way_for_the_same_seed(
    trained: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = trained
    plain = summa3d("generate", folder / "run", "--prompt", "abc ", "--tokens", 12, "--seed", 4)
    assert plain.returncode == 0, plain.stderr
    found = json.loads(summa3d("generate", folder / "run", "--prompt", "abc ", "--tokens", 12, "--seed", 4, "--json").stdout)
    assert found["text"].startswith("abc ") and found["tokens"] == 12
    assert plain.stdout == found["text"] + "\n"


def test_a_dry_run_says_what_each_rank_would_hold_and_needs_neither_ranks_nor_folder() -> None:
    arguments = ["train", "demo", "--dry-run", "--set", "grid.x=2", "--set", "grid.y=2", "--set", "grid.z=2"]
    found = json.loads(summa3d(*arguments, "--json").stdout)
    assert (found["ranks"], found["scheme"]) == (8, "cuboid") and found["bytes"]["peak"] > found["bytes"]["parameters"]
    table = summa3d(*arguments).stdout
    assert all(term in table for term in found["bytes"]) and f"{found['bytes']['peak'] / 2**20:,.2f}" in table
    done = summa3d(*arguments, "--set", "train.batch=6", "--set", "model.family=mixtral")
    assert done.returncode != 0 and "LayoutError" in done.stderr and "Traceback" not in done.stderr


def chosen_ranks(said: str) -> list[int]:
    """The numbers of ranks of the grids that the command says it has chosen: replicas, and axes of summa."""
    grids = re.findall(r"summa3d train: scheme summa, grid (\S+): ", said)
    return [prod(int(axis.partition("=")[2]) for axis in grid.split(",")) for grid in grids]


def test_without_a_grid_one_is_chosen_and_chosen_again_on_other_ranks(tmp_path: Path) -> None:
    """Also the folder of the run has a default, and a scheme that is given stays."""
    corpus = write_corpus(tmp_path / "corpus.txt")
    small = ("train.steps=2", "train.evaluate_every=0", "train.batch=12", f"data.path={corpus}", "model.layers=1")
    words = [part for one in ("scheme=summa", *small) for part in ("--set", one)]
    first = subprocess.run(
        [jobs.python(), "-m", "summa3d", "launch", "-n", "3", "train", "llama-tiny", *words],
        capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path, env=jobs.environment(),
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert chosen_ranks(first.stderr) == [3] and ", an assumed machine, " in first.stderr
    run = tmp_path / "runs" / "llama-tiny"
    then = summa3d("launch", "-n", 2, "train", "--run", run, "--resume", "--set", "train.steps=3")
    assert then.returncode == 0 and chosen_ranks(then.stderr) == [2], then.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    text = summa3d("launch", "-n", 3, "generate", run, "--prompt", "ab", "--tokens", 3)
    assert text.stdout.startswith("ab") and text.stderr.count("summa3d generate: scheme summa, grid x=3,y=1: ") == 1, text.stderr
    other = summa3d("train", "--run", run, "--resume", "--set", "grid.x=5")
    assert other.returncode != 0 and "--set grid.x=1 --set grid.y=1 gives the run another grid." in other.stderr
    refused = summa3d("launch", "-n", 5, "train", "demo", "--run", tmp_path / "other", *words, "--set", "scheme=serial")
    assert refused.returncode != 0 and "GridError: No grid of 5 ranks fits" in refused.stderr
    assert "Traceback" not in refused.stderr and not (tmp_path / "other").exists()


UNFIT = [
    ("grid.x=3", ["GridError", "x=3,y=1,z=1", "2 ranks", "x=2,y=1,z=1"]),
    ("train.step=3", ["ConfigError", "'train.step'", "'train.steps'"]),
    ("train.batch=7 model.family=mixtral", ["LayoutError", "batch 7", "x·y = 2", "6, 8"]),
    ("data.path=nowhere", ["DataError", "'nowhere'", "does not exist"]),
]


def test_an_error_is_printed_once_for_all_ranks_before_training_starts(tmp_path: Path) -> None:
    """The last one is that of one rank, of which the others are told."""
    words = settings(write_corpus(tmp_path / "corpus.txt"), grid__x=2)
    changes = [[word for one in change.split() for word in ("--set", one)] for change, _ in UNFIT]
    lines = [["train", "demo", "--run", tmp_path / "run", *words, *change] for change in changes]
    ended = jobs.commands(lines, 2)
    for line, done, (_, parts) in zip(lines, ended, UNFIT, strict=True):
        if line is lines[-1]:
            alone = summa3d("launch", "-n", 2, *line)
            assert alone.returncode != 0 and alone.stdout == "" and "Traceback" not in alone.stderr
            assert alone.stderr.count(parts[0]) == 1 and all(part in alone.stderr for part in parts), alone.stderr
            assert len(alone.stderr.splitlines()) < 20  # one screen, Open MPI's own words on an abort included
        assert done.status != 0 and done.stdout == "" and done.stderr.count(parts[0]) == 1, done
        assert all(part in done.stderr for part in parts), done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


SENSELESS = [
    (["train", "--run", "nowhere"], "Name a configuration"),
    (["train", "demo", "--ranks", "4"], "--ranks is for --dry-run"),
    (["train", "demo", "--run", "nowhere", "--resume", "--start-or-resume"], "Give one of them"),
    (["train", "demo", "--run", "nowhere", "--start-or-resume", "--overwrite"], "Give one of them"),
    (["train", "--run", "nowhere", "--start-or-resume"], "nowhere holds no run"),
    (["train", "demo", "--run", "nowhere", "--resume", "--overwrite"], "Give one of them"),
    (["train", "--run", "nowhere", "--resume"], "nowhere holds no run. There are no runs in ."),
    (["generate", "nowhere", "--prompt", "x"], "nowhere is not a run folder"),
    (["generate", "nowhere", "--prompt", ""], "--prompt is empty"),
    (["generate", "nowhere", "--prompt", "x", "--top-k", "-1"], "--top-k is -1"),
    (["generate", "nowhere", "--prompt", "x", "--temperature", "nan"], "--temperature is nan; it must be at least 0, and finite"),
    (["train", "demo", "--run", "nowhere", "--trace-steps", "1:2"], "Give --trace FILE as well"),
    (["train", "demo", "--dry-run", "--trace", "t.json"], "--dry-run takes no steps"),
    (["train", "demo", "--dry-run", "--ranks", "8", "--set", "grid.x=2"], "Grid x=2,y=1,z=1 has 2 places, but there are 8 ranks"),
]


def test_arguments_that_make_no_sense_are_refused() -> None:
    for done, (_, words) in zip(jobs.commands([line for line, _ in SENSELESS], 1), SENSELESS, strict=True):
        assert done.status != 0 and done.stdout == "", done
        assert words in done.stderr and len(done.stderr.splitlines()) <= 3, done.stderr
    for line, words in SENSELESS[6:8]:
        alone = summa3d(*line)
        assert alone.returncode != 0 and alone.stdout == ""
        assert words in alone.stderr and "Traceback" not in alone.stderr and len(alone.stderr.splitlines()) <= 3


PIPELINE = ("grid.pp=4", "pipeline.schedule=interleaved", "pipeline.chunks=2", "model.layers=8")
MISFITS = [
    (("train.accumulate=5",), "train.batch 24 cannot be divided into train.accumulate = 5 equal micro-batches. Values of"),
    (("grid.dp=5",), "grid.dp = 5 replicas. Batches that fit: 20, 25, 30. Values of grid.dp that fit batch 24: 1, 2, 3, 4, 6"),
    ((*PIPELINE, "train.accumulate=2"), "2 is no multiple of 4. Numbers of micro-batches that fit: 4. Schedule 1f1b takes any."),
    (("grid.pp=2", "model.layers=1"), "1 layer cannot fill the 2 stages of 2 pipeline ranks × 1 chunk. What fits: 1 rank"),
    (
        ("grid.pp=2", "grid.dp=2", "grid.y=2", "scheme=oned"),
        "Grid x=1,y=2,z=1,dp=2,pp=2 has 8 places, but there are 6 ranks. Start 8 ranks, or choose a grid of 6: ",
    ),
    (
        ("grid.pp=2", "grid.dp=2"),
        "6 ranks cannot be divided into 4 equal parts (grid.cp 1 · grid.ep 1 · grid.dp 2 · grid.pp 2). Numbers of ranks that",
    ),
    (("grid.pp=2", "pipeline.schedule=ifib"), "there is no schedule 'ifib'; did you mean '1f1b'? Schedules: gpipe, 1f1b"),
    (
        ("grid.ep=2",),
        "grid.ep is 2, but gpt2 has no experts to share. Set grid.dp to 2 instead.",
    ),
]
"""Settings of `train demo`, and what is said of them."""
EACH = """
import json, sys
from summa3d.cli.main import _run
from summa3d.errors import Summa3dError
for words in json.loads(sys.argv[1]):
    try:
        _run("train", words)
    except Summa3dError as error:
        print(json.dumps(str(error)))
"""
"""The command several times in one process."""


def test_pipelines_and_replicas_that_do_not_fit_are_told_in_one_line() -> None:
    commands = []
    for changes, _ in MISFITS:
        ranks = ["--ranks", "6"] if any("grid.dp=2" in change for change in changes) else []
        commands.append(["demo", "--dry-run", *ranks, *[part for change in changes for part in ("--set", change)]])
    done = subprocess.run([jobs.python(), "-c", EACH, json.dumps(commands)], capture_output=True, text=True, timeout=PATIENCE)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(said) == len(MISFITS), done.stdout + done.stderr
    for (_, words), message in zip(MISFITS, said, strict=True):
        assert words in message and "\n" not in message
    alone = summa3d("train", *commands[-1])
    assert alone.returncode == 1 and alone.stdout == "" and alone.stderr == f"ConfigError: {said[-1]}\n"


MIXTURE = ("model.family=mixtral", "model.layers=2", "model.experts=3", "model.experts_per_token=2", "train.batch=4")
TAKES = "whole numbers from 0, [layers of experts, experts] = [2, 3], or [ranks, micro-batches, layers, experts] = [2, 1, 2, 3]"
LOADS = [
    (None, (), "file has no load: [Errno 2] No such file or directory"),
    ("[[1, 2", (), "It is a JSON file of counts, or the metrics.jsonl of a mixture."),
    ("[[8, 8, 8]]", (), f"The load has the shape [1, 3] of int64; it is {TAKES}"),
    ("[[8, 8, 8], [8, 8]]", (), TAKES),
    ("[[8, 8, 8], [9, 9, -2]]", (), TAKES),
    ("[[8, 8, 8], [8, 8, 8.5]]", (), f"The load has the shape [2, 3] of float64; it is {TAKES}"),
    (
        "[[8, 8, 8], [8, 8, 8]]",
        ("model.family=gpt2", "model.experts=none", "model.experts_per_token=none"),
        "gpt2 has no experts to share",
    ),
    ("[[8, 8, 8], [8, 8, 8]]", ("model.experts_per_token=4",), "experts_per_token is 4"),
    ("[[8, 8, 8], [8, 8, 8]]", ("model.moe.capacity=0",), "model.moe.capacity is 0.0"),
]
"""What a file of --load holds, settings of `train demo`, and what is said of them."""


def test_mixtures_and_loads_that_cannot_be_are_told_in_one_line_and_pipelines_take_a_load(tmp_path: Path) -> None:
    files, commands = [tmp_path / f"{number} file" for number in range(len(LOADS))], []
    for file, (text, changes, _) in zip(files, LOADS, strict=True):
        if text is not None:
            file.write_text(text)
        words = [part for change in (*MIXTURE, *changes, "grid.ep=2") for part in ("--set", change)]
        commands.append(["demo", "--dry-run", "--ranks", "2", "--load", str(file), *words])
    commands.append(["demo", "--dry-run", "--load", str(files[-1]), "--grids", "all"])
    done = subprocess.run([jobs.python(), "-c", EACH, json.dumps(commands)], capture_output=True, text=True, timeout=PATIENCE)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(said) == len(commands), done.stdout + done.stderr
    for words, message in zip([*(words for *_, words in LOADS), "--load is of one grid"], said, strict=True):
        assert words in message and "\n" not in message
    pipeline = [part for change in (*MIXTURE, "grid.pp=2", "grid.ep=2", "model.hidden=48") for part in ("--set", change)]
    moved = []
    for load in ("[[64, 0, 0], [0, 64, 0]]", "[[32, 43, 53], [128, 0, 0]]"):
        files[0].write_text(load)
        run = summa3d("train", "demo", "--dry-run", "--json", "--ranks", 4, "--load", files[0], *pipeline)
        moved.append(sum(axes.get("ep·x·y", 0) for axes in json.loads(run.stdout)["words"].values()))
    assert moved[1] - moved[0] == 2 * 48 * (128 - 64) / 2  # forward and backward, half of a layer's rows come from the other rank
