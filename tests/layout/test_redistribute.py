"""Redistribution: the plan by hypothesis without MPI (every element once, words = formula), then the executor on real ranks."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import array, is_like, numbers, plain

from summa3d.comm.grid import Grid
from summa3d.errors import AgreementError, LayoutError, ShapeError
from summa3d.layout import BlockCyclic, Layout, Redistribution, distribute, redistribute
from summa3d.layout.redistribute import Placement, common_runs, put, taken

AXES = "xyzd"
SIZES = pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 12))


def points(grid_shape, order):
    """Coordinates of every rank, the axes of `order` counted fastest first."""
    slow_first = list(reversed(order))
    indices = itertools.product(*(range(grid_shape[axis]) for axis in slow_first))
    return [dict(zip(slow_first, index, strict=True)) for index in indices]


@st.composite
def grid_shapes(draw, ranks):
    """A grid of `ranks` ranks with up to four axes, some of size 1, ranks counted in any order."""
    sizes = []
    for _ in range(3):
        sizes.append(draw(st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0])))
        ranks //= sizes[-1]
    names = draw(st.permutations(AXES))
    shape = dict(zip(names, [*sizes, ranks], strict=True))
    return shape, points(shape, draw(st.permutations(names)))


@st.composite
def ownerships(draw, dims):
    """A layout of any axes on any dims, or a block-cyclic one for matrices; axes left out hold copies."""
    owners = draw(st.lists(st.integers(-1, dims - 1), min_size=4, max_size=4))
    order = draw(st.permutations(AXES))
    split = [tuple(axis for axis, owner in zip(order, owners, strict=True) if owner == dim) for dim in range(dims)]
    if dims == 2 and draw(st.booleans()):
        return BlockCyclic(rows=(split[0], draw(st.integers(1, 5))), columns=(split[1], draw(st.integers(1, 5))))
    if draw(st.booleans()):
        return Layout(*split)
    return Layout(*split, root_only=[axis for axis, owner in zip(order, owners, strict=True) if owner == -1][:1])


@st.composite
def redistributions(draw):
    """Between grids that each fill all ranks, or some in any order; {} are the coordinates of the others."""
    ranks = draw(st.integers(1, 12))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    placements = []
    for _ in range(2):
        used = draw(st.one_of(st.just(ranks), st.integers(1, ranks))) if shape else ranks
        grid_shape, at = draw(grid_shapes(used))
        at = draw(st.permutations([*at, *[{}] * (ranks - used)])) if used < ranks else at
        placements.append(Placement(draw(ownerships(len(shape))), grid_shape, at))
    return Redistribution(shape, *placements)


def cut(whole, placement, rank):
    """The block of `rank`, taken from the whole by index arrays alone."""
    for dim, runs in enumerate(placement.runs(whole.shape, rank)):
        whole = np.take(whole, [index for run in runs for index in range(run.start, run.stop)], axis=dim)
    return whole


@settings(max_examples=300, deadline=None)
@given(redistributions())
def test_every_element_arrives_exactly_once_and_words_are_the_formula(plan):
    whole = np.arange(1, prod(plan.shape) + 1).reshape(plan.shape)
    for rank in range(len(plan.target.points)):
        want = cut(whole, plan.target, rank)
        got, times = np.zeros_like(want), np.zeros_like(want)
        received = plan.received_by(rank)
        for piece in [*received, *filter(None, [plan.kept_by(rank)])]:
            values = taken(cut(whole, plan.source, piece.sender), piece.take)
            assert values.shape == piece.shape and values.size == piece.words > 0
            put(got, piece.put, values)
            put(times, piece.put, taken(times, piece.put) + 1)
        assert np.array_equal(got, want) and np.all(times == 1)
        held = np.isin(want, cut(whole, plan.source, rank)).sum()
        assert sum(piece.words for piece in received) == plan.words_of(rank) == want.size - held
        assert all(piece.receiver == rank and piece.sender != rank for piece in received)


@settings(max_examples=200, deadline=None)
@given(redistributions())
def test_senders_and_receivers_agree(plan):
    ranks = range(len(plan.target.points))
    sent = {(piece.sender, piece.receiver): piece for rank in ranks for piece in plan.sent_by(rank)}
    received = {(piece.sender, piece.receiver): piece for rank in ranks for piece in plan.received_by(rank)}
    assert sent == received
    assert all(plan.messages_of(rank) == (len(ranks) - 1 if received else 0) for rank in ranks)


def test_receivers_of_a_part_take_turns_over_its_copies():
    shape = {"x": 2, "y": 4}
    at = points(shape, "yx")
    plan = Redistribution((8,), Placement(Layout(("x",)), shape, at), Placement(Layout(()), shape, at))
    given_by = [sum(piece.words for piece in plan.sent_by(rank)) for rank in range(8)]
    assert given_by == [4] * 8


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_common_runs_are_the_intersection(given_sizes, taken_sizes):
    def runs_of(sizes):
        edges = np.cumsum([0, *sizes])
        return tuple(slice(int(a), int(b)) for a, b in zip(edges[:-1:2], edges[1::2], strict=False) if b > a)

    def indices(runs):
        return [index for run in runs for index in range(run.start, run.stop)]

    held, wanted = runs_of(given_sizes), runs_of(taken_sizes)
    in_held, in_wanted = common_runs(held, wanted)
    both = [index for index in indices(held) if index in indices(wanted)]
    assert [indices(held)[at] for at in indices(in_held)] == both == [indices(wanted)[at] for at in indices(in_wanted)]


def cases(ranks):
    """Pairs of (grid shape, order, ownership) over `ranks` ranks, with copies, changed axis names and orders."""
    x = max(size for size in range(1, ranks + 1) if ranks % size == 0 and size * size <= ranks)
    flat, square = {"x": ranks}, {"x": x, "y": ranks // x}
    cube = {"a": x, "b": 1, "c": ranks // x}
    return [
        (flat, "x", Layout(("x",), ())),
        (flat, "x", Layout((), ())),
        (square, "xy", Layout(("y",), ("x",))),
        (square, "yx", Layout((), ("y",))),
        (square, "yx", Layout(("x", "y"), ())),
        (cube, "cba", Layout(("b", "c"), ("a",))),
        (square, "yx", BlockCyclic(rows=("x", 2), columns=("y", 3))),
        (square, "xy", BlockCyclic(rows=(("y", "x"), 1), columns=((), 4))),
        (square, "yx", Layout((), ("y",), root_only=("x",))),
    ]


def assert_redistributes(make_grid, comm, kind, dtypes, shapes):
    """Every case to every other: the result cut from the whole, the ledger as planned."""
    sources = [(make_grid(order=order, **axes), layout) for axes, order, layout in cases(comm.size)]
    targets = [(make_grid(order=order, check=False, **axes), layout) for axes, order, layout in cases(comm.size)]
    wholes = {shape: numbers("float64", shape, 3) for shape in shapes}
    turns = zip(itertools.product(sources, targets), itertools.cycle(dtypes), itertools.cycle(shapes), strict=False)
    for ((grid, layout), (to_grid, to)), dtype, shape in turns:
        source, target = Placement.on(grid, layout), Placement.on(to_grid, to)
        plan = Redistribution(shape, source, target)
        block = array(kind, dtype, cut(wholes[shape], source, comm.rank), transposed=comm.rank % 2 == 1)
        grid.ledger.reset_peak()
        with grid.ledger.watch() as moved:
            got = redistribute(block, shape, grid, layout, to, to_grid)
        assert grid.ledger.workspace_peak == plan.workspace_of(comm.rank) * block.itemsize
        assert np.array_equal(plain(got), cut(wholes[shape], target, comm.rank)) and is_like(got, kind, dtype)
        assert (moved.words, moved.messages) == (plan.words_of(comm.rank), plan.messages_of(comm.rank))
        assert [row.collective for row in moved.rows] == (["all_to_all"] if plan.moves() else [])


SHAPES = [(13, 17), (2, 40), (40, 40), (0, 5), (300, 7)]


@SIZES
def test_redistribution_of_numpy_blocks_equals_cutting_the_whole(comm, make_grid):
    assert_redistributes(make_grid, comm, "numpy", ["float64", "float32", "complex64", "int32", "float16", "complex128"], SHAPES)


@pytest.mark.mpi(sizes=(4, 6))
def test_redistribution_of_torch_blocks_equals_cutting_the_whole(comm, make_grid):
    assert_redistributes(make_grid, comm, "torch", ["float64", "bfloat16", "float32", "int64", "float16", "complex64"], SHAPES)


@SIZES
def test_any_number_of_dims(comm, make_grid):
    grid = make_grid(x=comm.size, y=1)
    for dims in range(4):
        whole = numbers("float64", (5,) * dims, 1)
        splits = [[("x",) if dim == at else ("y",) if dim == at - 1 else () for dim in range(dims)] for at in range(dims + 1)]
        layouts = [Layout(*split) for split in splits]
        for source, target in itertools.product(layouts, repeat=2):
            got = redistribute(distribute(whole, grid, source), whole.shape, grid, source, target)
            assert np.array_equal(got, distribute(whole, grid, target))


@pytest.mark.mpi(sizes=(4,))
def test_what_is_held_already_moves_nothing(comm, make_grid):
    grid = make_grid(x=2, y=2)
    whole = numbers("float64", (6, 6), 5)
    everywhere, rows, both = Layout((), ()), Layout(("x",), ()), Layout(("x", "y"), ())
    with grid.ledger.watch() as moved:
        redistribute(whole, (6, 6), grid, everywhere, both)
        redistribute(distribute(whole, grid, rows), (6, 6), grid, rows, both)
        redistribute(distribute(whole, grid, both), (6, 6), grid, both, both)
    assert (moved.calls, moved.words, moved.messages) == (0, 0, 0)
    with grid.ledger.watch() as moved:
        held = distribute(whole, grid, both)
        redistribute(held, (6, 6), grid, both, rows)
    assert moved.words == 3 * 6 - held.size


@pytest.mark.mpi(sizes=(4,))
def test_by_columns_for_fortran(comm, make_grid):
    grid = make_grid(x=2, y=2)
    whole = numbers("float64", (7, 9), 5)
    block = distribute(whole, grid, Layout(("x",), ("y",)))
    cyclic = BlockCyclic(rows=("x", 2), columns=("y", 2))
    local = redistribute(block, whole.shape, grid, Layout(("x",), ("y",)), cyclic, order="F")
    assert local.flags.f_contiguous and np.array_equal(local, cut(whole, Placement.on(grid, cyclic), comm.rank))
    again = redistribute(local, whole.shape, grid, cyclic, Layout(("x",), ("y",)))
    assert again.flags.c_contiguous and np.array_equal(again, block)


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_redistributed_is_an_error_on_every_rank(comm, make_grid):
    grid, reversed_comm = make_grid(x=4), comm.Split(0, -comm.rank)
    rows, columns = Layout(("x",), ()), Layout((), ("x",))
    block = np.zeros((2, 8))
    with Grid(reversed_comm, {"x": 4}) as other, pytest.raises(LayoutError, match="no common communicator"):
        redistribute(block, (8, 8), grid, rows, columns, other)
    with pytest.raises(LayoutError, match="names axis 'y'"):
        redistribute(block, (8, 8), grid, rows, Layout(("y",), ()))
    with pytest.raises(ShapeError, match="holds a block of shape"):
        redistribute(np.zeros((8, 2)), (8, 8), grid, rows, columns)
    with pytest.raises(ShapeError, match="order 'K'"):
        redistribute(block, (8, 8), grid, rows, columns, order="K")
    reversed_comm.Free()


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("between", [False, True], ids=["one grid", "two grids"])
@pytest.mark.parametrize(
    ("block", "order"), [([[0.0]], "C"), (None, "C"), (np.zeros((2, 6)), "K")], ids=["a list", "None", "an order"]
)
def test_what_is_no_block_on_one_rank_is_an_error_on_all(comm, between, block, order):
    with Grid(comm, {"x": comm.size}) as grid, Grid(comm, {"y": comm.size}) as other:
        shape, target, to = (2 * comm.size, 6), other if between else None, "m k:y" if between else "m k:x"
        wrong = comm.rank == 1
        with pytest.raises(AgreementError, match="do not agree on redistribute"):
            redistribute(block if wrong else np.zeros((2, 6)), shape, grid, "m:x k", to, target, order if wrong else "C")
