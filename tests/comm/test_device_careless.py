"""Mistakes that a GPU forgives most of the time, each made on purpose: the fake device sees every one."""

from __future__ import annotations

import gc

import fake_device
import numpy as np
import pytest

from summa3d.comm.device.arrival import Held
from summa3d.comm.transport.pinned import Buffers

WORLD = pytest.mark.mpi(sizes=(2,))


def gathers_right(comm, make_grid, transport, mode, device_type=fake_device.Device):
    """Return whether started gathers and sums, some of which are dropped before they are waited for, are right on all ranks."""
    device = fake_device.use(device_type(comm, mode, seed=comm.rank))
    axis = make_grid(x=2, transport=transport, device=device, check=False)["x"]
    right = True
    for round_ in range(4):
        whole = fake_device.empty((128,), "float64")
        whole *= 0  # work on the memory of the result that is still to be done when the gather is called
        dropped = axis.start_all_gather(device.put(np.full((64,), comm.rank + round_ + 2.0)), into=whole)
        if transport == "nccl":
            del dropped
            gc.collect()
        else:
            dropped.wait()
        total = axis.start_all_reduce(device.put(np.full((64,), comm.rank + round_ + 1.0))).wait()
        right &= np.array_equal(device.read(total), np.full((64,), 2 * round_ + 3.0))
        right &= np.array_equal(device.read(whole), np.repeat([round_ + 2.0, round_ + 3.0], 64))
        first, second = (device.put(np.full((64,), round_ + (5.0 if comm.rank == 0 else 9.0) + add)) for add in (0, 1))
        axis.broadcast(first)
        axis.broadcast(second)
        for add, array in enumerate((first, second)):
            right &= np.array_equal(device.read(array), np.full((64,), round_ + 5.0 + add))
    device.finish()
    return comm.allreduce(right, fake_device.MPI.MIN)


class NeverWaits(fake_device.Device):
    def wait(self, stream, event):
        pass


class TransportDoesNotWait(fake_device.Device):
    """The caller's stream waits for the transport's, and not the other way round."""

    def wait(self, stream, event):
        if stream is self.compute:
            super().wait(stream, event)


class CallerDoesNotWait(fake_device.Device):
    def wait(self, stream, event):
        if stream is not self.compute:
            super().wait(stream, event)


class WrongStream(fake_device.Device):
    """A new stream for the one on which the caller's work is queued, as on a thread that did not set it."""

    def current(self, array):
        return self.stream()


class HostDoesNotWait(fake_device.Device):
    def record(self, stream, timing=False):
        event = super().record(stream, timing)
        if stream is not self.compute:
            event.synchronize = lambda: None
        return event


def gathers_wrong(comm, make_grid, transport, device_type=fake_device.Device):
    """Return whether at least one order of execution shows the mistake."""
    found = [not gathers_right(comm, make_grid, transport, mode, device_type) for mode in fake_device.MODES]
    return any(found)


@WORLD
@pytest.mark.parametrize("mode", fake_device.MODES)
@pytest.mark.parametrize("transport", ["nccl", "pinned"])
def test_without_a_mistake_all_is_right(comm, make_grid, transport, mode):
    assert gathers_right(comm, make_grid, transport, mode)


@WORLD
@pytest.mark.parametrize("transport", ["nccl", "pinned"])
@pytest.mark.parametrize("careless", [NeverWaits, TransportDoesNotWait, CallerDoesNotWait, WrongStream])
def test_an_event_that_a_stream_does_not_wait_for_is_seen(comm, make_grid, transport, careless):
    assert gathers_wrong(comm, make_grid, transport, careless)


@WORLD
def test_a_host_that_does_not_wait_for_the_way_down_is_seen(comm, make_grid):
    assert gathers_wrong(comm, make_grid, "pinned", HostDoesNotWait)


@WORLD
def test_an_array_that_is_let_go_of_too_early_is_seen(comm, make_grid, monkeypatch):
    monkeypatch.setattr(Held, "hold", lambda held, event, arrays: None)
    assert gathers_wrong(comm, make_grid, "nccl")


@WORLD
def test_a_pinned_buffer_that_is_used_again_too_early_is_seen(comm, make_grid, monkeypatch):
    give = Buffers.give
    monkeypatch.setattr(Buffers, "give", lambda buffers, memory, event=None: give(buffers, memory))
    assert gathers_wrong(comm, make_grid, "pinned")


def test_the_host_cannot_read_a_device_array():
    device = fake_device.use(fake_device.Device(fake_device.MPI.COMM_SELF))
    array = device.put(np.ones((3, 2)))
    for touch in (np.asarray, float, lambda one: one[0, 0], lambda one: one + np.ones((3, 2)), memoryview):
        with pytest.raises((TypeError, AttributeError)):
            touch(array)
