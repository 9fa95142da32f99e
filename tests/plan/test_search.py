"""The search for a plan: cells as lines, their files, bounds that never exceed a price, bytes, wrong input."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest

from summa3d.cli import plan as cli
from summa3d.cluster import Cluster, load
from summa3d.dry.record import ENTER, LEAVE
from summa3d.dry.step import Rank
from summa3d.errors import ClusterError, ConfigError
from summa3d.nn.config import ModelConfig, named_models
from summa3d.plan.cells import BLOCK
from summa3d.plan.search import command
from summa3d.plan.search import store as kept
from summa3d.plan.search.bounds import Bounds
from summa3d.plan.search.cells import LinearSize, PassOps, StageGrid, traced
from summa3d.plan.search.explain import explain
from summa3d.plan.search.export import configured
from summa3d.plan.search.memory import extent, memory
from summa3d.plan.search.plans import SCHEDULES, SCHEMES, Era, OuterGrid, Plan, PlanTable, Space, columns, refused, tiles
from summa3d.plan.search.request import bytes_of, request, space_of
from summa3d.plan.search.search import PlanSearch
from summa3d.plan.search.store import Store, file_of
from summa3d.plan.search.timing import Times, number_of
from summa3d.train import config as configuration

MODEL = ModelConfig(layers=3, hidden=64, heads=4, sequence=32, vocabulary=256)
CLUSTER = load("selene").replaced({"node.size": 2.0}, "assumed")
"""Nodes of two ranks, so that four ranks have placements."""
BATCH = 8
SPACE = Space(
    MODEL, 4, BATCH, "bfloat16", "cuda", (2,), most={"x": 2}, fixed={"scheme": "cuboid", "recompute": "none", "regather": False}
)
LIMIT = 80e9


def inner(scheme: str, unit: int, recompute: str = "none", **axes: int) -> StageGrid:
    return StageGrid(MODEL, scheme, tuple({"x": 1, "y": 1, "z": 1, **axes}.items()), recompute, False, "bfloat16", "cuda", unit)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of cells of its own."""
    folder, before = tmp_path_factory.mktemp("cells"), os.environ.get("SUMMA3D_CACHE")
    os.environ["SUMMA3D_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["SUMMA3D_CACHE"]
    else:
        os.environ["SUMMA3D_CACHE"] = before


@pytest.fixture(scope="module")
def searched(cache: Path) -> tuple[PlanSearch, Any]:
    """A search of all cuboids on four ranks, and what it found."""
    search = PlanSearch(SPACE, Times(CLUSTER, Store()), LIMIT, 3)
    return search, search.run(lambda *state: None)


def test_an_explanation_names_the_least_change_that_puts_a_plan_first_and_what_a_wrong_number_costs(cache: Path) -> None:
    cluster = CLUSTER.replaced({"elements.launch": 0.5 * CLUSTER["elements.launch"]}, "assumed")  # makes pipelines near the best
    search = PlanSearch(SPACE, Times(cluster, Store()), LIMIT, 4)
    found = search.run(lambda *state: None)
    first = found.best[0]
    number = next(place for place, one in enumerate(found.best, 1) if one.plan.pp != first.plan.pp)
    one, said = found.best[number - 1], "\n".join(explain(found, number, search.times))

    def seconds(key: str, factor: float) -> list[float]:
        times = Times(cluster.replaced({key: cluster[key] * factor}, "assumed"), search.times.store)
        return [times.seconds(each.plan) for each in (first, one, *found.best, *found.families.values())]

    def is_ahead(key: str, factor: float) -> bool:
        before, this, *_ = seconds(key, factor)
        return this < before

    assert f"plan {number}: {one.plan}" in said
    rows = re.findall(r"^([a-z0-9/]+(?: [xyzd·]+)?) +([\d.e-]+(?: +[\d.e-]+)*)$", said, re.MULTILINE)
    columns = {name: values.split() for name, values in rows}
    assert columns.pop("s/step")[:2] == [f"{one.seconds:.4g}", f"{first.seconds:.4g}"]
    waited = sum(float(values[0]) for name, values in columns.items() if name != "hidden")
    assert "bubble" in columns and waited == pytest.approx(one.seconds, rel=2e-3)

    change = re.search(r"with ([\d.e-]+)× (\S+) it would be before plan 1", said)
    assert change is not None
    factor, key = float(change[1]), change[2]
    away = 1.03 if factor > 1 else 1 / 1.03  # how finely it is sought, and the digits that are printed
    assert is_ahead(key, factor * away) and not is_ahead(key, factor / away)
    numbers = [name for name, given in cluster.numbers.items() if given.value and not name.endswith((".size", ".ports"))]
    least = max(factor, 1 / factor) / 1.03
    tried = [(name, by) for name in numbers for by in (least, 1 / least) if is_possible(cluster, name, by)]
    assert len(tried) > 20 and not any(is_ahead(*change) for change in tried)

    regrets = {}
    for name, by in ((name, by) for name in numbers for by in (0.8, 1.25) if is_possible(cluster, name, by)):
        shown = seconds(name, by)
        regrets[f"{by}× {name}"] = shown[0] / min(shown) - 1
    worst = re.search(r"regret of plan 1 .*: ([\d.]+)% at most \((.*)\)", said)
    assert worst is not None and float(worst[1]) == pytest.approx(100 * max(regrets.values()), abs=0.051)
    assert max(regrets.values()) > 0 and regrets[worst[2]] == max(regrets.values())


def is_possible(cluster: Cluster, key: str, factor: float) -> bool:
    """Return whether a number of a cluster can be changed so."""
    try:
        cluster.replaced({key: cluster[key] * factor}, "assumed")
    except ClusterError:
        return False
    return True


def test_plan_1_is_explained_beside_the_second(searched: tuple[PlanSearch, Any]) -> None:
    search, found = searched
    said = "\n".join(explain(found, 1, search.times))
    heads = re.search(r"^ {16}(.*)$", said, re.MULTILINE)
    assert heads is not None and heads[1].split()[0] == "1" and len(heads[1].split()) > 1
    (values,) = re.findall(r"^s/step +(.*)$", said, re.MULTILINE)
    assert values.split()[0] == f"{found.best[0].seconds:.4g}" and len(values.split()) == len(
        re.split(r" {2,}", heads[1].strip())
    )
    assert "regret of plan 1" in said or "plan 1 stays the fastest of the plans shown" in said


def test_a_plan_that_was_not_kept_is_refused_before_any_is_printed(searched: tuple[PlanSearch, Any]) -> None:
    search, found = searched
    with pytest.raises(ConfigError, match="--explain 99: the plans that are kept are 1 to 3"):
        explain(found, 99, search.times)


@pytest.mark.parametrize(("scheme", "unit", "axes"), [("oned-sp", 1, {"y": 2}), ("summa", 2, {"x": 2, "y": 2})])
def test_two_traces_give_the_operations_of_every_micro_batch(scheme: str, unit: int, axes: dict[str, int]) -> None:
    one = inner(scheme, unit, "full", **axes)
    lines, direct = traced(one, False), traced(replace(one, unit=5 * unit), True)
    assert lines is not None and direct is not None
    for cell in (ENTER, BLOCK, LEAVE):
        for way in ("F", "B"):
            ours, theirs = lines.trace(cell, way, 5), direct.trace(cell, way, 1)
            assert len(ours) == len(theirs) > 0
            for op, other in zip(ours, theirs, strict=True):
                if op.kind == "elements":  # sums in lanes make steps
                    assert op[:4] == other[:4] and op.read + op.written == pytest.approx(other.read + other.written, rel=0.3)
                else:
                    assert op == other


def test_what_cells_depend_on_is_hashed_anew_in_another_process() -> None:
    one = inner("oned", 1, y=2)
    object.__setattr__(one, "_hash", hash(one) + 1)  # as of a process in which texts have other hashes
    there = pickle.loads(pickle.dumps(one))
    assert there == one and hash(there) == hash(inner("oned", 1, y=2))


def test_a_file_is_of_everything_that_a_trace_depends_on(cache: Path) -> None:
    one = inner("oned", 1, y=2)
    changes = {"scheme": "oned-sp", "axes": (("x", 1), ("y", 4), ("z", 1)), "recompute": "full", "regather": True}
    changes |= {
        "dtype": "float32",
        "device": "cpu",
        "unit": 2,
        "replicas": 2,
        "shared": 2,
        "split": True,
        "outer": (("ep", 2),),
        "options": (("pipeline.scatter", False),),
        "pieces": 2,
        "ahead": 2,
        "model": replace(MODEL, hidden=128),
    }
    assert set(changes) == {field.name for field in fields(StageGrid)}
    files = [file_of(one, False), file_of(one, True), *(file_of(replace(one, **{key: to}), False) for key, to in changes.items())]
    for field in fields(ModelConfig):
        to = {"family": "llama", "heads": 8, "ffn": 96, "kv_heads": 4}.get(field.name)
        if isinstance(value := getattr(MODEL, field.name), int) and field.name not in ("layers", "heads"):
            to = 2 * value
        if isinstance(value, float):
            to = 0.25
        if to is not None and field.name not in ("hidden",):
            files.append(file_of(replace(one, model=replace(MODEL, **{field.name: to})), False))
    assert len({*files}) == len(files)
    assert file_of(replace(one, model=replace(MODEL, layers=9)), False) == files[0]  # one block is traced of any number


def test_an_odd_number_of_causal_heads_has_a_line_of_even_sizes(cache: Path) -> None:
    model = replace(MODEL, hidden=48, heads=6)
    one = replace(inner("oned", 1, y=2), device="cpu", dtype="float32", model=model)
    store = Store()
    assert store.cells(one, 1)[1] == 1
    before = store.traces
    for units in (2, 4, 12):
        cells, at = store.cells(one, units)
        exact = traced(replace(one, unit=units), True)
        assert at == units // 2 and exact is not None
        for cell, way in cells.counts:
            ops, others = cells.trace(cell, way, at), exact.trace(cell, way, 1)
            assert [op[4:] for op in ops if op.kind == "product"] == [op[4:] for op in others if op.kind == "product"]
    assert store.traces == before + 1


def test_a_damaged_or_foreign_file_is_traced_again_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = inner("oned", 1, y=2), []
    first = Store().cells(one, 2)[0]
    file, whole = file_of(one, False), file_of(one, False).read_text()
    assert Store(said.append).cells(one, 4)[0] == first and not said
    monkeypatch.setattr(kept, "traced", lambda *of: first)
    for text in (whole[:100], "[]", whole.replace(f'"format":{kept.FORMAT}', '"format":0'), '{"header":' + whole):
        file.write_text(text)
        again = Store(said.append)
        assert again.cells(one, 2)[0] == first and again.traces == 1
        assert f"{file} is traced again" in said.pop() and not said
        assert file.read_text() == whole


def plans(space: Space) -> Iterator[Plan]:
    """Every plan of a space that divides evenly and saves no memory."""
    return (rows.plan(place) for rows in columns(space, Counter()) for place in range(len(rows)))


def test_bounds_never_exceed_the_price_and_the_search_finds_the_fastest(searched: tuple[PlanSearch, Any]) -> None:
    search, found = searched
    bounds, prices = Bounds(search.times), []
    for plan in plans(SPACE):
        placements = [*tiles(plan, SPACE.nodes)] if not refused(SPACE, plan) else []
        held = bounds_hold(bounds, plan, placements)
        prices += [search.times.estimate(other) for one in placements if held <= LIMIT for other in with_prefetch(one)]
    assert len(prices) >= 60
    assert min(prices) == pytest.approx(min(one[0] for one in search.done))
    assert any(reason == "slower than the best by a lower bound" for _, reason in found.rejected)
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)
    assert found.families.keys() == {"FSDP", "cuboid", "1-D"}
    faster = [one.memory.total for one in found.pareto]
    assert faster == sorted(faster, reverse=True)


