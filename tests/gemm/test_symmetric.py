"""Products of a matrix with its own transpose: numbers of plain numpy, symmetry bit for bit, half of the arithmetic, words."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from any_layouts import grids_of, random_layout
from kinds import array, numbers, plain

from summa3d.comm.grid import Grid, Place
from summa3d.errors import AgreementError, ConfigError, LayoutError, ShapeError
from summa3d.gemm import DistMatrix, PackedSymmetric, matmul, plan_syrk, syrk
from summa3d.gemm.any_layout.vectors import RankSpace
from summa3d.gemm.local.triangle import accumulate_lower, pack_lower, put_transposed, unpack_lower
from summa3d.gemm.one_matrix import SymmetricBinding
from summa3d.gemm.symmetric.work import pairs, ring

CASES = 12
"""Products at each world size; the nightly ones take more."""


def conjugate(whole: Any) -> Any:
    return whole.conj().T


PRODUCTS = {
    "A @ A.T": (lambda a: (a, a.T, "nn"), lambda x: x @ x.T),
    "A.T @ A": (lambda a: (a.T, a, "nn"), lambda x: x.T @ x),
    "A @ A.H": (lambda a: (a, a.H, "nn"), lambda x: x @ conjugate(x)),
    "A.H @ A": (lambda a: (a.H, a, "nn"), lambda x: conjugate(x) @ x),
    "A.conj() @ A.T": (lambda a: (a.conj(), a.T, "nn"), lambda x: x.conj() @ x.T),
    "A.T @ A.conj()": (lambda a: (a.T, a.conj(), "nn"), lambda x: x.T @ x.conj()),
    "A.conj() @ A.H": (lambda a: (a.conj(), a.H, "nn"), lambda x: x.conj() @ conjugate(x)),
    "nt": (lambda a: (a, a, "nt"), lambda x: x @ x.T),
    "tn": (lambda a: (a, a, "tn"), lambda x: x.T @ x),
    "nc": (lambda a: (a, a, "nc"), lambda x: x @ conjugate(x)),
    "cn": (lambda a: (a, a, "cn"), lambda x: conjugate(x) @ x),
    "tt of A.T": (lambda a: (a.T, a, "tt"), lambda x: x @ x.T),
    "cn of A.H": (lambda a: (a.H, a.H, "cn"), lambda x: x @ conjugate(x)),
}
"""Ways to ask for such a product: the operands and the form, and the same in plain numpy."""
HERMITIAN = ("A @ A.H", "A.H @ A", "A.conj() @ A.T", "A.T @ A.conj()", "nc", "cn", "cn of A.H")


class Asked(NamedTuple):
    """A random product of one matrix."""

    grid: dict[str, int]
    shape: tuple[int, int]
    way: str
    dtype: str
    layout: Any
    to: Any
    alpha: Any
    beta: Any
    has_out: bool
    objective: str


def random_product(random: Random, ranks: int) -> Asked:
    grid, dtype = random.choice(grids_of(ranks)), random.choice(["float64", "complex128", "int64"])
    shape = random.choice([1, 2, 3, 7, 11, 19, 37]), random.choice([1, 2, 5, 13, 24, 41])
    alpha = random.choice([1, 2, -3])
    if dtype == "complex128" and random.random() < 0.3:
        alpha = 2 - 1j
    has_out = random.random() < 0.3
    to = random_layout(random, grid) if has_out or random.random() < 0.4 else None
    way, layout, beta = random.choice(list(PRODUCTS)), random_layout(random, grid), random.choice([0, 3]) if has_out else 0
    return Asked(grid, shape, way, dtype, layout, to, alpha, beta, has_out, random.choice(["seconds", "words"]))


def plan_in(grid):
    """The plan of the one symmetric product that a grid has kept; its binding where the general product was taken."""
    (bound,) = grid.job.kept[grid][SymmetricBinding].values()
    assert bound.taken
    return bound.plan


def check_product(comm, asked: Asked, seed: int) -> None:
    """Multiply, and compare: numbers and their mirror images with numpy's, words and messages of each rank with the plan's."""
    whole = numbers(asked.dtype, asked.shape, seed).astype(asked.dtype)
    if asked.dtype == "float64":
        whole = np.random.default_rng(seed).standard_normal(asked.shape)
    operands, exact = PRODUCTS[asked.way]
    want = exact(whole)
    old = numbers(asked.dtype, want.shape, seed, 1).astype(asked.dtype)
    with Grid(comm, asked.grid) as grid:
        a = DistMatrix.from_global(whole, grid, asked.layout)
        out = DistMatrix.from_global(old, grid, asked.to) if asked.has_out else None
        first, second, form = operands(a)
        with grid.ledger.watch() as moved:
            c = matmul(
                first, second, form, alpha=asked.alpha, beta=asked.beta, out=out, out_layout=None if out else asked.to,
                objective=asked.objective,
            )  # fmt: skip
        plan, found = plan_in(grid), c.to_global()
        text = f"{asked}\n{plan}"
        want = asked.alpha * want + asked.beta * old
        assert np.linalg.norm(found - want) <= 1e-12 * np.linalg.norm(want), text
        assert (out is None or c is out) and c.layout == (asked.to or plan.c.layout), text
        if asked.beta == 0 and not (isinstance(asked.alpha, complex) and asked.way in HERMITIAN):
            assert np.array_equal(found, conjugate(found) if asked.way in HERMITIAN else found.T), text
        assert [moved.words, moved.messages] == [plan.words_of(comm.rank), plan.messages_of(comm.rank)], text
        if asked.to is None:
            other = DistMatrix.from_global(whole, grid, asked.layout)
            assert c.layout == matmul(*operands(other)[:1], operands(a)[1], form, objective=asked.objective).layout, text


@pytest.mark.mpi(sizes=(4, 6, 8, 9))
def test_random_products_of_one_matrix_are_numpys_and_symmetric_and_move_the_words_of_their_plan(comm):
    random = Random(comm.size)
    for number in range(CASES):
        check_product(comm, random_product(random, comm.size), number)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(1, 2, 4, 6, 8, 9, 12), timeout=600)
def test_hundreds_of_random_products_of_one_matrix(comm):
    random = Random(500 + comm.size)
    for number in range(75):
        check_product(comm, random_product(random, comm.size), number)


# -- the plan alone ----------------------------------------------------------------------------------------------------------

WORKS = [
    *(
        (ring, shape, axes)
        for shape, axes in (((2, 2), "x|y"), ((3, 2), "x|y"), ((2, 3), "xy|"), ((5, 1), "x|y"), ((2, 2), "|yx"))
    ),
    *((pairs, shape, axes) for shape, axes in (((2, 2), "x|y|"), ((3, 3), "y|x|"), ((2, 2, 2), "x|z|y"), ((3, 3, 2), "x|y|z"))),
]


@pytest.mark.parametrize(("way", "shape", "axes"), WORKS)
def test_each_element_of_half_of_c_is_multiplied_once_for_each_k_and_owned_once(way, shape, axes):
    space = RankSpace.on(Place(dict(zip("xyz", shape, strict=False))))
    for n, k in ((13, 5), (3, 7), (24, 24), (0, 3), (5, 0)):
        work = way(space, *map(tuple, axes.split("|")), n, k)
        made, held = np.zeros((n, n, k), int), np.zeros((n, n), int)
        for rank in range(len(space)):
            inner = [i for start, stop in work.inner[:, rank] for i in range(start, stop)]
            read = {i for start, stop in work.rows[:, rank] for i in range(start, stop)}
            for boxes, count in ((work.blocks, made), (work.shares(), held)):
                for number, (top, bottom, left, right) in enumerate(boxes[:, rank].tolist()):
                    for i, j in product(range(top, bottom), range(left, right)):
                        if number or j <= i:
                            count[(max(i, j), min(i, j), *([inner] if count is made else []))] += 1
                            assert count is held or {i, j} <= read
        lower = np.tril(np.ones((n, n), int))
        assert np.array_equal(held, lower) and np.array_equal(made, np.repeat(lower[..., None], k, 2))


@pytest.mark.parametrize(("x", "y"), [(3, 2), (3, 3), (5, 2)])
@pytest.mark.parametrize(("n", "k"), [(24, 96), (37, 53), (60, 60)])
def test_words_of_a_ring_are_the_closed_form_and_half_of_the_general_products(x, y, n, k):
    best = plan_syrk("m:x k:y", n, k, Place({"x": x, "y": y}), storage="lower", objective="words")
    plan = replace(best, way="ring", x=("x",), y=("y",), z=())
    assert 2 * plan.words == (x - 1) * n * k + (y - 1) * n * (n + 1)
    assert best.words <= plan.words <= 0.6 * best.general.words


@pytest.mark.parametrize("grid", [{"x": 2, "y": 2}, {"x": 3, "y": 3}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}])
@pytest.mark.parametrize("layout", ["m:x k:y", "m:(x,y) k", "m k:(x,y)", "m k @x=0", "m:x[3] k:y[5]"])
@pytest.mark.parametrize("storage", ["full", "lower"])
def test_a_rank_does_little_more_than_half_of_the_arithmetic(grid, layout, storage):
    for n, most in ((37, 0.56), (4096, 0.52)):
        plan = plan_syrk(layout, n, n, Place(grid), storage=storage)
        assert plan.max_multiply_adds <= most * plan.general.max_multiply_adds
        assert sum(map(plan.multiply_adds_of, range(Place(grid).size))) == n * (n + 1) // 2 * n
        assert plan.general.max_multiply_adds >= n**3 // Place(grid).size
        text = str(plan)
        assert f"{plan.words:,}" in text and f"{plan.general.words:,}" in text and plan.summary in text


def test_what_cannot_be_planned_is_refused():
    grid = Place({"x": 2, "y": 2})
    for kind, words, options in (
        (ConfigError, "forms: n, t, c", {"form": "nn"}),
        (ConfigError, "storages: full, lower", {"storage": "upper"}),
        (ConfigError, "storage lower has no out_layout", {"storage": "lower", "out_layout": "m n"}),
        (ConfigError, "objectives: seconds, words", {"objective": "bytes"}),
        (LayoutError, "names axis 'z'", {"out_layout": "m:z n"}),
    ):
        with pytest.raises(kind, match=words):
            plan_syrk("m:x k:y", 8, 6, grid, **options)
    with pytest.raises(ShapeError, match="sizes are whole numbers"):
        plan_syrk("m:x k:y", 8, -6, grid)


# -- on one rank -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int32", "int64"])
def test_the_lower_triangle_on_one_rank_its_packing_and_its_mirror_image(dtype, kind):
    for form, (n, k), turned in product(("nt", "tn", "nc", "cn"), ((5, 3), (150, 7), (0, 3), (3, 0), (1, 1)), (False, True)):
        values = numbers(dtype, (n, k) if form[0] == "n" else (k, n), 1)
        a, turn = array(kind, dtype, values, turned), conjugate(values) if "c" in form else values.T
        want = values @ turn if form[0] == "n" else turn @ values
        out = array(kind, dtype, np.full((n, n), 7))
        accumulate_lower(a, form, out)
        assert np.array_equal(np.tril(plain(out)), np.tril(want))
        packed, square = array(kind, dtype, np.zeros(n * (n + 1) // 2)), array(kind, dtype, np.zeros((n, n)))
        pack_lower(out, packed)
        unpack_lower(packed, square, "c" in form)
        assert np.array_equal(plain(square), want)
        block = array(kind, dtype, numbers(dtype, (70, 130), 3))
        mirrored = array(kind, dtype, np.zeros((130, 70)))
        put_transposed(mirrored, block, "c" in form)
        assert np.array_equal(plain(mirrored), conjugate(plain(block)) if "c" in form else plain(block).T)


# -- what may be asked -------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int32", "int64"])
@pytest.mark.turns
def test_every_dtype_with_factors_and_an_output_that_is_not_symmetric(comm, make_grid, dtype, kind):
    grid, values = make_grid(x=2, y=2), numbers(dtype, (11, 7), 1)
    if dtype in ("float16", "bfloat16"):
        values = values // 4
    old = numbers(dtype, (11, 11), 3)
    a = DistMatrix.from_global(array(kind, dtype, values), grid, "m:x k:y")
    alpha, beta = (2, 3) if not dtype.startswith("complex") else (2 - 1j, 1j)
    for second, exact in ((a.T, values @ values.T), (a.H, values @ conjugate(values))):
        for layout in ("m:x n:y", "m n @x=0", "m:y[2] n:x[3]"):
            out = DistMatrix.from_global(array(kind, dtype, old), grid, layout)
            found = matmul(a, second, alpha=alpha, beta=beta, out=out)
            assert found is out and np.array_equal(plain(out.to_global()), alpha * exact + beta * old)
            free = matmul(a, second, alpha=alpha, out_layout=layout)
            assert free.block.dtype == a.block.dtype and np.array_equal(plain(free.to_global()), alpha * exact)
    assert all(bound.taken for bound in grid.job.kept[grid][SymmetricBinding].values())


@pytest.mark.mpi(sizes=(4, 6))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_rounded_once(comm, make_grid, dtype):
    grid = make_grid(x=2, y=comm.size // 2)
    whole = array("torch", dtype, np.random.default_rng(6).standard_normal((16, 96)))
    exact = whole.double() @ whole.double().T
    for layout, to in product(("m:x k:y", "m k:(x,y)"), ("m n @x=0", "m:x n:y")):
        c = matmul(DistMatrix.from_global(whole, grid, layout), DistMatrix.from_global(whole, grid, layout).T, out_layout=to)
        a = DistMatrix.from_global(whole, grid, layout)
        found = matmul(a, a.T, out_layout=to).to_global()
        near = exact.float().to(found.dtype)
        apart = (found.double() - exact).abs() / (near.double() - exact).abs().clamp(min=2.0**-16)
        assert apart.max() < 1.1 and c.layout == matmul(a, a.T, out_layout=to).layout


@pytest.mark.mpi(sizes=(4,))
def test_what_is_written_into_a_matrix_is_seen_through_its_views_and_a_replaced_block_is_another_matrix(comm, make_grid):
    grid, random = make_grid(x=2, y=2), np.random.default_rng(comm.size)
    first, second = (random.standard_normal((9, 5)) + 1j * random.standard_normal((9, 5)) for _ in range(2))
    a, b = (DistMatrix.from_global(one, grid, "m:x k:y") for one in (first, second))
    turned, conjugated = a.T, a.H
    a.block[...] = b.block
    assert np.allclose((a @ turned).to_global(), second @ second.T)
    assert np.allclose((a @ conjugated).to_global(), second @ conjugate(second))
    assert np.allclose(conjugated.to_global(), conjugate(second)) and np.allclose(
        (a.H @ b).to_global(), conjugate(second) @ second
    )
    a.block = DistMatrix.from_global(first, grid, "m:x k:y").block
    assert np.allclose((a @ turned).to_global(), first @ second.T), "the view is of the block that was there"
    again = turned.T
    again.block = a.block
    assert np.allclose((again @ turned).to_global(), first @ second.T)
    with pytest.raises(ValueError, match="read-only"):
        a.H.block[...] = 0
    with pytest.raises(ShapeError, match="conjugate of a matrix"):
        matmul(a, a.T, out=DistMatrix.from_global(first @ first.T, grid, "m:x n:y").conj())


@pytest.mark.mpi(sizes=(4,))
def test_conjugates_are_matrices_like_others(comm, make_grid):
    grid, random = make_grid(x=2, y=2), np.random.default_rng(4)
    whole = random.standard_normal((9, 5)) + 1j * random.standard_normal((9, 5))
    other = random.standard_normal((9, 4)) + 0j
    a, b = DistMatrix.from_global(whole, grid, "m:x k:y"), DistMatrix.from_global(other, grid, "m:x n:y")
    assert a.conj().conj() is a and np.shares_memory(a.H.H.block, a.block) == (a.block.size > 0)
    assert a.H.shape == (5, 9) and str(a.H.layout) == str(a.T.layout) and np.array_equal(a.H.to_global(), conjugate(whole))
    assert np.allclose((a.H @ b).to_global(), conjugate(whole) @ other)
    assert np.allclose((a.conj() + a).to_global(), 2 * whole.real) and np.isclose(a.H.norm(), a.norm())
    assert np.allclose((2 * a.H).redistribute("m n").block, 2 * conjugate(whole))
    real = DistMatrix.from_global(whole.real, grid, "m:x k:y")
    assert real.conj().block is real.block and np.shares_memory(real.H.block, real.block)


@pytest.mark.mpi(sizes=(4,))
def test_a_named_algorithm_and_a_copy_bring_the_general_product_with_its_words(comm, make_grid):
    grid, whole = make_grid(x=2, y=2), np.random.default_rng(3).standard_normal((24, 20))
    a, copy = (DistMatrix.from_global(whole, grid, "m:x k:y") for _ in range(2))
    counts = []
    for attempt in (lambda: a @ copy.T, lambda: matmul(a, a.T, algorithm="summa"), lambda: a @ a.T):
        with grid.ledger.watch() as moved:
            c = attempt()
        assert str(c.layout) == "m:x n:y" and np.allclose(c.to_global(), whole @ whole.T, rtol=0, atol=1e-12)
        counts.append(moved.words)
    assert counts[0] == counts[1] != counts[2]
    assert np.allclose((a @ a.T.redistribute("k:y n:x")).to_global(), whole @ whole.T)
    square = DistMatrix.from_global(whole[:20], grid, "m:x k:y")
    assert np.allclose((square @ square).to_global(), whole[:20] @ whole[:20])


@pytest.mark.mpi(sizes=(4,))
def test_the_general_product_is_taken_where_it_is_predicted_to_be_faster_and_syrk_is_not_swayed(comm, make_grid):
    grid, whole = make_grid(x=2, y=2), np.arange(2048.0)[:, None] % 7
    a = DistMatrix.from_global(whole, grid, "m:x k:y")
    c = a @ a.T
    ((bound),) = grid.job.kept[grid][SymmetricBinding].values()
    assert not bound.taken and bound.plan.steady_seconds > bound.plan.general.seconds
    with grid.ledger.watch() as moved:
        forced = syrk(a)
    assert moved.words == bound.plan.words_of(comm.rank) and np.array_equal(forced.block, c.block)


@pytest.mark.mpi(sizes=(4, 9))
def test_the_flops_of_a_trace_are_those_of_the_plan(comm, make_grid):
    side = 2 if comm.size == 4 else 3
    grid = make_grid(x=side, y=side)
    a = DistMatrix.from_global(np.random.default_rng(3).standard_normal((37, 53)), grid, "m:x k:y")
    trace = grid.ledger.start_trace()
    a @ a.T
    grid.ledger.stop_trace()
    plan = plan_in(grid)
    assert sum(work.about["flops"] for work in trace.work if "flops" in work.about) == 2 * plan.multiply_adds_of(comm.rank)


@pytest.mark.mpi(sizes=(4,))
def test_a_product_that_comes_again_is_not_planned_again_and_has_the_same_bits(comm, make_grid, monkeypatch):
    grid = make_grid(x=2, y=2, check=False)
    a = DistMatrix.from_global(np.random.default_rng(3).standard_normal((23, 30)), grid, "m k:(x,y)")
    first = a @ a.T
    monkeypatch.setattr("summa3d.gemm.one_matrix.planned", None)
    control = grid.ledger.control
    again = a @ a.T
    assert np.array_equal(first.block, again.block) and first.layout == again.layout and grid.ledger.control == control


@pytest.mark.mpi(sizes=(6,))
def test_ranks_outside_a_grid_call_too_and_hold_nothing(comm):
    whole = np.random.default_rng(3).standard_normal((7, 11))
    with Grid(comm, {"x": 2, "y": 2}, ranks=[4, 1, 2, 5]) as part:
        a = DistMatrix.from_global(whole, part, "m:x k:y")
        c, packed = a @ a.T, syrk(a, storage="lower")
        assert (part.inside or c.block.size == packed.blocks.size == 0) and c.layout == packed.full().layout
        for one in (c, packed) if part.inside else ():
            assert np.allclose(one.to_global(), whole @ whole.T)


@pytest.mark.mpi(sizes=(4, 6))
def test_memory_that_a_product_takes_is_at_most_what_the_plan_says(comm):
    random = Random(12)
    for number in range(12):
        asked = random_product(random, comm.size)
        with Grid(comm, asked.grid, node_memory=False) as grid:
            a = DistMatrix.from_global(np.random.default_rng(number).standard_normal(asked.shape), grid, asked.layout)
            grid.ledger.reset_peak()
            syrk(a, out_layout=asked.to)
            plan = plan_in(grid)
            assert grid.ledger.workspace_peak <= 8 * plan.workspace_of(comm.rank), f"{asked}\n{plan}"
            assert grid.ledger.workspace_bytes == 0


# -- the packed half ---------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(sizes=(1, 4, 9))
@pytest.mark.parametrize("dtype", ["complex128", "float16"])
@pytest.mark.turns
def test_the_packed_half_adds_scales_multiplies_and_completes(comm, make_grid, dtype):
    grid = make_grid(x=3 if comm.size == 9 else min(2, comm.size), y=3 if comm.size == 9 else max(1, comm.size // 2))
    values = numbers("int64" if dtype == "float16" else dtype, (13, 5), 2)
    if dtype == "float16":
        values = values // 4
    a = DistMatrix.from_global(array("numpy", dtype, values), grid, "m:x k:y")
    for form, want in (("nt", values @ values.T), ("nc", values @ conjugate(values)), ("c", conjugate(values) @ values)):
        n = len(want)
        packed = syrk(a, form, storage="lower", alpha=2)
        assert isinstance(packed, PackedSymmetric) and packed.blocks.dtype == a.block.dtype
        assert comm.allreduce(len(packed.blocks)) == n * (n + 1) // 2
        assert np.array_equal((3 * packed + packed * 2).to_global(), 10 * want)
        for layout in (None, "m:y n", "m:x[2] n:y[1]", "m n @x=0"):
            assert np.array_equal(packed.full(layout).to_global(), 2 * want)
        b = DistMatrix.from_global(array("numpy", dtype, np.eye(n)[:, :4]), grid, "m:y n")
        assert np.array_equal((packed @ b).to_global(), 2 * want[:, :4])
        assert np.array_equal((b.T @ packed).to_global(), 2 * want[:4])
        if dtype != "float16":
            assert np.array_equal((packed @ packed).to_global(), 4 * want @ want)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("check", [False, True])
def test_what_cannot_be_is_refused_before_anything_moves(comm, make_grid, check):
    grid = make_grid(x=2, y=2, check=check)
    a = DistMatrix.from_global(np.ones((12, 6)), grid, "m:x k:y")
    z = DistMatrix.from_global(np.ones((12, 6), complex), grid, "m:x k:y")
    out = DistMatrix.from_global(np.ones((12, 12)), grid, "m n:y")
    packed, hermitian = syrk(a, storage="lower"), syrk(z, "nc", storage="lower")
    with grid.ledger.watch() as moved:
        for attempt, kind, words in (
            (lambda: syrk(np.ones((3, 2))), ShapeError, "takes DistMatrix"),
            (lambda: syrk(a, "nn"), ConfigError, "forms: n, t, c"),
            (lambda: syrk(a, storage="packed"), ConfigError, "storages: full, lower"),
            (lambda: syrk(a, storage="lower", out_layout="m n"), ConfigError, "has no out_layout"),
            (lambda: syrk(a, storage="lower", out=out), ShapeError, "no out and no beta"),
            (lambda: syrk(z, "nc", storage="lower", alpha=1j), ShapeError, "is not Hermitian"),
            (lambda: syrk(a, storage="lower", alpha=1j), ShapeError, "is complex"),
            (lambda: syrk(a, beta=1), ShapeError, "beta = 1 needs the block of C"),
            (lambda: a @ a.T @ a, None, ""),
            (lambda: matmul(a, a.T, alpha=1j), ShapeError, "alpha = 1j is complex"),
            (lambda: matmul(a, a.T, out=a), ShapeError, "out is a itself"),
            (lambda: matmul(a, a.T, out=out, out_layout="m:y n"), LayoutError, "out_layout is m:y n"),
            (lambda: matmul(a, a.T, out_layout="m:z n"), LayoutError, "names axis 'z'"),
            (lambda: matmul(a, a.T, objective="time"), ConfigError, "objectives: seconds, words"),
            (lambda: matmul(a, a.T, "nt"), ShapeError, "inner sizes 6 and 12"),
            (lambda: packed + syrk(a.T, "t", storage="lower", objective="words"), None, ""),
            (lambda: packed + hermitian, LayoutError, "differ"),
            (lambda: packed * 1j, ShapeError, "is complex"),
            (lambda: hermitian * 1j, ShapeError, "is not Hermitian"),
        ):
            if kind is not None:
                with pytest.raises(kind, match=words):
                    attempt()
    assert moved.words == 0


@pytest.mark.mpi(sizes=(2,))
def test_ranks_that_multiply_one_matrix_and_two_are_told_so(comm):
    with Grid(comm, {"x": 2}) as grid:
        a, b = (DistMatrix.from_global(np.ones((4, 4)), grid, "m:x k") for _ in range(2))
        with pytest.raises(AgreementError, match="do not agree on matmul"):
            a @ (a if comm.rank else b).T
