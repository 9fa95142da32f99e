"""The thread that lets MPI move what is in flight while a rank computes: messages arrive though nobody asks for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from summa3d.comm.transport.progress import Mover

ATTEMPTS, ASKS, PATIENCE = 5, 60, 30.0


class Counted:
    """Asks, and counts how often."""

    def __init__(self) -> None:
        self.asked, self.fails = 0, False

    def __call__(self, **about: Any) -> bool:
        self.asked += 1
        if self.fails:
            raise MPI.Exception(MPI.ERR_COMM)
        return bool(MPI.COMM_WORLD.Iprobe(**about))

    def until(self, asked: int) -> None:
        end = time.monotonic() + PATIENCE
        while self.asked < asked:
            assert time.monotonic() < end, f"asked {self.asked} times in {PATIENCE} s"
            time.sleep(0.001)


@pytest.mark.mpi(sizes=(2,))
def test_a_message_that_takes_several_turns_arrives_while_the_rank_computes(make_grid: Any, comm: Any) -> None:
    axis, asks, arrived = make_grid(dp=2, node_memory=False)["dp"], Counted(), []
    mover = Mover(asks)
    for _ in range(ATTEMPTS):  # the other rank may be slow
        comm.Barrier()
        pending = [axis.start_all_gather(np.full(1 << 20, float(comm.rank))) for _ in range(2)]
        mover.begin()
        asks.until(asks.asked + ASKS)
        arrived.append(pending[-1].done)
        mover.end()
        for one in pending:
            assert one.wait()[-1] == 1
    assert any(arrived)


def test_it_asks_only_while_something_is_in_flight_and_survives_errors() -> None:
    asks, others = Counted(), threading.active_count()
    mover = Mover(asks)
    mover.begin(by_mpi=False)
    assert threading.active_count() == others
    mover.begin()
    asks.fails = True
    asks.until(3)
    asks.fails = False
    mover.end()
    asks.until(asks.asked + 3)  # the first is still in flight
    mover.end()
    time.sleep(0.05)
    asked = asks.asked
    time.sleep(0.05)
    assert asks.asked == asked and threading.active_count() == others + 1
