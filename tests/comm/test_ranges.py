"""NVTX ranges: around phases, runs and communications where they are asked for, by a recorded stand-in for CuPy's and torch's."""

from __future__ import annotations

import argparse
import sys
import types

import numpy as np
import pytest

from summa3d.cli.traces import check_trace_arguments
from summa3d.comm.profile.ledger import Ledger
from summa3d.comm.profile.nvtx import nvtx, nvtx_or_none
from summa3d.errors import ConfigError, ShapeError


class Recorder:
    """What was pushed, at which depth, and how deep it is now."""

    def __init__(self):
        self.pushed, self.depth = [], 0

    def push(self, name):
        self.pushed.append((self.depth, name))
        self.depth += 1

    def pop(self):
        self.depth -= 1

    def install(self, monkeypatch, name, push, pop):
        whole, parts = "", name.split(".")
        for part in parts:
            whole = f"{whole}.{part}".lstrip(".")
            monkeypatch.setitem(sys.modules, whole, types.ModuleType(whole))
        setattr(sys.modules[name], push, self.push)
        setattr(sys.modules[name], pop, self.pop)


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    recorder.install(monkeypatch, "cupy.cuda.nvtx", "RangePush", "RangePop")
    return recorder


@pytest.mark.mpi(sizes=(2,))
def test_phases_and_communications_are_ranges_in_each_other_and_cost_nothing_when_off(comm, make_grid, recorder):
    grid = make_grid(x=2, y=1, node_memory=False)
    ranges = nvtx()
    del recorder.pushed[:]

    def step():
        with grid.ledger.run("step 1"), grid.ledger.phase("forward"):
            pending = grid["x"].start_all_gather(np.ones((2, 3)))
            grid["x"].all_reduce(np.ones(3))
            grid["y"].all_reduce(np.ones(3))  # of one member: none
            pending.wait()
            pending.wait()

    step()
    assert recorder.pushed == []
    grid.ledger.ranges = ranges
    step()
    assert recorder.depth == 0
    assert recorder.pushed == [
        (0, "step 1"),
        (1, "forward"),
        (2, "all_gather x"),
        (2, "all_reduce x"),
        (2, "wait for all_reduce x"),
        (2, "wait for all_gather x"),
    ]


@pytest.mark.mpi(sizes=(2,))
def test_nvtx_that_one_rank_lacks_and_a_folder_that_one_rank_lacks_are_errors_on_all(comm, recorder, monkeypatch, tmp_path):
    def refused():
        raise ConfigError("NVTX ranges need CuPy")

    if comm.rank == 1:
        monkeypatch.setattr("summa3d.comm.profile.nvtx.nvtx", refused)
    with pytest.raises(ConfigError, match="NVTX ranges need CuPy"):
        check_trace_arguments(argparse.Namespace(trace=None, nvtx=True), comm)
    file = tmp_path / "none" / "trace.json" if comm.rank == 1 else tmp_path / "trace.json"
    with pytest.raises(ConfigError, match="which is no folder"):
        check_trace_arguments(argparse.Namespace(trace=file, nvtx=False), comm)
    check_trace_arguments(argparse.Namespace(trace=tmp_path / "trace.json", nvtx=False), comm)


@pytest.mark.mpi(sizes=(2,))
def test_messages_have_ranges_and_an_error_leaves_none_open(comm, make_grid, recorder):
    grid = make_grid(x=2)
    grid.ledger.ranges = nvtx()
    del recorder.pushed[:]
    arriving, other = np.ones(3), 1 - comm.rank
    pending = [grid["x"].start_send(np.ones(3), other), grid["x"].start_receive(arriving, other)]
    for one in pending:
        one.wait()
    assert [name for _, name in recorder.pushed] == ["send x", "receive x", "wait for send x", "wait for receive x"]
    with pytest.raises(ShapeError), grid.ledger.phase("backward"):
        grid["x"].start_receive(np.ones(3, np.int8), other)
    assert recorder.depth == 0 and recorder.pushed[-1] == (1, "receive x")


def test_without_cupy_torchs_ranges_are_taken_and_without_both_it_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvtx", None)
    recorder = Recorder()
    recorder.install(monkeypatch, "torch.cuda.nvtx", "range_push", "range_pop")
    ledger = Ledger()
    ledger.ranges = nvtx()
    with ledger.phase("optimizer"):
        pass
    assert recorder.pushed[-1] == (0, "optimizer") and recorder.depth == 0

    def refuse(name):
        raise RuntimeError("NVTX functions not installed")

    sys.modules["torch.cuda.nvtx"].range_push = refuse
    with pytest.raises(ConfigError, match=r"need CuPy, or a torch with CUDA.*NVTX functions not installed"):
        nvtx()
    assert nvtx_or_none() is None
