"""What a rank multiplies and receives by layouts alone: the words of the closed forms, and a scheme that no planner has seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from summa3d.cluster import load
from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.algorithms.gradients import gradient_plans
from summa3d.gemm.algorithms.oned import OnedColumnPlan, OnedRowPlan
from summa3d.gemm.algorithms.registry import algorithm_of
from summa3d.gemm.algorithms.summa import SummaPlan
from summa3d.gemm.algorithms.tesseract import TesseractPlan
from summa3d.layout.layout import Layout
from summa3d.nn.config import ModelConfig
from summa3d.nn.schemes.products import A, B, C, LaidOutProduct, alone, family_of, products_of
from summa3d.nn.schemes.registry import SCHEME_SPECS, SchemeSpec
from summa3d.plan.search.plans import Era, Space
from summa3d.plan.search.search import Found, PlanSearch
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import Times
from summa3d.train import config

M, N, K = 2 * 3 * 5 * 7 * 11, 2 * 3 * 5 * 7 * 13, 2 * 3 * 5 * 7 * 17
GRIDS: dict[Any, list[dict[str, int]]] = {
    CuboidPlan: [{"x": 3, "y": 5, "z": 7}, {"x": 2, "y": 1, "z": 3}],
    SummaPlan: [{"x": 3, "y": 5}, {"x": 7, "y": 2}],
    TesseractPlan: [{"x": 3, "y": 3, "d": 5}, {"x": 5, "y": 5, "d": 2}],
    OnedColumnPlan: [{"y": 7}],
    OnedRowPlan: [{"y": 7}],
}
CASES = [(plan, form, grid) for plan, grids in GRIDS.items() for grid in grids for form in ("nn", "nt")]


def words(plan: Any, grid: dict[str, int]) -> float:
    """Words of A and B gathered and of C summed, of a product by its layouts."""
    one = LaidOutProduct(plan)
    moved = [words for operand in (A, B) for _, words in one.gathered(operand, grid, plan.m)]
    return sum(moved) + sum(words for *_, words in one.summed(C, grid, plan.m))


@pytest.mark.parametrize(("kind", "form", "grid"), CASES)
def test_layouts_alone_give_the_words_and_the_products_of_the_closed_forms(kind: Any, form: str, grid: dict[str, int]) -> None:
    plan = kind(form, M, N, K)
    mean, one = algorithm_of(plan).mean(form, M, N, K, grid), LaidOutProduct(plan)
    assert words(plan, grid) == pytest.approx(float(mean.words), rel=1e-12)
    assert one.count(grid) <= mean.products and (one.count(grid) == 1) == (mean.products == 1)
    assert one.count(grid) == (max(grid["x"], grid["y"]) if mean.products > 1 else 1)
    m, n, k = one.local(grid, M)
    assert m * n * k * one.count(grid) == pytest.approx(float(mean.m * mean.n * mean.k) * mean.products, rel=1e-12)
    if kind in (SummaPlan, TesseractPlan):
        of_a, of_b = gradient_plans(plan)
        for operand, others, found in ((A, (B, C), of_a), (B, (A, C), of_b)):
            wanted = algorithm_of(found).mean(found.form, found.m, found.n, found.k, grid)
            gathered = sum(words for other in others for _, words in one.gathered(other, grid, M))
            assert gathered + sum(words for *_, words in one.summed(operand, grid, M)) == pytest.approx(float(wanted.words))


def test_an_operand_that_one_layout_alone_splits_is_gathered_whole() -> None:
    one = LaidOutProduct(OnedColumnPlan("nn", M, N, K, "y", sequence=True))
    assert (one.gathers, one.count({"y": 7}), one.local({"y": 7}, M)) == (True, 1, (M, N / 7, K))
    assert [*one.gathered(A, {"y": 7}, M)] == [("y", 6 * M * K / 7)]


def turned(monkeypatch: pytest.MonkeyPatch) -> str:
    """A scheme that nobody has written: a cuboid whose x and z have changed places."""
    twin, residual = SCHEME_SPECS["cuboid"], Layout("b:(z,y) s h:x")
    spec = SchemeSpec("turned", "a cuboid turned round", residual, twin.plan, twin.grids, repeats=twin.repeats)
    monkeypatch.setitem(SCHEME_SPECS, spec.name, spec)
    monkeypatch.setattr(config, "SCHEMES", tuple(SCHEME_SPECS))
    return spec.name


def test_a_scheme_that_no_line_of_the_planner_names_is_planned_as_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMMA3D_CACHE", str(tmp_path))
    model = ModelConfig(layers=2, hidden=256, heads=4, sequence=64, vocabulary=512)

    def best(scheme: str) -> Found:
        space = Space(model, 4, 8, "bfloat16", "cuda", (8,), era=Era((scheme,), (("none", False),), (1,), ("1f1b",)))
        return PlanSearch(space, Times(load("selene"), Store()), 80e9, 4).run(lambda *state: None)

    names = {"x": "z", "z": "x"}
    ours, twin = best(turned(monkeypatch)), best("cuboid")
    assert (ours.considered, {*ours.families}) == (twin.considered, {*twin.families})
    assert [one.seconds for one in ours.best] == pytest.approx([one.seconds for one in twin.best], rel=1e-12)
    assert [one.memory for one in ours.best] == [one.memory for one in twin.best]
    shapes = [{names.get(axis, axis): size for axis, size in one.plan.inner.shape.items()} for one in ours.best]
    assert shapes == [one.plan.inner.shape for one in twin.best]


def test_families_are_what_layouts_say() -> None:
    found = {
        name: family_of(name, dict.fromkeys(("x", "y", "z", "d"), 2)) for name in SCHEME_SPECS if not SCHEME_SPECS[name].limits
    }
    assert {found[name] for name in ("cuboid", "cuboid-sequence", "oned-sp")} == {"cuboid"}
    assert (found["oned"], found["summa"], found["tesseract"]) == ("1-D", "2-D", "2.5-D")
    assert family_of("cuboid", {"x": 8, "y": 2, "z": 1}) == "FSDP" and family_of("oned-sp", {"x": 1, "y": 8, "z": 1}) == "1-D"
    assert products_of("oned", ModelConfig()) == products_of("oned", ModelConfig()) and not alone("oned").residual.axes