def with_prefetch(plan: Plan) -> list[Plan]:
    """The plan, and with ever more weights gathered ahead."""
    return [replace(plan, inner=inner) for inner in (plan.inner, *plan.inner.with_prefetch)]


def bounds_hold(bounds: Bounds, plan: Plan, placements: list[Plan]) -> int:
    """Check that no bound of a plan exceeds what it is a bound of; returns the plan's bytes."""
    times, at = bounds.times, np.array([0])
    era = Era((), ((plan.inner.recompute, plan.inner.regather),), (plan.zero,))
    at_stage = plan.dp, plan.pp, SCHEDULES.index(plan.schedule), plan.chunks
    rows = PlanTable(era, [plan.inner], [OuterGrid(0, *at_stage, plan.units, plan.micro_batches)])
    held = memory(plan, *times.store.cells(plan.inner, plan.units)).total
    states, least = (float(one[0]) for one in bounds.bytes(rows, at, (0, 0)))
    assert states <= least <= held, plan
    floor = float(bounds.floor(rows, at, (0, 0))[0])
    for one, placed in zip(placements, bounds.placed(plan, placements), strict=True):
        closed = min(map(times.estimate, with_prefetch(one)))
        assert floor <= placed * (1 + 1e-9) and placed <= closed * (1 + 1e-9), one
        assert times.estimate(one, least=True) <= closed * (1 + 1e-9), one
    return held


