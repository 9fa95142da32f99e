"""The progress thread: what is in flight arrives while a rank computes and calls no MPI."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from summa3d.comm.transport.progress import ProgressThread

ATTEMPTS, PROBES, PATIENCE = 5, 60, 30.0


class Counted:
    """A probe that counts its calls."""

    def __init__(self) -> None:
        self.calls, self.fails = 0, False

    def __call__(self, **about: Any) -> bool:
        self.calls += 1
        if self.fails:
            raise MPI.Exception(MPI.ERR_COMM)
        return bool(MPI.COMM_WORLD.Iprobe(**about))

    def until(self, calls: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.calls < calls:
            assert time.monotonic() < end, f"{self.calls} probes in {PATIENCE} s"
            time.sleep(0.001)


@pytest.mark.mpi(sizes=(2,))
def test_a_message_that_takes_several_turns_arrives_while_the_rank_computes(make_grid: Any, comm: Any) -> None:
    axis, probe, arrived = make_grid(dp=2, node_memory=False)["dp"], Counted(), []
    thread = ProgressThread(probe)
    for _ in range(ATTEMPTS):  # the other rank may be slow
        comm.Barrier()
        pending = [axis.start_all_gather(np.full(1 << 20, float(comm.rank))) for _ in range(2)]
        thread.begin()
        probe.until(probe.calls + PROBES)
        arrived.append(pending[-1].done)
        thread.end()
        for one in pending:
            assert one.wait()[-1] == 1
    assert any(arrived)


def test_it_probes_only_while_something_is_in_flight_and_survives_errors() -> None:
    probe, others = Counted(), threading.active_count()
    thread = ProgressThread(probe)
    thread.begin(by_mpi=False)
    assert threading.active_count() == others
    thread.begin()
    probe.fails = True
    probe.until(3)
    probe.fails = False
    thread.end()
    probe.until(probe.calls + 3)  # the first is still in flight
    thread.end()
    time.sleep(0.05)
    calls = probe.calls
    time.sleep(0.05)
    assert probe.calls == calls and threading.active_count() == others + 1
