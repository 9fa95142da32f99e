"""One call at a time is inside an axis: threads, signal handlers, interrupts and forks never make a wrong number of it."""

from __future__ import annotations

import pickle
import signal
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import jobs
import numpy as np
import pytest
from mpi4py import MPI

from summa3d import DistMatrix
from summa3d.comm.grid import Grid
from summa3d.comm.transport.transports import Transports
from summa3d.errors import AgreementError, GridError

BROKEN = r"axis x is broken: .*rank 1\)? failed in .*KeyboardInterrupt"
MODES = [True, False]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", MODES)
def test_a_second_thread_inside_an_axis_is_refused_and_breaks_it(comm, make_grid, monkeypatch, node_memory):
    axis = make_grid(x=2, node_memory=node_memory, check=False)["x"]
    axis.barrier()
    inside, leave, whole = threading.Event(), threading.Event(), Transports.carry

    def slow(self, *call):
        inside.set()
        leave.wait(60)
        return whole(self, *call)

    results = []

    def first():
        try:
            results.append(axis.all_reduce(np.full(2, 1.0)))
        except GridError as error:
            results.append(error)

    monkeypatch.setattr(Transports, "carry", slow)
    thread = threading.Thread(target=first, name="first")
    thread.start()
    inside.wait(60)
    with pytest.raises(GridError, match=r"MainThread began a call while first was in one"):
        axis.all_reduce(np.full(2, 100.0))
    leave.set()
    thread.join()
    assert isinstance(results[0], GridError) or results[0].tolist() == [2, 2]
    with pytest.raises(GridError, match="axis x is broken"):
        axis.all_gather(np.ones(2))


@pytest.mark.mpi(sizes=(2,))
def test_threads_that_take_turns_in_other_orders_are_found_with_check(comm, make_grid):
    axis = make_grid(x=2, node_memory=False, check=True)["x"]
    failed = []

    def call(value):
        try:
            axis.all_reduce(np.full(2, value))
        except AgreementError as error:
            failed.append(str(error))

    for name in ("a", "b") if comm.rank else ("b", "a"):
        thread = threading.Thread(target=call, args=(1.0 if name == "a" else 100.0,), name=name)
        thread.start()
        thread.join()
    assert len(failed) == 2 and "thread: 'b' on rank 0; 'a' on rank 1" in failed[0]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize(
    ("node_memory", "check", "when"),
    [(True, False, "before"), (True, True, "after"), (False, False, "before"), (False, False, "after"), (False, True, "after")],
)
def test_an_axis_is_broken_after_an_interrupt_in_a_call_that_a_program_has_caught(
    comm, make_grid, monkeypatch, node_memory, check, when
):
    axis, whole = make_grid(x=2, node_memory=node_memory, check=check)["x"], Transports.carry
    axis.all_reduce(np.ones(2))
    comm.Barrier()  # a member that still reads that sum would see the axis break

    def interrupted(self, *call):
        if when == "after":
            whole(self, *call).complete()
        raise KeyboardInterrupt

    if comm.rank == 1:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Transports, "carry", interrupted)
            axis.all_reduce(np.full(2, 7.0))
    elif node_memory:  # which may have its result already
        with suppress(GridError):
            assert axis.all_reduce(np.full(2, 7.0)).tolist() == [14, 14]
            assert when == "after"
    elif when == "after":
        assert axis.all_reduce(np.full(2, 7.0)).tolist() == [14, 14]
    comm.Barrier()
    if comm.rank == 1 or node_memory:  # through MPI the others cannot learn it
        for use in (lambda: axis.all_reduce(np.ones(2)), lambda: axis.start_all_gather(np.ones(2)), axis.barrier):
            with pytest.raises(GridError, match=BROKEN):
                use()


@pytest.mark.mpi(sizes=(2,))
def test_a_message_of_a_broken_axis_never_arrives_in_the_grid_that_is_made_in_its_place(comm):
    """MPI gives the number of a communicator that is freed to the next one; what nobody received would be received there."""
    received = []
    for turn in range(3):
        grid = Grid(comm, {"x": 2}, node_memory=False, check=False)
        axis = grid["x"]
        if comm.rank == 0:
            axis.send(np.full(2, float(turn)), 1)
        elif turn > 0:
            received.append(axis.receive(np.empty(2), 0).tolist())
        if turn == 0 and comm.rank == 0:  # its member 1 has not received yet
            with pytest.raises(KeyboardInterrupt), axis.lock:
                raise KeyboardInterrupt
        grid.free()
    assert received == ([] if comm.rank == 0 else [[1, 1], [2, 2]])


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", MODES)
def test_a_signal_handler_that_communicates_inside_a_call_is_refused(comm, make_grid, monkeypatch, node_memory):
    axis, whole, refused = make_grid(x=2, node_memory=node_memory, check=False)["x"], Transports.carry, []

    def handler(*_):
        try:
            axis.all_reduce(np.full(2, 100.0))
        except GridError as error:
            refused.append(str(error))

    def signalled(self, *call):
        signal.raise_signal(signal.SIGUSR2)
        return whole(self, *call)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        monkeypatch.setattr(Transports, "carry", signalled)
        with pytest.raises(GridError, match="began a call inside another one") if node_memory else nullcontext():
            assert axis.all_reduce(np.full(2, 1.0)).tolist() == [2, 2]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "began a call inside another one" in refused[0]
    with pytest.raises(GridError, match="axis x is broken"):
        axis.barrier()


