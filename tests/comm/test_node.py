"""The memory that the ranks of a node share.

Views and allocated buffers, who waits sleeps, and what happens where there is none. The collectives themselves are compared
with numpy in test_collectives.py, both ways.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import jobs
import numpy as np
import pytest
from kinds import array, plain

from summa3d.comm.transport import node, node_buffer, node_memory
from summa3d.comm.transport.slot_collective import IN_ONE_COPY
from summa3d.errors import ConfigError
from summa3d.node_support import why_no_node_memory

SOON = 200.0
pytestmark = pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}")


@pytest.mark.mpi(sizes=(2, 4))
def test_a_view_is_what_was_gathered_until_the_next_communication_of_the_axis(comm, make_grid):
    axis = make_grid(x=comm.size, node_memory=True)["x"]
    blocks = [np.full((member + 1, 3), 10.0 * member) for member in range(comm.size)]
    sizes = [len(block) for block in blocks]
    for turn in range(5):
        mine = blocks[comm.rank] + turn
        view = axis.all_gather(mine, sizes=sizes, view=True)
        mine[...] = -1  # what is viewed was laid out of the caller's reach
        comm.Barrier()
        assert np.array_equal(view, np.concatenate(blocks) + turn)
        assert not view.flags.owndata
    assert axis.all_gather(blocks[comm.rank], sizes=sizes).flags.owndata


@pytest.mark.mpi(sizes=(3,))
def test_summands_computed_in_an_allocated_buffer_are_summed_there(comm, make_grid):
    axis = make_grid(x=3, node_memory=True)["x"]
    like = np.empty(0)
    for rows in (3, 9, 3):
        summand = axis.allocate((rows, 4), like)
        summand[...] = comm.rank + np.arange(rows)[:, None]
        mine = slice(rows // 3 * comm.rank, rows // 3 * (comm.rank + 1))
        assert np.array_equal(axis.reduce_scatter(summand), np.broadcast_to(3 + 3 * np.arange(rows)[mine, None], (rows // 3, 4)))
    left = axis.allocate((3, 4), like)  # a buffer that is not used is simply left
    left[...] = 7
    assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]
    assert np.array_equal(axis.reduce_scatter(np.ones((3, 4))), np.full((1, 4), 3))


@pytest.mark.mpi(sizes=(2,))
def test_slots_grow_and_more_may_be_started_than_there_are_slots(comm, make_grid):
    grid = make_grid(x=2, node_memory=True)
    axis, words = grid["x"], node_buffer.GRAIN // 8
    for size in (1, words, 3 * words + 5, 7):
        assert np.array_equal(axis.all_gather(np.full(size, comm.rank)), np.repeat([0, 1], size))
    started = [axis.start_all_reduce(np.full(3, turn + comm.rank)) for turn in range(2 * node_buffer.SLOTS + 1)]
    order = started if comm.rank == 0 else started[::-1]
    for pending in order:
        pending.wait()
    assert [pending.wait().tolist() for pending in started] == [[2 * turn + 1] * 3 for turn in range(2 * node_buffer.SLOTS + 1)]
    assert axis.node_bytes >= 2 * (3 * words + 5) * 8 // 2


@pytest.mark.mpi(sizes=(2,))
def test_a_view_of_a_slot_that_has_grown_since_an_equal_call_is_of_its_new_memory(comm, make_grid):
    axis = make_grid(x=2, node_memory=True)["x"]
    for turn, size in enumerate((3, node_buffer.GRAIN // 8, 3)):
        for _ in range(node_buffer.SLOTS):
            view = axis.all_gather(np.full(size, 2.0 * turn + comm.rank), view=True)
            assert np.array_equal(view, np.repeat([2.0 * turn, 2.0 * turn + 1], size)), (turn, size)


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_large_reduce_scatter_sums_the_part_that_no_other_member_reads_from_its_own_array(comm, make_grid, kind):
    """Of large arrays each member writes the others' parts alone; for several turns, so that all slots are used again."""
    axis, rows = make_grid(x=comm.size, node_memory=True)["x"], IN_ONE_COPY // 8
    mine = slice(rows * comm.rank, rows * (comm.rank + 1))
    for turn in range(node_buffer.SLOTS + 1):
        summands = [np.arange(rows * comm.size) * 10.0**member + turn for member in range(comm.size)]
        assert np.array_equal(plain(axis.reduce_scatter(array(kind, "float64", summands[comm.rank]))), sum(summands)[mine])


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_large_all_reduce_sums_shares_and_gathers_them(comm, make_grid, dtype):
    grid = make_grid(x=3, node_memory=True)
    rows = node.ALL_REDUCE_LIMIT // 16 + 1  # of 11 words: above the limit in every dtype, and no multiple of 3
    summands = [np.random.default_rng(member).integers(-9, 9, (rows, 11)).astype(dtype) for member in range(3)]
    for into in (None, "itself", "another", "strided"):
        mine = summands[comm.rank].copy()
        given = {"itself": mine, "another": np.empty_like(mine), "strided": np.empty((11, rows), dtype).T}.get(into)
        with grid.ledger.watch() as moved:
            total = grid["x"].all_reduce(mine, into=given)
        assert np.array_equal(total, sum(summands)) and (given is None or total is given)
        own = rows * 11 // 3 + (comm.rank < rows * 11 % 3)
        assert (moved.calls, moved.words, moved.messages) == (1, rows * 11 + own, 4)
        assert into == "itself" or np.array_equal(mine, summands[comm.rank])


