"""Products of operands in any layouts: numbers of plain numpy, words of the plan, and what the plan says of itself."""

from __future__ import annotations

from itertools import permutations, product
from math import prod
from random import Random

import jobs
import numpy as np
import pytest
from any_layouts import Case, random_case, stored
from kinds import array, numbers, plain

from summa3d.comm.grid import Grid, Place
from summa3d.errors import AgreementError, ConfigError, LayoutError, ShapeError
from summa3d.gemm import CuboidPlan, DistMatrix, matmul, volume
from summa3d.gemm.any_layout.planned import plan_any
from summa3d.gemm.binding import Binding
from summa3d.layout import BlockCyclic, Layout
from summa3d.layout.redistribute import Placement, Redistribution

CASES = 14
"""Products at each world size; the nightly ones take more."""


def plans_of(grid):
    """The plans of the products in any layouts that a grid has kept."""
    return [bound.product.plan for bound in grid.job.kept[grid].get(Binding, {}).values() if bound.product is not None]


def matrix(whole, grid, layout, letter="n", turned=False):
    """A matrix as an operand under op `letter`; turned, as the .T of what is stored the other way round."""
    if turned:
        return DistMatrix.from_global(np.ascontiguousarray(stored(whole, letter).T), grid, layout.transposed()).T
    return DistMatrix.from_global(stored(whole, letter), grid, layout)


def check_product(comm, case: Case, seed: int, node_memory=None) -> None:
    """Multiply, and compare: numbers with numpy's, words and messages of each rank with the plan's, what is sent with both."""
    left, right = case.operands(seed)
    with Grid(comm, case.grids[0], order=case.orders[0], node_memory=node_memory) as grid:
        other = grid if case.orders[1] is None else Grid(comm, case.grids[1], order=case.orders[1], node_memory=node_memory)
        a = matrix(left, grid, case.a, case.form[0], case.turned[0])
        b = matrix(right, other, case.b, case.form[1], case.turned[1])
        with grid.ledger.watch() as here, other.ledger.watch() as there:
            c = matmul(a, b, case.form, "any", out_layout=case.c, objective=case.objective)
        moved = np.array([here.words, here.messages]) + (0 if other is grid else np.array([there.words, there.messages]))
        (plan,) = plans_of(grid)
        text = f"{case}\n{plan}"
        assert c.grid is grid and c.layout == (case.c or plan.c.layout), text
        want = left @ right
        assert np.linalg.norm(c.to_global() - want) <= 1e-12 * np.linalg.norm(want), text
        assert moved.tolist() == [plan.words_of(comm.rank), plan.messages_of(comm.rank)], text
        assert comm.allreduce(plan.sent_of(comm.rank)) == plan.words, text
        if other is not grid:
            other.free()


@pytest.mark.mpi(sizes=(4, 6, 8))
@pytest.mark.parametrize("node_memory", [False, None])
def test_random_products_are_numpys_and_move_the_words_of_their_plan(comm, node_memory):
    random = Random(comm.size)
    for number in range(CASES):
        check_product(comm, random_case(random, comm.size), number, node_memory)


@pytest.mark.mpi(sizes=(4, 6))
def test_random_products_on_two_grids_are_numpys_and_move_the_words_of_their_plan(comm):
    random = Random(100 + comm.size)
    for number in range(CASES):
        check_product(comm, random_case(random, comm.size, two_grids=True), number)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12), timeout=600)
@pytest.mark.parametrize("two_grids", [False, True])
def test_hundreds_of_random_products_are_numpys_and_move_the_words_of_their_plan(comm, two_grids):
    random = Random(1000 + comm.size)
    for number in range(30):
        check_product(comm, random_case(random, comm.size, two_grids), number)


# -- the plan alone ----------------------------------------------------------------------------------------------------------


def planned(case: Case, objective: str | None = None, with_c: bool = True):
    grid = Place(case.grids[0])
    return plan_any(
        case.a, case.b, case.m, case.n, case.k, grid, case.c if with_c else None, case.form, objective=objective or case.objective
    )


