"""Seconds on a device: between events of its streams, by axis and collective, read without making the host wait on the way."""

from __future__ import annotations

import json

import fake_device
import numpy as np
import pytest

from summa3d.comm.profile import trace
from summa3d.comm.profile.timeline import TRIES
from summa3d.comm.transport.call import Carried
from summa3d.gemm.algorithms.workspace import Workspace

SLOW = 100_000.0  # ms of a product: longer than anything else by far
WAITED, WORKED = 0.5, 0.25  # s, of the host: until the device has written, and inside MPI


@pytest.fixture(params=fake_device.MODES)
def mode(request):
    return request.param


@pytest.fixture
def make_device(comm, make_grid, monkeypatch):
    """A grid on a fake device where a call takes as many milliseconds as it has elements, a copy as bytes, a product SLOW."""
    from summa3d.comm.transport import probe

    monkeypatch.setattr(probe, "cuda_aware", lambda: probe.Probe(True, "a test says so"))
    devices = []

    def make(transport, mode="lazy", **axes):
        device = fake_device.use(fake_device.Device(comm, mode, seed=comm.rank))
        device.takes = lambda name, size: SLOW if name == "gemm" else float(size)
        devices.append(device)
        return device, make_grid(transport=transport, device=device, **axes)

    yield make
    for device in devices:
        device.finish()


def put(device, shape, dtype="float64"):
    return device.put(np.ones(shape, dtype))


def multiplied(device, grid):
    """A slow product on the caller's stream; returns its result."""
    out = put(device, (4, 5))
    Workspace(grid).accumulate(put(device, (4, 3)), put(device, (3, 5)), "nn", out)
    return out


@pytest.mark.mpi(sizes=(4,))
def test_seconds_by_axis_and_collective_are_the_devices_whatever_it_has_to_do_before(comm, make_device, mode):
    device, grid = make_device("nccl", mode, x=2, y=2)
    x, y, ledger = grid["x"], grid["y"], grid.ledger
    sizes = [3, 2]
    pending = x.start_all_gather(multiplied(device, grid))  # 20
    y.reduce_scatter(put(device, (6, 5)))  # 15 to each
    y.all_gather(put(device, (sizes[y.index], 5)), sizes=sizes)  # broadcasts of 15 and of 10
    multiplied(device, grid)
    pending.wait()
    x.all_reduce(put(device, (4, 5), "float16"))  # 20, in float32
    x.all_to_all(put(device, (4, 3)))  # a send and a receive of 6, with each of two
    x.all_reduce(put(device, (0, 5)))  # nothing to queue
    ledger.timeline.settle()
    found = {(row.collective, row.axis, row.dtype): round(row.amounts.seconds * 1e3, 6) for row in ledger.rows()}
    assert found == {
        ("all_gather", "x", "float64"): 20,
        ("reduce_scatter", "y", "float64"): 15,
        ("all_gather", "y", "float64"): 25,
        ("all_reduce", "x", "float32"): 20,
        ("all_to_all", "x", "float64"): 24,
        ("all_reduce", "x", "float64"): 0,
    }
    assert [round(ledger.total(axis=axis).seconds * 1e3, 6) for axis in ("x", "y")] == [64, 40]


@pytest.mark.mpi(sizes=(2,))
def test_the_host_waits_for_the_device_to_tie_the_clocks_and_at_the_end_of_a_trace_and_never_between(comm, make_device):
    device, grid = make_device("nccl", x=2)
    ledger = grid.ledger
    ledger.start_trace()
    for _ in range(4):
        with ledger.phase("forward"):
            pending = grid["x"].start_all_gather(multiplied(device, grid))
            grid["x"].all_reduce(multiplied(device, grid))
            pending.wait()
        assert device.host_waits == TRIES  # the clocks were tied at the first mark
        ledger.rows(), ledger.total()
    assert device.host_waits == TRIES and ledger.total().seconds == 0
    found = ledger.stop_trace()
    assert device.host_waits > TRIES
    assert round(ledger.total().seconds * 1e3, 6) == 4 * (20 + 20)
    assert len(found.communications) == len(found.work) == 8


