"""Ranks that call different collectives: each raises, and says what each has called, before a number is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from summa3d.comm.grid import Grid
from summa3d.comm.health.signatures import KEPT
from summa3d.errors import AgreementError, GridError
from summa3d.gemm.matrix import DistMatrix
from summa3d.layout.redistribute import redistribute
from summa3d.node_support import why_no_node_memory

node_memory_only = pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}")
MOST_CALLS = 12
DTYPES = ("float64", "float32", "int32", "bfloat16")


class Planned(NamedTuple):
    """A call of a program: the same numbers on every rank, but for what a rank adds to them."""

    operation: str
    dtype: str
    rows: int
    op: str
    root: int
    started: bool


def drawn(chance: random.Random, size: int) -> Planned:
    """A call of `size` members. Some have more bytes than MPI is left with, or than are reduced in one piece."""
    operation = chance.choice(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all", "barrier"])
    rows = size * chance.choice([1, 2, 3, 5, 700, 1 << 15])
    return Planned(
        operation, chance.choice(DTYPES[:3]), rows, chance.choice(["sum", "max"]), chance.randrange(size), chance.random() < 0.3
    )


def changed(call: Planned, chance: random.Random, size: int) -> Planned:
    """The call that one rank makes instead: another size, dtype, operation or root."""
    kinds: dict[str, Callable[[], Planned]] = {
        "rows": lambda: call._replace(rows=call.rows + size * chance.choice([1, 1 << 14])),
        "dtype": lambda: call._replace(dtype=chance.choice([one for one in DTYPES[:3] if one != call.dtype])),
        "operation": lambda: call._replace(operation="all_gather" if call.operation != "all_gather" else "all_reduce"),
    }
    if call.operation in ("all_reduce", "reduce"):
        kinds["op"] = lambda: call._replace(op="min" if call.op == "sum" else "sum")
    if call.operation in ("broadcast", "reduce"):
        kinds["root"] = lambda: call._replace(root=(call.root + 1) % size)
    if call.operation == "barrier":
        kinds = {"operation": kinds["operation"]}
    return kinds[chance.choice(sorted(kinds))]()


def made(axis: Any, call: Planned) -> tuple[Any, Callable[[Any], None]]:
    """Begin a call; what its result is, or will be, and what compares that with the right one."""
    size, index = axis.size, axis.index
    parts = [np.arange(call.rows).astype(call.dtype) % 7 + member for member in range(size)]
    mine, op = parts[index].copy(), {"sum": np.add, "max": np.maximum, "min": np.minimum}[call.op].reduce
    own = slice(call.rows // size * index, call.rows // size * (index + 1))
    takes: dict[str, tuple[tuple[Any, ...], Any]] = {
        "all_gather": ((mine,), np.concatenate(parts)),
        "reduce_scatter": ((mine,), np.add.reduce(parts)[own]),
        "all_reduce": ((mine, call.op), op(parts)),
        "broadcast": ((mine, call.root), parts[call.root]),
        "reduce": ((mine, call.root, call.op), op(parts) if index == call.root else None),
        "all_to_all": ((mine,), np.concatenate([part[own] for part in parts])),
    }
    if call.operation == "barrier":
        axis.barrier()
        return None, lambda result: None
    arguments, right = takes[call.operation]

    def compare(result: Any) -> None:
        assert np.array_equal(result, right) if right is not None else result is None, f"a silent wrong number: {call}"

    return getattr(axis, f"start_{call.operation}" if call.started else call.operation)(*arguments), compare


def ran(axis: Any, program: list[Planned], differs: int, instead: Planned, here: bool) -> AgreementError | None:
    """Run a program, in which one rank (`here`) makes another call at one place; the error that it ends with.

    Results of the calls before are compared with the right ones, those of the call that differs too where ranks call alike.
    """
    waiting = []
    try:
        for number, call in enumerate(program):
            result, compare = made(axis, instead if here and number == differs else call)
            if call.started and call.operation != "barrier" and not (here and number == differs and not instead.started):
                waiting.append((result, compare, number))
            elif number < differs:
                compare(result)
        for pending, compare, number in waiting:
            result = pending.wait()
            if number < differs:
                compare(result)
    except AgreementError as error:
        return error
    return None


def desynchronised(comm: Any, seed: int, check: bool) -> None:
    """Every rank of a program that goes out of step raises, with what each has called.

    A call that MPI had begun on some ranks when others raised leaves its communicator out of step: each program has its own.
    """
    chance = random.Random(seed)
    program = [drawn(chance, comm.size) for _ in range(chance.randint(2, MOST_CALLS))]
    differs, victim = chance.randrange(len(program)), chance.randrange(comm.size)
    instead = changed(program[differs], chance, comm.size)
    grid = Grid(comm.Dup(), {"x": comm.size}, node_memory=not check, check=check)
    error = ran(grid["x"], program, differs, instead, comm.rank == victim)
    try:
        grid.free()
    except AgreementError as late:
        error = late
    said = f"seed {seed}: {program[differs]} on all but rank {victim}: {instead}\n{error}"
    assert error is not None, said
    for word in {program[differs].operation, instead.operation}:
        assert word in str(error), said
    assert f"rank {victim}" in str(error), said
    comm.Barrier()


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("check", [pytest.param(False, marks=node_memory_only), True], ids=["node memory", "MPI with checks"])
def test_a_program_out_of_step_raises_on_every_rank_what_each_called(comm, check):
    for seed in range(20):
        desynchronised(comm, seed, check)


@pytest.mark.wide
@pytest.mark.mpi(sizes=(2, 4), timeout=900)
@pytest.mark.parametrize("check", [pytest.param(False, marks=node_memory_only), True], ids=["node memory", "MPI with checks"])
def test_three_hundred_programs_out_of_step(comm, check):
    for seed in range(1000, 1300):
        desynchronised(comm, seed, check)


@node_memory_only
@pytest.mark.mpi(sizes=(3,))
def test_programs_in_step_are_right(comm, make_grid):
    """The same generator, without a change: no error, and the right numbers."""
    for seed in range(20):
        chance = random.Random(seed)
        program = [drawn(chance, comm.size) for _ in range(MOST_CALLS)]
        grid = make_grid(x=comm.size, node_memory=True, check=False)
        assert ran(grid["x"], program, len(program), program[0], False) is None
        grid.free()


@node_memory_only
@pytest.mark.mpi(sizes=(3,))
def test_a_call_missed_before_an_identical_one_is_found_when_the_grid_is_freed(comm, make_grid):
    grid = make_grid(x=3, node_memory=True, check=False)
    with pytest.raises(
        AgreementError, match=r"their call 4 .*\n  all_reduce of float64 \[2\], sum on ranks 0, 1; grid.free\(\) on rank 2"
    ):
        for _ in range(4 if comm.rank != 2 else 3):
            grid["x"].all_reduce(np.ones(2))
        grid.free()


@node_memory_only
@pytest.mark.mpi(sizes=(3,))
def test_more_calls_in_flight_than_are_kept_for_comparison(comm, make_grid):
    axis = make_grid(x=3, node_memory=True, check=False)["x"]
    begun = [axis.start_all_to_all(np.full(3, number + comm.rank)) for number in range(3 * KEPT)]
    assert [one.wait().tolist() for one in begun] == [[number, number + 1, number + 2] for number in range(3 * KEPT)]
    for number in range(3 * KEPT):  # the root of a broadcast does not wait for the others
        assert axis.broadcast(np.full(2, number if comm.rank == number % 3 else -1), number % 3).tolist() == [number] * 2


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("check", [False, True])
def test_a_product_or_a_redistribution_called_differently_is_an_error_on_all_ranks(comm, make_grid, check):
    grid = make_grid(x=2, y=2, check=check)
    whole = np.arange(48.0).reshape(8, 6)
    a = DistMatrix.from_global(whole, grid, "m:x k:y")
    for victim in range(4):
        to = "m:y k" if comm.rank == victim else "m:x k:y"  # which moves nothing
        with pytest.raises(AgreementError, match=rf"redistribute:\n  to: .*'m:y k' on rank {victim}"):
            redistribute(a.block, a.shape, grid, a.layout, to)
        with pytest.raises(AgreementError, match="matmul"):
            a.T @ a if comm.rank == victim else a @ a.T
    assert np.array_equal(a.redistribute("m k:y").to_global(), whole)


@node_memory_only
@pytest.mark.mpi(sizes=(2,))
def test_what_holds_an_axis_of_a_freed_grid_gets_an_error(comm, make_grid):
    for check in (False, True):
        grid = make_grid(x=2, node_memory=True, check=check)
        axis = grid["x"]
        axis.all_reduce(np.ones(2))
        grid.free()
        for use in (
            lambda axis=axis: axis.all_reduce(np.ones(2)),
            lambda axis=axis: axis.start_send(np.ones(2), 1 - comm.rank),
            lambda axis=axis: axis.allocate((2,), np.ones(2)),
            axis.barrier,
        ):
            with pytest.raises(GridError, match="axis x was freed with its grid"):
                use()
