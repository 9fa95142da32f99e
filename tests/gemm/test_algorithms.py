"""Every algorithm × form × dtype against numpy on one process; words, messages, workspace against the closed forms per rank.

Products run in loops: a case here costs a millisecond.
"""

from __future__ import annotations

import tracemalloc
import warnings
from itertools import product

import numpy as np
import pytest
from products import Judge, operand

from summa3d.errors import ConfigError, GridError, ShapeError
from summa3d.gemm.algorithms.registry import ALGORITHMS, algorithm
from summa3d.layout import distribute

SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 27)
FULL = (1, 2, 3, 4, 8)
"""World sizes on which every form meets every dtype: each algorithm is on several ranks of one of them."""
NUMPY_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32")
FORMS = ("nn", "nt", "tn", "tt")
CONJUGATE_FORMS = ("nc", "cn", "cc", "tc", "ct")
UNEVEN = (19, 13, 23)
RAGGED = ((2, 5, 3), (1, 1, 1), (0, 4, 3), (3, 0, 4), (5, 4, 0), (0, 0, 0))
OTHERS = [name for name in ALGORITHMS if name != "cuboid"]


def variants(name):
    """The options that change what moves."""
    options = ALGORITHMS[name].options
    if "panel" in options:
        return [{}, {"panel": 3}, {"panel": 3, "lookahead": True}, {"lookahead": True}, {"pieces": 3}]
    return [{}, {"sequence": True}, {"pieces": 3}, {"sequence": True, "pieces": 3}] if "sequence" in options else [{}]


def usable(ranks, most):
    """Every algorithm with at most so many of the grids of this many ranks that it can use, the squarest first."""
    for name in OTHERS:
        for shape in sorted(ALGORITHMS[name].grids(ranks), key=lambda grid: max(grid.values()))[:most]:
            yield name, shape


@pytest.fixture
def judges(comm, make_grid):
    """``judges()`` yields a judge for every algorithm and grid of this world, and takes each one's verdict."""

    def each(check=False, grids=1):
        for turn, (name, shape) in enumerate(usable(comm.size, grids)):
            judge = Judge(make_grid(check=check, node_memory=turn % 2 == 1, **shape), name)
            yield judge
            judge.verdict()

    return each


@pytest.mark.mpi(sizes=tuple(size for size in SIZES if size <= 12), every=True)
def test_products_of_every_form_and_dtype_equal_numpys_and_cost_what_the_formulas_say(comm, judges):
    """Every form with every dtype; on some numbers of ranks each dtype once, the forms in turn."""
    turns = [(FORMS[(turn + comm.size) % 4], dtype) for turn, dtype in enumerate(NUMPY_DTYPES)]
    for judge in judges(grids=4 if comm.size <= 4 else 1):
        for form, dtype in product(FORMS, NUMPY_DTYPES) if comm.size in FULL else turns:
            judge.product(form, dtype, UNEVEN, alpha=2, beta=3)


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(size for size in SIZES if size not in FULL), every=True)
def test_so_do_those_of_every_form_with_every_dtype_on_other_numbers_of_ranks(judges):
    for judge in judges():
        for form, dtype in product(FORMS, NUMPY_DTYPES):
            judge.product(form, dtype, UNEVEN, alpha=2, beta=3)


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 6, 8, 9, 12))
def test_panels_look_ahead_and_sequence_ends_change_the_cost_as_the_formulas_say(comm, judges):
    for judge in judges(grids=2 if comm.size <= 8 else 1):
        for options in variants(judge.name):
            for form in FORMS:
                judge.product(form, "float64", UNEVEN, **options)
            for dtype in ("float16", "int32"):
                judge.product(FORMS[len(judge.cases) % 4], dtype, UNEVEN, beta=2, **options)


@pytest.mark.mpi(sizes=(1, 4, 6, 8, 12))
def test_empty_blocks_and_fewer_rows_than_ranks(comm, judges):
    """Into a result that is added to and into a new one: both of each case on up to four ranks, on more in turn."""
    for judge in judges(check=True):
        for turn, sizes in enumerate(RAGGED):
            cases = zip(FORMS, ("float64", "float32", "int32", "float16"), variants(judge.name) * 4, strict=False)
            for number, (form, dtype, options) in enumerate(cases):
                for beta in (2, 0) if comm.size <= 4 else (2 * ((turn + number) % 2),):
                    judge.product(form, dtype, sizes, beta=beta, **options)


@pytest.mark.mpi(sizes=(1, 2, 4, 8, 9))
def test_conjugate_forms_complex_factors_and_any_memory_order(judges):
    for judge in judges(check=True):
        for form in CONJUGATE_FORMS:
            judge.product(form, "complex128", UNEVEN, alpha=2 - 1j, beta=0.5j)
        judge.product("nc", "float64", UNEVEN)
        for order in ("F", "strided"):
            for form, dtype in zip(FORMS, ("float64", "bfloat16", "complex64", "int32"), strict=True):
                judge.product(form, dtype, UNEVEN, order=order, beta=3)


