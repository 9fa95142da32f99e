"""Counts beyond what one MPI call may carry: every call in pieces of 7 elements, and one array that really is too large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from summa3d.comm.transport.host import HostTransport
from summa3d.comm.transport.p2p import pieces
from summa3d.errors import ShapeError
from summa3d.layout import split_sizes

NEEDED_BYTES = 12 * 2**30


@pytest.mark.parametrize(("n", "limit", "want"), [(0, 7, 1), (1, 7, 1), (7, 7, 1), (8, 7, 2), (29, 7, 5)])
def test_pieces_cover_everything_once_within_the_limit(n, limit, want):
    parts = pieces(n, limit)
    assert len(parts) == want
    assert np.concatenate([np.arange(n)[part] for part in parts]).tolist() == list(range(n))
    assert all(part.stop - part.start <= limit for part in parts)


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("started", [False, True])
def test_every_call_in_pieces_of_seven_elements_gives_what_one_call_gives(comm, make_grid, started):
    axis = make_grid(x=comm.size)["x"]
    axis.transports.host = HostTransport(limit=7)
    me, members = comm.rank, comm.size

    def done(name, *arguments, **options):
        return (
            getattr(axis, f"start_{name}")(*arguments, **options).wait()
            if started
            else getattr(axis, name)(*arguments, **options)
        )

    for rows in (1, 5, 23):
        sizes = split_sizes(rows, members)
        whole = np.arange(rows * 3.0).reshape(rows, 3)
        mine = np.split(whole, np.cumsum(sizes)[:-1])[me]
        assert np.array_equal(done("all_gather", mine, sizes=sizes), whole)
        assert np.array_equal(done("reduce_scatter", whole * (me + 1), sizes=sizes), mine * sum(range(1, members + 1)))
        assert np.array_equal(done("all_reduce", whole + me), whole * members + sum(range(members)))
        inplace = whole + me
        assert done("all_reduce", inplace, op="max", into=inplace) is inplace
        assert np.array_equal(inplace, whole + members - 1)
        assert np.array_equal(done("broadcast", whole * (me == 1), root=1), whole)
        total = done("reduce", whole + me, root=members - 1)
        assert total is None if me != members - 1 else np.array_equal(total, whole * members + sum(range(members)))
        spread = [[(source + target) * rows % 11 for target in range(members)] for source in range(members)]
        sent = np.repeat(np.arange(members), spread[me]) + 10 * me
        received = [spread[source][me] for source in range(members)]
        want = np.concatenate([np.full(count, 10 * source + me) for source, count in enumerate(received)])
        assert np.array_equal(done("all_to_all", sent, sizes=spread[me], receive_sizes=received), want)
        space = np.empty_like(whole)
        pending = axis.start_receive(space, (me - 1) % members)
        axis.send(whole + me, (me + 1) % members)
        assert np.array_equal(pending.wait(), whole + (me - 1) % members)


@pytest.mark.mpi(sizes=(2,))
def test_collectives_in_pieces_may_overlap_with_messages_of_any_tag(comm, make_grid):
    axis = make_grid(x=2, check=False)["x"]
    axis.transports.host = HostTransport(limit=7)
    other, blocks = 1 - comm.rank, [np.full(20, 10 * turn + comm.rank) for turn in range(3)]
    spaces = [axis.start_receive(np.empty(20, int), other, tag) for tag in range(9)]
    gathers = [axis.start_all_gather(block) for block in blocks]
    for tag in range(9):
        axis.send(np.full(20, -tag), other, tag)
    for turn, gather in enumerate(gathers):
        assert np.array_equal(gather.wait(), np.repeat([10 * turn, 10 * turn + 1], 20))
    for tag, space in enumerate(spaces):
        assert np.array_equal(space.wait(), np.full(20, -tag))


def available_bytes():
    meminfo = Path("/proc/meminfo")
    facts = dict(line.split(":") for line in meminfo.read_text().splitlines()) if meminfo.exists() else {}
    return int(facts.get("MemAvailable", "0 kB").split()[0]) * 1024


@pytest.mark.wide
@pytest.mark.mpi(sizes=(2,))
def test_a_message_of_more_than_two_to_the_31_elements(comm, make_grid):
    """2.2e9 elements a rank, 4.3 GiB in all."""
    if comm.allreduce(available_bytes() < NEEDED_BYTES):
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of free memory")
    n, marks = 2**31 + 12_347, [0, 5, 2**30, 2**31 - 1, 2**31, 2**31 + 12_346]
    array = np.zeros(n, bool)
    if comm.rank == 1:
        array[marks] = True
    grid = make_grid(x=2)
    with grid.ledger.watch() as moved:
        grid["x"].broadcast(array, root=1)
    assert array[marks].all() and np.count_nonzero(array) == len(marks)
    assert moved.words == (n if comm.rank == 0 else 0)


def test_dtypes_that_cannot_travel_are_named_with_those_that_can():
    with pytest.raises(ShapeError, match=r"dtype int8 cannot be communicated; supported: bool, int32, .*complex128\."):
        HostTransport().datatype(np.zeros(1, np.int8))
    with pytest.raises(ShapeError, match=r"dtype >f8 cannot"):
        HostTransport().datatype(np.zeros(1, ">f8"))
