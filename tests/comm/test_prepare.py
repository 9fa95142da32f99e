"""A prepared collective does what the axis's method of the same name does, and refuses what it was not prepared for."""

from __future__ import annotations

import numpy as np
import pytest

from summa3d.comm.grid import Grid
from summa3d.errors import AgreementError, GridError, ShapeError

WAYS = [True, False]
ROWS = (3, 0, 2, 5)
"""Of the members' blocks."""


def block(axis, dtype="float64", kind="numpy"):
    rows = ROWS[axis.index]
    array = (np.arange(rows * 7, dtype="float64").reshape(rows, 7) + 100 * axis.index + 1).astype(dtype)
    return array if kind == "numpy" else pytest.importorskip("torch").from_numpy(array)


def whole(axis, dtype="float64"):
    return np.concatenate(
        [np.arange(rows * 7).reshape(rows, 7) + 100 * index + 1 for index, rows in enumerate(ROWS[: axis.size])]
    )


def cases(axis):
    """Each collective: how it is prepared, and what numpy gives, of what this member starts."""
    size, index, sizes = axis.size, axis.index, ROWS[: axis.size]
    each = np.arange(sum(sizes) * 5.0).reshape(sum(sizes), 5)
    mine, total = each + index, each * size + sum(range(size))
    starts = np.cumsum([0, *sizes])
    exchanged = np.concatenate([(each + other)[starts[index] : starts[index + 1]] for other in range(size)])
    return {
        "all_gather": ({"sizes": sizes}, block(axis), whole(axis)),
        "all_gather, viewed": ({"sizes": sizes, "view": True}, block(axis), whole(axis)),
        "reduce_scatter": ({"sizes": sizes}, mine, total[starts[index] : starts[index + 1]]),
        "reduce_scatter, dim 1": ({"sizes": sizes, "dim": 1}, mine.T.copy(), total.T[:, starts[index] : starts[index + 1]]),
        "all_reduce": ({}, mine, total),
        "all_reduce, max": ({"op": "max"}, mine, each + size - 1),
        "reduce": ({"root": size - 1}, mine, total if index == size - 1 else None),
        "broadcast": ({"root": size - 1}, mine, each + size - 1),
        "all_to_all": ({"sizes": sizes, "receive_sizes": [sizes[index]] * size}, mine, exchanged),
    }