def moved(shape, layout, to, grid, points):
    """Words that each rank receives, by the library's own redistribution."""
    plan = Redistribution(shape, Placement(layout, grid, points), Placement(to, grid, points))
    return np.array([plan.words_of(rank) for rank in range(len(points))])


def test_words_of_a_plan_are_the_sums_of_redistributions_and_of_the_scatter():
    random = Random(5)
    for _ in range(60):
        case = random_case(random, random.choice([4, 6, 8, 12]))
        plan = planned(case)
        fetched = sum(np.array([fetch.words_of(rank) for rank in range(len(plan.space))]) for fetch in plan.fetches[0])
        delivered = [[step.words_of(rank) for rank in range(len(plan.space))] for step in plan.deliveries]
        fine = [prod(Placement(plan.c.layout, plan.space.shape, plan.space.points).local_shape(plan.c.shape, 0))]
        if plan.how.kind == "scattered" and plan.deliveries:
            source = plan.deliveries[0].source
            fine = [prod(source.local_shape(plan.c.shape, rank)) for rank in range(len(plan.space))]
        elif plan.how.kind == "scattered":
            here = Placement(plan.c.layout, plan.space.shape, plan.space.points)
            fine = [prod(here.local_shape(plan.c.shape, rank)) for rank in range(len(plan.space))]
        summed = (plan.summed - 1) * np.array(fine) if plan.how.kind == "scattered" else 0
        words = fetched + summed + np.array(delivered, int).reshape(-1, len(plan.space)).sum(0)
        assert [plan.words_of(rank) for rank in range(len(plan.space))] == np.broadcast_to(words, len(plan.space)).tolist()


def compute_layouts(axes):
    """Every way to give each axis to m, n or k, in every order."""
    for roles in product("mnk", repeat=len(axes)):
        given = [[axis for axis, role in zip(axes, roles, strict=True) if role == dim] for dim in "mnk"]
        yield from product(*(list(permutations(one)) for one in given))


def fewest_words(case: Case) -> int:
    """The words of the best compute layout, by redistributions alone: C natural, redistributed from either fine split, direct."""
    grid, best = Place(case.grids[0]), None
    points = [grid.coordinates_of(rank) for rank in range(grid.size)]
    a, b = (one if letter == "n" else one.transposed() for one, letter in zip((case.a, case.b), case.form, strict=True))
    for m, n, k in compute_layouts([axis for axis, size in grid.shape.items() if size > 1]):
        words = moved((case.m, case.k), a, Layout(m, k), grid.shape, points).sum()
        words += moved((case.k, case.n), b, Layout(k, n), grid.shape, points).sum()
        z, shape = prod(grid.shape[axis] for axis in k), (case.m, case.n)
        added = (z - 1) * case.m * case.n
        if case.c is not None:
            ends = [added + moved(shape, fine, case.c, grid.shape, points).sum() for fine in (Layout(m + k, n), Layout(m, n + k))]
            summands = [
                Layout(m, n, root_only=k, at={axis: (index,) for axis, index in zip(k, indices, strict=True)})
                for indices in product(*(range(grid.shape[axis]) for axis in k))
            ]
            ends.append(sum(moved(shape, one, case.c, grid.shape, points).sum() for one in summands))
            added = min(ends)
        best = words + added if best is None else min(best, words + added)
    return int(best)


@pytest.mark.parametrize("dealt", [False, True])
def test_by_words_no_compute_layout_moves_fewer(dealt):
    random, met = Random(3), 0
    while met < 25:
        case = random_case(random, random.choice([2, 4, 6, 8]), plain=not dealt)
        kinds = [isinstance(one, BlockCyclic) for one in (case.a, case.b, case.c)]
        met += 1
        plan, best = planned(case, "words"), fewest_words(case)
        assert plan.words <= best if any(kinds) else plan.words == best, f"{case}\n{plan}"


