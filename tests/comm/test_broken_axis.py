"""After an error in a collective through the node's memory its axis is broken, and says so; after a refused call it is not."""

from __future__ import annotations

import gc
import random
import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from summa3d.comm.grid import Grid
from summa3d.comm.transport import node_buffer, slot_collective
from summa3d.errors import AgreementError, GridError, ShapeError
from summa3d.node_support import why_no_node_memory

pytestmark = pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}")
TRIALS = 200
STEPS = ("part", "post", "wait", "wait_for_all", "write", "combine")
"""What a collective does with its slot, at any of which a member may fail."""


class Injected(Exception):
    """What a trial lets one member fail with."""


def summed_in_place(axis):
    summand = axis.allocate((2 * axis.size, 3), np.empty(0))
    summand[...] = 1
    return axis.reduce_scatter(summand)


WHOLE = np.arange(24.0).reshape(12, 2)
COLLECTIVES = {
    "all_gather": lambda axis: axis.all_gather(WHOLE[:2]),
    "all_gather, dim 1": lambda axis: axis.all_gather(WHOLE, 1),
    "all_gather, viewed": lambda axis: axis.all_gather(WHOLE[:2], view=True),
    "reduce_scatter": lambda axis: axis.reduce_scatter(WHOLE),
    "reduce_scatter, in place": summed_in_place,
    "all_reduce": lambda axis: axis.all_reduce(WHOLE),
    "all_reduce, large": lambda axis: axis.all_reduce(np.ones((1 << 17) + 5)),
    "broadcast": lambda axis: axis.broadcast(WHOLE.copy(), 1),
    "reduce": lambda axis: axis.reduce(WHOLE, 1),
    "barrier": lambda axis: axis.barrier(),
    "started": lambda axis: axis.start_all_reduce(WHOLE).wait(),
    "two started": lambda axis: [one.wait() for one in (axis.start_reduce_scatter(WHOLE), axis.start_all_gather(WHOLE))],
}
MORE = {
    "all_to_all": lambda axis: axis.all_to_all(WHOLE),
    "send": lambda axis: axis.start_send(WHOLE, (axis.index + 1) % axis.size),
    "receive": lambda axis: axis.start_receive(WHOLE.copy(), (axis.index + 1) % axis.size),
    "allocate": lambda axis: axis.allocate((2, 2), np.empty(0)),
}


def armed(monkeypatch, step, after, error):
    """Let the `after`th `step` of this member from now on raise `error`; returns whether it has."""
    calls = [0]

    def failing(whole, *args, **options):
        calls[0] += 1
        if calls[0] == after:
            raise error
        return whole(*args, **options)

    owner = slot_collective.SlotCollective if step in ("write", "combine") else node_buffer.Slot
    whole = vars(owner)[step]
    monkeypatch.setattr(owner, step, lambda *args, **options: failing(whole, *args, **options))
    return lambda: calls[0] >= after


@pytest.mark.mpi(sizes=(3,))
def test_after_an_error_on_one_member_the_next_call_names_it_on_every_member(comm, monkeypatch):
    failed = 0
    for trial in range(TRIALS):
        chance = random.Random(trial)
        before, name, after = (chance.choice(list(COLLECTIVES)) for _ in range(3))
        following = chance.choice([*COLLECTIVES, *MORE])
        victim, step, count = chance.randrange(comm.size), chance.choice(STEPS), chance.randint(1, 3)
        with Grid(comm, {"x": comm.size}, node_memory=True) as grid, monkeypatch.context() as patch:
            axis, has_failed, caught = grid["x"], lambda: False, None
            COLLECTIVES[before](axis)
            comm.Barrier()
            if comm.rank == victim:
                has_failed = armed(patch, step, count, Injected(f"trial {trial}"))
            try:
                COLLECTIVES[name](axis)
                COLLECTIVES[after](axis)
            except (Injected, GridError) as error:
                caught = error
            assert comm.rank != victim or isinstance(caught, Injected) == has_failed()
            fired = has_failed()
            patch.undo()
            if not any(comm.allgather(fired)):
                assert caught is None, trial
                COLLECTIVES[before](axis)
                continue
            failed += 1
            said = rf"axis x is broken: member {victim} \(rank \d+\) failed in a collective \(Injected: trial {trial}\)"
            assert caught is None or comm.rank == victim or re.search(said, str(caught)), caught
            for call in (following, name):
                with pytest.raises(GridError, match=said):
                    {**COLLECTIVES, **MORE}[call](axis)
    assert failed > TRIALS // 2


