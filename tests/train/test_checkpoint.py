"""Checkpoints: pieces written on one grid and read on another, damage found by every rank, old ones removed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

from summa3d.comm.grid import Grid
from summa3d.errors import CheckpointError
from summa3d.layout.layout import Layout, Sharding
from summa3d.train import config
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.checkpoint import shards, writer
from summa3d.train.checkpoint.shards import TensorBlock

LAYOUTS = {
    "w": Layout(("z", "x"), ("y",)),
    "table": Layout(("y", "x"), ("z",)),
    "copies": Layout(("y",), ()),
    "whole": Layout((), ()),
}
STAGES = {
    "w": Layout("m:z n @pp=1"),
    "table": Layout("v:z h @pp=0+1"),
    "copies": Layout("m n @pp=1").sharded_over(("z", "dp")),
    "whole": Layout("m n:z").sharded_over(("dp",)),
}
"""Held by pipeline stages, at both ends, and in shards of the replicas' copies, of which some are empty."""
SHAPES = {"w": (13, 7), "table": (11, 5), "copies": (3, 2), "whole": (4, 4)}
GRID = {1: {"x": 1, "y": 1, "z": 1}, 2: {"x": 1, "y": 2, "z": 1}, 6: {"x": 1, "y": 3, "z": 2}, 8: {"x": 2, "y": 2, "z": 2}}


def whole(name: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(SHAPES[name], dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))
    return values.to(dtype)


def blocks(grid: Any, filled: bool, dtype: torch.dtype = torch.float64) -> list[TensorBlock]:
    """This rank's blocks of four tensors in four layouts; filled, or NaN to be filled."""
    made = []
    for name, layout in (STAGES if "pp" in grid.shape else LAYOUTS).items():
        sharding = Sharding(layout, SHAPES[name])
        block = whole(name, dtype)[sharding.slices(grid)].clone()
        made.append(TensorBlock(name, block if filled else torch.full_like(block, torch.nan), sharding))
    return made


def save(grid: Any, folder: Path, step: int, keep: int = 2, dtype: torch.dtype = torch.float64) -> Path:
    settings = config.load("demo", [f"train.keep={keep}", "dtype=float64"])
    return writer.save(folder, step, blocks(grid, True, dtype), grid, settings)


def load(grid: Any, path: Path, comm: Any, dtype: torch.dtype = torch.float64) -> list[TensorBlock]:
    found = checkpoint.read(path, comm)
    found.verify(comm)
    wanted = blocks(grid, False, dtype)
    found.load(wanted, grid)
    return wanted


def assert_filled(found: list[TensorBlock], grid: Any, dtype: torch.dtype = torch.float64) -> None:
    for block in found:
        assert block.tensor.dtype == dtype
        torch.testing.assert_close(block.tensor, whole(block.name, dtype)[block.sharding.slices(grid)], rtol=0, atol=0)


@pytest.mark.mpi(sizes=(1, 2, 6, 8))
def test_any_grid_reads_what_any_grid_wrote(comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path) -> None:
    grid = make_grid(**GRID[comm.size])
    path = save(grid, shared_tmp_path, 3)
    assert_filled(load(grid, path, comm), grid)
    turned = make_grid(**dict(zip("xyz", reversed(GRID[comm.size].values()), strict=True)))
    assert_filled(load(turned, path, comm), turned)
    if comm.rank == 0:
        with Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1}) as alone:
            assert_filled(load(alone, path, MPI.COMM_SELF), alone)
            save(alone, shared_tmp_path, 4)
    comm.Barrier()
    assert_filled(load(grid, shared_tmp_path / "step-4", comm), grid)


