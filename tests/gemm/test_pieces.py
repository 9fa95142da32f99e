"""Products in pieces: right on every grid, with the words of the product in one piece and the messages of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from cuboids import FORMS, GRIDS, RAGGED, check_product, wholes

from summa3d.cluster import load
from summa3d.comm.grid import Place
from summa3d.dry.place import NODE_RULE
from summa3d.dtypes import dtype_of
from summa3d.errors import AgreementError, ConfigError, ShapeError
from summa3d.gemm import Cuboid, CuboidPlan, DistMatrix, matmul, volume
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.gemm.cost.machine import Machine
from summa3d.gemm.pieces import schedule
from summa3d.gemm.pieces.schedule import SLABS, is_crosswise, pieces_of, rounds, slabs
from summa3d.gemm.pieces.timing import best_pieces, pieces_on, predicted, seconds_of, steps_of
from summa3d.layout import distribute, split_sizes
from summa3d.nn.overlap import Overlap

SMALL = 48
"""m·n·k of a local product that these tests do not divide into slabs, far fewer than where it pays."""


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch):
    """Local products of a few rows are divided into slabs, too."""
    monkeypatch.setattr(schedule, "SMALLEST_SLAB", SMALL)


@pytest.mark.mpi(sizes=(2, 3, 4, 6, 8, 12))
def test_every_form_on_every_grid_is_right_and_costs_its_formula(comm, make_grid):
    turns = [(1, 0, False), (-1.5, 0, True), (1, 1, True), (0.5, -2, True), (2, 0, False)]
    for turn, (x, y, z) in enumerate(GRIDS[comm.size]):
        grid = make_grid(x=x, y=y, z=z, check=comm.size == 4, node_memory=False)
        for number, form in enumerate(FORMS):
            m, n, k = RAGGED[(turn + number + comm.size) % len(RAGGED)]
            fine = {"a_fine": number // 2, "b_fine": number % 2, "c_fine": turn % 2}
            plan = CuboidPlan(form, m, n, k, pieces=2 + (turn + number) % 3, **fine)
            check_product(grid, plan, "numpy", "float64", *turns[(turn + number) % len(turns)])


ACROSS = {"k": (41, 67, 13), "m": (13, 41, 97), "n": (41, 13, 97)}
"""Dim that an axis splits → m, n, k of a product whose pieces are cut across it."""


@pytest.mark.mpi(sizes=(3, 6))
@pytest.mark.parametrize(("kind", "dtype"), [("numpy", "float64"), ("torch", "bfloat16")])
def test_pieces_across_the_split_dim_are_right_and_cost_their_formula(comm, make_grid, kind, dtype):
    for number, (form, operand, fine) in enumerate(product(FORMS, "abc" if comm.size == 3 else "ab", (0, 1))):
        shape = {"x": 1, "y": 1, "z": comm.size // 3, {"a": "y", "b": "x", "c": "z"}[operand]: 3}
        plan = CuboidPlan(form, 1, 1, 1, **{f"{operand}_fine": fine})
        m, n, k = ACROSS[plan.fine_dims[operand]]
        plan = replace(plan, m=m, n=n, k=k, pieces=2 + number % 3, c_fine=fine if operand == "c" else number % 2)
        assert is_crosswise(plan, operand, shape), (form, operand, fine)
        check_product(make_grid(**shape, node_memory=False), plan, kind, dtype, -1.5, number % 2, True)


def test_pieces_are_cut_across_the_split_dim_where_products_pass_less_for_what_is_copied():
    """Cut along k, each piece passes all of C; along n, all of A. Where both ways pass as much, rows need no copies."""
    for form, operand, sizes, expected in (
        ("tn", "a", (2048, 12800, 1024), True),
        ("nn", "a", (2048, 12800, 1024), False),
        ("nn", "a", (2048, 12800, 1030), False),  # passes less by a part of what is copied
        ("nt", "b", (12800, 1024, 2048), True),
        ("nn", "b", (12800, 1024, 2048), False),
        ("tn", "a", (64, 64, 65536), False),
        ("tn", "c", (512, 2048, 4096), True),
        ("tn", "c", (512, 600, 64), True),  # what is summed is copied either way
        ("tn", "c", (4096, 512, 512), False),
    ):
        plan = CuboidPlan(form, *sizes, pieces=8)
        shape = {"x": 1, "y": 1, "z": 1, {"a": "y", "b": "x", "c": "z"}[operand]: 2}
        assert is_crosswise(plan, operand, shape) is expected, plan
        if operand == "c":  # as A arrives row by row, rows of C are complete
            assert not is_crosswise(plan, operand, {**shape, "y": 2})
        assert not is_crosswise(replace(plan, pieces=1), operand, shape)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_rank_whose_part_is_not_cut_across_holds_no_columns(comm, make_grid, dtype):
    """Of n = 3 over two ranks the second has one, which is one piece of whole rows."""
    grid = make_grid(x=1, y=2, z=2, node_memory=False)
    plan = CuboidPlan("nn", 2, 40, 3, pieces=3)
    assert is_crosswise(plan, "a", grid.shape)
    a, b = np.arange(6).reshape(2, 3).astype(dtype), np.arange(120).reshape(3, 40).astype(dtype)
    cuboid = Cuboid(plan, grid)
    c = cuboid.run(distribute(a, grid, plan.a_layout), distribute(b, grid, plan.b_layout))
    assert np.array_equal(c, distribute(a @ b, grid, plan.c_layout))
    cost = volume.of_plan(plan, grid.shape, dtype).cost_of(grid.coordinates)
    assert cuboid.workspace.nbytes == a.itemsize * cost.workspace


@pytest.mark.mpi(sizes=(4, 12))
def test_both_operands_arrive_across_what_is_split(comm, make_grid):
    """Also where a rank has no own part of k, and its first product is of no elements."""
    sizes, z = [(41, 43, 13), (13, 11, 97), (23, 19, 3)], comm.size // 4
    seen = set()
    for number, (form, (m, n, k)) in enumerate(product(FORMS, sizes)):
        plan = CuboidPlan(form, m, n, k * z, pieces=3, a_fine=number % 2, b_fine=number // 2 % 2)
        grid = make_grid(x=2, y=2, z=z, node_memory=False)
        seen |= {(operand, is_crosswise(plan, operand, grid.shape)) for operand in "ab"}
        check_product(grid, plan, "numpy", "float64", 2, -0.5, True)
    assert len(seen) == 4


@pytest.mark.mpi(sizes=(4, 8))
@pytest.mark.parametrize(
    ("kind", "dtype"), [("numpy", "complex128"), ("numpy", "float16"), ("torch", "bfloat16"), ("torch", "float32")]
)
def test_dtypes(comm, make_grid, kind, dtype):
    grid = make_grid(**dict(zip("xyz", GRIDS[comm.size][0], strict=True)), check=False, node_memory=False)
    for number, form in enumerate(FORMS):
        fine = {"a_fine": number % 2, "b_fine": number // 2, "c_fine": 1 - number % 2}
        check_product(grid, CuboidPlan(form, 23, 19, 37, pieces=3, **fine), kind, dtype, -1.5, 0.5, True)


@pytest.mark.mpi(sizes=(4,))
def test_integers_whose_sums_no_blas_takes_are_exact_in_pieces_of_k(comm, make_grid):
    grid = make_grid(x=2, y=2, z=1, node_memory=False)
    random = np.random.default_rng(3)
    a, b = random.integers(-9, 9, (29, 13)), random.integers(-9, 9, (29, 11))
    across = CuboidPlan("nn", 7, 31, 67, pieces=3)
    assert is_crosswise(across, "a", grid.shape) and not is_crosswise(across, "b", grid.shape)
    for plan, left, right in (
        (CuboidPlan("tn", 13, 11, 29, pieces=3), a, b),
        (across, random.integers(-9, 9, (7, 67)), random.integers(-9, 9, (67, 31))),
        (replace(across, b_fine=1), random.integers(-9, 9, (7, 67)), random.integers(-9, 9, (67, 31))),
    ):
        cuboid = Cuboid(plan, grid)
        c = cuboid.run(distribute(left, grid, plan.a_layout), distribute(right, grid, plan.b_layout))
        assert np.array_equal(c, distribute((left.T if plan.form == "tn" else left) @ right, grid, plan.c_layout))
        cost = volume.of_plan(plan, grid.shape, "int64").cost_of(grid.coordinates)
        assert cuboid.workspace.nbytes == 8 * cost.workspace


@pytest.mark.mpi(sizes=(4,))
def test_items_that_stay_whole_do_so_in_pieces(comm, make_grid):
    """Fine parts have 2 and 1 items of 7, 11 and 13 indices, so that pieces end where no part of equal sizes does."""
    for x, y, z in ((2, 2, 1), (1, 2, 2)):
        grid = make_grid(x=x, y=y, z=z, node_memory=False)
        for number, form in enumerate(FORMS):
            fine = {"a_fine": number % 2, "b_fine": number // 2, "c_fine": 1 - number % 2}
            plan = CuboidPlan(form, 5 * 7, 5 * 11, 5 * 13, pieces=3, grains=((7, 7), (11, 11), (13, 13)), **fine)
            check_product(grid, plan, "numpy", "float64", 2, 1, True)


@pytest.mark.mpi(sizes=(4,))
def test_what_moves_in_a_nodes_memory_is_not_cut(comm, make_grid):
    grid = make_grid(x=2, y=1, z=2, node_memory=True)
    for form in FORMS:
        check_product(grid, CuboidPlan(form, 23, 19, 37, pieces=3), "numpy", "float64", 2, 1, True)
        one, cut = (volume.of_plan(CuboidPlan(form, 23, 19, 37, pieces=pieces), grid.shape, staged="xyz") for pieces in (1, 3))
        assert one.costs() == cut.costs()


@pytest.mark.mpi(sizes=(3,))
def test_sums_are_those_of_the_product_in_one_piece(comm, make_grid):
    """Cells are summed in the members' order, in whatever order they arrive."""
    grid = make_grid(x=1, y=1, z=3, node_memory=False)
    plans = [CuboidPlan("nn", 23, 19, 37, pieces=pieces) for pieces in (1, 4)]
    (a, b, _), *_ = wholes(plans[0], "numpy", "float64")
    blocks = distribute(a, grid, plans[0].a_layout), distribute(b, grid, plans[0].b_layout)
    one, cut = (Cuboid(plan, grid).run(*blocks) for plan in plans)
    assert np.allclose(one, cut, rtol=1e-14, atol=1e-14)


