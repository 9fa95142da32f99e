"""A grid has communicators of its own: neither another grid on the same communicator nor the program's messages meet its own."""

from __future__ import annotations

from pathlib import Path

import jobs
import numpy as np
import pytest
from mpi4py import MPI

from summa3d.comm.grid import Grid
from summa3d.errors import AgreementError, GridError
from summa3d.node_support import why_no_node_memory

CROSSED = """
import sys
import numpy as np
from mpi4py import MPI
from summa3d import Grid
node_memory, check = sys.argv[1] == "node", sys.argv[2] == "check"
one, two = (Grid(MPI.COMM_WORLD, {"x": 2}, node_memory=node_memory, check=check) for _ in range(2))
order = (one, two) if one.rank == 0 else (two, one)
for grid in order:
    print(grid["x"].all_reduce(np.full(3, 1.0 + grid.rank)))
"""


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("node_memory", [False, True])
def test_a_wildcard_receive_on_the_users_communicator_gets_the_users_message_alone(comm, node_memory):
    with Grid(comm, {"x": comm.size}, node_memory=node_memory, check=False) as grid:
        axis, following, previous = grid["x"], (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        taken = np.zeros(4)
        mine = comm.Irecv(taken, MPI.ANY_SOURCE, MPI.ANY_TAG)
        arriving = axis.start_receive(np.zeros(4), previous)
        axis.send(np.full(4, 10.0 + comm.rank), following)
        assert axis.all_reduce(np.ones(3)).tolist() == [comm.size] * 3
        assert arriving.wait().tolist() == [10.0 + previous] * 4
        comm.Send(np.full(4, 100.0 + comm.rank), following)
        mine.Wait()
        assert taken.tolist() == [100.0 + previous] * 4


@pytest.mark.mpi(sizes=(2,))
def test_collectives_of_two_grids_begun_in_different_orders_through_mpi_are_each_grids_own(comm, make_grid):
    one, two = (make_grid(x=2, node_memory=False, check=False) for _ in range(2))
    values = {one: np.full(4, comm.rank + 1.0), two: np.full(4, 10.0 * (comm.rank + 1))}
    begun = {grid: grid["x"].start_all_reduce(values[grid]) for grid in ((one, two) if comm.rank == 0 else (two, one))}
    assert (begun[one].wait().tolist(), begun[two].wait().tolist()) == ([3.0] * 4, [30.0] * 4)


@pytest.mark.mpi(sizes=(2,))
def test_collectives_of_axes_with_the_same_ranks_begun_in_different_orders_through_mpi_are_each_axis_own(comm, make_grid):
    grid = make_grid(x=2, y=1, node_memory=False, check=False)
    axes = [grid["x"], grid.world, grid["x", "y"], grid.ranked]
    assert axes[1] is axes[2] and len({id(axis) for axis in axes}) == 3
    assert all(axis.size == axis.comm.size == 1 for axis in (grid[()], grid["y"]))
    del axes[2]
    begun = {n: axes[n].start_all_reduce(np.full(4, (comm.rank + 1.0) * 10**n)) for n in (range(3) if comm.rank else (2, 1, 0))}
    assert [begun[n].wait().tolist() for n in range(3)] == [[3.0 * 10**n] * 4 for n in range(3)]


@pytest.mark.mpi(sizes=(3,))
def test_the_first_use_of_everyone_makes_its_communicator_and_the_users_is_left_alone(comm):
    with Grid(comm, {"x": 2}, ranks=(2, 0)) as grid:
        request = comm.Irecv(np.zeros(1), MPI.ANY_SOURCE, MPI.ANY_TAG)
        assert grid.everyone.comm not in (comm, grid.comm)
        assert grid.everyone.all_gather(np.array([comm.rank])).tolist() == [0, 1, 2]
        comm.Isend(np.zeros(1), (comm.rank + 1) % 3).Wait()
        request.Wait()
    with pytest.raises(GridError, match="was freed"):
        grid.everyone.all_gather(np.zeros(1))


@pytest.mark.mpi(sizes=(2,))
def test_thousands_of_grids_are_made_and_freed_in_one_process(comm):
    for _ in range(2100):  # MPICH has some 2,000 context ids
        with Grid(comm, {"x": 2}, node_memory=False, ranks=(1, 0)):
            pass
    with Grid(comm, {"x": 2}) as grid:
        assert grid["x"].all_reduce(np.ones(2)).tolist() == [2, 2]


@pytest.mark.mpi(sizes=(2,))
def test_a_grid_outlives_the_communicator_that_it_was_made_on(comm):
    own = comm.Dup()
    grid = Grid(own, {"x": 2, "y": 1})
    own.Free()
    assert grid["x", "y"].all_reduce(np.ones(2)).tolist() == [2, 2] == grid.everyone.all_reduce(np.ones(2)).tolist()
    grid.free()


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize(
    ("name", "differs"),
    [
        ("axes", {"axes": {"y": 1}}),
        ("order", {"order": "xy"}),
        ("check", {"check": True}),
    ],
)
def test_ranks_that_make_different_grids_all_learn_of_it(comm, name, differs):
    given = {"axes": {"x": comm.size, "y": 1}, "check": False}
    if comm.rank == comm.size - 1:
        given |= {**differs, "axes": {"y": 1, "x": comm.size}} if name == "axes" else differs
    last, others = comm.size - 1, ", ".join(map(str, range(comm.size - 1)))
    with pytest.raises(AgreementError, match=rf"(?s)do not agree on Grid:.*{name}: .* on ranks? {others}; .* on rank {last}"):
        Grid(comm, **given)
    with Grid(comm, {"x": comm.size}) as grid:
        assert grid["x"].all_reduce(np.ones(2)).tolist() == [comm.size] * 2


@pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}")
def test_two_grids_in_different_orders_are_an_error_that_names_both_calls_where_they_share_the_nodes_memory(
    tmp_path: Path,
) -> None:
    (tmp_path / "crossed.py").write_text(CROSSED)
    ended = jobs.run(["crossed.py", "node", "no"], 2, tmp_path, 60)
    assert ended.status != 0 and ended.stdout == ""
    for grid in (1, 2):
        assert f"over x of grid {grid}" in ended.stderr
    assert "in all_reduce of float64 [3], sum" in ended.stderr and "use the two in different orders" in ended.stderr


@pytest.mark.parametrize(("carried", "check"), [("mpi", "no"), ("mpi", "check"), ("node", "check")])
def test_two_grids_in_different_orders_are_named_by_the_watchdog(tmp_path: Path, carried: str, check: str) -> None:
    (tmp_path / "crossed.py").write_text(CROSSED)
    ended = jobs.run(["crossed.py", carried, check], 2, tmp_path, 60, {"SUMMA3D_WATCHDOG": "1"})
    assert ended.status != 0 and ended.stdout == ""
    assert "nothing has gone on; the job ends" in ended.stderr
    shown = jobs.run_serial(["-m", "summa3d", "doctor", "--flight", "flight"], cwd=tmp_path).stdout
    assert "all_reduce" in shown and "x of grid 2" in shown, shown