@pytest.mark.mpi(sizes=(4,))
def test_who_waits_sleeps(comm, make_grid):
    """A rank that polled would never be seen asleep twice without any work in between: the last one comes once all are."""
    world = make_grid(x=4, node_memory=True, check=False).world  # a check asks MPI, which polls
    world.barrier()
    threads = comm.allgather(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")
    if comm.rank == 3:
        deadline = time.monotonic() + SOON
        while not all(map(asleep, map(Path, threads[:3]))):
            assert time.monotonic() < deadline, "a rank that waits does not sleep"
    world.barrier()


def asleep(thread: Path) -> bool:
    """Return whether a thread sleeps and, a while later, still does, without having run."""

    def seen() -> tuple[str, str]:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        return state, (thread / "schedstat").read_text().split()[0]

    first = seen()
    time.sleep(0.05)
    return first[0] == "S" and seen() == first


@pytest.mark.mpi(sizes=(2, 3))
def test_a_grid_may_do_without(comm, make_grid, monkeypatch):
    assert make_grid(x=comm.size, node_memory=False).staged == ()
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    grid = make_grid(x=comm.size)
    assert grid.staged == () and not grid["x"].offers_views(np.empty(0)) and grid["x"].allocate((2, 2), np.empty(0)) is None
    assert not node_memory.in_one_node(comm)
    assert grid["x"].all_gather(np.array([comm.rank]), view=True).tolist() == list(range(comm.size))
    grid.world.barrier()
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "off")
    with pytest.raises(ConfigError, match="SUMMA3D_NODE_MEMORY is 'off'; it takes yes or no"):
        make_grid(x=comm.size)


@pytest.mark.mpi(sizes=(3,))
def test_where_one_member_cannot_map_the_memory_none_does(comm, make_grid, monkeypatch):
    if comm.rank == 1:
        monkeypatch.setattr(node_memory, "joined", lambda nbytes, note: None)
    axis = make_grid(x=3, node_memory=True)["x"]
    assert axis.node_bytes is None
    assert axis.all_reduce(np.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.mpi(sizes=(3,))
def test_memory_that_runs_out_later_leaves_the_call_to_mpi(comm, make_grid, monkeypatch):
    axis = make_grid(x=3, node_memory=True)["x"]
    assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(node_buffer, "joined", lambda nbytes, note: None)
        large = axis.all_gather(np.full(node_buffer.GRAIN, comm.rank))
    assert np.array_equal(large, np.repeat(range(3), node_buffer.GRAIN))
    for _ in range(3):
        assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]


@pytest.mark.mpi(sizes=(3,))
def test_mpi_gathers_the_shares_of_a_large_sum_where_memory_runs_out_between_sum_and_gather(comm, make_grid, monkeypatch):
    axis, elements = make_grid(x=3, node_memory=True)["x"], np.arange(node.ALL_REDUCE_LIMIT // 8 + 1.0)
    mapped = [node_buffer.joined, lambda nbytes, note: None]
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(node_buffer, "joined", lambda nbytes, note: mapped.pop(0)(nbytes, note))
        total = axis.all_reduce(elements + comm.rank)
    assert np.array_equal(total, 3 * elements + 3)
    assert len(mapped) == (0 if comm.rank == 1 else 2)
    assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]


def test_a_member_that_is_killed_ends_those_that_sleep(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "from mpi4py import MPI\n"
        "from summa3d.comm.grid import Grid\n"
        "world = Grid(MPI.COMM_WORLD, {'x': 4}, node_memory=True).world\n"
        "world.barrier()\n"
        "Path(f'ready{MPI.COMM_WORLD.rank}').touch()\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)}) if MPI.COMM_WORLD.rank == 2 else world.barrier()\n"
    )
    ended = jobs.run(["job.py"], 4, cwd=tmp_path)
    assert ended.status != 0
    ready = [file for file in os.listdir(tmp_path) if file.startswith("ready")]
    assert ended.seconds < SOON and len(ready) >= 1


def test_who_sleeps_keeps_moving_what_it_has_begun_to_send():
    """Without copies between processes, MPI moves a large message only while both of its ranks are inside MPI."""
    ended = jobs.run([str(Path(__file__).with_name("pipelined.py")), "50"], 4, extra={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert (ended.status, ended.stdout) == (0, "done\n"), ended.stderr
