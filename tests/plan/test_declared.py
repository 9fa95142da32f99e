"""What the planner takes as it is declared: a scheme and an outer axis that it has never heard of are searched and priced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from summa3d.cluster import load
from summa3d.dry.step import run as run_dry
from summa3d.layout.layout import Layout
from summa3d.nn.config import ModelConfig
from summa3d.nn.schemes import products
from summa3d.nn.schemes.registry import SCHEME_SPECS
from summa3d.parallel.outer import LONG, SEARCHED, OuterAxis
from summa3d.plan.search.export import configured
from summa3d.plan.search.plans import Era, Plan, Space, columns
from summa3d.plan.search.request import request
from summa3d.plan.search.search import Found, PlanSearch
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import Times
from summa3d.train import config as configuration
from summa3d.train.dry_run import setting_of, training_of

MODEL = ModelConfig(layers=2, hidden=48, heads=6, sequence=20, vocabulary=96)
CLUSTER = load("selene").replaced({"node.size": 8.0}, "assumed")
"""All ranks in one node: whichever axis is the fastest, its links are the same."""
TOY = "mirrored"
LIMIT = 80e9


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The cells of all tests, traced once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMMA3D_CACHE", str(tmp_path_factory.mktemp("cells")))
        yield Store()


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A scheme that is declared as schemes are, and nowhere else: the cuboid with y and z in each other's place."""
    spec = replace(SCHEME_SPECS["cuboid"], name=TOY, title="mirrored", residual=Layout("b:(x,z) s h:y"), vectors=("copied",))
    monkeypatch.setitem(SCHEME_SPECS, TOY, spec)
    monkeypatch.setattr(configuration, "SCHEMES", (*configuration.SCHEMES, TOY))
    yield TOY
    for kept in (products.alone, products.products_of, products._one_of):
        kept.cache_clear()


def search(space: Space, store: Store) -> Found:
    return PlanSearch(space, Times(CLUSTER, store), LIMIT, 400).run(lambda *state: None)


def mirrored(plan: Plan) -> tuple[object, ...]:
    """Return what a plan is, with y and z in each other's place."""
    grid = plan.inner.shape
    return grid["x"], grid["z"], grid["y"], plan.dp, plan.pp, plan.rows, plan.micro_batches, plan.zero


def test_a_declared_scheme_is_searched_and_renaming_two_axes_changes_no_price(store: Store, scheme: str) -> None:
    def found(name: str) -> dict[Any, tuple[float, int, str]]:
        era = Era((name,), (("none", False),), (1,), ("1f1b",), ())
        space = Space(MODEL, 2, 4, "bfloat16", "cuda", (8,), era=era, fixed={"grid.pp": 1})
        return {one.plan: (one.seconds, one.memory.total, one.plan.family) for one in search(space, store).best}

    ours = {mirrored(plan): what for plan, what in found(scheme).items()}
    theirs = {tuple(mirrored(plan)[at] for at in (0, 2, 1, 3, 4, 5, 6, 7)): what for plan, what in found("cuboid").items()}
    assert len(ours) > 5 and ours.keys() == theirs.keys()
    for key, (seconds, size, family) in ours.items():
        assert seconds == pytest.approx(theirs[key][0], rel=1e-12) and (size, family) == theirs[key][1:], key
    assert {family for *_, family in ours.values()} == {"1-D", "FSDP", "cuboid"}
    assert len({round(seconds * 1e12) for seconds, *_ in ours.values()}) > 5


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> OuterAxis:
    """An axis of training code that knows it: ranks which take other rows of a micro-batch, and hold copies of all weights."""
    monkeypatch.setattr(configuration.Config, "_check_experts", lambda config: None)  # which a dense model has none of

    def misfit(model: ModelConfig, grid: Mapping[str, int], values: Mapping[str, Any]) -> str:
        return "ep is beside no y" if grid["y"] > 1 else ""

    return OuterAxis("ep", True, misfit, tuple({"pipeline.scatter": scatter} for scatter in (True, False)))


