"""Messages of a channel through the memory of a node: order, sizes, who waits for what, and what is left of a rank that dies."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch

from summa3d.comm import lanes
from summa3d.comm.channel import Channel
from summa3d.comm.lanes import LARGEST, PLACES, Lanes
from summa3d.errors import AgreementError
from summa3d.parallel.schedule import looped

SOON = 20.0


@pytest.fixture
def channel(comm, make_grid):
    """A channel of all ranks along pp, which is freed at the end."""
    grid = make_grid(pp=comm.size, check=False)
    made = Channel(grid["pp"], looped(comm.size, 1))
    assert made._lanes is not None
    yield made
    made.free()


def message(number: int, elements: int) -> np.ndarray:
    """A block that no other message has."""
    return number * 1000.0 + np.arange(elements)


@pytest.mark.mpi(sizes=(2,))
def test_more_messages_than_a_lane_has_places_arrive_in_order_whatever_their_sizes(comm, channel):
    sizes = [(7 * number * number) % 1013 for number in range(3 * PLACES)]  # 0 is among them
    assert 0 in sizes
    if comm.rank == 0:
        for number, size in enumerate(sizes):
            channel.send(message(number, size), 1, "F")
        assert channel.progress() == len(sizes) - PLACES
        comm.Barrier()
        channel.finish()
        assert channel.progress() == 0
    else:
        comm.Barrier()
        for number, size in enumerate(sizes):
            assert np.array_equal(channel.start_receive(np.empty(size), 1, "F").wait(), message(number, size)), number


@pytest.mark.mpi(sizes=(2,))
def test_a_large_message_goes_through_mpi_between_small_ones(comm, channel):
    sizes = [5, LARGEST // 8 + 3, 11, LARGEST // 8, LARGEST // 8 + 1, 2]
    if comm.rank == 0:
        for number, size in enumerate(sizes):
            channel.send(message(number, size), 1, "F")
        assert channel.progress() == 2  # MPI has buffered none of the two
        comm.send(None, 1)
    else:
        comm.recv(source=0)
        for number, size in enumerate(sizes):
            assert np.array_equal(channel.start_receive(np.empty(size), 1, "F").wait(), message(number, size)), number
    channel.finish()


@pytest.mark.mpi(sizes=(2,))
def test_large_messages_are_those_that_were_posted_whichever_is_waited_for_first(comm, channel):
    sizes = [LARGEST // 8 + 3, 5, LARGEST // 8 + 3, LARGEST // 8 + 9]
    if comm.rank == 0:
        for number, size in enumerate(sizes):
            channel.send(message(number, size), 1, "F")
    else:
        posted = [channel.start_receive(np.empty(size), 1, "F") for size in sizes]
        for number in (2, 0, 3, 1):
            assert np.array_equal(posted[number].wait(), message(number, sizes[number])), number
    channel.finish()


@pytest.mark.mpi(sizes=(2,))
def test_a_message_that_is_waited_for_late_is_not_overwritten(comm, channel):
    if comm.rank == 0:
        for number in range(2 * PLACES):
            channel.send(message(number, 9), 1, "F")
        channel.finish()
    else:
        first, *later = [channel.start_receive(np.empty(9), 1, "F") for _ in range(PLACES)]
        for number, incoming in enumerate(later, 1):
            assert np.array_equal(incoming.wait(), message(number, 9))
        time.sleep(0.05)
        assert np.array_equal(first.wait(), message(0, 9))
        for number in range(PLACES, 2 * PLACES):
            assert np.array_equal(channel.start_receive(np.empty(9), 1, "F").wait(), message(number, 9))


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_other_dtypes_keep_their_bits(comm, channel, dtype):
    sent = (torch.arange(35).reshape(5, 7) % 3).to(dtype)
    if comm.rank == 0:
        channel.send(sent, 1, "F")
    else:
        assert torch.equal(channel.start_receive(torch.empty(5, 7, dtype=dtype), 1, "F").wait(), sent)


@pytest.mark.mpi(sizes=(2,))
def test_another_message_than_the_awaited_one_is_told_and_the_next_one_arrives(comm, channel):
    sent = [(np.ones(3), "3 elements"), (np.ones(4, np.float32), "4 elements of float32")]
    for block, what in sent:
        if comm.rank == 0:
            channel.send(block, 1, "F")
        else:
            told = rf"member 0 has sent {what} with tag 2; this member awaits 4 of float64"
            with pytest.raises(AgreementError, match=told):
                channel.start_receive(np.empty(4), 1, "F").wait()
    if comm.rank == 0:
        channel.send(np.full(4, 2.0), 1, "F")
    else:
        assert channel.start_receive(np.empty(4), 1, "F").wait().tolist() == [2.0] * 4


@pytest.mark.mpi(sizes=(2,))
def test_where_the_node_has_no_memory_left_messages_go_through_mpi(comm, channel, monkeypatch):
    monkeypatch.setattr(lanes, "offered", lambda nbytes, note: (None, -1))
    if comm.rank == 0:
        for number in range(3):
            channel.send(message(number, 6), 1, "F")
    else:
        for number in range(3):
            assert np.array_equal(channel.start_receive(np.empty(6), 1, "F").wait(), message(number, 6))
    channel.finish()


@pytest.mark.mpi(sizes=(2,))
def test_a_member_that_waits_for_a_message_takes_no_core(comm, channel):
    if comm.rank == 0:
        time.sleep(0.5)
        channel.send(np.ones(3), 1, "F")
    else:
        incoming, before = channel.start_receive(np.empty(3), 1, "F"), time.thread_time()
        incoming.wait()
        assert time.thread_time() - before < 0.01


@pytest.mark.mpi(sizes=(3,))
def test_only_members_of_one_node_have_lanes(comm, channel):
    ends = {0: (0, 1), 1: (1, 0), 2: (1, 2), 3: (2, 1)}
    members = replace(channel._members, nodes=(4, 4, 9))
    found = Lanes.over(members, ends)
    tags = [tag for tag in ends if found is not None and found.take(tag)]
    assert tags == [[0, 1], [0, 1], []][comm.rank]
    if found is not None:
        found.free()


JOB = """
import os, signal, time
from pathlib import Path
import numpy as np
from mpi4py import MPI
from summa3d.cli.main import start_mpi
start_mpi()
from summa3d.comm.channel import Channel
from summa3d.comm.grid import Grid
from summa3d.comm.health.watchdog import Watchdog
rank = MPI.COMM_WORLD.rank
channel = Channel(Grid(MPI.COMM_WORLD, {{"pp": 2}})["pp"], (0, 1))
with Watchdog(3):
    if rank == 0:
        channel.send(np.ones(1 << 15), 1, "F")
    MPI.COMM_WORLD.Barrier()
    Path(f"at{{rank}}").write_text(str(time.time()))
    if rank == {who}:
        os.kill(os.getpid(), {signal})
    if rank == 0:
        channel.start_receive(np.empty(1), 0, "B").wait()
    else:
        channel.start_receive(np.empty(1), 1, "F")
        channel.start_receive(np.empty(1), 1, "F").wait()
"""


@pytest.mark.parametrize(("how", "who"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_a_rank_that_ends_or_stops_with_a_message_in_the_nodes_memory_ends_the_job_and_leaves_nothing(tmp_path, how, who):
    (tmp_path / "job.py").write_text(JOB.format(who=who, signal=int(how)))
    before = set(os.listdir("/dev/shm"))
    ended = jobs.run(["job.py"], 2, cwd=tmp_path, timeout=60)
    since = max(float(file.read_text()) for file in Path(tmp_path).glob("at*"))
    assert ended.status != 0 and time.time() - since < SOON
    if how == signal.SIGSTOP:
        assert f"rank {who}" in ended.stderr and "stopped" in ended.stderr, ended.stderr
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "summa3d" in name}