@pytest.mark.mpi(sizes=(1, 4, 8))
def test_torch_arrays_take_the_same_path(comm, judges):
    turns = [(FORMS[turn % 4], dtype) for turn, dtype in enumerate(NUMPY_DTYPES)]
    for judge in judges():
        for form, dtype in product(FORMS, NUMPY_DTYPES) if comm.size <= 4 else turns:
            judge.product(form, dtype, UNEVEN, alpha=2, beta=3, kind="torch")
        judge.product("cc", "complex128", UNEVEN, kind="torch")
        for order in ("F", "strided"):
            judge.product("nt", "bfloat16", UNEVEN, order=order, beta=2, kind="torch")


@pytest.mark.mpi(sizes=(4,))
def test_a_reused_executor_gives_the_same_result_and_allocates_nothing(judges):
    for judge in judges(grids=2):
        first, *_, last = [{}, *variants(judge.name)]
        for options in (first, last):
            for form in FORMS:
                judge.product(form, "float64", UNEVEN, beta=2, repeat=3, **options)
                held = allocated_by_a_second_run(judge.grid, judge.name, form, options)
                assert held < 60_000, (judge.name, form, options)  # bytes; the third of a block has 170 000 or more


def allocated_by_a_second_run(grid, name, form, options):
    """Bytes that a run holds beyond what the first one left, at most."""
    plan = ALGORITHMS[name].plan(form, 480, 640, 560, **options)
    a, b, c = (
        distribute(operand(shape, "float64", "numpy", 1), grid, layout)
        for shape, layout in ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout), (plan.c_shape, plan.c_layout))
    )
    executor = ALGORITHMS[name].executor(plan, grid)
    executor.run(a, b, c)
    tracemalloc.start()
    executor.run(a, b, c)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("name", "ranks", "named"), [("cannon", 6, ("4", "9")), ("agarwal", 9, ("8",)), ("agarwal", 4, ("1", "8"))]
)
def test_an_algorithm_that_cannot_use_a_rank_count_names_those_it_can_and_who_can(name, ranks, named):
    with pytest.raises(GridError, match=f"{name} cannot use {ranks} ranks") as caught:
        algorithm(name, ranks)
    assert all(count in str(caught.value) for count in named) and "summa" in str(caught.value)
    assert algorithm(name, 64).name == name


def test_an_unknown_algorithm_is_answered_with_all_of_them():
    with pytest.raises(ConfigError, match="Algorithms: cuboid, agarwal, summa"):
        algorithm("strassen")
    assert algorithm("oned") is ALGORITHMS["oned-row"]


def test_plans_refuse_forms_sizes_and_panels_that_cannot_be():
    for wrong in ({"form": "nx"}, {"form": "n"}, {"k": -1}, {"panel": 0}):
        with pytest.raises(ShapeError):
            ALGORITHMS["summa"].plan(**{"form": "nn", "m": 1, "n": 1, "k": 1, **wrong})


def test_a_grid_that_does_not_suit_the_algorithm_is_answered_with_those_that_do():
    with pytest.raises(GridError, match="x=2,y=2,d=1"):
        ALGORITHMS["tesseract"].plan("nn", 4, 4, 4).check_grid({"x": 2, "y": 1, "d": 2})
    with pytest.raises(GridError, match="needs an axis d"):
        ALGORITHMS["ca25d"].plan("nn", 4, 4, 4).check_grid({"x": 2, "y": 2})


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("name", ["summa", "oned-column", "oned-row"])
def test_wrong_blocks_dtypes_and_factors_are_refused_before_any_communication(comm, make_grid, name):
    grid = make_grid(**ALGORITHMS[name].grids(2)[0])
    plan = ALGORITHMS[name].plan("nn", 6, 4, 8)
    a, b, c = (
        np.zeros(layout.local_shape(shape, grid.shape, grid.coordinates), np.int32)
        for shape, layout in ((plan.a_shape, plan.a_layout), (plan.b_shape, plan.b_layout), (plan.c_shape, plan.c_layout))
    )
    executor = ALGORITHMS[name].executor(plan, grid)
    for arguments in (
        (a[1:], b, c),
        (a, b.astype(np.int64), c),
        (a, b, c[:, 1:]),
        (a, b, c, 0.5),
        (a, b, c, 1, 0.5),
        (a, b, None, 1, 2),
    ):
        with grid.ledger.watch() as moved, pytest.raises(ShapeError):
            executor.run(*arguments)
        assert moved.calls == 0


@pytest.mark.mpi(sizes=(1, 2, 4))
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 6e4, 3e38])
def test_products_of_nan_and_inf_and_those_that_overflow_print_no_warnings(comm, make_grid, value, dtype):
    said = []
    for name, shape in [*usable(comm.size, 1), ("cuboid", {"x": comm.size, "y": 1, "z": 1})]:
        for node in (False, True):
            grid, plan = make_grid(node_memory=node, **shape), ALGORITHMS[name].plan("nn", 8, 8, 8)
            whole = np.full((8, 8), min(value, 3e4) if dtype == "float16" and value < np.inf else value, dtype)
            whole[1::3], whole[:, 2] = -whole[1::3], 0
            blocks = [distribute(whole, grid, layout) for layout in (plan.a_layout, plan.b_layout, plan.c_layout)]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ALGORITHMS[name].executor(plan, grid).run(*blocks, 2, 3)
            said += [(name, node, str(one.message), one.filename, one.lineno) for one in caught]
    assert comm.allreduce(said) == []
