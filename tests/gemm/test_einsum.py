"""Products of tensors by letters, in any layouts: numbers of numpy's einsum, words, messages and workspace of the plan."""

from __future__ import annotations

from itertools import permutations, product
from math import prod
from random import Random

import numpy as np
import pytest
from any_layouts import LetteredCase, random_lettered
from kinds import array, numbers, plain

from summa3d import einsum, matmul
from summa3d.comm.grid import Grid, Place
from summa3d.errors import AgreementError, ConfigError, LayoutError, ShapeError
from summa3d.gemm import DistMatrix, DistTensor, plan_any, plan_einsum
from summa3d.gemm.binding import Binding
from summa3d.layout import BlockCyclic, Layout
from summa3d.layout.redistribute import Placement, Redistribution

CASES = 8
"""Products at each world size; the nightly ones take more."""


def plans_of(grid):
    """The plans that a grid has kept."""
    return [bound.product.plan for bound in grid.job.kept[grid].get(Binding, {}).values() if bound.product is not None]


def check_einsum(comm, case: LetteredCase, seed: int, node_memory=False) -> None:
    """Multiply, and compare: numbers with numpy's, words, messages and workspace of each rank with the plan's."""
    left, right = case.operands(seed)
    with Grid(comm, case.grids[0], order=case.orders[0], node_memory=node_memory) as grid:
        other = grid if case.orders[1] is None else Grid(comm, case.grids[1], order=case.orders[1], node_memory=node_memory)
        a, b = DistTensor.from_global(left, grid, case.a), DistTensor.from_global(right, other, case.b)
        grid.ledger.reset_peak()
        with grid.ledger.watch() as here, other.ledger.watch() as there:
            c = einsum(case.subscripts, a, b, case.c, objective=case.objective)
        moved = np.array([here.words, here.messages]) + (0 if other is grid else np.array([there.words, there.messages]))
        peak, (plan,) = grid.ledger.workspace_peak, plans_of(grid)
        text = f"{case}\n{plan}"
        assert c.grid is grid and c.layout == (case.c or plan.c.layout), text
        assert np.allclose(c.to_global(), np.einsum(case.subscripts, left, right), rtol=0, atol=1e-11), text
        assert moved.tolist() == [plan.words_of(comm.rank), plan.messages_of(comm.rank)], text
        assert comm.allreduce(plan.sent_of(comm.rank)) == plan.words, text
        if other is not grid:
            other.free()
        elif node_memory is False:
            assert peak == 8 * plan.workspace_of(comm.rank), text
            del c
            assert grid.ledger.workspace_bytes == 0


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8))
def test_random_products_are_numpys_and_move_the_words_of_their_plan(comm):
    random = Random(comm.size)
    for number in range(CASES):
        check_einsum(comm, random_lettered(random, comm.size), number)


@pytest.mark.mpi(sizes=(4, 6))
def test_random_products_on_two_grids_and_in_a_nodes_memory_are_numpys_and_move_the_words_of_their_plan(comm):
    random = Random(100 + comm.size)
    for number in range(CASES // 2):
        check_einsum(comm, random_lettered(random, comm.size, two_grids=True), number)
        check_einsum(comm, random_lettered(random, comm.size), number, None)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12), timeout=600)
@pytest.mark.parametrize("two_grids", [False, True])
def test_hundreds_of_random_products_are_numpys_and_move_the_words_of_their_plan(comm, two_grids):
    random = Random(1000 + comm.size)
    for number in range(30 if not two_grids else 10):
        check_einsum(comm, random_lettered(random, comm.size, two_grids), number)


# -- the plan alone ----------------------------------------------------------------------------------------------------------


def planned(case: LetteredCase, objective: str | None = None):
    return plan_einsum(
        case.subscripts, case.a, case.b, case.extents, Place(case.grids[0]), case.c, objective=objective or case.objective
    )


