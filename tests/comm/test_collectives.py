"""Every collective of an axis against numpy on one process.

Kinds, dtypes, dims, uneven and empty parts, and what the ledger says.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from kinds import DTYPES, array, is_like, numbers, plain

from summa3d.errors import ShapeError
from summa3d.layout import split_sizes


@pytest.fixture(params=[True, False], ids=["node", "mpi"])
def make_grid(request, make_grid):
    """Grids whose axes communicate through the node's memory, and grids whose axes do through MPI."""
    return partial(make_grid, node_memory=request.param)


WORLDS = pytest.mark.mpi(sizes=(2, 3))
KINDS = pytest.mark.parametrize("kind", ["numpy", "torch"])


def spreads(members):
    """Sizes of parts: equal, ragged, fewer rows than members, none at all, and a decreasing run that ends in 0."""
    return [
        [2] * members,
        split_sizes(2 * members + 1, members),
        split_sizes(1, members),
        [0] * members,
        list(range(members))[::-1],
    ]


def cases(kind, members):
    """(dtype, dim, sizes, started, transposed, given `into`): all dims with all spreads, blocking, started; the rest mixed."""
    mix = np.random.default_rng(1)
    dtypes = itertools.cycle(DTYPES)
    for dim, sizes, started in itertools.product((0, 1, -1), spreads(members), (False, True)):
        yield next(dtypes), dim, sizes, started, bool(mix.integers(2)), (None, "ordered", "strided")[mix.integers(3)]


def shape_with(dim, extent):
    shape = [3, 2, 5]
    shape[dim] = extent
    return tuple(shape)


def call(axis, name, started, *arguments, **options):
    if started:
        pending = getattr(axis, f"start_{name}")(*arguments, **options)
        first = pending.wait()
        assert pending.wait() is first
        return first
    return getattr(axis, name)(*arguments, **options)


def into_of(kind, dtype, given, shape):
    return None if given is None else array(kind, dtype, np.ones(shape), transposed=given == "strided")


def size_in_bytes(dtype):
    return {"bool": 1, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16}.get(dtype, 4)


def assert_result(got, want, kind, dtype, into, case):
    assert into is None or got is into, case
    assert got.shape == want.shape and np.array_equal(plain(got), want), case
    if into is None:
        assert is_like(got, kind, dtype), case


def assert_moved(moved, name, words, messages, word_bytes, case):
    assert (moved.calls, moved.words, moved.messages, moved.bytes) == (1, words, messages, words * word_bytes), case
    assert [(row.collective, row.axis) for row in moved.rows] == [(name, "x")], case
    assert moved.seconds > 0, case


@WORLDS
@KINDS
def test_all_gather_concatenates_blocks_along_any_dim(comm, make_grid, kind):
    grid = make_grid(x=comm.size)
    axis, me = grid["x"], comm.rank
    for case in cases(kind, comm.size):
        dtype, dim, sizes, started, transposed, given = case
        blocks = [numbers(dtype, shape_with(dim, size), 1, member) for member, size in enumerate(sizes)]
        want = np.concatenate(blocks, axis=dim)
        block = array(kind, dtype, blocks[me], transposed)
        into = into_of(kind, dtype, given, want.shape)
        with grid.ledger.watch() as moved:
            got = call(axis, "all_gather", started, block, dim=dim, sizes=sizes, into=into)
        assert_result(got, want, kind, dtype, into, case)
        assert np.array_equal(plain(block), blocks[me]), case
        assert_moved(moved, "all_gather", want.size - blocks[me].size, comm.size - 1, size_in_bytes(dtype), case)


@pytest.mark.mpi(sizes=(3,))
@KINDS
@pytest.mark.parametrize("node_memory", [True, False])
def test_calls_that_differ_in_shape_or_dtype_alone_take_turns(comm, make_grid, kind, node_memory):
    grid = make_grid(x=3, node_memory=node_memory, check=False)  # with checks nothing that is kept is used again
    axis, me = grid["x"], comm.rank
    for _ in range(2):
        for dtype in ("float64", "int32"):
            for shape in ((4,), (7,), (6, 2), (2, 6), (3, 5)):
                blocks = [numbers(dtype, shape, 1, member) for member in range(3)]
                block, case = array(kind, dtype, blocks[me]), (dtype, shape)
                with grid.ledger.watch() as moved:
                    got = axis.all_gather(block)
                assert_result(got, np.concatenate(blocks), kind, dtype, None, case)
                assert_moved(moved, "all_gather", 2 * blocks[me].size, 2, size_in_bytes(dtype), case)
                assert_result(axis.all_reduce(block), sum(blocks[1:], blocks[0]), kind, dtype, None, case)


