"""What runs behind arithmetic on devices: weights gathered ahead, where a block leaves one on its way, and sums over replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import ceil, inf, log, sqrt
from pathlib import Path

import pytest

from summa3d.cluster import load
from summa3d.dry import step
from summa3d.dry.record import ENTER, LEAVE
from summa3d.dry.step import OpKey, Rank
from summa3d.nn import ModelConfig
from summa3d.plan.cells import BLOCK
from summa3d.plan.price import move
from summa3d.plan.replay import replay
from summa3d.plan.search.cells import StageGrid, bucket_of
from summa3d.plan.search.export import configured
from summa3d.plan.search.find import find_plans
from summa3d.plan.search.memory import memory
from summa3d.plan.search.plans import Era, Plan, Space, columns, refused, tiles
from summa3d.plan.search.search import PlanSearch
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import Times, number_of
from summa3d.train.config import Config, DataConfig, numbers_of
from summa3d.train.dry_run import predict, setting_of, training_of

CLUSTER = load("dgx-h100")
LAYERS = 7
MODEL = ModelConfig(family="llama", layers=LAYERS, hidden=512, heads=8, sequence=256, vocabulary=1024)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def stage(ahead: int, replicas: int = 1, **axes: int) -> StageGrid:
    shape = {"x": 1, "y": 1, "z": 1, **axes}
    return StageGrid(
        MODEL, "cuboid", tuple(shape.items()), "none", True, "bfloat16", "cuda", 2 * shape["x"], replicas, 8, ahead=ahead
    )


@pytest.mark.parametrize(
    ("inner", "speed"),
    [(stage(1, x=2, z=2), 1.0), (stage(2, x=2, y=2), 1.0), (stage(1, replicas=4, y=2), 1.0), (stage(3, x=4), 0.05)],
)
def test_the_seconds_bytes_and_words_of_a_plan_with_prefetch_are_those_of_its_dry_run(
    cache: Path, inner: StageGrid, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links are slow, too: what comes before the blocks hides gathers of the first ones, and not those of all."""
    zero = 3 if inner.replicas > 1 else 1
    plan = Plan(inner, inner.replicas, 1, 1, 1, 3, zero)
    cluster = CLUSTER.replaced({"node.bandwidth": speed * CLUSTER["node.bandwidth"]}, "assumed")
    times = Times(cluster, Store())
    asked = Config(model=MODEL, device="cuda", dtype="bfloat16", data=DataConfig(tokenizer=numbers_of(MODEL)))
    config = configured(plan, asked)
    assert config.overlap.gather == inner.ahead
    setting = setting_of(config, 0, 8, True)
    with monkeypatch.context() as patch:
        patch.setattr(step, "TRACED", LAYERS)  # every block is traced
        rank = Rank.traced(setting, training_of(config), between=True)
    prices, spans = times.prices_of(plan), times.spans(plan)
    for way in "FB":
        parts = rank.ops[OpKey(way, 0, 1)].parts
        assert {many for _, many in parts} == {1}
        trace = [op for one, _ in parts for op in one.ops]
        whole = sum(spans[cell, way].seconds * many for cell, many in ((ENTER, 1), (BLOCK, LAYERS), (LEAVE, 1)))
        assert whole == pytest.approx(replay(trace, prices).seconds, rel=0.02), way
    still = replace(plan, inner=replace(inner, ahead=0))
    assert times.seconds(plan) < 0.995 * times.seconds(still)
    assert sum(times.spans(still)[BLOCK, "F"].moved.values()) == pytest.approx(sum(spans[BLOCK, "F"].moved.values()))
    held, before = (memory(one, *times.store.cells(one.inner, one.units)) for one in (plan, still))
    dry = predict(config)
    assert held.total == pytest.approx(dry["peak"], rel=0.1)
    weights = 2 * max(rows * columns for rows, columns in MODEL.matrices) // (inner.ranks // inner.shape["x"])
    assert 0 < held.prefetched <= inner.ahead * weights and before.prefetched == 0
    assert before.total <= held.total <= before.total + held.prefetched + weights


def test_the_search_takes_prefetch_where_it_gains_and_writes_it(cache: Path) -> None:
    config = Config(model=replace(MODEL, layers=3), device="cuda", dtype="bfloat16")
    found = find_plans(config, "dgx-h100", 4, 16, fix={"scheme": "cuboid", "x": 4, "dp": 1, "pp": 1}, top=2)
    best = found[0]
    assert best.plan.inner.ahead > 0 and found.config().overlap.gather == best.plan.inner.ahead
    assert f"· prefetch {best.plan.inner.ahead}" in str(found)
    still = replace(best.plan, inner=replace(best.plan.inner, ahead=0))
    one = found.searched.priced(still, best.memory)
    assert best.seconds < one.seconds and best.terms["axis"]["x"] < one.terms["axis"]["x"]


