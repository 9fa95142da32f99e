"""Laws that every plan obeys, on random ones: worse links never help, more choices never hurt, closed forms are simulations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from summa3d.cluster import load
from summa3d.dry.record import ENTER, LEAVE
from summa3d.nn.config import ModelConfig
from summa3d.nn.schemes.products import A, B
from summa3d.parallel.schedule import is_split
from summa3d.plan.cells import BLOCK
from summa3d.plan.predict import Durations
from summa3d.plan.search.bounds import moved
from summa3d.plan.search.cells import StageGrid
from summa3d.plan.search.memory import memory, summed
from summa3d.plan.search.plans import Era, Plan, Space, is_possible, tiles
from summa3d.plan.search.search import PlanSearch
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import Times, _update, number_of

MODEL = ModelConfig(layers=8, hidden=512, heads=8, sequence=256, vocabulary=2048)
CLUSTER = load("selene").replaced({"node.size": 4.0}, "assumed")
GRIDS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("oned", 1, {"y": 4}),
    ("oned-sp", 1, {"y": 8}),
    ("summa", 2, {"x": 2, "y": 4}),
    ("tesseract", 4, {"x": 2, "y": 2, "d": 2}),
    ("cuboid", 8, {"x": 4, "y": 2}),
    ("cuboid", 4, {"y": 4, "z": 2}),
    ("cuboid", 8, {"x": 2, "y": 2, "z": 2}),
    ("cuboid-sequence", 4, {"x": 4, "y": 2}),
)
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2))
ROUNDING = 1 + 1e-9
FEW = [5, pytest.param(40, marks=pytest.mark.wide)]
"""Plans of each grid, of which there are eight."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The cells of all tests, traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMMA3D_CACHE", str(tmp_path_factory.mktemp("cells")))
        yield Store()


def inner_of(scheme: str, unit: int, axes: dict[str, int], recompute: str, replicas: int, split: bool) -> StageGrid:
    of = scheme, tuple({"x": 1, "y": 1, "z": 1, **axes}.items()), recompute, False, "bfloat16", "cuda", unit
    return StageGrid(MODEL, *of, replicas=replicas, split=split)