@pytest.mark.mpi(sizes=(2,))
def test_a_trace_has_products_and_collectives_when_the_device_was_at_them(comm, make_device, shared_tmp_path):
    device, grid = make_device("nccl", x=2)
    grid["x"].all_gather(put(device, (1, 1)))
    grid.ledger.start_trace()
    waits = device.host_waits
    grid["x"].all_gather(multiplied(device, grid))
    assert device.host_waits == waits
    grid["x"].all_reduce(multiplied(device, grid))
    found = grid.ledger.stop_trace()
    products = [stretch for work in found.work for stretch in work.device]
    moved = [stretch for one in found.communications for stretch in one.device]
    first = products[0].start
    told = [(one.name, round((one.start - first) * 1e3, 4), round(one.seconds * 1e3, 4)) for one in (*products, *moved)]
    assert told == [
        ("product nn", 0, SLOW),
        ("product nn", SLOW + 20, SLOW),  # the caller's stream waits for what it gathered
        ("nccl", SLOW, 20),
        ("nccl", 2 * SLOW + 20, 20),
    ]
    assert all(one.end >= one.start and one.wait >= 0 for one in found.communications)
    file = shared_tmp_path / "trace.json"
    trace.write(file, found, comm)
    whole = json.loads(file.read_text()) if comm.rank == 0 else {"traceEvents": [], "otherData": {"device clock": "µs off"}}
    tracks = {event["args"]["name"]: event["tid"] for event in whole["traceEvents"] if event["name"] == "thread_name"}
    for track, want in (("products on the device", SLOW), ("axis x on the device", 20)):
        spans = [event["dur"] for event in whole["traceEvents"] if event["ph"] == "X" and event["tid"] == tracks.get(track)]
        assert comm.rank or spans == pytest.approx([want * 1e3] * 4)
    ends = [event["ts"] for event in whole["traceEvents"] if event["ph"] == "e"]
    assert comm.rank or all(end >= SLOW * 1e3 for end in ends)
    assert "µs off" in whole["otherData"]["device clock"] and 0 <= found.error < 1


@pytest.mark.mpi(sizes=(2,))
def test_messages_that_are_queued_as_one_share_its_seconds(comm, make_device):
    device, grid = make_device("nccl", x=2)
    axis, other = grid["x"], 1 - comm.rank
    arriving = put(device, (3, 4))
    axis.open_device(arriving)
    grid.ledger.start_trace()
    pending = [axis.start_send(put(device, (3, 4)), other), axis.start_receive(arriving, other)]
    pending.append(axis.start_send(put(device, (0, 4)), other))
    for one in pending:
        one.wait()
    found = grid.ledger.stop_trace()
    assert [round(grid.ledger.total().seconds * 1e3, 6), grid.ledger.total().calls] == [24, 3]
    assert {row.collective: round(row.amounts.seconds * 1e3, 6) for row in grid.ledger.rows()} == {"send": 12, "receive": 12}
    assert [[round(one.seconds * 1e3, 4) for one in sent.device] for sent in found.communications] == [[24], [24], []]


@pytest.mark.mpi(sizes=(2,))
def test_marks_are_recorded_again_once_they_have_been_read(comm, make_device, monkeypatch):
    device, grid = make_device("nccl", x=2)
    made, record = [], device.record
    monkeypatch.setattr(device, "record", lambda stream, timing=False: made.append(timing) or record(stream, timing))
    for _ in range(12):
        device.read(grid["x"].all_reduce(put(device, (4, 5))))
    grid.ledger.timeline.settle()
    assert made.count(True) <= 4
    assert round(grid.ledger.total().seconds * 1e3, 6) == 12 * 20


def make_host_wait(monkeypatch, clock):
    """Have the host wait for each event, and work at the completion of each communication."""
    synchronize, complete = fake_device.Event.synchronize, Carried.complete
    monkeypatch.setattr(fake_device.Event, "synchronize", lambda event: (clock.passes(WAITED), synchronize(event))[1])
    monkeypatch.setattr(Carried, "complete", lambda carried: (clock.passes(WORKED), complete(carried))[1])


@pytest.mark.mpi(sizes=(2,))
def test_copies_through_pinned_memory_are_the_devices_and_the_wait_for_them_is_nobodys(make_device, monkeypatch, clock):
    device, grid = make_device("pinned", x=2)
    make_host_wait(monkeypatch, clock)
    axis, ledger = grid["x"], grid.ledger
    axis.all_gather(multiplied(device, grid))  # 160 bytes down, 320 up
    array = put(device, (4, 5))
    axis.all_reduce(array, into=array)  # in place: 160 down, 160 up
    ledger.timeline.settle()
    copies = {"all_gather": 0.16 + 0.32, "all_reduce": 0.16 + 0.16}
    host = {row.collective: row.amounts.seconds - copies[row.collective] for row in ledger.rows()}
    assert host == pytest.approx(dict.fromkeys(copies, WORKED))


@pytest.mark.mpi(sizes=(2,))
def test_cuda_aware_mpi_is_timed_on_the_host_without_its_wait_for_the_callers_stream(make_device, monkeypatch, clock):
    device, grid = make_device("cuda-aware", x=2)
    array = multiplied(device, grid)
    device.read(array)
    make_host_wait(monkeypatch, clock)
    grid["x"].all_gather(array)
    assert grid.ledger.total().seconds == WORKED


def test_a_product_on_a_device_needs_no_communication_for_its_time(make_device_alone, clock):
    device, grid = make_device_alone
    grid.ledger.start_trace()
    multiplied(device, grid)
    (work,) = grid.ledger.stop_trace().work
    assert work.about["flops"] == 2 * 4 * 5 * 3
    assert [round(stretch.seconds * 1e3, 4) for stretch in work.device] == [SLOW] and work.seconds == 0  # the host's


@pytest.fixture
def make_device_alone():
    from mpi4py import MPI

    from summa3d.comm.grid import Grid

    device = fake_device.use(fake_device.Device(MPI.COMM_SELF))
    device.takes = lambda name, size: SLOW
    return device, Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1}, device=device)