def fewest_words(case: LetteredCase) -> int:
    """The words of the best compute layout by redistributions alone: C natural, redistributed from any fine split, direct."""
    grid, letters, best = Place(case.grids[0]), list(case.extents), []
    points = [grid.coordinates_of(rank) for rank in range(grid.size)]
    a, b, c = case.names

    def moved(names, layout, to):
        shape = tuple(case.extents[letter] for letter in names)
        plan = Redistribution(shape, Placement(layout, grid.shape, points), Placement(to, grid.shape, points))
        return sum(plan.words_of(rank) for rank in range(grid.size))

    axes = [axis for axis, size in grid.shape.items() if size > 1]
    for roles in product(letters, repeat=len(axes)):
        given = [[axis for axis, role in zip(axes, roles, strict=True) if role == letter] for letter in letters]
        for orders in product(*(list(permutations(one)) for one in given)):
            own = dict(zip(letters, orders, strict=True))
            words = moved(a, case.a, Layout(*(own[x] for x in a))) + moved(b, case.b, Layout(*(own[x] for x in b)))
            inner = sum((own[letter] for letter in a if letter not in c), ())
            added = (prod(grid.shape[axis] for axis in inner) - 1) * prod(case.extents[letter] for letter in c)
            if case.c is None:
                best.append(words + added)
                continue
            for fine in c:
                best.append(words + added + moved(c, Layout(*(own[x] + (inner if x == fine else ()) for x in c)), case.c))
            indices = product(*(range(grid.shape[axis]) for axis in inner))
            at = ({axis: (index,) for axis, index in zip(inner, one, strict=True)} for one in indices)
            best.append(words + sum(moved(c, Layout(*(own[x] for x in c), at=one), case.c) for one in at))
    return min(best)


def test_by_words_no_compute_layout_moves_fewer():
    random, met = Random(3), 0
    while met < 20:
        case = random_lettered(random, random.choice([2, 4, 6]), plain=True)
        axes = sum(size > 1 for size in case.grids[0].values())
        if len(case.extents) ** axes > 40:
            continue
        met += 1
        plan = planned(case, "words")
        assert plan.words == fewest_words(case), f"{case}\n{plan}"


def test_of_more_layouts_than_are_tried_the_plan_is_still_exact_and_gives_axes_to_long_letters():
    grid = Place(dict.fromkeys("uvwxyz", 2))
    extents = {"b": 8, "h": 16, "s": 64, "t": 48, "d": 32, "e": 2}
    layouts = ("b:u h:v s:w d e", "b h:(x,v) t d:y e:z")
    plan = plan_einsum("bhsde,bhtde->bhst", *layouts, extents, grid, objective="words")
    moved = sum(fetch.words_of(rank) for fetch in plan.fetches[0] for rank in range(64))
    assert plan.is_even and plan.words == moved + (plan.summed - 1) * prod(extents[letter] for letter in "bhst")


def test_letters_of_matrices_have_the_plan_of_matmul():
    grid, layouts = Place({"x": 2, "y": 3}), ("m:x k @y=0", "k:y n:x")
    sizes = {"m": 11, "n": 7, "k": 13}
    one, other = plan_einsum("mk,kn->mn", *layouts, sizes, grid), plan_any(*layouts, 11, 7, 13, grid)
    assert (one.summary, one.others, one.bound, one.seconds) == (other.summary, other.others, other.bound, other.seconds)
    turned = plan_einsum("km,kn->mn", "k m:x @y=0", "k:y n:x", sizes, grid)
    assert turned.words == plan_any("k m:x @y=0", "k:y n:x", 11, 7, 13, grid, form="tn").words


def test_the_bound_of_a_batch_is_that_of_whole_entries_and_a_part_of_one():
    cube = {"m": 8, "n": 8, "k": 8}
    half = 3 * (8**3 / 2) ** (2 / 3)  # words that half an entry reads and writes
    for entries, axes, layouts in (
        (2, {"x": 2, "y": 2}, ("b:x m:y k", "b:x k n:y", "b:x m n:y")),  # each of 4 ranks half an entry, and holds half of one
        (3, {"x": 2}, ("b m:x k", "b k n:x", "b m n:x")),  # each of 2 ranks one and a half
    ):
        share = entries / prod(axes.values())
        plan = plan_einsum("bmk,bkn->bmn", *layouts[:2], {"b": entries, **cube}, Place(axes), layouts[2], objective="words")
        assert plan.bound == pytest.approx(int(share) * 3 * 64 + half - share * 3 * 64) and plan.bound <= plan.max_words
    copies = plan_einsum("bmk,bkn->bmn", "b m k", "b k n", {"b": 2, **cube}, Place({"x": 4}))
    assert copies.bound == 0


# -- what may be asked -------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex128", "int32"])
def test_every_dtype_and_order_of_letters(comm, make_grid, dtype, kind):
    grid = make_grid(x=2, y=2)
    sizes = {"b": 3, "m": 4, "n": 5, "k": 2}
    for subscripts in ("bmk,bkn->bmn", "bkm,bkn->bnm", "mkb,knb->mnb", "mkb,kb->bm", "kbm,nkb->nbm", "bm,bn->bmn"):
        names = subscripts.replace("->", ",").split(",")
        left, right = (numbers(dtype, [sizes[x] for x in one], 1 + at) for at, one in enumerate(names[:2]))
        if dtype in ("float16", "bfloat16"):
            left, right = left // 2, right // 2
        layouts = (Layout(*([("x",)] + [()] * (len(one) - 1))) for one in names[:2])
        a, b = (
            DistTensor.from_global(array(kind, dtype, one), grid, own) for one, own in zip((left, right), layouts, strict=True)
        )
        for layout in (None, Layout(("y",), *([()] * (len(names[2]) - 1)))):
            c = einsum(subscripts, a, b, layout)
            assert c.block.dtype == a.block.dtype and np.array_equal(plain(c.to_global()), np.einsum(subscripts, left, right))


