"""The bounds beside a dry run's words: by hand, below what single copies move, and of as many products as the step has."""

from __future__ import annotations

from math import prod

import pytest

from summa3d.dry.bounds import bound_of, bounded_products
from summa3d.dry.record import operations
from summa3d.dry.step import Setting, run
from summa3d.gemm import CuboidPlan, lower_bound
from summa3d.gemm.cost.volume import of_plan
from summa3d.nn import ModelConfig
from summa3d.nn.schemes.scheme import Scheme

SETTINGS = {
    "cuboid": {"x": 2, "y": 2, "z": 2},
    "summa": {"x": 2, "y": 2},
    "tesseract": {"x": 2, "y": 2, "d": 2},
    "oned": {"y": 4},
    "agarwal": {"x": 2, "y": 2, "z": 2},
}
MODEL = ModelConfig(layers=3, hidden=64, heads=8, sequence=16, vocabulary=256)


def test_a_product_by_hand() -> None:
    shape = {"x": 2, "y": 2, "z": 2}
    plan = CuboidPlan("nn", 16, 16, 16)
    assert bound_of(plan, shape) == pytest.approx(3 * 64 - 3 * 32)  # the work of a cube of 8: its faces, less a rank's blocks
    words = of_plan(plan, shape)
    assert words.words_of(dict.fromkeys(shape, 0)) == 96  # which the cuboid on 2×2×2 moves
    flat = CuboidPlan("nn", 64, 4, 4)
    assert bound_of(flat, {"x": 4, "y": 1, "z": 1}) == 16 - 4  # B whole, of which a rank holds a quarter


@pytest.mark.parametrize("scheme", ["cuboid", "summa", "agarwal"])
@pytest.mark.parametrize("sizes", [(24, 16, 32), (64, 8, 8), (8, 8, 128), (16, 128, 16)])
def test_a_bound_is_never_above_the_words_that_evenly_spread_single_copies_move(scheme, sizes) -> None:
    layouts = Scheme.of(scheme, SETTINGS[scheme])
    for form in ("nn", "nt"):
        plan = layouts.plan(layouts.residual, form, *sizes)
        words, shape = of_plan(plan, layouts.shape), layouts.shape
        places = [dict(zip(shape, divmod_all(rank, shape), strict=True)) for rank in range(prod(shape.values()))]
        most = max(words.words_of(place) for place in places)
        assert bound_of(plan, shape) <= most * (1 + 1e-12)
        if scheme != "agarwal":
            assert bound_of(plan, shape) == pytest.approx(lower_bound(*sizes, len(places)))


def divmod_all(rank: int, shape: dict[str, int]) -> list[int]:
    """The coordinates of a rank, the last axis fastest."""
    found = []
    for size in reversed(shape.values()):
        rank, index = divmod(rank, size)
        found.append(index)
    return found[::-1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("scheme", ["cuboid", "summa", "oned"])
@pytest.mark.turns
def test_there_are_as_many_products_as_the_step_multiplies_and_their_words_are_in_it(scheme, recompute, family) -> None:
    model = ModelConfig(family=family, layers=3, hidden=64, heads=8, sequence=16, vocabulary=256)
    setting = Setting(model, batch=8, scheme=scheme, axes=SETTINGS[scheme], recompute=(recompute, 1), accumulate=2)
    step = run(setting)
    found = bounded_products(setting, step)
    ranks = prod(setting.layouts.shape.values())
    multiplied = sum(times * op.flops for op, times in operations(step.parts) if op.kind == "product" and op.name != "attention")
    assert sum(2 * one.times * one.m * one.n * one.k for one in found) == ranks * multiplied
    assert [one.product for one in found] == ["qkv", "out", "up", "down", "head"]
    words = sum(times * op.words for op, times in operations(step.parts) if op.kind == "move")
    assert 0 < sum(one.words for one in found) <= words and all(one.words for one in found)


def test_a_stage_counts_its_own_layers_and_the_last_one_the_head() -> None:
    counts = {}
    for rank in (0, 1):
        setting = Setting(MODEL, batch=8, scheme="oned", axes={"y": 1, "pp": 2}, rank=rank, accumulate=2)
        counts[rank] = {one.product: one.times for one in bounded_products(setting, run(setting))}
    assert counts[0] == dict.fromkeys(("qkv", "out", "up", "down"), 2 * 2 * 3)
    assert counts[1] == {**dict.fromkeys(("qkv", "out", "up", "down"), 1 * 2 * 3), "head": 2 * 3}


def test_copies_make_a_bound_less() -> None:
    for scheme in ("oned", "tesseract"):
        layouts = Scheme.of(scheme, SETTINGS[scheme])
        plan = layouts.plan(layouts.residual, "nn", 128, 256, 64)
        assert bound_of(plan, layouts.shape) < lower_bound(128, 256, 64, prod(layouts.shape.values()))