@pytest.mark.mpi(sizes=(2,))
def test_panels_and_rows_in_pieces_have_the_sums_of_one_piece(comm, make_grid):
    """To rounding: some BLAS sum the products of another width in another order."""
    for name, shape in (
        ("summa", {"x": 1, "y": 2}),
        ("summa", {"x": 2, "y": 1}),
        ("oned-row", {"y": 2}),
        ("oned-column", {"y": 2}),
    ):
        grid = make_grid(**shape, node_memory=False)
        for form, sequence in product(("nn", "nt", "tn"), (False, True)):
            if name == "summa" and sequence:
                continue
            options = {} if name == "summa" else {"sequence": sequence}
            plans = [ALGORITHMS[name].plan(form, 64, 48, 96, pieces=pieces, **options) for pieces in (1, 4)]
            (a, b, _), *_ = wholes(plans[0], "numpy", "float64")
            blocks = distribute(a, grid, plans[0].a_layout), distribute(b, grid, plans[0].b_layout)
            one, cut = (ALGORITHMS[name].executor(plan, grid).run(*blocks) for plan in plans)
            assert np.linalg.norm(one - cut) < 1e-14 * np.linalg.norm(one), (name, shape, form, sequence)


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_priced_steps_multiply_and_move_what_the_formulas_count(pieces):
    """In one piece a rank is busy with the panels that it sends, too."""
    cases = [("summa", {"x": 2, "y": 3}), ("tesseract", {"x": 2, "y": 2, "d": 2}), ("ca25d", {"x": 2, "y": 2, "d": 2})]
    for name, shape in [*cases, ("oned-row", {"y": 4}), ("oned-column", {"y": 4})]:
        for form in ("nn", "nt", "tn"):
            plan = ALGORITHMS[name].plan(form, 144, 72, 216, pieces=pieces)
            at = dict.fromkeys(shape, 1)
            steps = steps_of(plan, shape, at)
            assert sum(np.prod(step.product) for step in steps) * np.prod([*shape.values()]) == 144 * 72 * 216
            words = sum(sum(step.arriving) + step.leaving for step in steps)
            counted = volume.of_plan(plan, shape).words_of(at)
            assert words == counted if pieces > 1 or "oned" in name else words > counted, (name, form)