@pytest.mark.mpi(sizes=(4,))
def test_large_entries_of_a_batch_are_multiplied_one_by_one_and_small_ones_together(comm, make_grid, monkeypatch):
    grid, random = make_grid(x=4), np.random.default_rng(1)
    calls = []
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda *given, **options: calls.append(given[0].ndim) or matmul(*given, **options))
    for size in (5, 200):
        left, right = random.standard_normal((8, size, size)), random.standard_normal((8, size, size))
        a, b = (DistTensor.from_global(one, grid, "b:x m k") for one in (left, right))
        calls.clear()
        c = einsum("bmk,bkn->bmn", a, b, "b:x m n")
        assert 3 not in calls or size == 5
        assert np.allclose(c.to_global(), np.einsum("bmk,bkn->bmn", left, right), rtol=0, atol=1e-10)


@pytest.mark.mpi(sizes=(4,))
def test_matrices_may_be_dealt_out_and_c_of_two_dims_is_a_matrix(comm, make_grid):
    grid, random = make_grid(x=2, y=2), np.random.default_rng(2)
    left, right = random.standard_normal((7, 11)), random.standard_normal((3, 11, 5))
    a = DistMatrix.from_global(left, grid, BlockCyclic(("x", 2), ("y", 3)))
    b = DistTensor.from_global(right, grid, "b k:(y,x) n")
    c = einsum("mk,bkn->bmn", a, b)
    assert type(c) is DistTensor and np.allclose(c.to_global(), np.einsum("mk,bkn->bmn", left, right), rtol=0, atol=1e-12)
    for layout in (None, "b m:x @y=1", "b:y[2] m:x[1]"):
        matrix = einsum("mk,bk->bm", a, DistMatrix.from_global(right[:, :, 0].copy(), grid, "b:y k"), layout)
        assert type(matrix) is DistMatrix
        assert np.allclose(matrix.to_global(), right[:, :, 0] @ left.T, rtol=0, atol=1e-12)


@pytest.mark.mpi(sizes=(6,))
def test_ranks_outside_a_grid_call_too_and_hold_nothing(comm):
    left, right = np.arange(24.0).reshape(2, 3, 4), np.arange(40.0).reshape(2, 4, 5)
    want = np.einsum("bmk,bkn->bmn", left, right)
    with Grid(comm, {"x": 2, "y": 2}, ranks=[4, 1, 2, 5]) as part, Grid(comm, {"u": 6}) as all_of_them:
        a, b = DistTensor.from_global(left, part, "b:x m k"), DistTensor.from_global(right, part, "b k n @y=1")
        c = einsum("bmk,bkn->bmn", a, b)
        assert c.block.size if part.inside else c.block.shape == (0, 0, 0)
        assert not part.inside or np.array_equal(c.to_global(), want)
        far = DistTensor.from_global(right, all_of_them, "b k n:u")
        for first, second in ((a, far), (DistTensor.from_global(left, all_of_them, "b m:u k"), b)):
            c = einsum("bmk,bkn->bmn", first, second)
            assert c.grid is first.grid and np.array_equal(c.redistribute("b m n", all_of_them).block, want)


@pytest.mark.mpi(sizes=(4,))
def test_a_plan_is_found_once(comm, make_grid, monkeypatch):
    grid = make_grid(x=2, y=2, check=False)
    a, b = (DistTensor.from_global(np.ones(shape), grid, "b:x y z") for shape in ((2, 3, 4), (2, 4, 5)))
    first = einsum("bmk,bkn->bmn", a, b)
    monkeypatch.setitem(einsum.__globals__, "plan_einsum", None)
    control = grid.ledger.control
    again = einsum("bmk, bkn -> bmn", a, b)
    assert np.array_equal(first.block, again.block) and first.layout == again.layout and grid.ledger.control == control


@pytest.mark.mpi(sizes=(6,))
def test_summands_that_are_sent_are_added_one_at_a_time(comm):
    left, right = np.arange(15.0).reshape(3, 5), np.arange(15.0).reshape(3, 5)
    with Grid(comm, {"z": 6}, node_memory=False) as grid:
        a, b = DistTensor.from_global(left, grid, "k:z b"), DistTensor.from_global(right, grid, "k:z b")
        grid.ledger.reset_peak()
        c = einsum("kb,kb->b", a, b, "b @z=3", objective="words")
        peak, (plan,) = grid.ledger.workspace_peak, plans_of(grid)
        assert plan.how.kind == "direct" and plan.summed == 6 and peak == 8 * plan.workspace_of(comm.rank)
        assert np.array_equal(c.to_global(), (left * right).sum(0))


