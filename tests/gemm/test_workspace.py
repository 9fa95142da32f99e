"""Products whose workspace is bounded: operands come panel by panel, with the words, messages and bytes of the plan."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from any_layouts import random_case, random_lettered, stored
from kinds import array, numbers, plain

from summa3d import einsum, matmul
from summa3d.comm.grid import Grid, Place
from summa3d.errors import AgreementError, ConfigError, LayoutError, ShapeError
from summa3d.gemm import DistMatrix, DistTensor, plan_any, plan_einsum
from summa3d.gemm.any_layout.panels import bytes_of
from summa3d.gemm.binding import Binding


def plan_of(grid):
    """The one plan that a grid has kept."""
    (found,) = [bound.product.plan for bound in grid.job.kept[grid].get(Binding, {}).values() if bound.product is not None]
    return found


def limited(random, plan, again):
    """A limit below what the plan takes, and the plan with it; where none is small enough, the least that works."""
    limit = int(bytes_of(plan) * random.random())
    try:
        return limit, again(limit)
    except ConfigError as refusal:
        least = int(re.search(r"least that works is ([\d,]+) bytes", str(refusal))[1].replace(",", ""))
        assert least > limit
        return least, again(least)


def check(comm, grid, multiply, plan, limit, want, close):
    """Multiply with a limit: numbers, and words, messages and peak of this rank as the plan has them."""
    grid.ledger.reset_peak()
    with grid.ledger.watch() as moved:
        c = multiply(limit)
    peak, kept = grid.ledger.workspace_peak, plan_of(grid)
    text = f"{plan}\n{limit}"
    assert repr(kept) == repr(plan), text
    assert np.allclose(plain(c.to_global()), want, rtol=0, atol=close), text
    assert [moved.words, moved.messages] == [plan.words_of(comm.rank), plan.messages_of(comm.rank)], text
    assert comm.allreduce(plan.sent_of(comm.rank)) == plan.words, text
    assert peak == plan.workspace_of(comm.rank) * plan.dtype.nbytes <= limit, text
    del c
    assert grid.ledger.workspace_bytes == 0


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float64", "float16", "int64"])
def test_matrices_are_multiplied_within_a_limit(comm, dtype):
    random, panels = Random(comm.size), 0
    for number in range(4):
        case = random_case(random, comm.size)
        case = case._replace(m=5, k=37, n=7) if number % 2 else case
        left, right = (np.rint(2 * one).astype(dtype) for one in case.operands(number))
        layouts = (case.a, case.b, case.m, case.n, case.k)

        def planned(limit=None, case=case, layouts=layouts):
            more = {"dtype": dtype, "objective": case.objective, "workspace": limit}
            return plan_any(*layouts, Place(case.grids[0]), case.c, case.form, **more)

        limit, plan = limited(random, planned(), planned)
        panels += plan.panels > 1
        with Grid(comm, case.grids[0], node_memory=False) as grid:
            a = DistMatrix.from_global(stored(left, case.form[0]), grid, case.a)
            b = DistMatrix.from_global(stored(right, case.form[1]), grid, case.b)

            def multiply(limit, a=a, b=b, case=case):
                return matmul(a, b, case.form, out_layout=case.c, objective=case.objective, workspace=limit)

            check(comm, grid, multiply, plan, limit, left.astype("float64") @ right, 1e-10)
    assert panels


@pytest.mark.mpi(sizes=(4,))
def test_tensors_are_multiplied_within_a_limit(comm):
    random, panels = Random(10 + comm.size), 0
    for number in range(5):
        case = random_lettered(random, comm.size)
        left, right = case.operands(number)

        def planned(limit=None, case=case):
            layouts = (case.a, case.b, case.extents, Place(case.grids[0]), case.c)
            return plan_einsum(case.subscripts, *layouts, objective=case.objective, workspace=limit)

        limit, plan = limited(random, planned(), planned)
        panels += plan.panels > 1
        with Grid(comm, case.grids[0], node_memory=False) as grid:
            a, b = DistTensor.from_global(left, grid, case.a), DistTensor.from_global(right, grid, case.b)

            def multiply(limit, a=a, b=b, case=case):
                return einsum(case.subscripts, a, b, case.c, objective=case.objective, workspace=limit)

            check(comm, grid, multiply, plan, limit, np.einsum(case.subscripts, left, right), 1e-10)
    assert panels


def test_panels_move_the_words_of_the_whole_and_cost_messages_and_seconds():
    grid, layouts = Place({"x": 2, "y": 3}), ("m:x k:y", "k:x n:y", 61, 53, 211)
    whole = plan_any(*layouts, grid)
    cut = plan_any(*layouts, grid, workspace=bytes_of(whole) // 3)
    assert whole.panels == 1 and cut.panels > 1 and "k in" in str(cut) and cut.seconds > whole.seconds
    alike = next(one for one in whole.others if one.text == cut.text.rpartition(",")[0]) if cut.splits != whole.splits else whole
    assert cut.words == alike.words
    for rank in range(6):
        fetched = sum(fetch.words_of(rank) for panel in cut.fetches for fetch in panel)
        assert fetched == cut.received["a"][rank] + cut.received["b"][rank]
    assert bytes_of(cut) <= bytes_of(whole) // 3 < bytes_of(plan_any(*layouts, grid, workspace=bytes_of(whole)))
    with pytest.raises(ConfigError, match="None"):
        plan_any(*layouts, grid, workspace=1.5)


@pytest.mark.mpi(sizes=(4,))
def test_a_limit_has_no_other_algorithm_and_is_agreed_on(comm, make_grid):
    grid = make_grid(x=2, y=2)
    a, b = (DistMatrix.from_global(np.ones((8, 8)), grid, layout) for layout in ("m:x k:y", "k:x n:y"))
    with grid.ledger.watch() as moved:
        with pytest.raises(ConfigError, match="workspace is of products of any layouts"):
            matmul(a, b, algorithm="summa", workspace=10**6)
        with pytest.raises(ConfigError, match="least that works is"):
            matmul(a, b, workspace=8)
        with pytest.raises(ConfigError, match="least that works is"):
            einsum("mk,kn->mn", a, b, workspace=8)
    assert moved.words == 0
    assert np.array_equal(matmul(a, a.T, "nn", workspace=10**6).to_global(), np.full((8, 8), 8.0))
    with pytest.raises(AgreementError):
        matmul(a, b, workspace=10**6 + comm.rank)


# -- alpha, beta, out of einsum ------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "complex64", "complex128", "int32"])
@pytest.mark.parametrize("subscripts", ["bmk,bkn->bmn", "kbm,nbk->nmb"])
@pytest.mark.pairs
def test_einsum_writes_alpha_and_beta_times_out(comm, make_grid, kind, dtype, subscripts):
    grid, sizes = make_grid(x=2, y=2), {"b": 3, "m": 5, "n": 7, "k": 11}
    shapes = [tuple(sizes[letter] for letter in names) for names in subscripts.replace("->", ",").split(",")]
    small = 4 if dtype in ("float16", "bfloat16") else 1
    left, right, before = (
        (numbers(dtype, shape, 0, seed) // small for seed, shape in enumerate(shapes, 1))
        if small > 1
        else (numbers(dtype, shape, 0, seed) for seed, shape in enumerate(shapes, 1))
    )
    alpha, beta = (2 - 1j, 1j) if dtype.startswith("complex") else (2, 3)
    letters = subscripts[-3:]
    a, b = (
        DistTensor.from_global(array(kind, dtype, one), grid, layout)
        for one, layout in ((left, "p:x q r @y=0"), (right, "p q:y r:x"))
    )
    product = np.einsum(subscripts, left, right)
    for layout in (f"{letters[0]} {letters[1]}:(x,y) {letters[2]}", f"{letters[0]}:y {letters[1]} {letters[2]} @x=1"):
        for limit in (None, 10**6):
            out = DistTensor.from_global(array(kind, dtype, before), grid, layout)
            found = einsum(subscripts, a, b, alpha=alpha, beta=beta, out=out, workspace=limit)
            assert found is out and out.block.dtype == a.block.dtype
            assert np.array_equal(plain(out.to_global()), alpha * product + beta * before)
    if dtype == "float64":
        out = DistTensor.from_global(np.full(shapes[2], np.nan), grid, layout)
        assert np.array_equal(einsum(subscripts, a, b, out=out).to_global() if kind == "numpy" else product, product)


@pytest.mark.mpi(sizes=(2,))
def test_an_out_that_cannot_be_written_is_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(x=2)
    a, b = (DistTensor.from_global(np.ones((2, 4, 4)), grid, "b m:x k") for _ in range(2))
    out = DistTensor.from_global(np.ones((2, 4, 4)), grid, "b m:x n")
    other = DistTensor.from_global(np.ones((2, 4, 3)), grid, "b m:x n")
    half = DistTensor.from_global(np.ones((2, 4, 4), "float32"), grid, "b m:x n")
    with grid.ledger.watch() as moved:
        for kind, words, options in (
            (ShapeError, "out is a", {"out": np.ones((2, 4, 4))}),
            (ShapeError, "out is a itself", {"out": a}),
            (LayoutError, "the product is 2×4×4", {"out": other}),
            (LayoutError, "Pass one of them", {"out": out, "out_layout": "b m n:x"}),
            (ShapeError, "float32", {"out": half}),
            (ShapeError, "beta", {"beta": 2}),
        ):
            with pytest.raises(kind, match=words):
                einsum("bmk,bkn->bmn", a, b, **options)
    assert moved.words == 0