@WORLDS
@KINDS
def test_reduce_scatter_sums_and_keeps_this_members_part(comm, make_grid, kind):
    grid = make_grid(x=comm.size)
    axis, me = grid["x"], comm.rank
    for case in cases(kind, comm.size):
        dtype, dim, sizes, started, transposed, given = case
        if dtype == "bool":
            continue
        wholes = [numbers(dtype, shape_with(dim, sum(sizes)), 2, member) for member in range(comm.size)]
        want = np.split(sum(wholes), np.cumsum(sizes)[:-1], axis=dim)[me]
        whole = array(kind, dtype, wholes[me], transposed)
        into = into_of(kind, dtype, given, want.shape)
        with grid.ledger.watch() as moved:
            got = call(axis, "reduce_scatter", started, whole, dim=dim, sizes=sizes, into=into)
        assert_result(got, want, kind, dtype, into, case)
        assert np.array_equal(plain(whole), wholes[me]), case
        assert_moved(moved, "reduce_scatter", (comm.size - 1) * want.size, comm.size - 1, size_in_bytes(dtype), case)


@WORLDS
@KINDS
@pytest.mark.parametrize("name", ["all_reduce", "reduce"])
def test_reductions_over_members(comm, make_grid, kind, name):
    grid = make_grid(x=comm.size)
    axis, me = grid["x"], comm.rank
    functions = {"sum": sum, "max": lambda parts: np.maximum.reduce(parts), "min": lambda parts: np.minimum.reduce(parts)}
    mix, shapes = np.random.default_rng(2), [(), (0,), (2, 3), (1, 3 * comm.size + 1)]
    for dtype, op, started in itertools.product(DTYPES, functions, (False, True)):
        transposed, shape = bool(mix.integers(2)), shapes[mix.integers(4)]
        case = dtype, op, started, transposed, shape
        if (dtype == "bool" and op == "sum") or (dtype.startswith("complex") and op != "sum"):
            continue
        parts = [numbers(dtype, shape, 3, member) for member in range(comm.size)]
        want, mine = np.asarray(functions[op](parts)), array(kind, dtype, parts[me], transposed)
        n, own = want.size, split_sizes(want.size, comm.size)[me]
        root = comm.size - 1
        with grid.ledger.watch() as moved:
            got = call(axis, name, started, mine, op=op, **({"root": root} if name == "reduce" else {}))
        if name == "all_reduce" or me == root:
            assert got.shape == shape and np.array_equal(plain(got), want), case
            assert is_like(got, kind, dtype), case
        else:
            assert got is None, case
        assert np.array_equal(plain(mine), parts[me]), case
        words = n + (comm.size - 2) * own if name == "all_reduce" else (comm.size - 1) * own
        messages = (comm.size - 1) * (2 if name == "all_reduce" else 1)
        widened = "float16" in dtype and not grid.staged  # MPI is given them in float32
        assert_moved(moved, name, words, messages, 4 if widened else size_in_bytes(dtype), case)


@WORLDS
@KINDS
def test_all_reduce_into_itself_another_and_a_strided_array(comm, make_grid, kind):
    axis = make_grid(x=comm.size)["x"]
    for dtype, transposed, itself in itertools.product(("float64", "float16", "int32"), (False, True), (False, True)):
        parts = [numbers(dtype, (5, 3), 4, member) for member in range(comm.size)]
        mine = array(kind, dtype, parts[comm.rank], transposed)
        into = mine if itself else array(kind, dtype, np.ones((5, 3)), transposed)
        assert axis.all_reduce(mine, into=into) is into
        assert np.array_equal(plain(into), sum(parts))