# -- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(4,))
def test_what_cannot_be_is_refused_before_anything_moves(comm, make_grid):
    grid = make_grid(x=2, y=2)
    a, b = (DistTensor.from_global(np.ones(shape), grid, "0:x 1 2:y") for shape in ((2, 3, 4), (2, 4, 5)))
    matrix = DistMatrix.from_global(np.ones((4, 4)), grid, "m:x k")
    half = comm.Split(comm.rank // 2)
    with Grid(half, {"x": 2}) as foreign, grid.ledger.watch() as moved:
        far = DistTensor.from_global(np.ones((2, 4, 5)), foreign, "b k n")
        for subscripts, operands, options, kind, words in (
            ("bmk,bkn", (a, b), {}, ShapeError, "says what C is"),
            ("bmk,bkn,kn->bmn", (a, b), {}, ShapeError, "takes two operands"),
            ("b...k,bkn->bn", (a, b), {}, ShapeError, "a letter for each dim"),
            ("bmk,bkn->", (a, b), {}, ShapeError, "C is ''"),
            ("bmm,bmn->bn", (a, b), {}, ShapeError, "A has m twice"),
            ("bmk,bkn->bmq", (a, b), {}, ShapeError, "C has q, which neither"),
            ("bmk,bkn->bn", (a, b), {}, ShapeError, "m is in A alone, and not in C. Sum A over it first"),
            ("bmk,bkn->bmn", (a, a), {}, ShapeError, "k is 4 in A (2, 3, 4) and 3 in B (2, 3, 4)"),
            ("mk,bkn->bmn", (a, b), {}, ShapeError, "A has 2 letters"),
            (5, (a, b), {}, ShapeError, "not 5"),
            ("bmk,bkn->bmn", (a, np.ones((2, 4, 5))), {}, ShapeError, "b is a ndarray; einsum takes DistTensor"),
            (
                "bmk,bkn->bmn",
                (a, DistTensor(b.block.astype("f4"), b.layout, grid, b.shape)),
                {},
                ShapeError,
                "must have one dtype",
            ),
            ("bmk,bkn->bmn", (a, b), {"out_layout": "b:z m n"}, LayoutError, "names axis 'z'"),
            ("bmk,bkn->bmn", (a, b), {"out_layout": "m n"}, LayoutError, "describes 2 dims"),
            ("bmk,bkn->bmn", (a, b), {"out_layout": "m:x[2] n:y[2]"}, LayoutError, "matrices alone can be"),
            ("bmk,bkn->bmn", (a, b), {"objective": "time"}, ConfigError, "objectives: seconds, words"),
            ("bmk,bkn->bmn", (a, far), {}, LayoutError, "no common communicator"),
        ):
            with pytest.raises(kind) as caught:
                einsum(subscripts, *operands, **options)
            assert words in str(caught.value), str(caught.value)
        with pytest.raises(ShapeError, match="matmul takes matrices"):
            matmul(matrix, a)
    half.Free()
    assert moved.calls == 0 and einsum("bmk,bkn->bmn", a, b).shape == (2, 3, 5)
    with pytest.raises(ShapeError, match="k is None; each letter has a size"):
        plan_einsum("mk,kn->mn", "m k", "k n", {"m": 2, "n": 3}, grid)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("check", [False, True])
def test_ranks_that_ask_for_different_things_are_told_so(comm, check):
    with Grid(comm, {"x": 2}, check=check) as grid:
        a = DistTensor.from_global(np.ones((4, 4, 4)), grid, "b:x m k")
        for one in ({"subscripts": ("bmk,bkn->bmn", "bmk,bkn->bnm")}, {"out_layout": ("b:x m n", "b m:x n")}):
            ((name, given),) = one.items()
            options = {"subscripts": "bmk,bkn->bmn", name: given[comm.rank]}
            with pytest.raises(AgreementError, match=f"(?s)do not agree on einsum.*{name}: .* on rank 0; .* on rank 1"):
                einsum(a=a, b=a, **options)


@pytest.mark.mpi(sizes=(2,))
def test_a_rank_that_refuses_is_heard_by_the_others(comm, make_grid):
    grid = make_grid(x=2)
    a = DistTensor.from_global(np.ones((4, 4, 4)), grid, "b:x m k")
    if comm.rank == 0:
        a.block = a.block[:1]
    with pytest.raises(AgreementError, match="gives blocks"):
        einsum("bmk,bkn->bmn", a, a)