SHARED = (
    ("oned", 1, {"y": 2}),
    ("summa", 2, {"x": 2, "y": 2}),
    ("tesseract", 4, {"x": 2, "y": 2, "d": 2}),
    ("cuboid", 4, {"x": 2, "y": 2}),
)


@pytest.mark.parametrize(("scheme", "unit", "axes"), SHARED)
def test_bounds_hold_for_every_scheme_and_for_weights_that_replicas_share(cache: Path, scheme: str, unit: int, axes: Any) -> None:
    bounds, model = Bounds(Times(CLUSTER, Store())), replace(MODEL, hidden=2048, sequence=512)
    for zero, recompute in ((1, "none"), (3, "full")):
        of = replace(inner(scheme, unit, recompute, **axes), model=model, replicas=4 if zero == 3 else 1)
        plan = Plan(of, 4, 1, 1, 1, 2, zero)
        bounds_hold(bounds, plan, [*tiles(plan, SPACE.nodes)])


@pytest.mark.parametrize("kind", ["gather", "ring", "heads", "mesh"])
def test_bounds_of_contexts_are_those_of_their_kind_and_hold(cache: Path, kind: str) -> None:
    """Beside an axis of the scheme and a pipeline, and where replicas share weights, and layers are computed again."""
    bounds = Bounds(Times(CLUSTER, Store()))
    model = replace(MODEL, family="llama", hidden=2048, heads=16, sequence=65536)
    of = replace(inner("oned-sp", 1, y=2), model=model, outer=(("cp", 4),), options=(("context.kind", kind),))
    of = replace(of, options=(*of.options, ("context.heads", 2))) if kind == "mesh" else of
    for plan in (
        Plan(of, 2, 2, 1, 1, 3, 1),
        Plan(
            replace(of, scheme="cuboid", axes=(("x", 2), ("y", 1), ("z", 1)), unit=2, recompute="full", replicas=8),
            2,
            1,
            1,
            1,
            3,
            3,
        ),
    ):
        held = bounds_hold(bounds, plan, [*tiles(plan, SPACE.nodes)])
        era = Era((), ((plan.inner.recompute, False),), (plan.zero,))
        rows = PlanTable(era, [plan.inner], [OuterGrid(0, plan.dp, plan.pp, 0, 1, 1, plan.micro_batches)])
        assert float(bounds.bytes(rows, np.array([0]), (0, 0))[1][0]) > 0.85 * held
        assert bounds.placed(plan, [plan])[0] > 0.78 * bounds.times.estimate(plan)


