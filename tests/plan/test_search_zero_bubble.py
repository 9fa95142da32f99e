"""Zero-bubble schedules in the search: split cells, bytes and seconds of dry runs, bounds, what is written, which plan wins."""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summa3d.cli import plan as cli
from summa3d.cluster import load
from summa3d.comm.topology import Topology
from summa3d.dry.record import ENTER, LEAVE
from summa3d.nn.config import ModelConfig
from summa3d.parallel.schedule import SCHEDULES as RULES
from summa3d.parallel.schedule import build, held_stages, is_split, split_layers, unchecked
from summa3d.parallel.simulate import timeline
from summa3d.plan.cells import BLOCK, Cell
from summa3d.plan.predict import Durations
from summa3d.plan.search import command
from summa3d.plan.search.bounds import Bounds, kept
from summa3d.plan.search.cells import PASSES, Cells, StageGrid, traced
from summa3d.plan.search.export import configured
from summa3d.plan.search.memory import _of_rank, memory
from summa3d.plan.search.plans import ERAS, SCHEDULES, Era, OuterGrid, Plan, PlanTable, Space, columns, tiles
from summa3d.plan.search.request import request
from summa3d.plan.search.search import NEAR, PlanSearch
from summa3d.plan.search.stages import balanced, heaviest, homes_of, states
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import PlacedPlan, Times
from summa3d.plan.training import seconds
from summa3d.train import config as configuration

MODEL = ModelConfig(layers=8, hidden=512, heads=4, sequence=512, vocabulary=256)
CLUSTER = load("selene").replaced({"node.size": 2.0}, "assumed")
BASE = request(["layers=8", "hidden=512", "heads=4", "vocabulary=256"], 8, CLUSTER).config
SPLIT = (("zb-h1", 1), ("zb-v", 2))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of cells of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMMA3D_CACHE", str(tmp_path_factory.mktemp("cells")))
        yield


def inner(scheme: str = "oned-sp", unit: int = 1, **more: Any) -> StageGrid:
    axes = {"x": 1, "y": 1, "z": 1, **more.pop("axes", {"y": 2})}
    of = {"model": MODEL, "recompute": "none", "regather": False, "dtype": "bfloat16", "device": "cuda", **more}
    return StageGrid(scheme=scheme, axes=tuple(axes.items()), unit=unit, **of)


def plan(schedule: str, chunks: int, pp: int = 2, m: int = 4, dp: int = 1, zero: int = 1, units: int = 4, **more: Any) -> Plan:
    layers = more.pop("layers", 8)
    of = inner(replicas=dp if zero == 3 else 1, split=is_split(schedule, pp), **more)
    return Plan(replace(of, model=replace(MODEL, layers=layers)), dp, pp, chunks, units, m, zero, schedule=schedule)


def work(cells: Cells, cell: str, ways: str) -> tuple[Counter[Any], int]:
    """Products of a cell in some passes, those of a weight's gradient among them, and the words that it moves."""
    products, words = Counter[Any](), 0
    for way in ways:
        for kind, many in cells.counts[cell, way].items():
            op = cells.kinds[kind].at(4)
            products[op.m, op.n, op.k, op.batch] += many * (op.kind == "product")
            words += many * op.words * (op.kind == "move")
    return +products, words


@pytest.mark.parametrize(
    ("scheme", "unit", "axes", "regather"),
    [("oned", 1, {"y": 2}, False), ("oned-sp", 1, {"y": 2}, True), ("cuboid", 4, {"x": 2, "y": 2, "z": 2}, True)],
)
def test_both_halves_of_a_backward_are_the_whole_one_and_the_gathers_of_its_second(
    scheme: str, unit: int, axes: dict[str, int], regather: bool
) -> None:
    of = inner(scheme, unit, axes=axes, regather=regather)
    whole, halves = traced(of, False), traced(replace(of, split=True), False)
    assert whole is not None and halves is not None and not whole.passes["W"]
    x, y, z = (axes.get(axis, 1) for axis in "xyz")
    stream = 4 * unit * MODEL.sequence * MODEL.hidden // (x * y * z)
    for cell in (ENTER, BLOCK, LEAVE):
        (products, words), (both, moved) = work(whole, cell, "B"), work(halves, cell, "BW")
        assert products == both and work(whole, cell, "F") == work(halves, cell, "F")
        assert moved - words == {BLOCK: regather * (7 * (z - 1) + 2 * (y - 1)) * stream}.get(cell, moved - words)
    assert sum(work(halves, BLOCK, "W")[0].values()) == 4 and sum(work(halves, LEAVE, "W")[0].values()) == 1
    assert {piece.cell for piece in halves.passes["W"]} <= {ENTER, BLOCK, LEAVE}


