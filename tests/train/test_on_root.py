"""Work of rank 0 for all: whoever waits for it sleeps, and is not taken for one that hangs."""

from __future__ import annotations

import time

import pytest

from summa3d.comm.health import flight
from summa3d.errors import ConfigError
from summa3d.train import on_root as module
from summa3d.train.on_root import on_root


@pytest.mark.mpi(sizes=(2,))
def test_whoever_waits_for_rank_0_sleeps_and_records_that_it_waits_again_and_again(comm, monkeypatch):
    recorded, waiting_in = [], flight.waiting_in
    monkeypatch.setattr(flight, "waiting_in", lambda *what: recorded.append(what) or waiting_in(*what))
    monkeypatch.setattr(module, "AGAIN", 0.1)
    comm.Barrier()
    spent = time.thread_time()
    assert on_root(comm, lambda: time.sleep(0.8) or 17, ConfigError) == 17
    assert set(recorded) == ({("the work of rank 0", "2 ranks")} if comm.rank else set())
    assert comm.rank == 0 or (len(recorded) >= 3 and time.thread_time() - spent < 0.4)


@pytest.mark.mpi(sizes=(1, 3))
def test_an_error_of_rank_0_is_raised_on_all(comm):
    def action():
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"^Cannot write to runs: No space left on device\.$"):
        on_root(comm, action, ConfigError, folder="runs")