@pytest.mark.parametrize(("zero", "micro_batches"), [(1, 4), (2, 2), (2, 4), (2, 8), (3, 4)])
def test_the_bytes_and_words_of_a_plan_are_those_of_its_dry_run(cache: Path, zero: int, micro_batches: int) -> None:
    from summa3d.train.dry_run import predict

    model = replace(MODEL, layers=4, hidden=512, sequence=256)
    of = replace(inner("oned-sp", 1, y=2), model=model, replicas=2 if zero == 3 else 1)
    plan = Plan(of, 2, 2, 1, 1, micro_batches, zero)
    cells, units = Store().cells(plan.inner, plan.units)
    held = memory(plan, cells, units)
    asked = request(["layers=4", "hidden=512", "heads=4", "vocabulary=256"], 2 * micro_batches, CLUSTER)
    dry = predict(configured(plan, asked.config))
    for term in ("parameters", "gradients", "optimizer"):
        assert held._asdict()[term] == dry["bytes"][term]
    assert held.total == pytest.approx(dry["peak"], rel=0.1)
    words = Counter[str]()
    for (cell, _), counts in cells.counts.items():
        times = {BLOCK: plan.layers_of(held.stage), ENTER: held.stage == 0, LEAVE: held.stage == plan.pp - 1}[cell]
        for kind, many in counts.items():
            op = cells.kinds[kind].at(units)
            words[op.axis] += op.words * many * times * plan.micro_batches * (op.kind == "move")
    assert words["y"] == sum(axes.get("y", 0) for axes in dry["words"].values()) > 0
    held_by = number_of(plan, cells.elements, held.stage)
    words["dp"] += {1: 2, 2: plan.micro_batches + 1, 3: 0}[zero] * held_by // 2
    assert words["dp"] == pytest.approx(sum(axes.get("dp", 0) for axes in dry["words"].values()), abs=2) and words["dp"] > 0
    cells.extents.update(dict.fromkeys(cells.extents, (0, 0)))
    nothing = memory(plan, cells, units)
    cells.extents.update({key: (10, 1000) if key[0] == "F" else (-10, 50) for key in cells.extents})
    forward = memory(plan, cells, units)  # needs most, and one micro-batch less is kept when it begins
    assert (nothing.activations, forward.activations) == (0, 20) and forward.workspace - nothing.workspace == 1000 - 10
    more = memory(plan, replace(cells, kept=LinearSize(cells.kept.base + 300, cells.kept.slope + 5)), units)
    assert more.workspace == memory(plan, replace(cells), units).workspace + 300 + 5 * units