def test_no_plan_that_prefetch_makes_one_of_the_fastest_is_dropped(cache: Path) -> None:
    """One that waits for its weights is slower than all that are kept, and with prefetch faster than one of them."""
    cluster = load("selene").replaced({"node.size": 2.0, "elements.launch": 1e-6}, "assumed")
    model, era = ModelConfig(layers=5, hidden=256, heads=4, sequence=64, vocabulary=512), Era(("cuboid-sequence",))
    fixed = {"grid.x": 2, "grid.y": 2, "recompute": "none", "regather": False, "replicas.zero": 1, "pipeline.schedule": "1f1b"}
    space = Space(model, 8, 16, "bfloat16", "cuda", (2,), era=era, fixed=fixed)
    times, prices = Times(cluster, Store()), set[float]()
    found = PlanSearch(space, times, 80e9, 3).run(lambda *state: None)
    for plan in (rows.plan(row) for rows in columns(space, Counter()) for row in range(len(rows))):
        for one in tiles(plan, (2,)) if not refused(space, plan) else ():
            with_prefetch = [replace(one, inner=inner) for inner in (one.inner, *one.inner.with_prefetch)]
            prices.add(round(min(map(times.seconds, with_prefetch)), 15))
    assert len(prices) > 10 and [one.seconds for one in found.best] == pytest.approx(sorted(prices)[:3], rel=1e-9)


def test_a_mixture_waits_for_the_experts_of_its_first_layer_too_which_fewer_replicas_gather(cache: Path) -> None:
    model = ModelConfig(family="mixtral", layers=LAYERS, hidden=512, heads=8, ffn=4096, sequence=256, vocabulary=1024, experts=8)
    shape = (("x", 1), ("y", 2), ("z", 1))
    inner = StageGrid(model, "cuboid", shape, "none", True, "bfloat16", "cuda", 4, 1, 8, outer=(("ep", 2),))
    times = Times(CLUSTER, Store())
    plan = Plan(inner, 8, 1, 1, 2, 1, 1)
    cells, _ = times.store.cells(plan.inner, plan.units)
    held, experts, bucket = number_of(plan, cells.elements, 0), cells.elements["experts"], bucket_of(inner, 2) / 4
    dense_of_first = cells.elements[ENTER] + cells.elements[BLOCK] - experts
    kinds = [(held - LAYERS * experts, dense_of_first, 16), (LAYERS * experts, experts, 8)]
    want = 0.0
    for own, needed, copies in kinds:
        outer, words = times.outer("dp", 2 * 16 // copies, copies), own * (copies - 1) // copies
        sums = outer.seconds(move("reduce_scatter", "dp", words, "float32"))
        gather = outer.seconds(move("all_gather", "dp", words, "bfloat16"))
        want += min(1.0, bucket / own) * sums + min(1.0, ceil(needed / bucket) * bucket / own) * gather
    assert plan.expert_copies == 8 and min(needed / own for own, needed, _ in kinds) > 0.1
    assert times._after(plan, inf, inf).replicas == pytest.approx(want)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_over_replicas_run_behind_backwards_but_for_the_last_bucket_and_gathers_behind_forwards_but_for_the_first_layer(
    cache: Path, zero: int
) -> None:
    times = Times(CLUSTER, Store())
    plan = Plan(stage(0, y=2), 16, 1, 1, 4, 3, zero)
    cells, _ = times.store.cells(plan.inner, plan.units)
    held, outer = number_of(plan, cells.elements, 0), times.outer("dp", 2, 16)
    once = outer.seconds(move("reduce_scatter", "dp", held * 15 // 16, "float32"))
    gather = outer.seconds(move("all_gather", "dp", held * 15 // 16, "float32" if zero == 0 else "bfloat16"))
    sums, part = 3 if zero == 2 else 1, bucket_of(plan.inner, 2) / (4 * held)
    first = ceil((cells.elements[ENTER] + cells.elements[BLOCK]) / held / part) * part  # in whole buckets
    assert 0.1 < part <= first < 0.9

    def exposed(backward: float, forward: float) -> float:
        left, gathered = once - LAYERS * backward, gather if zero == 0 else max(first * gather, gather - LAYERS * forward)
        return gathered + (sums - 1) * max(0.0, left) + max(part * once, left)

    parts = (0.0, 0.3 * once / LAYERS, 0.9 * once / LAYERS, once)
    for backward, forward in product(parts, parts):
        assert times._after(plan, backward, forward).replicas == pytest.approx(exposed(backward, forward)), (backward, forward)
    spans = times.spans(plan)
    behind = spans[BLOCK, "B"].seconds + spans[BLOCK, "W"].seconds, spans[BLOCK, "F"].seconds
    assert times.after(plan).replicas == pytest.approx(exposed(*behind))
    assert times.estimate(plan, least=True) <= times.estimate(plan)
    of_nodes = 1 + CLUSTER["nodes.spread"] * sqrt(2 * log(2 * 16 / 8))  # all wait for the slowest of those that all ranks fill
    assert CLUSTER["nodes.spread"] and times.seconds(plan) == pytest.approx(of_nodes * times.estimate(plan))
    for shared, hidden in ((plan.stage_ranks, False), (plan.stage_ranks - 1, True)):
        on_hosts = replace(plan, inner=replace(plan.inner, device="cpu", dtype="float32", shared=shared))
        assert (times.after(on_hosts) != times._after(on_hosts, 0.0, 0.0)) == hidden, shared
