"""Every collective on a fake device, by every device transport: results, words, calls, and nothing read or freed too early."""

from __future__ import annotations

import gc

import fake_device
import numpy as np
import pytest
from kinds import numbers

from summa3d.errors import GridError
from summa3d.layout import split_sizes

TRANSPORTS = ("nccl", "pinned", "cuda-aware")
WORLDS = pytest.mark.mpi(sizes=(1, 2, 3, 4))
DTYPES = ("float64", "float16", "float32", "int32", "int64", "complex128", "complex64")


@pytest.fixture(params=fake_device.MODES)
def mode(request):
    return request.param


@pytest.fixture(params=TRANSPORTS)
def world(request, mode, comm, make_grid, monkeypatch):
    """A grid of one axis on fake devices by one transport, and a grid of the same ranks on the host by MPI."""
    from summa3d.comm.transport import probe

    monkeypatch.setattr(probe, "cuda_aware", lambda: probe.Probe(True, "a test says so"))
    device = fake_device.use(fake_device.Device(comm, mode, seed=comm.rank))
    grid = make_grid(x=comm.size, transport=request.param, device=device)
    yield request.param, device, grid, make_grid(x=comm.size, node_memory=False)
    device.finish()


def both(world, name, arrays, started, into=None, **options):
    """The collective on the device and on the host: both results as numpy, after checking that words and messages agree."""
    _, device, grid, host = world
    on_device = [device.put(array) if isinstance(array, np.ndarray) else array for array in arrays]
    results, moved = [], []
    for axis, ledger, operands, buffer in (
        (host["x"], host.ledger, [array.copy() if isinstance(array, np.ndarray) else array for array in arrays], into),
        (grid["x"], grid.ledger, on_device, None if into is None else device.put(into)),
    ):
        given = {} if buffer is None else {"into": buffer}
        with ledger.watch() as watched:
            if started:
                pending = getattr(axis, f"start_{name}")(*operands, **options, **given)
                del operands
                result = pending.wait()
            else:
                result = getattr(axis, name)(*operands, **options, **given)
        assert buffer is None or result is buffer or (result is None and name == "reduce")
        results.append(result)
        moved.append(
            [(row.collective, row.dtype, row.amounts.words, row.amounts.messages, row.amounts.bytes) for row in watched.rows]
        )
    assert moved[0] == moved[1], (name, options)
    want, got = results
    values = None if got is None else device.read(got)
    device.finish()  # who has no result to read meets the others all the same
    return want, values


def same(want, got, case):
    assert (want is None and got is None) or (want.dtype == got.dtype and np.array_equal(want, got)), case


def spreads(members):
    return [
        [2] * members,
        split_sizes(2 * members + 1, members),
        split_sizes(1, members),
        list(range(members))[::-1],
        [0] * members,
    ]


def cases(members):
    for number, sizes in enumerate(spreads(members)):
        for dim in (0, 1):
            for started in (False, True):
                yield DTYPES[(2 * number + dim) % len(DTYPES)], sizes, dim, started, bool((number + started) % 2)


def shape_with(dim, extent):
    shape = [3, 5]
    shape[dim] = extent
    return tuple(shape)


@WORLDS
def test_gathers_and_scatters_on_a_device_equal_those_on_the_host(comm, world):
    me = comm.rank
    for case in cases(comm.size):
        dtype, sizes, dim, started, given = case
        block = numbers(dtype, shape_with(dim, sizes[me]), 1, me).astype(dtype)
        into = np.ones(shape_with(dim, sum(sizes)), dtype) if given else None
        same(*both(world, "all_gather", [block], started, into, dim=dim, sizes=sizes), ("all_gather", case))
        whole = numbers(dtype, shape_with(dim, sum(sizes)), 2, me).astype(dtype)
        into = np.ones(shape_with(dim, sizes[me]), dtype) if given else None
        same(*both(world, "reduce_scatter", [whole], started, into, dim=dim, sizes=sizes), ("reduce_scatter", case))


@WORLDS
def test_exchanges_on_a_device_equal_those_on_the_host(comm, world):
    me, members = comm.rank, comm.size
    for dtype, dim, started in (("float32", 0, False), ("float16", 1, True), ("complex64", 0, True), ("bool", 0, False)):
        equal = numbers(dtype, shape_with(dim, 2 * members), 3, me).astype(dtype)
        same(*both(world, "all_to_all", [equal], started, dim=dim), ("equal", dtype))
        sizes, awaited = [(me + other) % 3 for other in range(members)], [(me + other) % 3 for other in range(members)]
        ragged = numbers(dtype, shape_with(dim, sum(sizes)), 4, me).astype(dtype)
        same(*both(world, "all_to_all", [ragged], started, dim=dim, sizes=sizes, receive_sizes=awaited), ("ragged", dtype))