@pytest.mark.parametrize("zero", [1, 3])
def test_a_declared_outer_axis_is_searched_with_its_choices_and_priced_by_its_own_trace(
    store: Store, axis: OuterAxis, zero: int
) -> None:
    """Ranks of an axis that takes rows do what replicas do: the same seconds and bytes, whichever of the two has them."""
    axis = axis if zero == 1 else axis._replace(choices=({},))
    era = Era(("oned",), (("none", False),), (zero,), ("1f1b",), (axis,))
    space = Space(MODEL, 4, 8, "bfloat16", "cuda", (8,), era=era, most={"y": 2})
    found, plain = search(space, store), search(replace(space, era=replace(era, outer=())), store)
    prices: dict[object, dict[tuple[int, str], tuple[float, int]]] = {}
    for one in found.best:
        plan, inner = one.plan, one.plan.inner
        key = inner.axes, plan.copies, plan.pp, plan.chunks, plan.rows // inner.copies, plan.micro_batches
        prices.setdefault(key, {})[plan.dp, str(inner.options)] = one.seconds, one.memory.total
    both = [alike for alike in prices.values() if len({dp for dp, _ in alike}) > 1]
    assert len(both) > 4 and any(len({dp for dp, _ in alike}) == 3 for alike in both)
    for alike in both:
        seconds, sizes = zip(*alike.values(), strict=True)
        assert seconds == pytest.approx([seconds[0]] * len(seconds), rel=1e-9)
        assert max(sizes) == min(sizes)
    assert found.considered > plain.considered and found.best[0].seconds <= plain.best[0].seconds * (1 + 1e-12)
    assert found.rejected["1-D", "ep is beside no y"] and not any(why.startswith("ep") for _, why in plain.rejected)
    several = next(one.plan for one in found.best if one.plan.inner.options == (("pipeline.scatter", False),) * (zero == 1))
    config = configured(several, request(MODEL, 8, CLUSTER).config)
    assert config.pipeline.scatter is (zero == 3) and config.grid.ep == several.inner.copies
    assert prod(config.grid.axes.values()) == 4 and config.train.micro_batch == several.rows * several.dp
    assert ("· ep " in str(several)) is (several.inner.copies > 1)


def test_what_shares_a_rows_positions_divides_tokens_and_no_rows(axis: OuterAxis) -> None:
    sharing = axis._replace(splits_rows=False, choices=({},))
    for one, unit in ((sharing, 1), (axis._replace(choices=({},)), 2)):
        era = Era(("oned",), (("none", False),), (1,), ("1f1b",), (one,))
        tables = columns(Space(MODEL, 2, 4, "bfloat16", "cuda", (8,), era=era, fixed={"y": 1}), Counter())
        table, inner = next((table, found) for table in tables for found in table.inners if found.outer)
        assert inner.outer == (("ep", 2),) and inner.unit == unit and inner.copies == 2
        row = int((table.inner == table.inners.index(inner)).nonzero()[0][0])
        assert table.share[row] == table.units[row] * unit / 2 and table.copies[row] == 2


def test_contexts_are_searched_for_long_sequences_or_where_they_are_asked_for() -> None:
    space = Space(MODEL, 2, 4, "bfloat16", "cuda", (8,))
    assert space.outer == []
    assert replace(space, model=replace(MODEL, sequence=LONG)).outer == [*SEARCHED[:1]]
    for asked in ({"fixed": {"context.kind": "ring"}}, {"least": {"grid.cp": 2}}, {"most": {"grid.cp": 4}}):
        assert replace(space, **asked).outer == [*SEARCHED[:1]], asked
    assert replace(space, fixed={"grid.pp": 2}).outer == []
    assert replace(space, model=ModelConfig(family="mixtral")).outer == [*SEARCHED[1:]]


def test_every_kind_of_contexts_is_a_plan_with_the_words_of_its_dry_run(store: Store) -> None:
    """Words of the kinds' formulas, in a block and micro-batch; what cannot be is counted with the run's own words."""
    era = Era(("oned",), (("none", False),), (1,), ("1f1b",), SEARCHED)
    space = Space(MODEL, 4, 4, "bfloat16", "cuda", (8,), era=era, fixed={"grid.cp": 4, "train.batch": 4})
    found = search(replace(space, model=replace(MODEL, sequence=24, heads=8)), store)
    kinds = {dict(one.plan.inner.options)["context.kind"]: one.plan for one in found.best if one.plan.rows == 1}
    assert kinds.keys() == {"gather", "ring", "heads", "mesh"}
    base, block = request(MODEL, 4, CLUSTER).config, 2 * 24 // 4 * 48  # of keys and values
    for kind, plan in kinds.items():
        config = configured(plan, replace(base, model=plan.inner.model))
        dry = run_dry(setting_of(config, 0), training_of(config)).words()
        one = {"gather": (3 * block, 3 * block), "ring": (3 * block, 6 * block), "heads": (3 * block // 2, 3 * block // 2)}
        one["mesh"] = 2 * block, 3 * block  # of groups of 2
        many = plan.micro_batches * MODEL.layers
        along = [sum(words for axis, words in dry[name].items() if axis.startswith("cp")) for name in ("forward", "backward")]
        assert along == [many * words for words in one[kind]], kind
    refused: Counter[tuple[str, str]] = Counter()
    columns(replace(space, model=replace(MODEL, sequence=20)), refused)
    assert any(why.startswith("sequence 20 cannot be split over cp = 4") for _, why in refused)