CASES = (
    pytest.param(plan("zb-h1", 1), marks=pytest.mark.wide),  # each two of its sizes are in other cases, so are the next one's
    pytest.param(plan("zb-h1", 1, pp=4, m=8, recompute="full"), marks=pytest.mark.wide),
    plan("zb-v", 2),
    pytest.param(plan("zb-h1", 1, pp=4, m=6, layers=9), marks=pytest.mark.wide),
    plan("zb-v", 2, pp=4, m=8, recompute="full"),
    plan("zb-v", 2, scheme="cuboid", axes={"z": 2}, unit=2, units=2, regather=True),
    plan("zb-h1", 1, scheme="summa", axes={"x": 2, "y": 2}, unit=2, units=2),
    pytest.param(plan("zb-h1", 1, dp=2, zero=3), marks=pytest.mark.wide),
    plan("zb-v", 2, dp=2, zero=3),
    plan("zb-v", 2, pp=4, m=8, dp=2, zero=2, recompute="full"),  # W sums buckets beside what all others keep
    pytest.param(plan("zb-h1", 1, pp=4, m=8, dp=2, zero=2, recompute="full"), marks=pytest.mark.wide),
    pytest.param(plan("zb-h1", 1, dp=2, recompute="full"), marks=pytest.mark.wide),
)


@pytest.mark.parametrize("one", CASES, ids=str)
def test_bytes_and_seconds_are_those_of_the_dry_run_and_bounds_hold(one: Plan) -> None:
    from summa3d.train.dry_run import predict

    times, config = Times(CLUSTER, Store()), configured(one, BASE)
    cells, units = times.store.cells(one.inner, one.units)
    held, dry = memory(one, cells, units), predict(config)
    assert held.total == pytest.approx(dry["peak"], rel=0.03)
    own = next(row for row in dry["stages"] if row["pp"] == held.stage)
    assert held.parameters == own["parameters"] and held.total == pytest.approx(own["peak"], rel=0.03)
    if one.dp == 1:
        assert times.seconds(one) == pytest.approx(seconds(config, CLUSTER), rel=0.05)
    bounds, at = Bounds(times), np.array([0])
    era = Era((), ((one.inner.recompute, one.inner.regather),), (one.zero,))
    around = OuterGrid(0, one.dp, one.pp, SCHEDULES.index(one.schedule), one.chunks, one.units, one.micro_batches)
    rows = PlanTable(era, [one.inner], [around])
    assert rows.plan(0) == one
    states, least = (float(size[0]) for size in bounds.bytes(rows, at, (0, 0)))
    assert 0 < states < least <= held.total
    floor, placements = float(bounds.floor(rows, at, (0, 0))[0]), [*tiles(one, (2,))]
    for placed, bound in zip(placements, bounds.placed(one, placements), strict=True):
        counted = times.estimate(placed, least=True)
        assert 0 < floor <= bound * (1 + 1e-9) and max(bound, counted) <= times.estimate(placed) * (1 + 1e-9)
    assert len({rank: _of_rank(one, cells, units, rank).total for rank in range(one.pp)}) == one.pp
    assert held.total == max(_of_rank(one, cells, units, rank).total for rank in range(one.pp))


SIZES = [(*kind, p, m) for kind in SPLIT for p, m in ((2, 9), (3, 17), (4, 5), (5, 31))]


@pytest.mark.parametrize(("schedule", "chunks", "p", "m"), [*SIZES, ("zb-h1", 1, 6, 2), ("zb-h1", 1, 5, 1)])
def test_a_step_is_its_simulated_schedule_and_few_micro_batches_of_it_say_hardly_more(
    schedule: str, chunks: int, p: int, m: int
) -> None:
    rng = random.Random(f"{schedule} {p} {m}")
    for _ in range(20):
        most = {ENTER: 0.1, BLOCK: 1.0, LEAVE: 1.0}
        forward, backward, weights = ({cell: rng.uniform(one / 2, one) for cell, one in most.items()} for _ in range(3))
        layers = split_layers(rng.randint(p * chunks, 4 * p * chunks), p, chunks)
        topology = Topology({"dp": 1, "pp": p}, ("dp", "pp"), {"dp": 1, "pp": 1})
        parts = Durations(forward, backward, rng.uniform(0, 0.3), 0.0, weights)
        step = PlacedPlan(dict.fromkeys(forward, Cell()), topology, schedule, layers, m, parts=parts)
        whole = timeline(build(schedule, p, m, chunks), of_stages=step.of_stages(parts))
        assert step.pipeline(CLUSTER) == pytest.approx(whole.time)
        assert whole.time * (1 - 1e-9) <= step.closed(parts) <= 1.015 * whole.time
        assert (0.9 if chunks == 1 else 0.0) * whole.time <= step.least(parts) <= whole.time * (1 + 1e-9)
        ends = [forward[cell] + backward[cell] + weights[cell] for cell in (BLOCK, ENTER, LEAVE)]
        messages = 2 * (p * chunks - 1) - 2 * (chunks - 1)
        assert sum(whole.busy) == pytest.approx(m * (sum(layers) * ends[0] + ends[1] + ends[2] + messages * parts.send))