@WORLDS
@KINDS
def test_broadcast_overwrites_every_members_array_by_the_roots(comm, make_grid, kind):
    grid = make_grid(x=comm.size)
    mix, shapes = np.random.default_rng(3), [(), (0, 4), (3, 5)]
    for dtype, started in itertools.product(DTYPES, (False, True)):
        root, shape = int(mix.integers(comm.size)), shapes[mix.integers(3)]
        case = dtype, started, root, shape
        want = numbers(dtype, shape, 5, root)
        # Every second member receives into a strided array: its memory must not be permuted.
        mine = array(kind, dtype, want if comm.rank == root else np.zeros(shape), transposed=comm.rank % 2 == 1)
        with grid.ledger.watch() as moved:
            got = call(grid["x"], "broadcast", started, mine, root=root)
        assert got is mine and np.array_equal(plain(mine), want), case
        received = int(comm.rank != root)
        assert_moved(moved, "broadcast", received * want.size, received, size_in_bytes(dtype), case)


@WORLDS
@KINDS
def test_all_to_all_sends_each_member_its_piece(comm, make_grid, kind):
    grid = make_grid(x=comm.size)
    me, members = comm.rank, range(comm.size)
    dtypes = itertools.cycle(DTYPES)
    counts = [
        [[2] * comm.size] * comm.size,  # equal pieces
        [[(source + 2 * target) % 4 for target in members] for source in members],  # ragged, some empty
        [[0] * comm.size] * comm.size,
    ]
    for case in itertools.product((0, 1, -1), range(len(counts)), (False, True)):
        dim, table, started = case
        transposed = started == (dim == 0)
        dtype, sizes = next(dtypes), counts[table]
        pieces = [[numbers(dtype, shape_with(dim, sizes[s][t]), 6, s, t) for t in members] for s in members]
        want = np.concatenate([pieces[source][me] for source in members], axis=dim)
        mine = array(kind, dtype, np.concatenate(pieces[me], axis=dim), transposed)
        options = {} if table == 0 else {"sizes": sizes[me], "receive_sizes": [sizes[source][me] for source in members]}
        with grid.ledger.watch() as moved:
            got = call(grid["x"], "all_to_all", started, mine, dim=dim, **options)
        assert_result(got, want, kind, dtype, None, case)
        assert_moved(moved, "all_to_all", want.size - pieces[me][me].size, comm.size - 1, size_in_bytes(dtype), case)


