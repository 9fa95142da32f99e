"""`summa3d train` and `summa3d generate` as a user starts them: what is printed, where, and how often.

Starts real processes; what the runs compute is tested in tests/train.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jobs
import pytest
from small_runs import assignments, metrics_of, write_corpus

PATIENCE = 120.0


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
    assert "step 6/6" in done.stderr and "0 words moved · arithmetic" in done.stderr
    assert "communication" not in done.stderr + done.stdout  # one rank moves nothing, however long it sleeps
    assert [line["step"] for line in metrics_of(folder)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics_of(folder) if "validation_loss" in line] == [3, 6]


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
    done = summa3d(*arguments, "--set", "train.batch=6")
    assert done.returncode != 0 and "LayoutError" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("train.step=3", ["ConfigError", "'train.step'", "'train.steps'"]),
        ("grid.x=3", ["GridError", "x=3,y=1,z=1", "2 ranks", "x=2,y=1,z=1"]),
        ("train.batch=7", ["LayoutError", "batch 7", "x·y = 2", "6, 8"]),
        ("data.path=nowhere", ["DataError", "'nowhere'", "does not exist"]),
    ],
)
def test_an_error_is_printed_once_for_all_ranks_before_training_starts(tmp_path: Path, change: str, parts: list[str]) -> None:
    run = tmp_path / "run"
    words = settings(write_corpus(tmp_path / "corpus.txt"), grid__x=2)
    done = summa3d("launch", "-n", 2, "train", "demo", "--run", run, *words, "--set", change)
    assert done.returncode != 0
    assert done.stderr.count(parts[0]) == 1 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
    assert len(done.stderr.splitlines()) < 20 and done.stdout == ""  # one screen, Open MPI's own words on an abort included
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--run", "nowhere"], "Name a configuration"),
        (["train", "demo"], "Name the run's folder"),
        (["train", "demo", "--run", "nowhere", "--resume", "--overwrite"], "Give one of them"),
        (["train", "--run", "nowhere", "--resume"], "nowhere/config.toml"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere is not a run folder"),
        (["generate", "nowhere", "--prompt", ""], "--prompt is empty"),
        (["generate", "nowhere", "--prompt", "x", "--top-k", "-1"], "--top-k is -1"),
        (
            ["generate", "nowhere", "--prompt", "x", "--temperature", "nan"],
            "--temperature is nan; it must be at least 0, and finite",
        ),
        (["train", "demo", "--run", "nowhere", "--trace-steps", "1:2"], "Give --trace FILE as well"),
        (["train", "demo", "--dry-run", "--trace", "t.json"], "--dry-run takes no steps"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], words: str) -> None:
    done = summa3d(*arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 3
