"""What a user can get wrong: one clear error, the same on every rank, before training starts."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_runs import shared_corpus, small_config, train_small

from summa3d.errors import CheckpointError, ConfigError, DataError, GridError, LayoutError, Summa3dError
from summa3d.train.loop import train


def refused(comm: Any, folder: Path, kind: type[Summa3dError], resume: bool = False, **changes: object) -> str:
    """The message with which every rank refuses this run, before its first step."""
    changes = {"data__path": shared_corpus(comm, folder), **changes}
    settings = small_config(changes.pop("data__path"), **changes)  # type: ignore[arg-type]
    before = (folder / "run" / "metrics.jsonl").exists()
    with pytest.raises(kind) as raised:
        train(settings, comm, folder / "run", resume=resume)
    messages = comm.allgather(str(raised.value))
    assert len(set(messages)) == 1
    assert (folder / "run" / "metrics.jsonl").exists() == before
    assert len(messages[0].splitlines()) <= 6
    comm.Barrier()
    return messages[0]


@pytest.mark.mpi(sizes=(2,))
def test_a_grid_that_does_not_match_the_ranks(comm: Any, shared_tmp_path: Path) -> None:
    message = refused(comm, shared_tmp_path, GridError, grid__x=2, grid__y=2)
    assert all(part in message for part in ["x=2,y=2,z=1", "4", "2 ranks", "x=1,y=2,z=1"])
    assert "x=1,y=1,z=1" in refused(comm, shared_tmp_path, GridError, scheme="serial", grid__y=2)
    message = refused(comm, shared_tmp_path, GridError, grid__d=2)
    assert all(part in message for part in ["cuboid", "d=2", "x=1,y=1,z=2"])


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"train__batch": 6, "model__family": "mixtral"}, ["batch 6", "x·y = 4", "4, 8"]),
        ({"train__batch": 24, "train__accumulate": 4, "model__family": "mixtral"}, ["batch 6", "x·y = 4"]),
    ],
)
def test_rows_of_experts_that_the_grid_does_not_divide(
    comm: Any, shared_tmp_path: Path, changes: dict[str, object], parts: list[str]
) -> None:
    message = refused(comm, shared_tmp_path, LayoutError, **{"grid__x": 2, "grid__y": 2, "grid__z": 2, **changes})
    assert all(part in message for part in parts), message


@pytest.mark.mpi(sizes=(2,))
def test_a_missing_or_empty_corpus(comm: Any, shared_tmp_path: Path) -> None:
    said = refused(comm, shared_tmp_path, DataError, grid__y=2, data__path=shared_tmp_path / "nowhere")
    assert "does not exist. " in said
    assert f"does not exist (looked in {Path.cwd()})" in refused(
        comm, shared_tmp_path, DataError, grid__y=2, data__path="nowhere"
    )
    if comm.rank == 0:
        (shared_tmp_path / "empty").write_text("")
    comm.Barrier()
    assert "is empty" in refused(comm, shared_tmp_path, DataError, grid__y=2, data__path=shared_tmp_path / "empty")


@pytest.mark.mpi(sizes=(2,))
def test_a_prompt_that_the_tokenizer_does_not_read(comm: Any, shared_tmp_path: Path) -> None:
    if comm.rank == 0:
        (shared_tmp_path / "numbers.txt").write_text("1 2 3 " * 200)
    comm.Barrier()
    keys = {"data__tokenizer": "numbers:9", "train__sample_tokens": 2}
    said = refused(comm, shared_tmp_path, DataError, grid__y=2, data__path=shared_tmp_path / "numbers.txt", **keys)
    assert said.startswith("train.sample_prompt: ") and "'def ' is not such text" in said and "\n" not in said


@pytest.mark.mpi(sizes=(2,))
def test_a_checkpoint_of_another_model_or_a_damaged_one(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, grid__y=2, train__steps=2)
    message = refused(comm, shared_tmp_path, CheckpointError, resume=True, grid__y=2, model__hidden=48)
    assert "model.hidden: checkpoint 24, this run 48" in message and "model.ffn: checkpoint 96, this run 192" in message
    file = shared_tmp_path / "run" / "checkpoints" / "step-2" / "rank-1.safetensors"
    comm.Barrier()
    if comm.rank == 0:
        file.write_bytes(file.read_bytes()[:-1])
    comm.Barrier()
    assert f"{file} is truncated" in refused(comm, shared_tmp_path, CheckpointError, resume=True, grid__y=2)


@pytest.mark.mpi(sizes=(2,))
def test_a_run_folder_that_holds_a_run_or_cannot_be_one(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, grid__y=2, train__steps=2)
    message = refused(comm, shared_tmp_path, ConfigError, grid__y=2)
    assert all(part in message for part in ["already holds a run", "step-2", "--resume", "--overwrite"])
    if comm.rank == 0:
        shutil.rmtree(shared_tmp_path / "run")
        (shared_tmp_path / "run").write_text("a file")
    comm.Barrier()
    assert "cannot be made a run folder" in refused(comm, shared_tmp_path, ConfigError, grid__y=2)


@pytest.mark.mpi(sizes=(2,))
def test_overwrite_starts_again_and_removes_the_old_checkpoints(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, grid__y=2, train__steps=4)
    settings = small_config(shared_corpus(comm, shared_tmp_path), grid__y=2, train__steps=2)
    assert train(settings, comm, shared_tmp_path / "run", overwrite=True)["steps_taken"] == 2
    assert [path.name for path in (shared_tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]


@pytest.mark.mpi(sizes=(2,))
def test_resuming_where_nothing_is_saved_starts_from_the_start(comm: Any, shared_tmp_path: Path) -> None:
    assert train_small(comm, shared_tmp_path, resume=True, grid__y=2, train__steps=2)["steps_taken"] == 2
    assert train_small(comm, shared_tmp_path, resume=True, grid__y=2, train__steps=2)["steps_taken"] == 0


@pytest.mark.mpi(sizes=(2,))
def test_a_disk_without_room_is_named_by_the_folder(comm: Any, shared_tmp_path: Path) -> None:
    settings = small_config(shared_corpus(comm, shared_tmp_path), grid__y=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError) as raised:
            train(settings, comm, shared_tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(raised.value) == f"Cannot write to {shared_tmp_path / 'run'}: File too large."