@WORLDS
@KINDS
def test_send_and_receive_around_a_ring(comm, make_grid, kind):
    grid = make_grid(x=comm.size)
    axis, following, previous = grid["x"], (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for dtype, transposed in itertools.product(DTYPES, (False, True)):
        first, second = (array(kind, dtype, numbers(dtype, (3, 4), tag, comm.rank), transposed) for tag in (7, 8))
        space = [array(kind, dtype, np.zeros((3, 4))) for _ in range(2)]
        with grid.ledger.watch() as moved:
            receiving = [axis.start_receive(space[1], previous, tag=1), axis.start_receive(space[0], previous)]
            sending = axis.start_send(first, following)
            axis.send(second, following, tag=1)
            got = [pending.wait() for pending in receiving]
            assert sending.wait() is None
        assert got[0] is space[1] and got[1] is space[0]
        assert np.array_equal(plain(space[0]), numbers(dtype, (3, 4), 7, previous))
        assert np.array_equal(plain(space[1]), numbers(dtype, (3, 4), 8, previous))
        assert (moved.calls, moved.words, moved.messages, moved.bytes) == (4, 24, 2, 24 * size_in_bytes(dtype))


@pytest.mark.mpi(sizes=(1, 2))
@KINDS
def test_an_axis_of_one_member_returns_its_input_and_costs_nothing(comm, make_grid, kind):
    grid = make_grid(x=1, y=comm.size)
    x = grid["x"]
    block = array(kind, "float16", numbers("float16", (3, 4), 9), transposed=True)
    with grid.ledger.watch() as moved:
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"):
            for started in (False, True):
                assert call(x, name, started, block) is block
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            into = array(kind, "float16", np.zeros((3, 4)))
            assert getattr(x, name)(block, into=into) is into
            assert np.array_equal(plain(into), plain(block))
    assert not moved.rows and moved.calls == 0


@pytest.mark.mpi(sizes=(12,))
def test_axes_and_planes_of_a_3_2_2_grid_each_move_their_own_blocks(comm, make_grid):
    grid = make_grid(x=3, y=2, z=2)
    for names in (("x",), ("y",), ("z",), ("x", "y"), ("y", "x"), ("z", "x"), ("x", "y", "z")):
        axis = grid[names]
        line = [
            rank
            for rank in range(12)
            if all(grid.coordinates_of(rank)[n] == grid.coordinates[n] for n in tuple(grid.shape) if n not in names)
        ]
        line.sort(key=lambda rank: [grid.coordinates_of(rank)[name] for name in names])
        assert axis.size == len(line) and line[axis.index] == comm.rank
        sizes = split_sizes(7, axis.size)
        got = axis.all_gather(np.full((sizes[axis.index], 2), comm.rank), sizes=sizes)
        assert np.array_equal(got, np.repeat(line, sizes)[:, None] * [1, 1])
        part = axis.reduce_scatter(np.full((7, 1), 1 << comm.rank), sizes=sizes)
        assert part.tolist() == [[sum(1 << rank for rank in line)]] * sizes[axis.index]


@pytest.mark.mpi(sizes=(3,))
@KINDS
@pytest.mark.parametrize("check", [False, True])
def test_bad_calls_are_refused_on_every_member_alike(comm, make_grid, kind, check):
    axis = make_grid(x=3, check=check)["x"]
    rows = array(kind, "float32", np.zeros((4, 2)))
    flags = array(kind, "bool", np.zeros(3))
    refused = [
        (
            lambda: axis.reduce_scatter(rows),
            "dim 0 of size 4 has no equal parts over x = 3. Pass sizes, or a multiple of 3: 3, 6.",
        ),
        (lambda: axis.all_to_all(rows), "dim 0 of size 4 has no equal parts"),
        (lambda: axis.reduce_scatter(rows, sizes=[2, 2, 1]), r"sizes \[2, 2, 1\] for dim 0 of size 4"),
        (lambda: axis.reduce_scatter(rows, sizes=[2, 2]), r"x = 3 was given sizes \[2, 2\]"),
        (lambda: axis.all_gather(rows, sizes=[3, 3, 3]), "size 4"),
        (lambda: axis.all_to_all(rows, sizes=[2, 1, 2], receive_sizes=[2, 1, 2]), "size 4"),
        (lambda: axis.all_to_all(rows, sizes=[2, 1, 1]), "receive_sizes"),
        (lambda: axis.all_gather(rows, into=array(kind, "float32", np.zeros((4, 2)))), r"into.*\(4, 2\).*\(12, 2\)"),
        (lambda: axis.all_gather(rows, into=array(kind, "float64", np.zeros((12, 2)))), "into.*float64.*float32"),
        (lambda: axis.all_reduce(rows, into=array(kind, "float32", np.zeros((2, 4)))), "into"),
        (
            lambda: axis.reduce_scatter(array(kind, "float32", np.zeros((6, 2))), into=array(kind, "float32", np.zeros((6, 2)))),
            r"is \(2, 2\)",
        ),
        (lambda: axis.all_gather(rows, dim=2), "dim 2"),
        (
            lambda: axis.all_reduce(rows, op="median"),
            "Reduction 'median' is not defined for dtype float32. Defined: sum, max, min",
        ),
        (lambda: axis.all_reduce(flags, op="sum"), "'sum' is not defined for dtype bool. Defined: max, min"),
        (lambda: axis.reduce_scatter(flags), "'sum' is not defined for dtype bool"),
        (
            lambda: axis.all_reduce(array(kind, "complex64", np.zeros(3)), op="max"),
            "'max' is not defined for dtype complex64",
        ),
        (lambda: axis.broadcast(rows, root=3), "root 3"),
        (lambda: axis.reduce(rows, root=-1), "root -1"),
        (lambda: axis.send(rows, to=3), "no peer 3. Peers:"),
        (lambda: axis.receive(rows, source=comm.rank), f"no peer {comm.rank}"),
        (lambda: axis.receive(rows.T, source=(comm.rank + 1) % 3), "C-contiguous"),
        (
            lambda: axis.all_gather(array(kind, "float32", np.zeros((4, 2))).astype("int8") if kind == "numpy" else rows.char()),
            "int8 cannot",
        ),
    ]
    for attempt, message in refused:
        with pytest.raises(ShapeError, match=message):
            attempt()
    assert axis.all_reduce(array(kind, "int32", [1])).tolist() == [3]  # nothing was left in flight
