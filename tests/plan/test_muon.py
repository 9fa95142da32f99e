"""Plans whose optimizer is Muon: words, products and bytes of a step are those of the dry run, and searches price them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summa3d.cluster import load as cluster
from summa3d.dry.step import run as run_dry
from summa3d.errors import ConfigError
from summa3d.nn.choose import SchemeChoice
from summa3d.nn.muon.groups import group_axes
from summa3d.plan.muon import muon_step
from summa3d.plan.pick import Exact, plan_of
from summa3d.plan.questions import cluster_with
from summa3d.plan.search.find import find_plans
from summa3d.plan.search.memory import memory
from summa3d.plan.search.request import request
from summa3d.plan.search.timing import Times
from summa3d.train.config import Config, from_table
from summa3d.train.dry_run import predict, setting_of, training_of

MODEL = {"layers": 3, "hidden": 48, "heads": 6, "sequence": 16, "vocabulary": 64}


def config_of(scheme: str, zero: int = 1, ranks: str = "auto", **grid: int) -> Config:
    train = {"optimizer": "muon", "batch": 12, "checkpoint_every": 0, "muon": {"ranks": ranks}}
    data = {"tokenizer": "numbers:64"}
    table = {"scheme": scheme, "model": MODEL, "grid": grid, "train": train, "data": data, "replicas": {"zero": zero}}
    return from_table({**table, "device": "cpu"})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    return tmp_path


def flops(ops: Any) -> int:
    return sum(2 * op.m * op.n * op.k * op.batch for op in ops if op.kind == "product")


CASES = [
    ("cuboid", 1, {"y": 2, "z": 2}),
    pytest.param("oned", 2, {"y": 2, "dp": 3}, marks=pytest.mark.wide),
    ("summa", 1, {"x": 2, "y": 1, "dp": 2}),
]


@pytest.mark.parametrize(("scheme", "zero", "grid"), CASES)
def test_the_step_of_the_busiest_rank_is_that_of_its_dry_run(cache: Path, scheme: str, zero: int, grid: dict[str, int]) -> None:
    config = config_of(scheme, zero, **grid)
    inner = {axis: size for axis, size in config.grid.axes.items() if axis != "dp"}
    plan = plan_of(config, SchemeChoice(scheme, inner, 0), cluster("host"))
    found = muon_step(plan.inner, 3, plan.dp, zero, config.train)
    every = [run_dry(setting_of(config, rank), training_of(config)) for rank in range(plan.inner.ranks * plan.dp)]
    ops = [[op for segment, _ in step.optimizer for op in segment.ops] for step in every]
    most = max(range(len(every)), key=lambda rank: flops(ops[rank]))
    assert flops(found.ops) == flops(ops[most]) > 0
    stage = next(name for name in every[most].words()["optimizer"] if name.startswith("x·y·z"))
    assert found.words == every[most].words()["optimizer"][stage] > 3 * 48 * 48
    times = Times(cluster("host"), Exact(), config.train)
    held = memory(plan, *times.store.cells(plan.inner, plan.units), times.muon(plan))
    assert held.optimizer == pytest.approx(predict(config)["mean_bytes"]["optimizer"], rel=0.02)
    adamw = memory(plan, *times.store.cells(plan.inner, plan.units))
    assert held.optimizer < 0.6 * adamw.optimizer


@pytest.mark.parametrize("ranks", ["2", pytest.param("4", marks=pytest.mark.wide)])
def test_the_step_of_a_group_is_that_of_its_dry_run_and_its_axes_have_prices(cache: Path, ranks: str) -> None:
    config = config_of("cuboid", ranks=ranks, y=2, z=2)
    plan = plan_of(config, SchemeChoice("cuboid", {"x": 1, "y": 2, "z": 2, "d": 1}, 0), cluster("host"))
    found = muon_step(plan.inner, 3, 1, 1, config.train)
    steps = [run_dry(setting_of(config, rank), training_of(config)) for rank in range(4)]
    ops = [[op for segment, _ in step.optimizer for op in segment.ops] for step in steps]
    most = max(range(4), key=lambda rank: flops(ops[rank]))
    assert 0.95 * flops(ops[most]) <= flops(found.ops) <= flops(ops[most])
    moves = [op for op in found.ops if op.kind == "move"]
    assert found.words == sum(steps[0].words()["optimizer"].values()) and {op.axis for op in moves if group_axes(op.axis)}
    times = Times(cluster("selene"), Exact(), config.train)
    longer = [op._replace(words=100 * op.words) if group_axes(op.axis) else op for op in found.ops]
    before = times.after(plan).optimizer
    (key,) = times._muon
    times._muon[key] = found._replace(ops=tuple(longer))
    assert times.after(plan).optimizer > before


def test_a_search_prices_the_optimizer_that_it_is_asked_for(cache: Path) -> None:
    words = [*(f"{key}={value}" for key, value in MODEL.items())]
    fix = {"pp": 1, "scheme": "cuboid", "zero": 1, "recompute": "none", "regather": False}
    options: dict[str, Any] = {"fix": fix, "top": 40}
    adamw = find_plans(words, "selene", 2, 12, **options)
    muon = find_plans([*words, "train.optimizer=muon", "train.muon.steps=7"], "selene", 2, 12, **options)
    assert muon.config().train.optimizer == "muon" and muon.config().train.muon.steps == 7
    seconds = {str(one.plan): one for one in adamw.result.best}
    for one in muon.result.best:
        other = seconds[str(one.plan)]
        assert one.terms["optimizer"] > 2 * other.terms["optimizer"] and one.memory.optimizer < other.memory.optimizer
        assert one.terms["compute"] == other.terms["compute"] and one.terms["dp"] == other.terms["dp"]
    assert ", bfloat16, muon; " in str(muon) and ", bfloat16; " in str(adamw)
    more = muon.searched.times.muon(muon.best)
    assert more is not None and one.seconds - other.seconds == pytest.approx(
        one.terms["optimizer"] - other.terms["optimizer"], rel=1e-6
    )


def test_the_optimizer_is_a_key_of_the_training_and_no_number_of_the_cluster() -> None:
    asked = request(["gpt3-125m", "train.optimizer=muon"], 8, cluster("selene"))
    assert asked.config.train.optimizer == "muon" and asked.config.train.batch == 8
    with pytest.raises(ConfigError, match="KEY=NUMBER"):
        cluster_with("selene", ["train.optimizer=muon"])
    with pytest.raises(ConfigError, match=r"model\.train\.batch"):
        request(["gpt3-125m", "train.batch=4"], 8, cluster("selene"))