def sliced(case: Case) -> list[int]:
    """The words of stationary A, B and C, whose tiles of the others are fetched and whose summands go to C's owners."""
    grid = Place(case.grids[0])
    points = [grid.coordinates_of(rank) for rank in range(grid.size)]
    extents = {"m": case.m, "n": case.n, "k": case.k}
    a, b = (one if letter == "n" else one.transposed() for one, letter in zip((case.a, case.b), case.form, strict=True))
    held, found = {"mk": a, "kn": b, "mn": case.c}, []
    for names, layout in held.items():
        if layout.root_only:
            continue
        (third,) = set("mnk") - set(names)
        rest = tuple(axis for axis, size in grid.shape.items() if size > 1 and axis not in layout.axes)

        def indices(dim, point, names=names, layout=layout, third=third, rest=rest):
            if dim == third:
                return {
                    i for part in Layout(rest).runs((extents[dim],), grid.shape, point)[0] for i in range(part.start, part.stop)
                }
            runs = layout.runs(tuple(extents[one] for one in names), grid.shape, point)[names.index(dim)]
            return {i for part in runs for i in range(part.start, part.stop)}

        def owned(one, pair, point):
            runs = held[one].runs(tuple(extents[dim] for dim in pair), grid.shape, point)
            return [{i for part in dim for i in range(part.start, part.stop)} for dim in runs]

        words = 0
        for pair in ("mk", "kn"):
            for point in points:
                need, have = [indices(dim, point) for dim in pair], owned(pair, pair, point)
                words += len(need[0]) * len(need[1]) - len(need[0] & have[0]) * len(need[1] & have[1])
        along_k = rest if third == "k" else layout.dims[names.index("k")]
        z = prod(grid.shape[axis] for axis in along_k)
        for point in points:
            own, want = [indices(dim, point) for dim in "mn"], owned("mn", "mn", point)
            words += z * len(want[0]) * len(want[1]) - len(own[0] & want[0]) * len(own[1] & want[1])
        found.append(words)
    return found


def test_by_words_slicing_never_moves_fewer():
    random, met = Random(8), 0
    while met < 120:
        case = random_case(random, random.choice([4, 6, 8, 12]))
        slicings = [] if case.c is None else sliced(case)
        if slicings:
            met += 1
            plan = planned(case, "words")
            assert plan.words <= min(slicings), f"{case}\n{slicings}\n{plan}"


def test_by_seconds_no_other_layout_is_predicted_to_be_faster_and_the_table_is_in_order():
    random = Random(9)
    for _ in range(40):
        case = random_case(random, random.choice([4, 6, 8]))
        fastest, fewest = planned(case, "seconds"), planned(case, "words")
        assert fastest.seconds <= fewest.seconds
        assert fewest.is_even and (fewest.words <= fastest.words or not fastest.is_even)
        times = [fastest.seconds, *(one.seconds for one in fastest.others)]
        assert times == sorted(times) and len(fastest.others) <= 7
        assert fastest.compute_layout in str(fastest) and all(one.text in str(fastest) for one in fastest.others)


def test_a_free_c_moves_no_more_words_than_any_asked_for():
    random = Random(10)
    for _ in range(60):
        case = random_case(random, random.choice([4, 6, 8]), plain=True)
        assert planned(case, "words", with_c=False).words <= planned(case, "words").words


def test_what_cannot_be_planned_is_refused_and_numpys_sizes_are_sizes():
    grid, other = Place({"x": 2, "y": 2}), Place({"u": 3})
    for kind, words, options in (
        (LayoutError, "not of the same ranks", {"b_grid": other}),
        (ConfigError, "Pass both", {"out_grid": Place({"u": 4})}),
        (LayoutError, "names axis 'u'", {"out_layout": "m:u n"}),
        (ShapeError, "none of|two of the letters", {"form": "nx"}),
        (ConfigError, "objectives: seconds, words", {"objective": "bytes"}),
        (ConfigError, "int4 is not supported", {"dtype": "int4"}),
    ):
        with pytest.raises(kind, match=words):
            plan_any("m:x k", "k n", 8, 6, 4, grid, **options)
    with pytest.raises(ShapeError, match="sizes are whole numbers"):
        plan_any("m:x k", "k n", 8.0, 6, 4, grid)
    large = plan_any("m:x k", "k n:x", *map(np.int32, (60_000, 60_000, 60_000)), grid, "m n", objective="words")
    assert large.words == plan_any("m:x k", "k n:x", 60_000, 60_000, 60_000, grid, "m n", objective="words").words > 2**32