def plans(many: int) -> Iterator[Plan]:
    """Random plans, so many of each grid; of each grid half recompute, and half shard their weights over replicas."""
    for number, (scheme, unit, axes) in enumerate(GRIDS):
        rng, kinds = random.Random(number), [("none", 1), ("full", 3)] if many > 5 else [(("none", 1), ("full", 3))[number % 2]]
        for _ in range(many):
            pp, (schedule, chunks), (recompute, zero) = rng.choice((1, 2, 4)), rng.choice(SCHEDULES), rng.choice(kinds)
            dp, units, rounds = rng.choice((2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
            if pp == 1 or not is_possible(schedule, MODEL.layers, pp, pp * rounds, chunks):
                schedule, chunks = "1f1b", 1
            dp = 2 if zero == 3 else dp
            inner = inner_of(scheme, unit, axes, recompute, dp if zero == 3 else 1, is_split(schedule, pp))
            plan = Plan(inner, dp, pp, chunks, units, pp * rounds, zero, schedule=schedule)
            yield rng.choice([*tiles(plan, (4,))])


WORSE = (
    {"node.bandwidth": 0.5},
    {"network.bandwidth": 0.3},
    {"node.latency": 5.0, "network.latency": 2.0},
    {"peak.bfloat16": 0.6},
    {"device.memory_bandwidth": 0.5},
    {"product.launch": 4.0, "elements.launch": 2.0, "collectives.launch": 3.0},
)


@pytest.mark.parametrize(("scheme", "unit", "axes"), [GRIDS[place] for place in (0, 2, 3, 4, 6)])
def test_what_a_bound_moves_is_what_a_block_moves_but_for_sums_that_may_hide(
    store: Store, scheme: str, unit: int, axes: dict[str, int]
) -> None:
    inner = inner_of(scheme, unit, axes, "none", 1, False)
    tokens, found, bound = 2 * unit * MODEL.sequence, dict.fromkeys(inner.shape, 0.0), dict.fromkeys(inner.shape, 0.0)
    for op in (op for way in ("F", "B") for op in store.cells(inner, 2)[0].trace(BLOCK, way, 2) if op.axis in found):
        if op.name != "all_reduce" or op.words > 10 * tokens:  # norms sum less
            size = inner.shape[op.axis]
            found[op.axis] += op.words * ((size - 1) / size if op.name == "broadcast" else 1)
    for one in moved(inner, inner.shape, tokens):
        bound[one.axis] += one.size / (4 if one.name in ("reduce", "all_reduce") else 2)
    for product in (product for product in inner.products if not product.panels):
        for axis, _, words in product.summed(A, inner.shape, tokens):
            bound[axis] += words
    assert bound == found and any(found.values())


@pytest.mark.parametrize("many", FEW)
@pytest.mark.parametrize("change", WORSE)
def test_a_lesser_cluster_makes_no_plan_faster(store: Store, change: dict[str, float], many: int) -> None:
    numbers = {key: CLUSTER[key] * factor for key, factor in change.items()}
    before, after, slower = Times(CLUSTER, store), Times(CLUSTER.replaced(numbers, "assumed"), store), 0
    for plan in plans(many):
        first, second = before.seconds(plan), after.seconds(plan)
        assert second * ROUNDING >= first, plan
        slower += second > first * ROUNDING
    assert slower >= many


@pytest.mark.parametrize("many", FEW)
def test_more_rows_or_more_micro_batches_make_no_step_shorter(store: Store, many: int) -> None:
    times = Times(CLUSTER, store)
    for plan in plans(many):
        for more in (replace(plan, units=2 * plan.units), replace(plan, micro_batches=2 * plan.micro_batches)):
            assert times.seconds(more) > times.seconds(plan), plan


@pytest.mark.parametrize("many", FEW)
def test_the_closed_form_of_a_pipeline_is_its_simulation_where_its_stages_are_alike(store: Store, many: int) -> None:
    times = Times(CLUSTER, store)
    for plan in plans(many):
        step, simulated = times.step(plan), times.seconds(plan)
        assert simulated * (1 - 1e-12) <= times.estimate(plan) <= simulated * (1.015 if plan.inner.split else 1 + 1e-12), plan
        bare = [{**of, ENTER: 0.0, LEAVE: 0.0} for of in (step.parts.forward, step.parts.backward, step.parts.weights)]
        parts = Durations(bare[0], bare[1], 0.0, 0.0, bare[2])
        alike = replace(step, parts=parts)
        assert alike.closed(parts) == pytest.approx(alike.pipeline(CLUSTER), rel=0.005), plan


@pytest.mark.parametrize("many", FEW)
def test_states_fall_with_zero_and_a_peak_rises_by_buckets_and_gathered_weights_at_most(store: Store, many: int) -> None:
    """Of a single micro-batch, buckets may come when as many bytes of its activations have gone."""
    most, sums = list[int](), 0
    for plan in plans(many):
        inner = replace(plan.inner, replicas=1)
        held = []
        for zero in (1, 2, 3):
            one = replace(plan, zero=zero, inner=replace(inner, replicas=plan.dp if zero == 3 else 1))
            held.append(memory(one, *store.cells(one.inner, one.units)))
        states = [one.parameters + one.gradients + one.optimizer for one in held]
        assert states[0] > states[1] > states[2], plan
        cells, _ = store.cells(inner, plan.units)
        elements = max(number_of(plan, cells.elements, rank) for rank in range(plan.pp))
        assert 0 == held[0].buckets == held[2].buckets <= held[1].buckets, plan
        most.append(max(map(int, summed(inner, [(elements, plan.copies)], inner.ranks, plan.micro_batches - 1))))
        assert held[1].buckets <= most[-1], plan
        sums += held[1].buckets > 0
        assert held[1].total <= held[0].total + held[1].buckets, plan
        block = sum(one.words(B, inner.shape, 1) for one in inner.products)
        assert held[2].total <= held[0].total + 4 * 4 * (block + MODEL.vocabulary * MODEL.hidden), plan
    assert 2 * sums > len(most)


def test_the_norm_of_gradients_reads_all_that_a_rank_updates(store: Store) -> None:
    times, plan, held, tensors = Times(CLUSTER, store), next(plans(1)), 1_000_003, 7
    seconds, prices = times._optimizer(plan, held, tensors), times.prices_of(plan)
    updates = _update(store.cells(plan.inner, plan.units)[0], held, prices)
    assert seconds - updates == pytest.approx(4 * held * CLUSTER.byte_time() + tensors * CLUSTER["elements.launch"])


@pytest.mark.parametrize("scheme", ["oned-sp", pytest.param("cuboid", marks=pytest.mark.wide), "summa"])
def test_more_choices_and_more_memory_never_hurt(store: Store, scheme: str) -> None:
    def best(variants: Any, zero: Any, schedules: Any, limit: float = 80e9, batch: int = 8) -> float:
        model = replace(MODEL, layers=4)
        space = Space(model, 4, batch, "bfloat16", "cuda", (4,), era=Era((scheme,), variants, zero, schedules))
        return PlanSearch(space, Times(CLUSTER, store), limit, 1).run(lambda *state: None).best[0].seconds

    few = best((("full", False),), (1,), ("1f1b",))
    more = best((("none", False), ("full", False)), (1,), ("1f1b",))
    most = best((("none", False), ("full", False)), (1, 2), ("1f1b", "interleaved"))
    assert most <= more * ROUNDING and more <= few * ROUNDING
    assert best((("none", False), ("full", False)), (1, 2), ("1f1b", "interleaved"), limit=4e8) * ROUNDING >= most
    assert best((("none", False), ("full", False)), (1, 2), ("1f1b", "interleaved"), batch=16) > most