@pytest.mark.parametrize("more", [{"panel": 3}, {"lookahead": True}])
def test_pieces_beside_a_width_of_panels_are_refused(more):
    with pytest.raises(ShapeError, match="pieces are panels of a width of their own"):
        ALGORITHMS["summa"].plan("nn", 3, 4, 5, pieces=2, **more)


@pytest.mark.mpi(sizes=(2,))
def test_ranks_that_ask_for_other_pieces_hear_of_it_before_anything_moves(comm, make_grid):
    grid = make_grid(x=1, y=2, z=1, node_memory=False)
    a, b = (
        DistMatrix.from_global(np.ones(shape), grid, layout)
        for shape, layout in (((12, 5), "m:(x,y) k:z"), ((5, 8), "k:(z,x) n:y"))
    )
    assert np.array_equal(matmul(a, b, pieces=3).to_global(), np.full((12, 8), 5.0))
    with pytest.raises(AgreementError, match=r"pieces.*2.*on rank 0.*pieces.*4.*on rank 1"):
        matmul(a, b, pieces=2 + 2 * comm.rank)
    grid = make_grid(x=1, y=2, node_memory=False)
    a, b = (DistMatrix.from_global(np.ones(shape), grid, "m:x k:y") for shape in ((12, 5), (5, 8)))
    assert np.array_equal(matmul(a, b, algorithm="summa", pieces=3).to_global(), np.full((12, 8), 5.0))
    with pytest.raises(AgreementError, match=r"pieces.*2.*on rank 0.*pieces.*4.*on rank 1"):
        matmul(a, b, algorithm="summa", pieces=2 + 2 * comm.rank)