FORKED = """
import os, sys
import numpy as np
from mpi4py import MPI
from summa3d import Grid
grid, how = Grid(MPI.COMM_WORLD, {"x": 2}, node_memory=sys.argv[1] == "node"), sys.argv[2]
axis = grid["x"]
first = axis.all_reduce(np.full(4, grid.rank + 1.0))
child = os.fork()
if child == 0:
    if how == "exits":
        sys.exit(3)
    if how == "raises":
        raise ValueError("in the child")
    if how == "frees":
        grid.free()
    if how == "makes an axis":
        Grid(MPI.COMM_WORLD, {"x": 2})
    axis.all_reduce(np.full(4, 100.0))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sums = [axis.all_reduce(np.full(4, grid.rank + 1.0 + step))[0] for step in range(5)]
print(f"{status} {first[0]:.0f} {sums == [3.0 + 2 * step for step in range(5)]}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("carried", ["node", "mpi"])
@pytest.mark.parametrize("how", ["exits", "raises", "uses it", "frees", "makes an axis"])
def test_a_process_forked_from_a_rank_is_no_member_and_its_end_is_its_own(tmp_path: Path, carried: str, how: str) -> None:
    (tmp_path / "forked.py").write_text(FORKED)
    ended = jobs.run(["forked.py", carried, how], 2, tmp_path, 60)
    status = 3 if how == "exits" else 1
    assert (ended.status, ended.stdout) == (0, f"{status} 3 True\n" * 2), ended.stderr
    if how not in ("exits", "raises"):
        assert "was forked from rank 0, and is no rank itself: it cannot communicate" in ended.stderr


@pytest.mark.mpi(sizes=(2,))
def test_two_threads_each_on_a_grid_of_its_own_are_right(comm, make_grid):
    axes, wrong = [make_grid(x=2, node_memory=node_memory, check=False)["x"] for node_memory in MODES], []

    def work(axis, value):
        for step in range(50):
            found = axis.all_reduce(np.full(5, value + step))
            if found.tolist() != [2.0 * (value + step)] * 5:
                wrong.append((value, step, found))

    threads = [threading.Thread(target=work, args=(axis, 1000.0 * number)) for number, axis in enumerate(axes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", MODES)
def test_what_is_in_flight_when_its_grid_is_freed_completes_through_mpi_and_says_so_in_the_nodes_memory(comm, node_memory):
    with Grid(comm, {"x": 2}, node_memory=node_memory) as grid:
        pending = grid["x"].start_all_gather(np.ones(3))
        done = grid["x"].start_all_reduce(np.ones(3))
        assert done.wait().tolist() == [2, 2, 2]
    if node_memory:
        with pytest.raises(GridError, match="axis x was freed with its grid, and communicates no more"):
            pending.wait()
    else:
        assert pending.wait().tolist() == [1] * 6
    assert done.wait().tolist() == [2, 2, 2]


@pytest.mark.mpi(sizes=(3,))
def test_what_mpi_still_writes_of_a_dropped_pending_is_kept(comm, make_grid):
    """Its freed memory was written into: sums of another grid were wrong, or the process died."""
    one, two = (make_grid(x=3, node_memory=False, check=False) for _ in range(2))
    for step in range(60):
        one["x"].start_all_reduce(np.arange(3.0 * (1, 3, 5000)[step % 3]) + 1000 * step)
        assert two["x"].all_reduce(np.full(3, float(step + comm.rank))).tolist() == [3.0 * step + 3] * 3


def test_grids_axes_and_what_holds_them_are_not_pickled():
    grid = Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
    for held in (grid, grid["x"], DistMatrix.from_global(np.ones((3, 4)), grid, "m:(x,y) k:z"), {"a": [grid]}):
        with pytest.raises(GridError, match=r"belongs to the processes of this job, and cannot be pickled"):
            pickle.dumps(held)