PLANS = """
import sys
sys.path.insert(0, sys.argv[1])
from random import Random
from any_layouts import random_case
from summa3d.comm.grid import Place
from summa3d.gemm.any_layout.planned import plan_any
random = Random(4)
for _ in range(30):
    case = random_case(random, random.choice([4, 6, 8, 12]))
    print(plan_any(case.a, case.b, case.m, case.n, case.k, Place(case.grids[0]), case.c, case.form, objective=case.objective))
"""


def test_plans_do_not_depend_on_the_hashes_of_texts(request):
    folder = str(request.path.parent.parent)
    texts = jobs.printed_by_hash_seeds(PLANS, folder)
    assert texts[0] == texts[1] and texts[0].count("→") >= 30


# -- what may be asked -------------------------------------------------------------------------------------------------------


def pair(grid, kind, dtype, seed=0, shape=(11, 7, 13), layouts=("m:x k @y=0", "k:y n"), transposed=False):
    """op(A) and op(B) as plain numpy, and as matrices of a kind and dtype in layouts that no algorithm has."""
    m, n, k = shape
    values = numbers(dtype, (m, k), seed, 1), numbers(dtype, (k, n), seed, 2)
    wholes = (array(kind, dtype, one, transposed) for one in values)
    return values, [DistMatrix.from_global(whole, grid, layout) for whole, layout in zip(wholes, layouts, strict=True)]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int32", "int64"])