@pytest.mark.mpi(sizes=(8,))
def test_stages_and_shards_of_replicas_are_read_by_any_grid(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path
) -> None:
    job, inner = make_grid(z=2, dp=2, pp=2), make_grid(**GRID[8])
    assert_filled(load(inner, path := save(job, shared_tmp_path, 1), comm), inner)
    assert_filled(load(job, path, comm), job)
    assert_filled(load(job, save(inner, shared_tmp_path, 2), comm), job)


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("shape", [GRID[8], {"z": 2, "dp": 2, "pp": 2}], ids=["inner", "job"])
def test_each_element_is_stored_once(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, shape: dict[str, int]
) -> None:
    path = save(make_grid(**shape), shared_tmp_path, 1)
    index = json.loads((path / "index.json").read_text())
    for name, shape in SHAPES.items():
        covered = torch.zeros(shape, dtype=torch.int64)
        for piece in index["tensors"][name]["pieces"]:
            covered[tuple(slice(*part) for part in piece["slices"])] += 1
        assert bool((covered == 1).all()), name


@pytest.mark.mpi(sizes=(2,))
def test_dtypes_are_kept(comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path) -> None:
    grid = make_grid(**GRID[2])
    path = save(grid, shared_tmp_path, 1, dtype=torch.bfloat16)
    assert_filled(load(grid, path, comm, torch.bfloat16), grid, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"w in .*bfloat16 \(13, 7\); this run's is float64"):
        load(grid, path, comm)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize(("damage", "words"), [(truncate, "is truncated"), (alter, "is altered"), (Path.unlink, "is missing")])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_damaged_file_is_named_and_refused_by_every_rank(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, damage: Callable[[Path], None], words: str, victim: str
) -> None:
    grid = make_grid(**GRID[comm.size])
    path = save(grid, shared_tmp_path, 5)
    name = f"rank-{0 if victim == 'first' else comm.size - 1}.safetensors"
    if comm.rank == 0:
        damage(path / name)
    comm.Barrier()
    with pytest.raises(CheckpointError, match=words) as raised:
        load(grid, path, comm)
    assert str(path / name) in str(raised.value)
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.mpi(sizes=(2,))
def test_a_file_that_one_rank_cannot_read_is_refused_by_every_rank(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = make_grid(**GRID[2])
    path = save(grid, shared_tmp_path, 5)

    def failing(file: Path) -> str:
        raise OSError(errno.EIO, "Input/output error")

    if comm.rank == 1:
        monkeypatch.setattr(shards, "checksum", failing)
    with pytest.raises(CheckpointError, match=rf"{path}: \[Errno 5\] Input/output error\.\n  On rank 1 of 2 only"):
        load(grid, path, comm)


@pytest.mark.mpi(sizes=(1,))
def test_a_publication_that_fails_is_said_and_tried_again(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    renames = iter([OSError(errno.EIO, "Input/output error"), None])

    def rename(source: Path, target: Path) -> None:
        if error := next(renames):
            raise error
        os.replace(source, target)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(writer, "PAUSE", 0.01)
    grid = make_grid(**GRID[1])
    with writer.Writer(shared_tmp_path, grid, config.load("demo", ["dtype=float64"]), said.append) as writes:
        writes.save(3, blocks(grid, True), waits=True)
    assert said == ["The checkpoint of step 3 cannot be written: [Errno 5] Input/output error. Trying again."]
    assert [path.name for path in shared_tmp_path.iterdir()] == ["step-3"]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [('"step": 5', '"step": 6', "is altered"), ('"step"', '"step', "is damaged"), ("{", "[]{", "is damaged")],
)
def test_a_damaged_index_is_named_and_refused(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = save(make_grid(**GRID[2]), shared_tmp_path, 5)
    if comm.rank == 0:
        index = path / "index.json"
        index.write_text(index.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=words) as raised:
        checkpoint.read(path, comm)
    assert str(path / "index.json") in str(raised.value)


@pytest.mark.mpi(sizes=(1,))
def test_the_last_are_kept_and_left_overs_removed(comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path) -> None:
    grid = make_grid(**GRID[1])
    (shared_tmp_path / ".tmp-step-9").mkdir()
    (shared_tmp_path / ".old-step-1").mkdir()
    (shared_tmp_path / "step-99").mkdir()  # has no index: not complete
    for step in (2, 4, 6, 10):
        save(grid, shared_tmp_path, step, keep=2)
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["step-10", "step-6", "step-99"]
    assert checkpoint.newest(shared_tmp_path) == shared_tmp_path / "step-10"


@pytest.mark.mpi(sizes=(2,))
def test_a_checkpoint_of_another_model_is_refused_with_the_differing_keys(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path
) -> None:
    found = checkpoint.read(save(make_grid(**GRID[2]), shared_tmp_path, 1), comm)
    found.check_model(config.load("demo", ["dtype=float64", "model.dropout=0.3", "model.ffn=1024", "model.kv_heads=8"]))
    with pytest.raises(CheckpointError, match="another model") as raised:
        found.check_model(config.load("demo", ["dtype=float32", "model.hidden=128", "model.ffn=1024"]))
    lines = str(raised.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["model.hidden", "dtype"]
    assert "checkpoint 256, this run 128" in lines[0]
    with pytest.raises(CheckpointError, match=r"weights in float64, and .* in float32\. Values of dtype that fit it: float64\."):
        found.check_model(config.load("demo", ["dtype=bfloat16", "model.ffn=1024"]))


class Disk:
    """A disk that refuses the first `times` files of a rank."""

    def __init__(self, times: int) -> None:
        self.left, self.save_file = times, shards.save_file

    def __call__(self, tensors: Any, path: Path) -> str:
        self.left -= 1
        if self.left >= 0:
            path.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.save_file(tensors, path)


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("times", [0, 2, 3])
def test_a_thread_writes_a_copy_and_tries_three_times(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    grid, said = make_grid(**GRID[comm.size]), []
    settings, mine = config.load("demo", ["dtype=float64"]), blocks(grid, True)
    monkeypatch.setattr(shards, "save_file", Disk(times * (comm.rank == comm.size - 1)))
    monkeypatch.setattr(writer, "PAUSE", 0.01)
    with writer.Writer(shared_tmp_path, grid, settings, said.append) as writes:
        writes.save(3, mine)
        for block in mine:
            block.tensor.zero_()
        if times == 3:
            with pytest.raises(CheckpointError, match=r"No space left on device\. It was tried 3 times"):
                writes.wait()
        else:
            writes.wait()
            assert sum(copy.nbytes for copy in writes.copies.values()) == sum(
                block.tensor.nbytes for block in mine if block.sharding.is_primary(grid)
            )
            assert writes.cpu > 0 and not writes.busy
    comm.Barrier()
    refused = f"Cannot write the checkpoint file {shared_tmp_path}/.tmp-step-3/rank-{comm.size - 1}.safetensors"
    assert len(said) == min(times, 2) and all(text.startswith(refused) and text.endswith("Trying again.") for text in said)
    assert [path.name for path in shared_tmp_path.iterdir()] == ["step-3"] * (times < 3)
    if times < 3:
        assert_filled(load(grid, shared_tmp_path / "step-3", comm), grid)


@pytest.mark.mpi(sizes=(2,))
def test_what_is_not_waited_for_is_published_by_ranks_that_are_not_busy(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path
) -> None:
    grid = make_grid(**GRID[2])
    with writer.Writer(shared_tmp_path, grid, config.load("demo", ["dtype=float64"])) as writes:
        writes.save(1, blocks(grid, True))
        stages = 0
        while not comm.bcast((shared_tmp_path / "step-1").exists()):
            if not comm.allreduce(writes.busy):
                writes.settle()
                stages += 1
        assert stages == 1, "rank 0 publishes in its thread once the files are written"
        writes.save(2, blocks(grid, True))
        writes.wait()
    assert checkpoint.newest(shared_tmp_path) == shared_tmp_path / "step-2"


@pytest.mark.mpi(sizes=(2,))
def test_a_folder_that_cannot_be_written_fails_on_every_rank(
    comm: Any, make_grid: Callable[..., Any], shared_tmp_path: Path
) -> None:
    blocked = shared_tmp_path / "file"
    if comm.rank == 0:
        blocked.write_text("in the way")
    comm.Barrier()
    with pytest.raises(CheckpointError, match="file"):
        save(make_grid(**GRID[2]), blocked, 1)