REFUSED = {
    "no such dim": lambda axis: axis.all_gather(WHOLE, 2),
    "sizes": lambda axis: axis.reduce_scatter(WHOLE, sizes=[1] * axis.size),
    "no equal parts": lambda axis: axis.reduce_scatter(WHOLE[:7]),
    "into of another shape": lambda axis: axis.all_gather(WHOLE, into=np.empty(3)),
    "into of another dtype": lambda axis: axis.all_reduce(WHOLE, into=np.empty(WHOLE.shape, np.float32)),
    "into read-only": lambda axis: axis.all_reduce(WHOLE, into=read_only(WHOLE)),
    "broadcast read-only": lambda axis: axis.broadcast(read_only(WHOLE), (axis.index + 1) % axis.size),
    "receive read-only": lambda axis: axis.receive(read_only(WHOLE), (axis.index + 1) % axis.size),
    "no such reduction": lambda axis: axis.all_reduce(WHOLE, "product"),
    "no such reduction onto one": lambda axis: axis.reduce(WHOLE, 0, "product"),
    "complex numbers have no order": lambda axis: axis.all_reduce(WHOLE.astype(complex), "max"),
    "no such root": lambda axis: axis.broadcast(WHOLE.copy(), axis.size),
    "no such peer": lambda axis: axis.send(WHOLE, axis.size),
    "dtype of sums": lambda axis: axis.reduce_scatter(np.ones((12, 2), bool)),
    "dtype": lambda axis: axis.all_gather(WHOLE.astype(np.int8)),
    "pieces": lambda axis: axis.all_to_all(WHOLE, sizes=[1] * axis.size),
}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.mpi(sizes=(3,))
def test_a_refused_call_leaves_the_axis_as_it_was_whether_all_are_refused_or_one(comm, make_grid):
    axis = make_grid(x=comm.size, node_memory=True, check=False)["x"]
    for trial in range(TRIALS):
        chance = random.Random(trial)
        refused, then = chance.choice(list(REFUSED)), chance.choice(list(COLLECTIVES))
        victim = chance.choice([None, *range(comm.size)])
        if victim in (None, comm.rank):
            with pytest.raises(ShapeError):
                REFUSED[refused](axis)
        COLLECTIVES[then](axis)
        assert np.array_equal(axis.all_reduce(np.full(3, trial)), np.full(3, comm.size * trial)), (refused, then)


@pytest.mark.mpi(sizes=(3,))
def test_a_buffer_left_by_one_member_alone_breaks_the_axis(comm, make_grid):
    """As when a product into it has failed on one rank, which the others cannot know."""
    axis = make_grid(x=comm.size, node_memory=True, check=False)["x"]
    summand = axis.allocate((6, 2), np.empty(0))
    summand[...] = 1
    comm.Barrier()  # a member still in `allocate` would learn of the failure there
    with pytest.raises(AgreementError, match=r"reduce_scatter of float64 \[·, 2\].* on ranks 0, 2; all_reduce .* on rank 1"):
        if comm.rank == 1:
            axis.all_reduce(np.ones(3))
        else:
            axis.reduce_scatter(summand)
    with pytest.raises(GridError, match="axis x is broken"):
        axis.barrier()


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("node_memory", [True, False])
def test_arguments_that_are_no_whole_numbers_are_refused_before_anything_is_taken(comm, make_grid, node_memory):
    axis = make_grid(x=3, node_memory=node_memory, check=False)["x"]
    whole, sizes = np.arange(12.0), ([-4, 8, 8], [4.0] * 3, ["4"] * 3)
    calls = [lambda one=one: axis.reduce_scatter(whole, sizes=one) for one in sizes]
    calls += [lambda one=one: axis.all_gather(whole[:4], sizes=one) for one in ([4.0] * 3, [-4, 4, 4])]
    calls += [lambda one=one: axis.all_to_all(whole, sizes=[4] * 3, receive_sizes=one) for one in (*sizes, [4] * 2)]
    kept = [6 if member == axis.index else 3 for member in range(3)]
    calls += [lambda: axis.all_to_all(whole, sizes=kept, receive_sizes=[4] * 3)]  # its own piece is 6 and 4
    calls += [lambda: axis.all_gather(whole, 0.0), lambda: axis.broadcast(whole, 0.5), lambda: axis.reduce(whole, 1.5)]
    calls += [lambda: axis.start_send(whole, 0.5), lambda: axis.broadcast(whole, -1)]
    for call in calls:
        with pytest.raises(ShapeError):
            call()
        assert axis.all_reduce(np.ones(2)).tolist() == [3, 3]


@pytest.mark.mpi(sizes=(2,))
def test_an_axis_whose_making_was_interrupted_is_refused_afterwards(comm, make_grid, monkeypatch):
    grid = make_grid(x=2, y=1, z=1)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grid, "_new_axis", interrupted)
        grid["x", "y"]
    with pytest.raises(GridError, match=r"interrupted in grid\['x', 'y'\]"):
        grid["x", "y"]
    assert grid["x"].all_reduce(np.ones(2)).tolist() == [2, 2]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:summa3d")


@pytest.mark.mpi(sizes=(2,))
def test_freed_grids_give_back_their_memory_at_once(comm, make_grid):
    before, gc_was_on = None, gc.isenabled()
    gc.disable()
    try:
        for _ in range(30):
            with Grid(comm, {"x": 2}, node_memory=True) as grid:
                grid["x"].all_gather(np.ones(3), view=True)
                assert maps() >= 2
            before = before or (descriptors(), maps())
        assert (descriptors(), maps()) == before
    finally:
        if gc_was_on:
            gc.enable()


@pytest.mark.mpi(sizes=(2,))
def test_too_many_grids_are_a_grid_error(comm):
    made = []
    try:
        with pytest.raises(MPI.Exception) if "MPICH" in MPI.Get_library_version() else pytest.skip("other MPIs have more"):
            made += (comm.Dup() for _ in range(2100))
        with pytest.raises(GridError, match=r"no communicator left for Grid .*\n  grid.free\(\)"):
            Grid(comm, {"x": 2})
    finally:
        for one in made:
            one.Free()
    Grid(comm, {"x": 2}).free()