def test_all_plans_are_simulated_whole_that_may_be_faster_than_the_last_one_that_is_kept() -> None:
    """A pipeline whose stages have a layer or two is the least like some micro-batches of it."""
    forward, backward, weights = ({ENTER: part, BLOCK: one, LEAVE: 0.01} for part, one in ((0.3, 0.84), (0.22, 0.73), (0.2, 0.6)))
    topology = Topology({"dp": 1, "pp": 3}, ("dp", "pp"), {"dp": 1, "pp": 1})
    parts = Durations(forward, backward, 0.05, 0.0, weights)
    step = PlacedPlan(dict.fromkeys(forward, Cell()), topology, "zb-v", (2, 2, 2, 1, 1, 1), 9, parts=parts)
    assert 1.02 < step.few(parts) / step.pipeline(CLUSTER) <= NEAR


def test_only_what_the_library_builds_is_a_plan_and_all_of_it() -> None:
    space = Space(replace(MODEL, layers=6), 12, 24, "bfloat16", "cuda", (2,))
    found = {
        (one.schedule, one.pp, one.micro_batches, one.chunks)
        for rows in columns(space, Counter())
        for one in map(rows.plan, range(len(rows)))
    }
    for schedule, pp, m, chunks in found:
        if pp > 1:
            built = unchecked(schedule, pp, m, chunks)
            assert len(built.homes) <= 6 and built.split == (schedule in RULES and schedule.startswith("zb"))
    counts = {(pp, m) for _, pp, m, _ in found if pp > 1}
    assert {(pp, m) for name, pp, m, _ in found if name == "zb-h1"} == counts
    assert {(pp, m) for name, pp, m, _ in found if name == "zb-v"} == {(pp, m) for pp, m in counts if m >= pp and 2 * pp <= 6}
    old = columns(replace(space, era=ERAS["2021"]), Counter())
    assert {rows.plan(row).schedule for rows in old for row in range(len(rows))} == {"1f1b", "interleaved"}


def test_zb_v_wins_until_its_bytes_do_not_fit() -> None:
    model = replace(MODEL, hidden=1024, heads=8, vocabulary=512)
    fixed = {"scheme": "oned", "pp": 4, "b": 1, "recompute": "none"}
    space = Space(model, 4, 8, "bfloat16", "cuda", (2,), fixed=fixed)

    def best(limit: float) -> list[Any]:
        return PlanSearch(space, Times(CLUSTER, Store()), limit, 8).run(lambda *state: None).best

    first = best(80e9)
    assert [one.plan.schedule for one in first] == ["zb-v", "zb-h1", "interleaved", "1f1b"]
    bubbles = [float(str(one.terms["bubble"])) for one in first]
    assert bubbles == sorted(bubbles) and str(first[0].plan) == "oned y1 · pp 4×2 zb-v · b 1 · keep"
    less = best(first[0].memory.total - 1)
    assert less[0].plan.schedule == "zb-h1" and less[0].memory.total < first[0].memory.total
    assert less[0].seconds == first[1].seconds


@pytest.mark.parametrize(("schedule", "zero"), [("zb-h1", 1), ("zb-h1", 3), ("zb-v", 2), ("zb-v", 3)])
@pytest.mark.turns
def test_a_written_zero_bubble_plan_has_the_bytes_of_its_dry_run(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, schedule: str, zero: int
) -> None:
    from summa3d.train.dry_run import predict

    monkeypatch.setattr(command, "affinity", lambda: {0})  # no other processes that trace: each imports torch
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = "--model layers=4 hidden=64 heads=4 sequence=32 vocabulary=256 --cluster selene --ranks 8 --batch 16 --json --top 1"
    fixes = f"--fix schedule={schedule} --fix pp=2 --fix dp=2 --fix zero={zero} --fix recompute=none --fix scheme=oned-sp"
    assert cli.run(parser.parse_args([*words.split(), *fixes.split(), "--write", str(tmp_path)])) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]["config"]
    config, written = configuration.load(str(tmp_path / "plan.toml")), json.loads((tmp_path / "plan.json").read_text())
    assert found["pipeline.schedule"] == config.pipeline.schedule == schedule and config.replicas.zero == zero
    assert config.pipeline.chunks == found["pipeline.chunks"] == dict(SPLIT)[schedule]
    assert written["dry_run"]["bytes"] == predict(config)["bytes"]


