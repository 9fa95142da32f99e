"""The closed forms of the cuboid product against the formula of the mean that README shows, and its special cases.

The algorithm written out rank by rank.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.gemm import volume
from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.layout import split_sizes

SIZES = st.integers(0, 60)
AXES = st.integers(1, 5)
FORMS = st.sampled_from(["nn", "nt", "tn", "tt"])


def places(grid_shape):
    x, y, z = grid_shape.values()
    return [{"x": i, "y": j, "z": k} for i in range(x) for j in range(y) for k in range(z)]


@given(SIZES, SIZES, SIZES, AXES, AXES, AXES, FORMS)
@settings(max_examples=100, deadline=None)
def test_mean_words_are_exactly_the_closed_form(m, n, k, x, y, z, form):
    cost = volume.cuboid(m, n, k, {"x": x, "y": y, "z": z}, form)
    assert cost.mean_words == Fraction((y - 1) * m * k + (x - 1) * k * n + (z - 1) * m * n, x * y * z)
    assert all(each.messages == x + y + z - 3 for each in cost.costs())
    assert cost.max_words >= cost.mean_words


@given(SIZES, SIZES, SIZES, AXES, AXES, AXES, FORMS)
@settings(max_examples=60, deadline=None)
def test_each_ranks_words_and_workspace_follow_the_algorithm_step_by_step(m, n, k, x, y, z, form):
    """Nested splits by hand: m over x (then y for A, z for C), k over z, n over y, the fine split on the stored rows."""
    grid_shape = {"x": x, "y": y, "z": z}
    cost = volume.cuboid(m, n, k, grid_shape, form)
    for at in places(grid_shape):
        rows, columns, inner = split_sizes(m, x)[at["x"]], split_sizes(n, y)[at["y"]], split_sizes(k, z)[at["z"]]
        fine_a, rest_a = (rows, inner) if form[0] == "n" else (inner, rows)
        fine_b, rest_b = (inner, columns) if form[1] == "n" else (columns, inner)
        own_a = split_sizes(fine_a, y)[at["y"]] * rest_a
        own_b = split_sizes(fine_b, x)[at["x"]] * rest_b
        own_c = split_sizes(rows, z)[at["z"]] * columns
        words = (rows * inner - own_a) + (inner * columns - own_b) + (z - 1) * own_c
        assert cost.words_of(at) == words
        partial = rows * columns if z > 1 else 0
        gathered = (rows * inner if y > 1 else 0) + (inner * columns if x > 1 else 0)
        assert cost.workspace_of(at) == gathered + partial + (z * own_c if z > 1 else 0)


def test_the_cuboid_contains_one_dimensional_tensor_parallelism_and_fully_sharded_data_parallelism():
    m, n, k, t = 24, 36, 60, 6
    one_d = volume.cuboid(m, n, k, {"x": 1, "y": t, "z": 1})
    assert {cost.words for cost in one_d.costs()} == {(t - 1) * m * k // t}  # gathers the rows of the input: sequence parallel
    sharded = volume.cuboid(m, n, k, {"x": t, "y": 1, "z": 1})
    assert {cost.words for cost in sharded.costs()} == {(t - 1) * k * n // t}  # gathers the weights: ZeRO-3
    row = volume.cuboid(m, n, k, {"x": 1, "y": 1, "z": t})
    assert {cost.words for cost in row.costs()} == {(t - 1) * m * n // t}  # scatters the output
    assert all(cost.workspace == 0 for cost in volume.cuboid(m, n, k, {"x": 1, "y": 1, "z": 1}).costs())


def test_a_cube_moves_the_papers_words():
    """3 (q−1) n²/q³ words a rank for a q×q×q cube of n×n matrices."""
    q, n = 3, 27
    assert {cost.words for cost in volume.cuboid(n, n, n, {"x": q, "y": q, "z": q}).costs()} == {3 * (q - 1) * n * n // q**3}


@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_permuted_roles_cost_what_the_renamed_grid_costs(form):
    plan = CuboidPlan(form, 17, 23, 31, x="z", y="x", z="y")
    cost = volume.of_plan(plan, {"x": 2, "y": 3, "z": 4})
    renamed = volume.cuboid(17, 23, 31, {"x": 4, "y": 2, "z": 3}, form)
    for at in places({"x": 2, "y": 3, "z": 4}):
        assert cost.cost_of(at) == renamed.cost_of({"x": at["z"], "y": at["x"], "z": at["y"]})


@given(SIZES, SIZES, SIZES, AXES, AXES, AXES, FORMS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_gradients_move_what_they_scatter_and_gather(m, n, k, x, y, z, form, regather):
    """Mean: dC's gather, dA's and dB's scatters, and A's and B's gathers again if they were not kept."""
    grid_shape = {"x": x, "y": y, "z": z}
    both = volume.gradients(CuboidPlan(form, m, n, k), grid_shape, regather)
    gathers = (y - 1) * m * k + (x - 1) * k * n
    assert both.mean_words == Fraction((z - 1) * m * n + gathers * (2 if regather else 1), prod(grid_shape.values()))
    only_a = volume.gradients(CuboidPlan(form, m, n, k), grid_shape, regather, need_b=False)
    again = (x - 1) * k * n if regather else 0
    assert only_a.mean_words == Fraction((z - 1) * m * n + (y - 1) * m * k + again, prod(grid_shape.values()))


def test_gradients_of_every_algorithm_move_what_their_papers_say():
    m, n, k, t, q = 24, 48, 96, 4, 2
    line, plane = {"y": t}, {"x": q, "y": q}
    column, row = (ALGORITHMS[name].plan("nn", m, n, k) for name in ("oned-column", "oned-row"))
    assert volume.gradients(column, line).mean_words == 2 * (t - 1) * m * k // t  # dX is summed, dW is whole
    assert volume.gradients(column, line, need_a=False).mean_words == 0
    assert volume.gradients(row, line).mean_words == 0  # dY is copied, both are whole
    summa = ALGORITHMS["summa"].plan("nn", m, n, k)
    forward = volume.of_plan(summa, plane).mean_words
    grad_a = Fraction((q - 1) * k * n + (q - 1) * m * k, q * q)  # dA = dC·Bᵀ by nt
    grad_b = Fraction((q - 1) * m * k + (q - 1) * k * n, q * q)  # dB = Aᵀ·dC by tn
    assert (forward, volume.gradients(summa, plane).mean_words) == (grad_a, grad_a + grad_b)
    assert volume.gradients(summa, plane, need_b=False).mean_words == grad_a
    cube, plan = {"x": q, "y": q, "z": q}, CuboidPlan("nn", m, n, k)
    kept, again = (volume.gradients(plan, cube, regather).mean_words for regather in (False, True))
    assert (kept, again) == (Fraction(m * k + k * n + m * n, q**3), Fraction(2 * (m * k + k * n) + m * n, q**3))
