"""The closed forms without MPI: their means are the tables' for any sizes.

Panels never straddle, a transpose moves what it must.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.gemm.algorithms.panels import panels
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.layout import split_sizes

extents = st.integers(0, 40)
parts = st.integers(1, 6)
widths = st.none() | st.integers(1, 9)


def table(name, form, m, n, k, grid, sequence=False):
    """Mean words per rank as the tables of the plans give them."""
    p, q, d, t = prod(grid.values()), grid.get("x", 1), grid.get("d", 1), grid["y"]
    r, c = q, t
    square = {
        "summa": {
            "nn": Fraction((c - 1) * m * k + (r - 1) * k * n, p),
            "nt": Fraction((r - 1) * k * n + (c - 1) * m * n, p),
            "tn": Fraction((c - 1) * m * k + (r - 1) * m * n, p),
        },
        "tesseract": {
            "nn": (q - 1) * (Fraction(m * k, d) + k * n) / q**2,
            "nt": (q - 1) * (k * n + Fraction(m * n, d)) / q**2,
            "tn": ((q - 1) * (Fraction(m * k, d) + m * n) + Fraction(2 * (d - 1), d) * m * n) / q**2,
        },
        "ca25d": dict.fromkeys(("nn", "nt", "tn", "tt"), Fraction((q - 1) * (m * k + k * n) + (d - 1) * m * n, p)),
        "agarwal": dict.fromkeys(("nn", "nt", "tn", "tt"), Fraction((q - 1) * (m * k + k * n + m * n), p)),
        "oned-column": dict.fromkeys(("nn", "nt", "tn", "tt"), Fraction((t - 1) * m * k, t) if sequence else Fraction(0)),
        "oned-row": dict.fromkeys(("nn", "nt", "tn", "tt"), Fraction((1 if sequence else 2) * (t - 1) * m * n, t)),
    }
    return square[name][form]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["summa", "tesseract", "ca25d", "agarwal", "oned-column", "oned-row"]),
    st.sampled_from(["nn", "nt", "tn", "tt"]),
    extents, extents, extents, st.sampled_from([1, 2, 4, 6, 8, 9, 12, 18, 27]), widths, st.booleans(),
)  # fmt: skip
def test_mean_words_are_the_tables_for_any_sizes(name, form, m, n, k, ranks, panel, flag):
    algorithm = ALGORITHMS[name]
    if form == "tt" and name in ("summa", "tesseract"):
        form = "nn"
    options = (
        {"panel": panel, "lookahead": flag}
        if "panel" in algorithm.options
        else {"sequence": flag}
        if "sequence" in algorithm.options
        else {}
    )
    for grid in algorithm.grids(ranks):
        volume = algorithm.volume(algorithm.plan(form, m, n, k, **options), grid)
        assert volume.mean_words == table(name, form, m, n, k, grid, options.get("sequence", False))


@pytest.mark.parametrize("q", [1, 2, 3, 5])
@pytest.mark.parametrize("form", ["nn", "nt", "tn"])
def test_cannons_words_are_those_of_its_table_on_every_rank(q, form):
    m, n, k = 4 * q, 6 * q, 10 * q
    volume = ALGORITHMS["cannon"].volume(ALGORITHMS["cannon"].plan(form, m, n, k), {"x": q, "y": q})
    for i in range(q):
        for j in range(q):
            blocks = {
                "nn": (q - 1 + (i != 0)) * m * k + (q - 1 + (j != 0)) * k * n,
                "nt": (q - 1 + (j != q - 1)) * k * n + (q - 1 + (i != 0)) * m * n,
                "tn": (q - 1 + (i != q - 1)) * m * k + (q - 1 + (j != 0)) * m * n,
            }[form]
            assert volume.words_of({"x": i, "y": j}) == Fraction(blocks, q * q)


@given(extents, extents, extents, parts, st.sampled_from(["nn", "nt", "tn"]))
def test_cannon_moves_every_block_but_those_in_place(m, n, k, q, form):
    plan = ALGORITHMS["cannon"].plan(form, m, n, k)
    total = sum(cost.words for cost in ALGORITHMS["cannon"].volume(plan, {"x": q, "y": q}).costs())
    (rows, *_), (columns, *_), (*_, inner) = (split_sizes(extent, q) for extent in (m, n, k))
    nn = q * (m * k + k * n) - rows * k - columns * k
    nt = q * k * n - inner * n + (q - 1) * m * n + (m - rows) * n
    tn = q * k * m - inner * m + (q - 1) * m * n + (n - columns) * m
    assert total == ({"nn": nn, "nt": nt, "tn": tn}[form] if q > 1 else 0)


@given(st.integers(0, 60), st.integers(0, 60), parts, parts, widths)
def test_panels_cover_the_range_once_and_lie_in_one_block_of_each_split(start, length, x_parts, y_parts, width):
    cuts = panels(start, start + length, x_parts, y_parts, width)
    assert sum(cut.width for cut in cuts) == length
    assert all(0 < cut.width <= (width or length) for cut in cuts)
    at = 0
    for cut in cuts:
        for owner, offset, count in ((cut.x_owner, cut.x_start, x_parts), (cut.y_owner, cut.y_start, y_parts)):
            sizes = split_sizes(length, count)
            assert offset + cut.width <= sizes[owner] and [0, *accumulate(sizes)][owner] + offset == at
        at += cut.width
    if width is None:
        assert all((one.x_owner, one.y_owner) != (two.x_owner, two.y_owner) for one, two in pairwise(cuts))


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["summa", "cannon", "tesseract"]), extents, extents, extents, st.sampled_from([1, 4, 9, 12]))
def test_a_product_of_two_transposes_is_nn_of_the_swapped_operands_and_one_transpose(name, m, n, k, ranks):
    algorithm = ALGORITHMS[name]
    for grid in algorithm.grids(ranks):
        plan = algorithm.plan("tt", m, n, k)
        plain = algorithm.volume(algorithm.plan("nn", n, m, k), grid)
        whole = algorithm.volume(plan, grid)
        moved = 0
        for at in (dict(zip(grid, point, strict=True)) for point in points(grid)):
            block = prod(plan.c_layout.local_shape((m, n), grid, at))
            words = whole.words_of(at) - plain.words_of(at)
            assert 0 <= words <= block
            moved += words
        assert moved <= m * n
        if ranks == 1:
            assert moved == 0


def points(grid):
    """Every coordinate of a grid."""
    result = [()]
    for size in grid.values():
        result = [(*point, index) for point in result for index in range(size)]
    return result


@pytest.mark.parametrize("name", ["summa", "tesseract", "ca25d"])
def test_narrow_panels_need_less_workspace_and_more_messages_for_the_same_words(name):
    algorithm, grid = ALGORITHMS[name], ALGORITHMS[name].grids(16)[-1 if name == "summa" else 0]
    for form in ("nn", "nt", "tn"):
        wide, narrow = (algorithm.volume(algorithm.plan(form, 64, 96, 128, panel=panel), grid).costs() for panel in (None, 2))
        for one, two in zip(wide, narrow, strict=True):
            assert one.words == two.words and one.workspace >= two.workspace and one.messages <= two.messages


def test_sixteen_bit_floats_need_room_for_float32_sums():
    plan = ALGORITHMS["summa"].plan("nn", 8, 8, 8)
    at = {"x": 0, "y": 0}
    panel = 2 * 4 * 4  # of A and of B
    assert ALGORITHMS["summa"].volume(plan, {"x": 2, "y": 2}, "float32").workspace_of(at) == panel
    assert ALGORITHMS["summa"].volume(plan, {"x": 2, "y": 2}, "float16").workspace_of(at) == panel + 2 * panel + 2 * 16
    assert ALGORITHMS["summa"].volume(plan, {"x": 2, "y": 2}, "int32").workspace_of(at) == panel + 16
