"""The critical path: ops as long as their arithmetic took, whatever else the cores did meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from small_runs import shared_corpus, small_config

from summa3d.comm.profile.ledger import Ledger
from summa3d.parallel.critical import in_words, replay
from summa3d.parallel.schedule import build
from summa3d.parallel.simulate import timeline
from summa3d.train.loop import TraceWindow, train
from summa3d.train.progress import Progress


def test_a_replay_takes_the_mean_op_of_the_slowest_rank_of_each_stage() -> None:
    schedule = build("interleaved", p=2, m=4, v=2)
    of_stages = {(kind, stage): (1 + stage) * (1.0 if kind == "F" else 2.5) for kind in "FB" for stage in range(4)}
    ranks = []
    for index, share in ((0, 1.0), (0, 0.5), (1, 0.25), (1, 1.0)):  # two inner ranks a stage
        runs = [("step 3", 100.0), ("F 7.1", 100.0)]
        for op in schedule.ops_of(index):
            seconds = of_stages[op.kind, schedule.stages[index][op.chunk]] * share
            runs.append((str(op), seconds * (0.5 if op.micro % 2 else 1.5)))
        ranks.append((index, runs))
    replayed, wanted = replay(schedule, ranks), timeline(schedule, of_stages=of_stages)
    assert replayed.time == pytest.approx(wanted.time) and replayed.busy == pytest.approx(wanted.busy)
    assert wanted.time > max(wanted.busy) > 0
    work = sum(wanted.busy) / 2
    assert f"takes {wanted.time:.3g} s: {work:.3g} s of work a rank" in in_words(replayed)
    assert f"a bubble of {100 * (wanted.time / work - 1):.0f}% of it" in in_words(replayed)


def test_the_arithmetic_of_a_run_is_its_processor_time_without_sleep_and_communication(clock: FakeClock) -> None:
    ledger = Ledger()
    trace = ledger.start_trace()
    clock.passes(8, cpu=4)
    with ledger.run("F 0.1"):
        clock.passes(0.75, cpu=0.5)
        ledger.line("all_gather", "x", "float64").wait(0.375, 0.25)  # a quarter of the half second was a communication's
    assert trace.arithmetic == [("F 0.1", 0.25)]


@pytest.mark.mpi(sizes=(2,))
def test_a_traced_run_tells_the_critical_path_of_its_pipeline(comm: Any, shared_tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "say", lambda self, line: said.append(line))
    config = small_config(shared_corpus(comm, shared_tmp_path), scheme="serial", grid__pp=2, model__layers=2, train__accumulate=3)
    train(config, comm, shared_tmp_path / "run", traced=TraceWindow(shared_tmp_path / "trace.json", 2, 3))
    (line,) = [line for line in said if line.startswith("pipeline 1f1b: with a core for each rank")]
    assert float(line.split("a step takes ")[1].split(" s:")[0]) > 0 and "bubble of" in line