def test_passes_are_those_of_the_programs() -> None:
    assert PASSES == ("F", "B", "W") and set(SCHEDULES) == {*RULES} - {"gpipe"}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_deep_stage_whose_weight_gradients_wait_is_composed_of_few_cells(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from summa3d.dry import step as dry_step
    from summa3d.dry.step import Setting, run

    axes = {"x": 1, "y": 2, "z": 1, "pp": 2}
    setting = Setting(replace(MODEL, layers=10), 2, "oned-sp", axes, recompute=(recompute, 1), accumulate=4, schedule="zb-h1")
    few = run(setting)
    monkeypatch.setattr(dry_step, "TRACED", 100)
    whole = run(setting)
    assert sum(len(one.segment.ops) for one in few.parts) < sum(len(one.segment.ops) for one in whole.parts)
    assert few.words() == whole.words() and few.operations() == whole.operations()
    assert few.peak == pytest.approx(whole.peak, rel=1e-3)


KEEPS = (
    ("oned", 1, {"y": 4}),
    ("oned-sp", 1, {"y": 4}),
    ("cuboid", 8, {"x": 2, "y": 2, "z": 2}),
    ("cuboid-sequence", 4, {"x": 2, "y": 2, "z": 2}),
    ("summa", 2, {"x": 2, "y": 2}),
    ("summa-transposed", 2, {"x": 2, "y": 2}),
    ("tesseract", 4, {"x": 2, "y": 2, "d": 2}),
    ("cuboid", 2, {"x": 2}),
    ("cuboid", 2, {"x": 2, "z": 2}),
)


WAYS = (("none", False, True), ("none", True, True), ("none", False, False), ("full", False, True))
"""What is recomputed, whether weights are gathered again, and whether backward is split."""


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["cover", "all"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("scheme", "unit", "axes"), KEEPS)
@pytest.mark.turns
def test_what_a_block_keeps_at_least_is_hardly_less_than_what_it_keeps(
    scheme: str, unit: int, axes: dict[str, int], family: str, every: bool
) -> None:
    """Each way in each scheme, and with each family: in a cover of those pairs."""
    bounds, model = Bounds(Times(CLUSTER, Store())), replace(MODEL, family=family)
    sizes = {"x": 1, "y": 1, "z": 1, "d": 1, **axes}
    first = (KEEPS.index((scheme, unit, axes)) + (family == "llama")) % 2
    for recompute, regather, split in WAYS if every else WAYS[first::2]:
        if regather and not scheme.startswith(("cuboid", "oned-sp")):
            continue
        of = replace(inner(scheme, unit, axes=axes, recompute=recompute, regather=regather, split=split), model=model)
        for many, least in ((8, 0.85), (1, 0.0)):  # of one unit, copies of weights are most of it
            cells, units = bounds.times.store.cells(of, many)
            nets = [sum(one.net.at(units) for one in cells.passes[way] if one.cell == BLOCK) for way in PASSES[:2]]
            alone = [bounds._alone_keeps(of, 1, way, many * unit, 1) for way in PASSES[:2]]
            saved, owed = kept(of, sizes, many * unit * MODEL.sequence, alone)
            assert least * nets[0] <= saved <= nets[0], of
            assert least * sum(nets) <= owed <= sum(nets) or not split, of
        assert cells.elements[BLOCK] >= of.model.block_elements * sizes["d"] / of.ranks


def test_what_ranks_hold_when_they_keep_most_is_a_state_of_theirs_and_no_split_schedule_keeps_much_more() -> None:
    for (schedule, chunks), p, layers in product(SPLIT, (2, 3, 4, 6), (12, 13, 17)):
        for m in range(p if chunks == 2 else 1, 3 * p):
            found = [one[:3] for one in heaviest(schedule, p, m, chunks, layers)]
            of_stages = balanced(layers, p, chunks)
            every = []
            for own in held_stages(homes_of(schedule, p, chunks), p):
                each, rank = np.array([of_stages[stage] for stage in own]), len(every)
                _, flying, owed, _ = states(schedule, p, m, chunks, rank)
                every.append(
                    {(int(each.sum()), *pair) for pair in zip((flying @ each).tolist(), (owed @ each).tolist(), strict=True)}
                )
            assert {*found} <= every[0] | every[-1]
            for saved, waiting in ((1, 0), (1, 1), (1, 2)):
                most = max(a * saved + b * waiting for of_rank in every for _, a, b in of_rank)
                assert 0.6 * most <= max(a * saved + b * waiting for _, a, b in found) <= most