@pytest.mark.mpi(sizes=(1, 2, 4))
@pytest.mark.parametrize("node_memory", WAYS)
@pytest.mark.parametrize("check", [False, True])
def test_each_collective_started_or_run_again_gives_what_numpy_does_and_moves_what_the_method_does(
    comm, make_grid, node_memory, check
):
    grid = make_grid(x=comm.size, node_memory=node_memory, check=check)
    axis = grid["x"]
    for name, (options, array, want) in cases(axis).items():
        kind = name.partition(",")[0]
        method = getattr(axis, kind)
        if axis.size == 1:
            want = array
        with grid.ledger.watch() as moved:
            expected = method(array.copy(), **options)
        expected = None if expected is None else np.array(expected)  # a view ends with the next communication
        collective = axis.prepare(kind, array, **options)
        for turn in range(3):
            fresh = array.copy()
            with grid.ledger.watch() as prepared:
                result = collective.run(fresh) if turn == 1 else collective.start(fresh).wait()
            assert (prepared.words, prepared.messages, prepared.bytes) == (moved.words, moved.messages, moved.bytes), name
            assert (want is None and result is None and expected is None) or np.array_equal(result, want), name
            assert want is None or np.array_equal(expected, want), name


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", WAYS)
def test_results_go_into_an_array_that_fits_and_into_no_other(comm, make_grid, node_memory):
    axis = make_grid(x=2, node_memory=node_memory, check=False)["x"]
    gather = axis.prepare("all_gather", block(axis), sizes=ROWS[:2])
    into = np.empty((3, 7))
    assert gather.start(block(axis), into).wait() is into and np.array_equal(into, whole(axis))
    for wrong in (np.empty((4, 7)), np.empty((3, 7), "float32"), np.broadcast_to(np.empty(7), (3, 7))):
        with pytest.raises(ShapeError, match="into is"):
            gather.start(block(axis), wrong)
    scatter, parts = axis.prepare("reduce_scatter", np.ones((4, 3))), np.empty(12)
    assert np.array_equal(scatter.run(np.ones((4, 3)), parts=parts), np.full((2, 3), 2))
    with pytest.raises(ShapeError, match="parts cannot be its workspace"):
        scatter.run(np.ones((4, 3)), parts=np.empty(11))
    for kind in ("broadcast", "all_to_all"):
        with pytest.raises(ShapeError, match=f"{kind} over x takes no into"):
            axis.prepare(kind, np.ones(4)).start(np.ones(4), np.ones(4))
    broadcast = axis.prepare("broadcast", np.ones(3))
    if comm.rank:
        with pytest.raises(ShapeError, match="overwrites its array in place, and this one is read-only"):
            broadcast.start(np.broadcast_to(1.0, 3))


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("node_memory", WAYS)
@pytest.mark.parametrize("check", [False, True])
def test_another_shape_dtype_or_library_is_the_same_error_on_every_rank(comm, make_grid, node_memory, check):
    torch = pytest.importorskip("torch")
    axis = make_grid(x=comm.size, node_memory=node_memory, check=check)["x"]
    gather = axis.prepare("all_gather", np.ones((2, 3)))
    wrongs = {
        r"float32 \[2, 3\]": np.ones((2, 3), "float32"),
        r"float64 \[2, 4\]": np.ones((2, 4)),
        r"float64 \[2, 3\], in another library or memory": torch.ones(2, 3, dtype=torch.float64),
    }
    for given, wrong in wrongs.items():
        for use in (gather.start, gather.run):
            with pytest.raises(ShapeError, match=rf"prepared for float64 \[2, 3\], and is started with {given}"):
                use(wrong)
        assert np.array_equal(gather.run(np.ones((2, 3))), np.ones((2 * comm.size, 3)))  # the axis is as it was
    with pytest.raises(ShapeError, match="all_gather over x: "):
        gather.start([1.0, 2.0])


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("node_memory", WAYS)
def test_one_rank_that_starts_another_array_or_collective_is_an_error_on_all(comm, node_memory):
    other = comm.rank == comm.size - 1
    for wrong in ("dtype", "kind"):
        with Grid(comm, {"x": comm.size}, node_memory=node_memory, check=not node_memory) as grid:
            axis = grid["x"]
            gather, total = axis.prepare("all_gather", np.ones(3)), axis.prepare("all_reduce", np.ones(3))
            with pytest.raises((AgreementError, ShapeError) if other and wrong == "dtype" else AgreementError):
                if wrong == "dtype":
                    gather.run(np.ones(3, "float32" if other else "float64"))
                else:
                    (total if other else gather).run(np.ones(3))
            with (
                pytest.raises(AgreementError)
                if node_memory and other and wrong == "dtype"
                else pytest.raises((AgreementError, GridError))
            ):
                raise AgreementError("") if not node_memory else _next_error(axis)


def _next_error(axis):
    """Return what the next call over a broken axis raises."""
    try:
        axis.all_reduce(np.ones(3))
    except (AgreementError, GridError) as error:
        return error
    return AssertionError("nothing was raised")


@pytest.mark.mpi(sizes=(1, 2))
def test_what_cannot_be_prepared_is_refused_with_what_can(comm, make_grid):
    axis = make_grid(x=comm.size)["x"]
    with pytest.raises(ShapeError, match=r"no collective .gather. to prepare\. Those that there are: all_gather, reduce_scatter"):
        axis.prepare("gather", np.ones(3))
    with pytest.raises(ShapeError, match=r"all_gather over x takes no root\. It takes dim, sizes, view"):
        axis.prepare("all_gather", np.ones(3), root=0)
    if comm.size > 1:
        with pytest.raises(ShapeError, match="no equal parts over x = 2"):
            axis.prepare("reduce_scatter", np.ones(3))


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", WAYS)
@pytest.mark.parametrize("check", [False, True])
def test_a_freed_grid_refuses_what_was_prepared_before(comm, make_grid, node_memory, check):
    grid = make_grid(x=2, node_memory=node_memory, check=check)
    gather = grid["x"].prepare("all_gather", np.ones(3))
    gather.run(np.ones(3))
    grid.free()
    for use in (gather.start, gather.run):
        with pytest.raises(GridError, match="axis x was freed with its grid"):
            use(np.ones(3))


@pytest.mark.mpi(sizes=(3, 4))
@pytest.mark.parametrize("size", [3, 1 << 18])
def test_every_member_sums_in_the_order_of_the_members(comm, make_grid, size):
    """The same bits on all: here another order gives another sum."""
    axis = make_grid(x=comm.size, node_memory=True, check=False)["x"]
    terms = [1e16, 1.0, -1e16, 1.0][: comm.size]
    total = terms[0]
    for term in terms[1:]:
        total += term
    collective = axis.prepare("all_reduce", np.empty(size), in_order=True)
    assert np.array_equal(collective.run(np.full(size, terms[axis.index])), np.full(size, total))
