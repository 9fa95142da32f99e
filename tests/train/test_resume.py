"""Runs: the same on every grid, the same when interrupted, and continued on another grid."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import devices
import pytest
import torch
from mpi4py import MPI
from small_runs import metrics_of, shared_corpus, small_config, train_small

from summa3d.comm.grid import Grid
from summa3d.errors import ConfigError, Summa3dError
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.config import to_table
from summa3d.train.loop import train
from summa3d.train.prepare import prepare, rule_before, write_config

GRIDS = {1: (1, 1, 1), 2: (1, 2, 1), 8: (2, 2, 2)}
MEASURED = (
    *("tokens_per_second", "seconds", "words_per_rank", "words_by_axis"),
    *("arithmetic_share", "communication_share", "idle_share", "waited_seconds", "exposed_communication"),
    *("model_flops_per_second", "mfu"),
)


def grid_of(size: int) -> dict[str, object]:
    return {f"grid__{name}": length for name, length in zip("xyz", GRIDS[size], strict=True)}


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics lines without what depends on the machine."""
    return [{key: value for key, value in line.items() if key not in (*MEASURED, "resumed")} for line in metrics_of(folder)]


@pytest.mark.mpi(sizes=(1, 2, 8))
def test_a_resumed_run_ends_with_the_numbers_of_an_uninterrupted_one(comm: Any, shared_tmp_path: Path) -> None:
    whole, halves = shared_tmp_path / "whole", shared_tmp_path / "halves"
    if comm.rank == 0:
        whole.mkdir()
        halves.mkdir()
    comm.Barrier()
    grid = {**grid_of(comm.size), "dtype": "float32", "train__batch": 24, "train__accumulate": 2, "train__background": False}
    train_small(comm, whole, **grid)
    interrupted = Interrupted(after=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("summa3d.train.loop.take_step", interrupted)
        with pytest.raises(Summa3dError, match="interrupted"):
            train_small(comm, halves, **grid)
    assert checkpoint.newest(halves / "run" / "checkpoints") == halves / "run" / "checkpoints" / "step-4"
    summary = train_small(comm, halves, resume=True, **grid)
    comm.Barrier()
    assert numbers(halves) == numbers(whole)
    assert [line["step"] for line in numbers(halves)] == [1, 2, 3, 4, 5, 6]
    assert summary["steps_taken"] == 2
    assert summary["validation_loss"] == numbers(whole)[-1]["validation_loss"]


@pytest.mark.mpi(sizes=(1,))
def test_what_a_run_writes_takes_the_place_of_a_fifo(comm: Any, shared_tmp_path: Path) -> None:
    run = shared_tmp_path / "run"
    train_small(comm, shared_tmp_path, train__steps=2)
    for name in ("config.toml", "metrics.tmp", "summary.json", "loss.png"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)  # a write into which waits for a reader
    train_small(comm, shared_tmp_path, resume=True, train__steps=3)
    assert [line["step"] for line in metrics_of(shared_tmp_path)] == [1, 2, 3]
    for name in ("config.toml", "summary.json", "loss.png"):
        assert (run / name).is_file()
    assert not [file for file in run.iterdir() if file.name.startswith(".")]


class Interrupted:
    """A `take_step` that fails once, after so many steps, on all ranks."""

    def __init__(self, after: int) -> None:
        from summa3d.train.loop import take_step

        self.after, self.take_step = after, take_step

    def __call__(self, run: Any, number: int) -> Any:
        if number > self.after:
            raise Summa3dError("interrupted")
        return self.take_step(run, number)


@pytest.mark.mpi(sizes=(8,))
def test_a_checkpoint_of_eight_ranks_goes_on_on_two_and_on_one(comm: Any, shared_tmp_path: Path) -> None:
    corpus = shared_corpus(comm, shared_tmp_path)
    part = comm.Split(color=0 if comm.rank < 2 else 1 if comm.rank == 2 else MPI.UNDEFINED)
    train_small(comm, shared_tmp_path, **grid_of(8), train__steps=3)
    for name in ("two", "one"):
        if comm.rank == 0:
            (shared_tmp_path / name).mkdir()
            (shared_tmp_path / name / "corpus.txt").symlink_to(corpus)
            copy(shared_tmp_path / "run", shared_tmp_path / name / "run")
    train_small(comm, shared_tmp_path, resume=True, **grid_of(8))
    if part != MPI.COMM_NULL:
        small = {**grid_of(part.size), "scheme": "cuboid" if part.size == 2 else "serial"}
        train_small(part, shared_tmp_path / ("two" if part.size == 2 else "one"), resume=True, **small)
        part.Free()
    comm.Barrier()
    want = [line["loss"] for line in numbers(shared_tmp_path)]
    for name in ("two", "one"):
        found = [line["loss"] for line in numbers(shared_tmp_path / name)]
        assert found == pytest.approx(want, rel=1e-10) and len(found) == 6


@pytest.mark.mpi(sizes=(2,))
def test_a_run_that_was_to_end_before_its_checkpoint_is_an_error(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, **grid_of(2), train__steps=3)
    with pytest.raises(ConfigError, match=r"train.steps is 2, but .*step-3 is after step 3. Set train.steps to 3 or more"):
        train_small(comm, shared_tmp_path, resume=True, **grid_of(2), train__steps=2)
    train_small(comm, shared_tmp_path, resume=True, **grid_of(2), train__steps=3)  # ended: nothing is left to do


def copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


@pytest.mark.mpi(sizes=(2,))
def test_accumulated_micro_batches_give_the_step_of_the_whole_batch(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, **grid_of(2), train__keep=0)
    want = numbers(shared_tmp_path)
    comm.Barrier()
    train_small(comm, shared_tmp_path, **grid_of(2), train__keep=0, train__accumulate=3)
    for found, line in zip(numbers(shared_tmp_path), want, strict=True):
        assert found == pytest.approx(line, rel=1e-10)


@pytest.mark.mpi(sizes=(1,))
def test_every_step_has_its_own_windows_and_dropout_masks(comm: Any, shared_tmp_path: Path) -> None:
    changes = {"train__learning_rate": 0.0, "model__dropout": 0.5}
    train_small(comm, shared_tmp_path, **changes)
    run = prepare(small_config(shared_corpus(comm, shared_tmp_path), **changes), comm, shared_tmp_path / "again")
    for line in numbers(shared_tmp_path):
        number = line["step"] - 1
        windows = devices.on_device(torch.from_numpy(run.tokens.batch(1, number, 0, 12)))
        assert run.model(windows[:, :-1], windows[:, 1:], step=number).item() == pytest.approx(line["loss"], rel=1e-12)
    assert len({line["loss"] for line in numbers(shared_tmp_path)}) == 6


@pytest.mark.mpi(sizes=(2,))
def test_training_lowers_the_loss_and_leaves_its_files(comm: Any, shared_tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary = train_small(
        comm, shared_tmp_path, **grid_of(2), train__steps=25, train__sample_tokens=5, train__checkpoint_every=10
    )
    lines = numbers(shared_tmp_path)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.5
    assert {path.name for path in (shared_tmp_path / "run").iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
        "loss.png",
        "summary.json",
    }
    assert {path.name for path in (shared_tmp_path / "run" / "checkpoints").iterdir()} == {"step-20", "step-25"}
    assert summary["sample"].startswith("def ") and summary["ranks"] == 2
    assert 0 < summary["arithmetic_share"] <= 1.1


@pytest.mark.mpi(sizes=(2,))
def test_a_diverged_loss_ends_the_run_on_every_rank(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(Summa3dError, match="diverged at step"):
        train_small(comm, shared_tmp_path, **grid_of(2), train__learning_rate=1e200, train__warmup=0, train__clip=0.0)


@pytest.mark.mpi(sizes=(2,))
def test_settings_that_change_are_named_and_the_older_ones_are_kept(
    comm: Any, shared_tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, grid = shared_tmp_path / "run", grid_of(2)
    train_small(comm, shared_tmp_path, **grid, train__steps=2)
    before = (folder / "config.toml").read_text()
    train_small(comm, shared_tmp_path, resume=True, **grid, train__steps=2)
    assert "changed" not in capfd.readouterr().err and not [*folder.glob("config-*")]
    if comm.rank == 0:  # as one edits a file; what was changed is known to the checkpoint
        (folder / "config.toml").write_text(before.replace("learning_rate = 0.01", "learning_rate = 0.5"))
    comm.Barrier()
    train_small(comm, shared_tmp_path, resume=True, **grid, train__steps=3, train__learning_rate=0.5)
    said = " ".join(capfd.readouterr().err.split())
    wanted = "changed since step 2: train.steps 2 → 3, train.learning_rate 0.01 → 0.5"
    assert (wanted in said) == (comm.rank == 0)
    assert (folder / "config-2.toml").read_text() == before
    comm.Barrier()
    train(small_config(shared_corpus(comm, shared_tmp_path), **grid, train__steps=2), comm, folder, overwrite=True)
    assert not [*folder.glob("config-*")]


def test_a_key_that_is_newer_than_the_checkpoint_has_changed_where_it_is_not_its_default(tmp_path: Path) -> None:
    config, said = small_config(tmp_path / "corpus.txt", train__clip=0.25), Said()
    table = to_table(config)
    del table["grid"]["check"], table["train"]["clip"]
    write_config(config, tmp_path, SimpleNamespace(config=table, step=2), said)
    assert said == ["changed since step 2: train.clip 1.0 → 0.25"]


@pytest.mark.mpi(sizes=(2,))
def test_a_resumed_run_multiplies_by_what_multiplied_before(comm: Any, shared_tmp_path: Path, monkeypatch: Any) -> None:
    """The checkpoint says what; another is taken, and named, only where that is not to be had, or the user wants another."""
    from summa3d.blas_library import EVERY_SIZE, TORCH, VARIABLE, BlasRule, library_name

    monkeypatch.delenv(VARIABLE, raising=False)
    library, torchs = BlasRule(library_name(), "", EVERY_SIZE, 2), BlasRule(TORCH, "", {})
    said = Said()
    with Grid(comm, {"x": 2}) as grid:
        for here, before in ((library, torchs), (torchs, library), (library, library._replace(worth={"float64": 7}))):
            grid.job.blas = here
            assert rule_before(before, grid, said)[0::2] == before[0::2]
        assert rule_before(None, grid, said) == grid.job.blas and said == []
        missing = library if comm.rank == 0 else library._replace(name="OpenBLAS 0.0")
        assert rule_before(missing._replace(name="OpenBLAS 0.0"), grid, said) == grid.job.blas
        grid.job.blas = torchs
        monkeypatch.setenv(VARIABLE, "torch")
        assert rule_before(library, grid, said) == torchs
    assert said == [
        f"products by {library.name}, before by OpenBLAS 0.0: results may differ in their last bits",
        f"products by torch, before by {library.name}: results may differ in their last bits",
    ]


class Said(list):
    """What a progress line would say."""

    say = list.append


@pytest.mark.mpi(sizes=(1,))
def test_run_and_checkpoint_say_what_multiplied(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, **grid_of(1), train__steps=2, train__keep=1)
    folder = shared_tmp_path / "run"
    saved = checkpoint.read(checkpoint.newest(folder / "checkpoints"), comm)
    with Grid(comm, {"x": 1}) as grid:
        assert saved.blas == grid.job.blas
        assert json.loads((folder / "summary.json").read_text())["products_by"] == grid.job.blas.name