def test_every_dtype_with_factors_and_an_output_in_another_layout(comm, make_grid, dtype, kind):
    grid = make_grid(x=2, y=2)
    (left, right), (a, b) = pair(grid, kind, dtype)
    alpha, beta = (2, 3) if not dtype.startswith("complex") else (2 - 1j, 1j)
    before = numbers(dtype, (11, 7), 3)
    small = [array(kind, dtype, one // 4 if dtype in ("float16", "bfloat16") else one) for one in (left, right)]
    if dtype in ("float16", "bfloat16"):
        left, right = left // 4, right // 4
        a, b = (DistMatrix.from_global(one, grid, layout) for one, layout in zip(small, (a.layout, b.layout), strict=True))
    for layout in ("m:y n @x=0", "m n:(y,x)", "m n"):
        out = DistMatrix.from_global(array(kind, dtype, before), grid, layout)
        found = matmul(a, b, algorithm="any", alpha=alpha, beta=beta, out=out)
        assert found is out and out.block.dtype == a.block.dtype
        assert np.array_equal(plain(out.to_global()), alpha * (left @ right) + beta * before)
        free = matmul(a, b, algorithm="any", alpha=alpha, out_layout=layout)
        assert str(free.layout) == str(Layout(layout)) and np.array_equal(plain(free.to_global()), alpha * (left @ right))


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("objective", ["seconds", "words"])
@pytest.mark.parametrize("layouts", [("m k:(x,y)", "k:(x,y) n"), ("m k:x", "k:x n:y"), ("m:x k", "k n:y")])
def test_sums_of_16_bits_are_rounded_once(comm, make_grid, dtype, objective, layouts):
    grid, random = make_grid(x=2, y=2), np.random.default_rng(6)
    whole = [array("torch", dtype, random.standard_normal(shape)) for shape in ((16, 96), (96, 12))]
    old = array("torch", dtype, random.standard_normal((16, 12)))
    a, b = (DistMatrix.from_global(one, grid, layout) for one, layout in zip(whole, layouts, strict=True))
    exact = whole[0].double() @ whole[1].double()
    for how in ("m n @x=0,y=0", "m:(y,x) n", "m n"):
        c = matmul(a, b, algorithm="any", out_layout=how, objective=objective).to_global()
        out = DistMatrix.from_global(old, grid, how)
        matmul(a, b, algorithm="any", alpha=0.5, beta=1.5, out=out, objective=objective)
        for found, want in ((c, exact), (out.to_global(), 0.5 * exact + 1.5 * old.double())):
            near = want.float().to(found.dtype)
            apart = (found.double() - want).abs() / (near.double() - want).abs().clamp(min=2.0**-16)
            assert apart.max() < 1.1, "as near as one rounding is"


@pytest.mark.mpi(sizes=(4,))
def test_a_sum_over_two_axes_leaves_parts_that_nest_as_those_of_its_layout(comm, make_grid):
    grid, random = make_grid(x=2, y=2), np.random.default_rng(6)
    for m in (2, 6, 10):
        left, right = random.standard_normal((m, 640)), random.standard_normal((640, 1))
        a, b = DistMatrix.from_global(left, grid, "m k:(x,y)"), DistMatrix.from_global(right, grid, "k:(x,y) n")
        c = matmul(a, b, algorithm="any", objective="words")
        assert str(c.layout) == "m:(x,y) n" and np.allclose(c.to_global(), left @ right, rtol=0, atol=1e-11)
        assert c.block.shape[0] == c.layout.local_shape(c.shape, grid.shape, grid.coordinates)[0]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("beta", [0, 0.0])
def test_with_beta_of_zero_what_c_held_is_never_read(comm, make_grid, beta):
    grid = make_grid(x=2, y=2)
    (left, right), (a, b) = pair(grid, "numpy", "float64")
    for layout in ("m:y n @x=0", "m n"):
        out = DistMatrix.from_global(np.full((11, 7), np.nan), grid, layout)
        matmul(a, b, algorithm="any", beta=beta, out=out)
        assert np.array_equal(out.to_global(), left @ right)


@pytest.mark.mpi(sizes=(4,))
def test_conjugates_and_blocks_in_any_memory_order(comm, make_grid):
    grid = make_grid(x=2, y=2)
    (left, right), (a, b) = pair(grid, "numpy", "complex128", transposed=True)
    a.block, b.block = np.asfortranarray(a.block), np.asfortranarray(b.block)
    assert np.array_equal(matmul(a, b).to_global(), left @ right)
    turned = DistMatrix.from_global(left.conj().T.astype(np.complex128), grid, "k m:x @y=1")
    out = DistMatrix.from_global(np.zeros((11, 7), np.complex128, order="F"), grid, BlockCyclic(("y", 2), ("x", 3)))
    out.block = np.asfortranarray(out.block)
    assert np.array_equal(matmul(turned, b, "cn", out=out).to_global(), left @ right)


@pytest.mark.mpi(sizes=(1, 4, 6))
def test_empty_matrices(comm, make_grid):
    grid = make_grid(x=1 if comm.size == 1 else 2, y=max(1, comm.size // 2))
    for m, n, k in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (1, 1, 1), (0, 0, 0)):
        a, b = (
            DistMatrix.from_global(np.ones(shape), grid, layout) for shape, layout in (((m, k), "m k:(y,x)"), ((k, n), "k n:x"))
        )
        for layout in (None, "m n @x=0", "m:(x,y) n"):
            c = matmul(a, b, algorithm="any", out_layout=layout)
            assert np.array_equal(c.to_global(), np.full((m, n), float(k)))


@pytest.mark.mpi(sizes=(6,))
def test_ranks_outside_a_grid_call_too_and_hold_nothing(comm):
    left, right = np.arange(77.0).reshape(7, 11) % 5, np.arange(55.0).reshape(11, 5) % 3
    with Grid(comm, {"x": 2, "y": 2}, ranks=[4, 1, 2, 5]) as part, Grid(comm, {"u": 3, "v": 2}, order="uv") as all_of_them:
        a, b = DistMatrix.from_global(left, part, "m:x k"), DistMatrix.from_global(right, part, "k n @y=1")
        c = matmul(a, b, algorithm="any")
        assert c.layout == matmul(a, b, algorithm="any").layout and (part.inside or c.block.size == 0)
        assert not part.inside or np.array_equal(c.to_global(), left @ right)
        for first, second in ((part, all_of_them), (all_of_them, part)):
            a = DistMatrix.from_global(left, first, "m:x k" if first is part else "m:v k:u")
            b = DistMatrix.from_global(right, second, "k n @y=1" if second is part else "k[2] n:u[1]")
            for layout in (None, "m n:y" if first is part else "m:(u,v) n"):
                c = matmul(a, b, out_layout=layout)
                assert c.grid is first and (layout is None or str(c.layout) == layout)
                assert np.array_equal(c.redistribute("m n", all_of_them).block, left @ right)


@pytest.mark.mpi(sizes=(4,))
def test_c_may_lie_on_a_third_grid(comm, make_grid):
    first, second, third = make_grid(x=2, y=2), make_grid(u=4), make_grid(p=1, q=4, order="q,p")
    left, right = np.arange(77.0).reshape(7, 11) % 5, np.arange(55.0).reshape(11, 5) % 3
    a, b = DistMatrix.from_global(left, first, "m k:(x,y)"), DistMatrix.from_global(right, second, "k n:u")
    out = DistMatrix.from_global(np.ones((7, 5)), third, "m n:q")
    assert matmul(a, b, beta=-1, out=out) is out and np.array_equal(out.to_global(), left @ right - 1)


# -- what stays as it was ----------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(8,))
def test_what_an_algorithm_has_keeps_its_plan_and_words_and_names_ask_for_it_or_for_any(comm, make_grid):
    grid, plan = make_grid(x=2, y=2, z=2), CuboidPlan("nn", 23, 17, 19)
    left, right = np.random.default_rng(1).standard_normal((23, 19)), np.random.default_rng(2).standard_normal((19, 17))
    a, b = DistMatrix.from_global(left, grid, plan.a_layout), DistMatrix.from_global(right, grid, plan.b_layout)
    words = volume.of_plan(plan, grid.shape).words_of(grid.coordinates)
    for asked in ({}, {"algorithm": "cuboid"}, {"out_layout": plan.c_layout}, {"out_layout": str(plan.c_layout)}):
        with grid.ledger.watch() as moved:
            c = matmul(a, b, **asked)
        assert c.layout == plan.c_layout and moved.words == words and not plans_of(grid)
    assert np.allclose(matmul(a, b, algorithm="any").to_global(), left @ right, rtol=0, atol=1e-12) and len(plans_of(grid)) == 1
    c = matmul(a, b, out_layout="m n:(z,y,x)")
    assert str(c.layout) == "m n:(z,y,x)" and np.allclose(c.to_global(), left @ right, rtol=0, atol=1e-12)


@pytest.mark.mpi(sizes=(4,))
def test_a_plan_is_found_once_and_a_product_that_comes_again_gives_the_same_bits(comm, make_grid, monkeypatch):
    grid, random = make_grid(x=2, y=2, check=False), np.random.default_rng(3)
    whole = [random.standard_normal(shape) for shape in ((16, 96), (96, 12))]
    a, b = (DistMatrix.from_global(one, grid, layout) for one, layout in zip(whole, ("m k:(x,y)", "k n:x"), strict=True))
    first = a @ b
    monkeypatch.setattr("summa3d.gemm.binding.plan_any", None)
    control = grid.ledger.control
    again = a @ b
    assert np.array_equal(first.block, again.block) and first.layout == again.layout and grid.ledger.control == control


@pytest.mark.mpi(sizes=(4,))
def test_workspace_is_what_the_plan_says(comm):
    random = Random(12)
    for number in range(25):
        case = random_case(random, comm.size)
        left, right = case.operands(number)
        for dtype in ("float64", "float16"):
            with Grid(comm, case.grids[0], node_memory=False) as grid:
                a = DistMatrix.from_global(stored(left, case.form[0]).astype(dtype), grid, case.a)
                b = DistMatrix.from_global(stored(right, case.form[1]).astype(dtype), grid, case.b)
                grid.ledger.reset_peak()
                matmul(a, b, case.form, "any", out_layout=case.c, objective=case.objective)
                (plan,) = plans_of(grid)
                here = np.dtype(dtype).itemsize * plan.workspace_of(comm.rank)
                assert grid.ledger.workspace_peak == here, f"{case}\n{plan}\n{dtype}"
                assert grid.ledger.workspace_bytes == 0


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("asked", ["out_layout", "objective"])
def test_ranks_that_ask_for_different_things_are_told_so(comm, check, asked):
    with Grid(comm, {"x": 2}, check=check) as grid:
        a = DistMatrix.from_global(np.ones((4, 4)), grid, "m:x k")
        given = {"out_layout": ("m:x n", "m n:x"), "objective": ("seconds", "words")}[asked][comm.rank]
        with pytest.raises(AgreementError, match=f"(?s)do not agree on matmul.*{asked}: .* on rank 0; .* on rank 1"):
            matmul(a, a, algorithm="any", **{asked: given})


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_is_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(x=2, y=2)
    a, b = (DistMatrix.from_global(np.ones(shape), grid, "0:x 1") for shape in ((4, 6), (6, 5)))
    out = DistMatrix.from_global(np.ones((4, 5)), grid, "m n:y")
    half = comm.Split(comm.rank // 2)
    with Grid(half, {"x": 2}) as foreign, grid.ledger.watch() as moved:
        far = DistMatrix.from_global(np.ones((6, 5)), foreign, "k n")
        for attempt, kind, words in (
            (lambda: matmul(a, a, algorithm="any"), ShapeError, "inner sizes 6 and 4"),
            (lambda: matmul(a, b, beta=1), ShapeError, "beta = 1 needs the block of C"),
            (lambda: matmul(a, b, alpha=1j), ShapeError, "alpha = 1j is complex"),
            (lambda: matmul(a, b, out_layout="m:z n"), LayoutError, "names axis 'z'"),
            (lambda: matmul(a, b, out_layout="m:x n @y=2"), LayoutError, "held at index 2 of axis y"),
            (lambda: matmul(a, b, out_layout="m"), LayoutError, "describes 1 dims"),
            (lambda: matmul(a, b, out=out, out_layout="m:y n"), LayoutError, "out_layout is m:y n"),
            (lambda: matmul(a, b, objective="time"), ConfigError, "objectives: seconds, words"),
            (lambda: matmul(a, b, algorithm="any", panel=2), ConfigError, "panel"),
            (lambda: matmul(a, far), LayoutError, "no common communicator"),
        ):
            with pytest.raises(kind) as caught:
                attempt()
            assert words in str(caught.value), str(caught.value)
    half.Free()
    assert moved.calls == 0 and np.array_equal((a @ b).to_global(), np.full((4, 5), 6.0))


@pytest.mark.parametrize("rank", range(6))
def test_a_dry_grid_counts_the_words_of_the_plan(rank):
    pytest.importorskip("torch")
    from summa3d.dry.place import DryPlace

    random = Random(2)
    for _ in range(10):
        case = random_case(random, 6)
        grid = DryPlace(case.grids[0], rank)
        a, b = (
            DistMatrix(np.zeros(layout.local_shape(shape, grid.shape, grid.coordinates)), layout, grid, shape)
            for layout, shape in (
                (case.a, (case.m, case.k) if case.form[0] == "n" else (case.k, case.m)),
                (case.b, (case.k, case.n) if case.form[1] == "n" else (case.n, case.k)),
            )
        )
        c = matmul(a, b, case.form, "any", out_layout=case.c, objective=case.objective)
        (plan,) = plans_of(grid)
        total = grid.ledger.total()
        assert (total.words, total.messages) == (plan.words_of(rank), plan.messages_of(rank)) and c.layout == plan.c.layout
        assert matmul(a, b, case.form, "any", objective=case.objective, beta=2, out=c) is c
        assert grid.ledger.total().words == sum(one.words_of(rank) for one in plans_of(grid))
