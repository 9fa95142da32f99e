"""A trace of training: every communication of every rank is in it once, with its words, inside the phase that it belongs to."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import devices
import pretended
import pytest
from small_runs import assignments, write_corpus

from summa3d.comm.profile import trace
from summa3d.errors import ConfigError
from summa3d.train import config as configuration
from summa3d.train import loop


def small(folder, comm, **changes):
    if comm.rank == 0:
        write_corpus(folder / "corpus.txt")
    comm.Barrier()
    return configuration.load("demo", assignments(folder / "corpus.txt", **changes))


@pytest.fixture
def shared_folder(comm, tmp_path):
    return comm.bcast(tmp_path)


@pytest.mark.skipif(devices.NAME != "cpu", reason="phases are the host's times, a device's communications its own: see below")
@pytest.mark.mpi(sizes=(4,))
def test_a_trace_holds_every_communication_of_its_steps_once_with_the_words_of_the_ledger(comm, shared_folder, monkeypatch):
    scheme = {"scheme": "cuboid", "grid__x": 2, "grid__y": 2, "grid__z": 1}
    overlapped = {"overlap__gather": 1}
    config = small(shared_folder, comm, **scheme, **overlapped, train__steps=3, train__evaluate_every=0)
    moved, taken = [], loop.take_step

    def take(run, number):
        with run.grid.ledger.watch() as watched:
            step = taken(run, number)
        if number == 2:
            moved.append((watched.words, watched.messages, watched.calls))
        return step

    monkeypatch.setattr(loop, "take_step", take)
    file = shared_folder / "trace.json"
    loop.train(config, comm, shared_folder / "run", traced=loop.TraceWindow(file, 2, 2))
    everyones = comm.gather(moved[0])
    if comm.rank:
        return
    whole = json.loads(file.read_text())
    events = whole["traceEvents"]
    assert whole["otherData"] == {"ranks": 4, "clock": "the node's own clock"}
    for rank, (words, messages, calls) in enumerate(everyones):
        begun = [event for event in events if event["pid"] == rank and event["ph"] == "b"]
        assert (sum(event["args"]["words"] for event in begun), sum(event["args"]["messages"] for event in begun)) == (
            words,
            messages,
        )
        assert len(begun) == calls == len({event["id"] for event in begun})
        phases = [event for event in events if event["pid"] == rank and event["ph"] == "X" and event["tid"] == 0]
        assert Counter(event["name"] for event in phases) == {"forward": 1, "backward": 1, "optimizer": 1}
        for event in begun:
            phase = next(one for one in phases if one["name"] == event["args"]["phase"])
            assert phase["ts"] - 1 <= event["ts"] <= phase["ts"] + phase["dur"] + 1
        ends = {event["id"]: event["ts"] for event in events if event["pid"] == rank and event["ph"] == "e"}
        assert all(event["ts"] <= ends[event["id"]] for event in begun)
        # The switches leave gathers in flight while others begin: some flight ends after the next one has begun.
        ordered = sorted(begun, key=lambda event: event["ts"])
        assert any(ends[one["id"]] > after["ts"] for one, after in pairwise(ordered))
    assert min(event["ts"] for event in events if "ts" in event) == 0


@pytest.mark.mpi(sizes=(2,))
def test_on_a_device_every_product_and_communication_has_its_time_by_events_and_the_step_waits_no_more_often(
    comm, shared_folder, kernel_libraries, monkeypatch
):
    grid = {"scheme": "cuboid", "grid__x": 1, "grid__y": 1, "grid__z": 2}
    waits, take_step, file = [], loop.take_step, shared_folder / "trace.json"
    with pretended.pretended(monkeypatch, kernel_libraries) as (device, backends):
        config = small(shared_folder, comm, **grid, train__steps=3, train__evaluate_every=0, device="cuda", transport="nccl")

        def waited():
            return len(device.waits), sum(backend.host_waits for backend in backends)

        def take(run, number):
            before = waited()
            step = take_step(run, number)
            waits.append(tuple(now - then for now, then in zip(waited(), before, strict=True)))
            return step

        monkeypatch.setattr(loop, "take_step", take)
        loop.train(config, comm, shared_folder / "run", traced=loop.TraceWindow(file, 2, 2))
    assert waits == [(2, 0)] * 3
    if comm.rank:
        return
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["pid"] == 0]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = Counter(tracks[event["tid"]] for event in events if event["ph"] == "X")
    begun = Counter(event["cat"] for event in events if event["ph"] == "b")
    assert spans["products on the device"] == spans["products"] > 0
    assert begun.pop("axis x·y·z") == 1 and "axis x·y·z on the device" not in spans  # the norm, which lies on the host
    assert begun["axis z"] > 0 and {axis: spans[f"{axis} on the device"] for axis in begun} == begun
    assert [event["name"] for event in events if event["ph"] == "X" and tracks[event["tid"]] == "runs"] == [
        "F 0.0",
        "B 0.0",
        "step 2",
    ]


@pytest.mark.mpi(sizes=(1, 2))
def test_a_file_or_steps_that_cannot_be_are_an_error_on_every_rank_before_the_first_step(comm, shared_folder):
    config = small(shared_folder, comm, scheme="cuboid", grid__x=comm.size, grid__y=1, grid__z=1, train__steps=3)
    for number, (file, first, last, why) in enumerate(
        (
            (shared_folder, 1, 2, "is a folder"),
            (shared_folder / "none" / "trace.json", 1, 2, "which is no folder"),
            (shared_folder / "trace.json", 3, 5, "not among the steps 1 to 3"),
            (shared_folder / "trace.json", 2, 1, "not among the steps 1 to 3"),
        )
    ):
        with pytest.raises(ConfigError, match=why):
            loop.train(config, comm, shared_folder / f"run{number}", traced=loop.TraceWindow(file, first, last))


def test_a_communication_that_nobody_completed_has_no_wait(tmp_path):
    from mpi4py import MPI

    kept = trace.Trace()
    kept.communications.append(trace.Communication("all_gather", "x", "other", "float64", 7, 1, 56, 2.0, 0.5))
    trace.write(tmp_path / "trace.json", kept, MPI.COMM_SELF)
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] != "M"]
    assert [(event["ph"], event["name"], event["ts"]) for event in events] == [
        ("X", "begin all_gather", 0),
        ("b", "all_gather", 0),
        ("e", "all_gather", 500000.0),
    ]
