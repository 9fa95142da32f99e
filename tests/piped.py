"""A pipeline whose stages only check what they receive: run on ranks by tests, and as a program by jobs.

    piped.py TRANSPORT SCHEDULE RANKS MICRO_BATCHES CHUNKS WORDS STEPS [ssend]

TRANSPORT : mpi, or node, the node's memory; nccl, on fake devices, by the channel's links, or grouped, by one communicator that
queues messages lazily. The ranks of the job that are left over by the pipeline are inner ones, which sum over their stage in
each op.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from typing import Any

import fake_device
import numpy as np
from mpi4py import MPI

from summa3d.comm.axis import Axis
from summa3d.comm.channel import Channel
from summa3d.comm.grid import Grid
from summa3d.comm.health.failure import install_abort_hook
from summa3d.parallel.schedule import GRADIENT_ENDS, PipelineMessage, Schedule, build

DELAY = 0.001
"""Seconds that an op takes at most."""
DEADLOCK = 2.0
"""Seconds in which nothing moves, after which a deadlock that is expected is taken for one."""


class Synchronous(MPI.Intracomm):
    """A communicator whose sends end when they are received, whatever their size."""

    Isend = MPI.Intracomm.Issend


def value(kind: str, stage: int, micro: int, inner: int) -> float:
    """Return what a message is full of."""
    return float(1 + micro + 100 * stage + 10_000 * inner) * (1 if kind == "F" else -1)


class Host:
    """Arrays of numpy."""

    def full(self, words: int, number: float) -> Any:
        return np.full(words, number)

    def numbers(self, array: Any) -> np.ndarray:
        return array


class Fake(Host):
    """Arrays of a fake device."""

    def __init__(self, device: fake_device.Device) -> None:
        self.device = device

    def full(self, words: int, number: float) -> Any:
        return self.device.put(np.full(words, number))

    def numbers(self, array: Any) -> np.ndarray:
        return self.device.read(array)


def size_of(message: PipelineMessage, words: int, inner: int) -> int:
    """Messages differ in size, so that one that is taken for another is truncated; and inner ranks are not in step."""
    return words * (1 + 3 * (inner == (message.kind == "B"))) + 2 * message.stage


def run(schedule: Schedule, channel: Channel, inner: Axis, words: int, chance: random.Random, arrays: Host) -> list[int]:
    """One step of a pipeline: check each message, and return how many stage inputs were kept after each op."""
    rank, ledger = channel.axis.index, channel.axis.ledger
    program = schedule.ops_of(rank)
    posted: dict[PipelineMessage, Any] = {}
    kept, counts = set(), []

    def post(place: int) -> None:
        message = schedule.received(rank, program[place]) if place < len(program) else None
        if message is not None and message not in posted:
            out = arrays.full(size_of(message, words, inner.index), np.nan)
            posted[message] = channel.start_receive(out, message.stage, message.kind, message.micro)

    for place, op in enumerate(program):
        with ledger.phase("forward" if op.kind == "F" else "backward"):
            post(place)
            post(place + 1)
            if (message := schedule.received(rank, op)) is not None:
                found = arrays.numbers(posted.pop(message).wait())
                assert np.all(found == value(message.kind, message.stage, message.micro, inner.index)), (message, found[:2])
            time.sleep(chance.random() * DELAY)
            assert inner.all_reduce(np.ones(64))[0] == inner.size
            if (message := schedule.sent(rank, op)) is not None:
                y = arrays.full(
                    size_of(message, words, inner.index), value(message.kind, message.stage, message.micro, inner.index)
                )
                channel.send(y, message.stage, message.kind, message.micro)
            channel.progress()
        if op.kind == "F":
            kept.add(op[1:])
        elif op.kind in GRADIENT_ENDS:
            kept.remove(op[1:])
        counts.append(len(kept))
    channel.finish()
    return counts


def grouped(channel: Channel, array: Any) -> None:
    """Have all messages take the axis's own communicator, which queues them as a group when one is waited for."""
    transport = channel.axis.transports.of(array)

    class Whole:
        def __init__(self, peer: int) -> None:
            self.peer = peer

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

        def carry(self, members: Any, route: Any, *arrays: Any) -> Any:
            route.root = self.peer
            return transport.carry(members, route, *arrays)

    for link in set(channel.links.values()):
        if channel.axis.index in (link.source, link.target):
            channel._nccl[link] = Whole(link.target if link.source == channel.axis.index else link.source)  # type: ignore[assignment]


def main(transport: str, name: str, *numbers: str) -> None:
    install_abort_hook()
    p, m, v, words, steps = map(int, numbers[:5])
    world = MPI.COMM_WORLD
    schedule, arrays, device = build(name, p, m, v), Host(), None
    if transport not in ("mpi", "node"):
        patience = DEADLOCK if transport == "grouped" else fake_device.PATIENCE
        device = fake_device.use(fake_device.Device(world, "concurrent", seed=world.rank, patience=patience))
        arrays = Fake(device)
    options = {"node_memory": True} if transport in ("mpi", "node") else {"transport": "nccl", "device": device}
    grid = Grid(world, {"pp": p, "z": world.size // p}, order=["z", "pp"], check=False, **options)  # type: ignore[arg-type]
    channel = Channel(grid["pp"], schedule.homes)
    if transport == "mpi":
        channel._lanes = None
    if "ssend" in numbers:
        channel._members = replace(channel._members, comm=Synchronous(channel.comm))
    if transport == "nccl":
        channel.open_device(arrays.full(1, 0.0))
    elif transport == "grouped":
        grouped(channel, arrays.full(1, 0.0))
    for step in range(steps):
        run(schedule, channel, grid["z"], words, random.Random(step * world.size + world.rank), arrays)
    if device is not None:
        device.finish()
    if world.rank == 0:
        print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
