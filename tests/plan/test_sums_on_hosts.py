"""What the cores of hosts do behind the last backward: bytes and torch's calls of sums and gathers are those of a dry run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from summa3d.cluster import load
from summa3d.dry.step import META, Rank
from summa3d.nn.choose import SchemeChoice
from summa3d.plan.pick import Exact, plan_of
from summa3d.plan.search.plans import Plan
from summa3d.plan.search.timing import Times, bytes_and_calls_of_a_gather, bytes_and_calls_of_a_sum, number_of
from summa3d.train.config import Config, from_table
from summa3d.train.dry_run import setting_of, training_of

PASSES = {"cat": 2, "copy_": 2, "add": 3, "add_": 3}
"""Reads and writes of an element: what is written counts as read once where it is given."""


class Calls(TorchDispatchMode):
    """Counts torch's calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def config_of(dp: int, dtype: str = "float32") -> Config:
    model = {"layers": 2, "hidden": 48, "heads": 4, "sequence": 12, "vocabulary": 48}
    table = {"scheme": "oned", "model": model, "grid": {"y": 2, "dp": dp}, "dtype": dtype, "data": {"tokenizer": "numbers:48"}}
    return from_table({**table, "train": {"batch": 12, "checkpoint_every": 0}, "device": "cpu"})


def plan_and_rank(dp: int, node: int) -> tuple[Plan, Rank, Times]:
    config, cluster = config_of(dp), load("host").replaced({"node.size": node}, "assumed")
    rank = Rank.traced(setting_of(config, 0, node), training_of(config))
    return plan_of(config, SchemeChoice("oned", {"y": 2}, 0), cluster), rank, Times(cluster, Exact())


def calls_of_both(plan: Plan, held: int, tensors: int) -> list[tuple[float, int]]:
    """Bytes and calls of a sum over replicas and of a gather, of float32."""
    gather = bytes_and_calls_of_a_gather(plan.copies, held, tensors, 4, 4, plan.stage_ranks <= plan.inner.shared)
    return [bytes_and_calls_of_a_sum(plan.copies, held, tensors, 4), gather]


@pytest.mark.parametrize(("dp", "node"), [(2, 4), (3, 8), (3, 2)])
def test_bytes_and_calls_are_those_of_a_dry_run(dp: int, node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    plan, rank, times = plan_and_rank(dp, node)
    cells, _ = times.store.cells(plan.inner, plan.units)
    held, tensors = (number_of(plan, of, 0) for of in (cells.elements, cells.tensors))
    assert held == sum(state.shardings.numel for state in rank.states) and tensors == len(rank.states)
    replicas = rank.pipeline.replicas
    assert replicas is not None
    passed, calls = {}, {}

    def gather() -> None:
        replicas.gathers.start()
        replicas.gathers.finish()  # what is deferred where replicas are on several nodes

    for name, step in (("sum", replicas.reduce), ("gather", gather)):
        with META, Calls() as counted, rank.tracer.storages, rank.tracer.recording() as found, torch.no_grad():
            step()
        ops = [op for segment in found[0] for op in segment.ops if op.kind == "elements"]
        passed[name] = sum(PASSES[op.name] * op.written for op in ops)
        calls[name] = sum(counted.found.values()) + sum(op.name == "copy_" for op in ops)  # which the dry run takes over
    wanted = calls_of_both(plan, held, tensors)
    for (nbytes, many), name in zip(wanted, passed, strict=True):
        assert nbytes == pytest.approx(passed[name], rel=1e-9), name
        assert many == pytest.approx(calls[name], rel=0.05), name


def test_hosts_take_longer_by_their_bytes_and_calls_and_devices_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    config, after = config_of(3), {}
    for name, change in {"": {}, "memory": {"device.memory_bandwidth": 0.5}, "launch": {"elements.launch": 2.0}}.items():
        cluster = load("host")
        cluster = cluster.replaced({key: factor * cluster[key] for key, factor in change.items()}, "assumed")
        plan = plan_of(config, SchemeChoice("oned", {"y": 2}, 0), cluster)
        times = Times(cluster, Exact())
        after[name] = times.after(plan)
    assert all(slower > once for key in ("memory", "launch") for slower, once in zip(after[key], after[""], strict=True))
    cells, _ = times.store.cells(plan.inner, plan.units)
    held, tensors = (number_of(plan, of, 0) for of in (cells.elements, cells.tensors))
    more = calls_of_both(plan, held, tensors)
    longer = after["launch"].replicas - after[""].replicas
    assert longer == pytest.approx(load("host")["elements.launch"] * sum(calls for _, calls in more), rel=1e-6)
