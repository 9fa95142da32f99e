"""Predicted steps of configurations: as the search composes them from cells, and never faster than the cores allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from summa3d.cluster import load
from summa3d.nn.choose import SchemeChoice
from summa3d.plan.pick import Exact, plan_of
from summa3d.plan.search.timing import Times
from summa3d.plan.training import seconds
from summa3d.train.config import Config
from summa3d.train.config import load as load_config

HOST = load("host")
SMALL = ("model.layers=4", "model.hidden=64", "model.heads=4", "model.sequence=16", "train.batch=16", "train.accumulate=4")


def configured(*words: str) -> Config:
    return load_config("demo", [*SMALL, *words])


@pytest.mark.parametrize(
    "words", [("scheme=summa", "grid.x=2", "grid.y=2"), ("scheme=oned", "grid.y=2", "grid.pp=2"), ("grid.x=2", "grid.z=2")]
)
def test_a_step_takes_what_the_search_composes_of_cells(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    config = configured(*words)
    choice = SchemeChoice(config.scheme, {axis: size for axis, size in config.grid.axes.items() if axis in "xyz"}, 0)
    composed = Times(HOST, Exact()).seconds(plan_of(config, choice, HOST))
    assert seconds(config, HOST) == pytest.approx(composed, rel=0.05)


def test_stages_that_share_cores_take_what_all_of_them_compute() -> None:
    config = configured("scheme=oned", "grid.pp=4", "train.accumulate=1", "train.batch=4")
    apart, one = (seconds(config, HOST.replaced({"host.slots": slots}, "assumed")) for slots in (4.0, 1.0))
    assert apart < one < 2 * apart  # one micro-batch: stages compute in turn, with a core each, but for the optimizer
    many = configured("scheme=oned", "grid.pp=4", "train.accumulate=16")
    apart, one = (seconds(many, HOST.replaced({"host.slots": slots}, "assumed")) for slots in (4.0, 1.0))
    assert 2.5 * apart < one < 4 * apart


def test_every_schedule_and_replica_state_has_a_prediction() -> None:
    plain = seconds(configured("scheme=oned", "grid.pp=2", "grid.dp=2"), HOST)
    for words in (("pipeline.schedule=zb-h1",), ("pipeline.schedule=gpipe", "replicas.zero=2")):
        assert seconds(configured("scheme=oned", "grid.pp=2", "grid.dp=2", *words), HOST) == pytest.approx(plain, rel=0.5)