@pytest.mark.parametrize("pieces", [0, -1, 1.5, "2"])
def test_a_number_of_pieces_that_cannot_be_is_refused(pieces):
    with pytest.raises(ShapeError, match="whole number of at least 1"):
        CuboidPlan("nn", 3, 4, 5, pieces=pieces)


@pytest.mark.parametrize("crosswise", [False, True])
def test_every_word_is_exchanged_once_and_both_sides_know_of_it(crosswise):
    for sizes, pieces, extent in product(([5, 4, 0, 4], [1, 1], [7, 3, 2]), (1, 2, 5), (1, 3, 7)):
        sent, received = [], []
        for index in range(len(sizes)):
            whole = np.zeros((sum(sizes), extent), int)
            start = sum(sizes[:index])
            for one in rounds(sizes, index, pieces, extent, crosswise):
                if one.send:
                    sent.append((index, one.target, one.send.moved(start)))
                if one.receive:
                    received.append((one.source, index, one.receive))
                    whole[one.receive.slices(0)] += 1
                    assert one.receive.words == whole[one.receive.slices(0)].size
            assert (np.delete(whole, range(start, start + sizes[index]), 0) == 1).all() and whole.sum() == extent * (
                sum(sizes) - sizes[index]
            )
            others = [size for member, size in enumerate(sizes) if member != index]
            count = sum(min(extent if crosswise and size else size, pieces) for size in others)
            assert sum(each[1] == index for each in received) == count
        assert sorted(sent) == sorted(received)


def test_the_seconds_are_those_of_a_pipeline_of_pieces():
    """One operand that moves, g pieces, word time w, multiply-add time f: the last piece is multiplied after the last arrival."""
    m, n, k, pieces, word, flop = 48, 20, 10, 4, 3.0, 0.1
    plan, shape = CuboidPlan("nn", m, n, k, pieces=pieces), {"x": 1, "y": 2, "z": 1}
    found = seconds_of(plan, shape, {"x": 0, "y": 0, "z": 0}, lambda words: word * words, lambda *sides: flop * np.prod(sides))
    arithmetic, moved = flop * m * n / 2 * k, word * m / 2 * k
    assert moved > arithmetic and found == pytest.approx(moved + arithmetic / 2 / pieces)
    fast = seconds_of(plan, shape, {"x": 0, "y": 0, "z": 0}, lambda words: 0.01 * words, lambda *sides: flop * np.prod(sides))
    assert fast == pytest.approx(arithmetic)
    whole = CuboidPlan("nn", m, n, k)
    after = seconds_of(whole, shape, {"x": 0, "y": 0, "z": 0}, lambda words: word * words, lambda *sides: flop * np.prod(sides))
    assert after == pytest.approx(moved + arithmetic)