@WORLDS
def test_reductions_and_broadcasts_on_a_device_equal_those_on_the_host(comm, world):
    me, root = comm.rank, comm.size - 1
    for number, dtype in enumerate((*DTYPES, "bool")):
        started, values = bool(number % 2), numbers(dtype, (5, 3), 5, me).astype(dtype)
        op = "max" if dtype == "bool" else ("sum", "max", "min")[number % 3] if not dtype.startswith("complex") else "sum"
        into = np.ones((5, 3), dtype) if number % 3 == 0 else None
        same(*both(world, "all_reduce", [values], started, into, op=op), ("all_reduce", dtype))
        into = np.ones((5, 3), dtype) if number % 3 == 1 and me == root else None
        same(*both(world, "reduce", [values], started, into, op=op, root=root), ("reduce", dtype))
        same(
            *both(world, "broadcast", [np.asfortranarray(values) if started else values], started, root=root),
            ("broadcast", dtype),
        )


@pytest.mark.mpi(sizes=(2, 3, 4))
def test_a_ring_of_sends_that_all_begin_by_sending_arrives(comm, world):
    _, device, grid, _ = world
    axis, me, members = grid["x"], comm.rank, comm.size
    values = numbers("float64", (4, 3), 6, me).astype("float64")
    axis.open_device(device.put(values))
    for _ in range(members):
        arriving = fake_device.empty((4, 3), "float64")
        mine = device.put(values)
        pending = [axis.start_send(mine, (me + 1) % members), axis.start_receive(arriving, (me - 1) % members)]
        del mine
        for communication in pending:
            communication.wait()
        values = device.read(arriving)
    assert np.array_equal(values, numbers("float64", (4, 3), 6, me))


@pytest.mark.mpi(sizes=(3,))
def test_a_message_between_two_of_three_members_needs_a_transport_that_all_have_opened(comm, world):
    """Opening one is collective: a message that did it would wait for the member that takes no part in it."""
    _, device, grid, _ = world
    axis, values = grid["x"], device.put(np.arange(6.0))
    if comm.rank > 0:
        with pytest.raises(GridError, match="open_device"):
            axis.send(values, 3 - comm.rank)
    axis.open_device(values)
    if comm.rank == 1:
        axis.send(values, 2)
    if comm.rank == 2:
        arriving = fake_device.empty((6,), "float64")
        assert np.array_equal(device.read(axis.receive(arriving, 1)), np.arange(6.0))


@pytest.mark.mpi(sizes=(3,))
def test_what_was_waited_for_is_not_kept_until_the_device_has_done_with_it(comm, world):
    """The caller's stream waits for it, and with it whoever gets its memory next: a step's peak has no finished communication."""
    transport, device, grid, _ = world
    axis = grid["x"]
    if transport != "nccl":
        return
    pending = axis.start_all_reduce(device.put(np.ones(64)))
    axis.all_gather(device.put(np.ones((3, 4))))
    carrier = axis.transports.of(device.put(np.ones(1)))
    assert len(carrier.held) == 1
    pending.wait()
    assert len(carrier.held) == 0


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("transport", ["nccl", "pinned"])
def test_what_another_stream_waits_for_is_kept_until_the_device_has_done_with_it(comm, make_grid, transport, monkeypatch):
    """The stream that it was begun on, whose memory it is, has not waited."""
    device = fake_device.use(fake_device.Device(comm, "lazy"))
    axis = make_grid(x=comm.size, transport=transport, device=device)["x"]
    other = device.stream()
    pending = axis.start_all_gather(device.put(np.ones((3, 4))))
    carrier = axis.transports.of(device.put(np.ones(1)))
    monkeypatch.setattr(device, "current", lambda array: other)
    pending.wait()
    assert len(carrier.held) == 1
    device.finish()


@pytest.mark.mpi(sizes=(3,))
def test_what_nobody_waits_for_is_kept_until_the_device_has_done_with_it(comm, world):
    transport, device, grid, _ = world
    axis = grid["x"]
    if transport == "cuda-aware":
        return  # there MPI itself reads the memory, and a Pending is to be waited for as on the host
    for round_ in range(3):
        block = device.put(numbers("float64", (3, 4), round_, comm.rank).astype("float64"))
        whole = fake_device.empty((9, 4), "float64")
        pending = axis.start_all_gather(block, into=whole)
        other = axis.start_all_reduce(device.put(np.full((64,), comm.rank + 1.0)))
        del block
        gc.collect()
        assert np.array_equal(device.read(other.wait()), np.full((64,), 6.0))
        want = np.concatenate([numbers("float64", (3, 4), round_, member) for member in range(3)])
        assert np.array_equal(device.read(pending.wait()), want)