@pytest.mark.parametrize(
    ("scheme", "axes", "ep", "zero"), [("cuboid", {"y": 2}, 2, 1), ("oned", {"y": 2}, 1, 3), ("oned", {}, 5, 2)]
)
def test_bounds_bytes_and_words_of_mixtures_are_those_of_dry_runs(
    cache: Path, scheme: str, axes: dict[str, int], ep: int, zero: int
) -> None:
    """Of 5 experts, which axes share unevenly; replicas share rows evenly, as the planner takes for granted."""
    from summa3d.train.dry_run import predict

    asked = request(
        ["family=mixtral", "layers=3", "hidden=320", "heads=4", "ffn=480", "sequence=120", "vocabulary=320", "experts=5"],
        8 * ep,
        CLUSTER,
    )
    unit = 2 * ep if scheme == "cuboid" else ep
    outer = (("ep", ep),) if ep > 1 else ()
    of = replace(inner(scheme, unit, **axes), model=asked.config.model, outer=outer, replicas=2 * ep if zero == 3 else 1)
    plan = Plan(of, 2, 1, 1, 1, 8 * ep // unit // 2, zero)
    bounds = Bounds(Times(CLUSTER, Store()))
    bounds_hold(bounds, plan, [*tiles(plan, SPACE.nodes)])
    cells, units = bounds.times.store.cells(plan.inner, plan.units)
    held, dry = memory(plan, cells, units), predict(configured(plan, asked.config))
    for term in ("parameters", "gradients", "optimizer"):
        assert held._asdict()[term] == pytest.approx(dry["bytes"][term], rel=1e-3), term
    assert 0.9 < held.total / dry["peak"] < 1.1
    words = Counter[str]()
    for (cell, _), counts in cells.counts.items():
        for kind, many in counts.items():
            op, times = cells.kinds[kind].at(units), plan.layers_of(0) if cell == BLOCK else 1
            words[op.axis] += op.words * many * times * plan.micro_batches * (op.kind == "move")
    for axis in (name for name in words if "dp" not in name and words[name]):
        found = sum(each.get(axis, 0) for each in dry["words"].values())
        assert words[axis] == pytest.approx(found, rel=0.02), axis
    assert ep == 1 or any("ep" in axis and many for axis, many in words.items())


def test_consecutive_pieces_of_a_block_are_repeated_as_one() -> None:
    def piece(cell: str, net: int, top: int) -> PassOps:
        return PassOps(cell, LinearSize(net, 0), LinearSize(top, 0), ())

    growing = [piece(ENTER, 5, 7), piece(BLOCK, 2, 9), piece(BLOCK, 1, 1), piece(LEAVE, -4, 3)]
    assert extent(growing, {BLOCK: 4, ENTER: 1, LEAVE: 1}, 1) == (5 + 4 * 3 - 4, 5 + 3 * 3 + 9)
    assert extent([piece(BLOCK, -3, 8)], {BLOCK: 4}, 1) == (-12, 8)  # the first holds most


def test_a_plan_that_keeps_less_on_each_replica_is_tried_where_no_other_fits(cache: Path) -> None:
    model = replace(MODEL, layers=4, hidden=2048)
    fixed = {"scheme": "oned-sp", "y": 2, "pp": 1, "recompute": "none", "regather": False, "b": 1}
    words = ["layers=4", "hidden=2048", "heads=4", "vocabulary=256"]
    space, base = replace(SPACE, model=model, fixed=fixed), request(words, 8, CLUSTER).config
    held = {}
    for zero in (1, 2, 3):
        limit = LIMIT if zero == 1 else held[zero - 1] - 1
        found = PlanSearch(space, Times(CLUSTER, Store()), limit, 1).run(lambda *state: None)
        best = found.best[0].plan
        held[zero] = memory(
            still := replace(best, inner=replace(best.inner, ahead=0)), *Store().cells(still.inner, still.units)
        ).total
        assert (best.zero, best.dp) == (zero, 2) and held[zero] <= found.best[0].memory.total <= limit
        assert configured(found.best[0].plan, base).replicas.zero == zero
    with pytest.raises(ConfigError, match="no plan fits"):
        PlanSearch(space, Times(CLUSTER, Store()), held[3] - 1, 1).run(lambda *state: None)


def test_cells_are_the_same_whoever_traces_them(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, fine = inner("oned-sp", 2, y=4), inner("summa", 2, x=2, y=2)  # an even number of heads: causal ones count half
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    said: list[str] = []
    store = Store(said.append, processes=1)
    for wanted in (one, one, fine):
        store.begin(wanted)
    for wanted in (one, fine):
        assert store.cells(wanted, 3) == (traced(wanted, False), 3)
    assert (store.traces, store.read, said) == (2, 0, []) and not store._known.keys() - {(one, False), (fine, False)}
    store.close()
    again = Store(said.append, processes=1)
    again.begin(one)
    assert again._pool is None and again.cells(one, 3) == store.cells(one, 3) and (again.traces, again.read) == (0, 1)


def test_cells_are_traced_here_where_the_process_that_does_so_ends(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, said = inner("oned-sp", 2, y=2), list[str]()
    store = Store(said.append, processes=1)
    store.begin(one)
    assert store._pool is not None
    for process in store._pool._processes.values():
        process.kill()
    assert store.cells(one, 3) == (traced(one, False), 3) and not store.idle
    assert len(said) == 1 and "has ended" in said[0]


def test_what_is_traced_of_the_middle_micro_batch_is_that_of_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Rank.traced.__func__  # type: ignore[attr-defined]

    def numbered(cells: Any) -> list[Any]:
        passes = [*cells.passes.values(), cells.copies, cells.optimizer]
        pieces = [[(*piece[:3], [cells.kinds[kind] for kind, _ in piece.ops]) for piece in one] for one in passes]
        return [pieces, cells.elements, cells.kept]

    for one in (inner("cuboid", 2, "full", x=2, z=2), inner("summa", 2, x=2, y=2)):
        short = numbered(traced(one, False))
        with monkeypatch.context() as patch:
            patch.setattr(
                Rank, "traced", classmethod(lambda cls, setting, training, between, split: whole(cls, setting, training))
            )
            assert numbered(traced(one, False)) == short


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_written_plan_has_the_bytes_of_its_dry_run(
    cache: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, zero: int
) -> None:
    from summa3d.train.dry_run import predict

    if zero > 1:  # the first starts other processes that trace, each of which imports torch
        monkeypatch.setattr(command, "affinity", lambda: {0})
    parser, folder = argparse.ArgumentParser(), tmp_path / "out"
    cli.add_arguments(parser)
    words = "--model layers=3 hidden=64 heads=4 sequence=32 vocabulary=256 --cluster selene --ranks 4 --batch 8 --top 2 --json"
    fixes = "--fix scheme=oned-sp --fix recompute=none --limit y>=2 --limit pp<=1 --memory 70GiB --rule ptdp"
    fixes += f" --limit dp>=2 --fix zero={zero} --fix regather=false"
    assert cli.run(parser.parse_args([*words.split(), *fixes.split(), "--write", str(folder)])) == 0
    found, said = capsys.readouterr()
    found = json.loads(found)
    assert f"written: {folder}/plan.toml" in said and "cells traced" in said
    first = found["plans"][0]
    assert [one["rank"] for one in found["plans"]] == [1, 2] and first["seconds"] <= found["plans"][1]["seconds"]
    assert 0 < first["mfu"] <= first["hfu"] < 1 and first["memory"]["limit"] == found["memory"]["limit"] == round(
        70 * 2**30 * 0.96 - 1.2 * 2**30
    )
    assert found["rule"]["seconds"] >= first["seconds"] * 0.999
    config = configuration.load(str(folder / "plan.toml"))
    assert config.scheme == "oned-sp" and config.grid.axes["y"] == first["config"]["grid.y"] and config.replicas.zero == zero
    dry = predict(config)
    written = json.loads((folder / "plan.json").read_text())
    assert written["plan"] == first["plan"] and written["dry_run"]["bytes"] == dry["bytes"]
    job = (folder / "job.sh").read_text()
    assert f"written={folder}/plan.toml\nCONFIG=${{CONFIG:-$written}}" in job and "SLURM_SUBMIT_DIR/jobs" not in job
    assert "#SBATCH --signal=TERM@120" in job and "#SBATCH --requeue" in job and "SLURM_GPUS_ON_NODE" in job
    assert subprocess.run(["bash", "-n", str(folder / "job.sh")], check=False).returncode == 0


WRONG = (
    (["gpt3-176b"], {}, "nearest is gpt3-175b"),
    (["gpt3-175b", "1t"], {}, "takes one name"),
    (["layers=2", "hiden=8"], {}, "hidden"),
    (["1t"], {"fixes": ["pipe=8"]}, "nearest is pp"),
    (["1t"], {"fixes": ["scheme=cubiod"]}, "nearest is cuboid"),
    (["1t"], {"fixes": ["pp"]}, "KEY=VALUE"),
    (["1t"], {"fixes": ["family=fsd"]}, "nearest is FSDP"),
    (["1t"], {"fixes": ["pp=x"]}, "--fix pp=x: pp takes a whole number"),
    (["1t"], {"fixes": ["grid.pp="]}, "takes a whole number"),
    (["1t"], {"fixes": ["pp=true"]}, "takes a whole number"),
    (["1t"], {"fixes": ["regather=maybe"]}, "takes true or false"),
    (["1t"], {"fixes": ["tile=2"]}, "takes a table of axes, as in --fix 'tile={y=2, z=4}'"),
    (["1t"], {"fixes": ["tile={y='2'}"]}, "grid.tile.y = '2' is text; grid.tile.y takes an integer"),
    (["1t"], {"fixes": ["order=x,y,z"]}, "Known: z,y,x,d,cp,ep,dp,pp"),
    (["1t"], {"fixes": ["pp=2", "grid.pp=4"]}, "grid.pp is given 2 and 4"),
    (["1t"], {"fixes": ["schedule=zb-w"]}, "nearest is zb-v"),
    (["1t"], {"limits": ["y=8"]}, "KEY<=NUMBER"),
    (["1t"], {"limits": ["scheme<=4"]}, "scheme is no number; --fix scheme=… takes it"),
    (["1t"], {"limits": ["tile<=4"]}, "tile is no number"),
    (["1t"], {"limits": ["y<=2", "grid.y>=4"]}, "grid.y>=4 and grid.y<=2: no number is within both"),
    (["1t"], {"limits": ["pp<=4"], "fixes": ["pp=8"]}, "grid.pp=8 is not within --limit grid.pp<=4"),
    (["1t"], {"era": "2019"}, "nearest is 2021"),
    (["1t"], {"ranks": 0}, "--ranks is 0"),
    (["1t"], {"batch": 0}, "--batch is 0"),
)


@pytest.mark.parametrize(("words", "options", "said"), WRONG)
def test_wrong_input_is_told_in_one_line(words: list[str], options: dict[str, Any], said: str) -> None:
    of = {"ranks": 8, "batch": 8, "era": "now", "fixes": (), "limits": (), **options}
    with pytest.raises(ConfigError) as error:
        space_of(request(words, of["batch"], CLUSTER), CLUSTER, of["ranks"], of["batch"], of["era"], of["fixes"], of["limits"])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_what_is_fixed_and_limited_is_taken_as_it_is_said() -> None:
    asked = request(["1t"], 8, CLUSTER)
    limits = ["y<=8", "y<=4", "z>=1", "z>=2"]
    space = space_of(asked, CLUSTER, 8, 8, "now", ["recompute=selective", "b=2", "tile={y=2}", "tile={y=2}"], limits)
    assert space.fixed == {"recompute": "selective", "micro_batch": 2, "grid.tile": {"y": 2}}
    assert space.most == {"grid.y": 4} and space.least == {"grid.z": 2}


@pytest.mark.parametrize("tile", [{"y": 2}, {"z": 2, "y": 1}])
def test_a_tile_that_is_fixed_is_that_of_every_plan(cache: Path, tile: dict[str, int]) -> None:
    fixed = {"scheme": "cuboid", "recompute": "none", "grid.y": 2, "grid.z": 2}
    best = (
        PlanSearch(replace(SPACE, fixed={**fixed, "grid.tile": tile}), Times(CLUSTER, Store()), LIMIT, 3)
        .run(lambda *state: None)
        .best
    )
    several = {axis: size for axis, size in tile.items() if size > 1}
    assert best and all({axis: size for axis, size in one.plan.tile if size > 1} == several for one in best)
    wide = replace(SPACE, fixed={**fixed, "grid.tile": {"y": 2, "z": 2}})  # nodes are of two ranks
    search = PlanSearch(wide, Times(CLUSTER, Store()), LIMIT, 3)
    with pytest.raises(ConfigError, match="no plan fits"):
        search.run(lambda *state: None)
    assert any(reason == "not within --fix tile={y=2, z=2}" for _, reason in search.rejected)


def test_what_refuses_a_plan_is_named_as_it_is_given_and_a_plan_prints_what_it_computes_again() -> None:
    one = Plan(inner("oned-sp", 1, "selective", y=4), 2, 1, 1, 3, 4, 1)
    assert str(one).endswith(" · b 3 · selective") and not refused(SPACE, replace(one, inner=inner("cuboid", 1)))
    given = (
        ({"fixed": {"scheme": "oned-sp", "pipeline.schedule": "zb-v"}}, "--fix schedule=zb-v"),
        ({"fixed": {"regather": True}}, "--fix regather=true"),
        ({"fixed": {"recompute": "none"}}, "--fix recompute=none"),
        ({"fixed": {"family": "2-D"}}, "--fix family=2-D"),
        ({"least": {"grid.y": 4, "micro_batch": 4}}, "--limit b>=4"),
        ({"most": {"grid.dp": 2, "grid.y": 2}}, "--limit y<=2"),
        ({"fixed": {"grid.tile": {"y": 2, "z": 1}}}, "--fix tile={y=2, z=1}"),
    )
    for options, said in given:
        assert refused(replace(SPACE, **{"fixed": {}, "most": {}, **options}), one) == said


def test_what_nothing_fits_names_each_familys_reasons(cache: Path) -> None:
    def message(space: Space, limit: float) -> str:
        with pytest.raises(ConfigError, match="no plan fits") as error:
            PlanSearch(space, Times(CLUSTER, Store()), limit, 3).run(lambda *state: None)
        return str(error.value)

    said = message(replace(SPACE, fixed={}), 1e3)
    assert all(f"{family}: " in said for family in ("1-D", "FSDP", "2-D", "cuboid")) and "weights and their states" in said
    assert "batch 7 does not divide" in message(replace(SPACE, batch=7, fixed={"pp": 1}, least={"dp": 2}), LIMIT)
    assert bytes_of("70GiB") == 70 * 2**30
    for wrong in ("70 pages", "0", "9" * 309):
        with pytest.raises(ConfigError, match="is no size"):
            bytes_of(wrong)


@pytest.mark.parametrize(
    "more",
    [
        ["family=bert", "vocabulary=64"],
        ["family=bert", "sequence=512"],
        ["family=vit", "image=28"],
        ["kv_heads=1", "activation=relu2"],
    ],
)
def test_a_model_of_every_family_is_planned_without_a_configuration(cache: Path, more: list[str]) -> None:
    asked = request(["layers=2", "hidden=64", "heads=4", *more], 8, CLUSTER)
    space = space_of(asked, CLUSTER, 2, 8, "now", ["scheme=cuboid", "recompute=none", "x=2"], [])
    assert PlanSearch(space, Times(CLUSTER, Store()), LIMIT, 1).run(lambda *state: None).best


SEARCHES = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import os, signal, time
from summa3d.plan.search.store import follow_parent
if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, get_context("spawn"), follow_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 60)
    time.sleep(60)
"""


def test_processes_that_trace_end_with_a_search_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "searches.py").write_text(SEARCHES)
    with subprocess.Popen([jobs.python(), str(tmp_path / "searches.py")], stdout=subprocess.PIPE, text=True) as search:
        assert search.stdout is not None
        process = int(search.stdout.readline())
        os.kill(process, 0)
        search.kill()
    began = time.monotonic()
    while Path(f"/proc/{process}").exists() and time.monotonic() < began + 20:
        time.sleep(0.05)
    assert not Path(f"/proc/{process}").exists()


def test_a_job_that_cannot_run_on_a_cluster_is_refused_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a configuration for the CPUs there the search begins."""
    monkeypatch.setattr(command, "find_plans", lambda *args, **options: (_ for _ in ()).throw(ConfigError("it searches")))
    file = tmp_path / "cpu.toml"
    file.write_text('device = "cpu"\n')
    for model, says in (("gpt3-1.3b", "MI250X"), (str(file), "it searches")):
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        words = ["--model", model, "--cluster", "frontier", "--ranks", "8", "--batch", "8", "--write", str(tmp_path / "plan")]
        with pytest.raises(ConfigError, match=says):
            cli.run(parser.parse_args(words))


def test_a_configuration_without_a_model_is_planned_with_the_default_one(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('dtype = "float64"\n')
    config = request([str(file)], 8, CLUSTER).config
    assert config.dtype == "float64" and config.model == ModelConfig()


def test_every_named_model_is_one_and_every_scheme_is_searched() -> None:
    for name in named_models():
        assert request([name], 8, CLUSTER).config.model.layers > 1
    every = Space(ModelConfig(layers=8, hidden=512, heads=16, sequence=64), 64, 64, "bfloat16", "cuda", (8,))
    found = [*plans(every)]
    assert {plan.inner.scheme for plan in found} == {*SCHEMES} and len({str(plan) for plan in found}) == len(found)
    assert all(plan.topology().size == 64 and plan.rows * plan.dp * plan.micro_batches == 64 for plan in found)


PROGRAM = "import sys; from summa3d.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.wide
def test_two_processes_with_other_hash_seeds_print_the_same(cache: Path) -> None:
    words = "plan --model layers=4 hidden=64 heads=4 sequence=32 vocabulary=256 --cluster selene --ranks 4 --batch 8 --json"
    lines = jobs.printed_by_hash_seeds(PROGRAM, *words.split())
    assert lines[0] == lines[1] and len(json.loads(lines[0])["plans"]) == 8