def test_the_number_of_pieces_is_one_in_a_node_and_of_fewest_predicted_seconds_elsewhere():
    plan, shape, dtype = CuboidPlan("nn", 8192, 8192, 8192), {"x": 2, "y": 2, "z": 2}, dtype_of("float32")
    between, inside = (Machine(load("frontera-rtx"), node=node) for node in (False, True))
    best = best_pieces(plan, shape, dtype, between)
    assert best_pieces(plan, shape, dtype, inside) == 1 < best
    at = {"x": 0, "y": 0, "z": 0}
    times = {
        pieces: predicted(CuboidPlan("nn", 8192, 8192, 8192, pieces=pieces), shape, at, dtype, between)
        for pieces in (1, 2, 4, 8, 16, 32)
    }
    assert times[best] == min(times.values()) < 0.9 * times[1]
    assert best_pieces(CuboidPlan("nn", 8, 8, 8), shape, dtype, between) == 1  # latency is all there is


def test_pieces_are_balanced_and_never_empty():
    assert [pieces_of(extent, 3) for extent in (7, 2, 0)] == [[(0, 3), (3, 5), (5, 7)], [(0, 1), (1, 2)], []]
    assert split_sizes(7, 3) == [3, 2, 2]


def test_the_rule_on_a_grid_is_one_in_a_node_and_the_same_on_all_ranks():
    sizes, axes, machine, dtype = (4099, 4093, 4091), {"x": 2, "y": 2, "z": 2}, Machine(load("frontera-rtx")), dtype_of("float32")
    plan = CuboidPlan("nn", *sizes)

    def found(nodes, rule=NODE_RULE):
        return {pieces_on(plan, Place(axes, rank, nodes=nodes, node_rule=rule), dtype, machine) for rank in range(8)}

    assert found([0] * 8) == {1}
    for nodes in (range(8), [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 2]):
        (pieces,) = found(list(nodes))
        assert pieces > 1, nodes
    assert found([0] * 8, None) == found(list(range(8)))  # no node's memory: all of it is messages


@pytest.mark.parametrize("pieces", [0, -2, "some"])
def test_an_overlap_in_pieces_that_cannot_be_is_refused(pieces):
    with pytest.raises(ConfigError, match=r"overlap\.pieces is"):
        Overlap(pieces=pieces)


@pytest.mark.parametrize("extents", [(23, 7, 5), (7, 23, 5), (5, 7, 61), (13, 11, 17), (1, 1, 500), (1, 1, 1), (2, 0, 3)])
@pytest.mark.parametrize("letters", ["mnk", "mn"])
def test_slabs_take_every_multiplication_once_with_those_of_each_sum_in_the_order_of_k(extents, letters):
    whole, ranges = 2 * prod(extents), {letter: (3, 3 + extent) for letter, extent in zip("mnk", extents, strict=True)}
    parts = list(slabs(ranges, whole, letters))
    taken: dict[tuple[int, int], list[int]] = {}
    for part in parts:
        for m, n, k in product(*(range(*span) for span in part.values())):
            taken.setdefault((m, n), []).append(k)
    assert taken.keys() == (set(product(range(*ranges["m"]), range(*ranges["n"]))) if extents[2] else set())
    assert all(of_k == list(range(*ranges["k"])) for of_k in taken.values())
    for part in parts:
        sizes = {letter: high - low for letter, (low, high) in part.items()}
        work = prod(sizes.values())
        assert work * SLABS <= whole or work < 2 * SMALL or max(sizes[letter] for letter in letters) < 2
        assert "k" in letters or part["k"] == ranges["k"]


def test_slabs_leave_the_short_dims_whole():
    parts = list(slabs({"m": (0, 8), "n": (0, 9), "k": (0, 400)}, 8 * 9 * 400))
    assert len(parts) == SLABS and all(part["m"] == (0, 8) and part["n"] == (0, 9) for part in parts)