@pytest.mark.mpi(sizes=(3,))
def test_several_communications_are_in_flight_on_a_device_in_any_order_of_waiting(comm, make_grid, mode):
    device = fake_device.use(fake_device.Device(comm, mode, seed=comm.rank))
    grid = make_grid(x=3, transport="nccl", device=device)
    blocks = [numbers("float64", (2 + number, 3), number, comm.rank) for number in range(4)]
    pending = [grid["x"].start_all_gather(device.put(block)) for block in blocks]
    for number in (2, 0, 3, 1):
        want = np.concatenate([numbers("float64", (2 + number, 3), number, member) for member in range(3)])
        assert np.array_equal(device.read(pending[number].wait()), want)
    device.finish()


@pytest.mark.mpi(sizes=(3,))
def test_nccl_makes_the_right_calls(comm, make_grid):
    device = fake_device.use(fake_device.Device(comm))
    axis = make_grid(x=3, transport="nccl", device=device)["x"]

    def calls(name, *arguments, **options):
        del device.calls[:]
        getattr(axis, name)(*arguments, **options)
        return device.calls

    def put(shape, dtype="float64"):
        return device.put(np.ones(shape, dtype))

    sizes = [3, 2, 2]
    assert calls("all_gather", put((2, 5))) == [("allGather", 10, "float64")]
    assert calls("all_gather", put((sizes[comm.rank], 5)), sizes=sizes) == [("broadcast", size * 5, "float64") for size in sizes]
    assert calls("reduce_scatter", put((6, 5))) == [("reduceScatter", 10, "float64")]
    assert calls("reduce_scatter", put((7, 5)), sizes=sizes) == [("reduce", size * 5, "float64") for size in sizes]
    assert calls("reduce_scatter", put((6, 5), "float16")) == [("send", 10, "float16")] * 3 + [("recv", 10, "float16")] * 3
    assert calls("all_reduce", put((4, 5), "float16")) == [("allReduce", 20, "float32")]
    assert calls("all_reduce", put((4, 5), "complex64")) == [("allReduce", 40, "float32")]
    assert calls("broadcast", put((4, 5), "int64")) == [("broadcast", 20, "int64")]
    assert calls("reduce", put((4, 5), "int32")) == [("reduce", 20, "int32")]
    device.finish()


@pytest.mark.mpi(sizes=(2,))
def test_nccl_never_blocks_the_host(comm, make_grid, monkeypatch):
    device = fake_device.use(fake_device.Device(comm))
    axis = make_grid(x=2, transport="nccl", device=device)["x"]
    waits = []
    with monkeypatch.context() as patch:
        patch.setattr(fake_device.Event, "synchronize", lambda event: waits.append(event))
        pending = axis.start_all_gather(device.put(np.ones((3, 2))))
        result = axis.all_reduce(pending.wait())
    assert waits == []
    assert np.array_equal(device.read(result), np.full((6, 2), 2.0))
    device.finish()


@pytest.mark.mpi(sizes=(2,))
def test_pinned_buffers_are_used_again(comm, make_grid):
    device = fake_device.use(fake_device.Device(comm, "random", seed=comm.rank))
    axis = make_grid(x=2, transport="pinned", device=device)["x"]
    for round_ in range(12):
        got = device.read(axis.all_gather(device.put(np.full((100,), comm.rank + round_ * 1.0))))
        assert np.array_equal(got, np.repeat([round_ + 0.0, round_ + 1.0], 100))
        if round_ == 3:
            settled = device.pinned_bytes
    assert device.pinned_bytes == settled <= 4 * 4096
    device.finish()


@pytest.mark.mpi(sizes=(2,))
def test_a_device_array_never_takes_the_nodes_memory(comm, make_grid):
    device = fake_device.use(fake_device.Device(comm))
    axis = make_grid(x=2, node_memory=True, transport="pinned", device=device)["x"]
    on_device, on_host = device.put(np.ones((3, 2))), np.ones((3, 2))
    assert axis.allocate((3, 2), on_device) is None and not axis.offers_views(on_device)
    assert np.array_equal(device.read(axis.all_gather(on_device, view=True)), np.ones((6, 2)))
    assert axis.node_bytes is None or axis.allocate((3, 2), on_host) is not None
    axis.barrier()
    device.finish()
