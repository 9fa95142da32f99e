"""Several collectives in flight at once; what sums round to and in which order they are taken; buffers while in flight."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
from kinds import array, numbers, plain


@pytest.fixture(params=[True, False], ids=["node", "mpi"])
def make_grid(request, make_grid):
    """Grids whose axes communicate through the node's memory, and grids whose axes do through MPI."""
    return partial(make_grid, node_memory=request.param)


@pytest.mark.mpi(sizes=(8,))
def test_many_in_flight_on_several_axes_and_waited_in_another_order_on_each_rank(comm, make_grid):
    grid = make_grid(x=2, y=2, z=2, check=False)
    pending, wanted = [], []
    for turn in range(5):
        for name in ("z", "x", "y"):
            axis = grid[name]
            line = [grid.rank_of({**grid.coordinates, name: index}) for index in range(2)]
            blocks = [numbers("float64", (member + 1, 3), turn, rank) for member, rank in enumerate(line)]
            pending.append(axis.start_all_gather(blocks[axis.index].astype(float), sizes=[1, 2]))
            wanted.append(np.concatenate(blocks))
            wholes = [numbers("float64", (5, 2), turn, rank, 1) for rank in line]
            pending.append(axis.start_reduce_scatter(wholes[axis.index].astype(float), sizes=[3, 2]))
            wanted.append(np.split(sum(wholes), [3])[axis.index])
            pending.append(axis.start_all_reduce(wholes[axis.index].astype(float)))
            wanted.append(sum(wholes))
        gc.collect()
    for place in np.random.default_rng(comm.rank).permutation(len(pending)):
        assert np.array_equal(pending[place].wait(), wanted[place])


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_started_collective_keeps_its_buffers_alive(comm, make_grid, kind):
    axis = make_grid(x=2, check=False)["x"]
    pending = [axis.start_all_gather(array(kind, "float64", np.full(100_003, 2 * turn + comm.rank))) for turn in range(4)]
    litter = [np.full(100_003, -1.0) for _ in range(8)]
    gc.collect()
    for turn, one in enumerate(pending):
        assert np.array_equal(plain(one.wait()), np.repeat([2 * turn, 2 * turn + 1], 100_003))
    assert len(litter) == 8


def halves(dtype, members, seed):
    """Values with few enough bits that their float32 sum is exact, so that one rounding to 16 bits has one right answer."""
    bound, unit = (2047, 2.0**-8) if dtype == "float16" else (255, 2.0**-5)
    return np.random.default_rng(seed).integers(-bound, bound + 1, (members, members * 101)) * unit


def rounded_once(values, dtype):
    """The float64 `values` rounded to nearest-even 16-bit floats, by integer arithmetic on their bits for bfloat16."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize(("kind", "dtype"), [("numpy", "float16"), ("torch", "float16"), ("torch", "bfloat16")])
def test_sums_of_16_bit_floats_are_accumulated_in_float32_and_rounded_once(comm, make_grid, kind, dtype):
    axis, me = make_grid(x=comm.size)["x"], comm.rank
    values = halves(dtype, comm.size, seed=11)
    want = rounded_once(values.sum(0), dtype)
    mine = array(kind, dtype, values[me])
    assert np.array_equal(plain(mine), values[me])
    assert np.array_equal(plain(axis.all_reduce(mine)), want)
    assert np.array_equal(plain(axis.reduce_scatter(mine)), want[me * 101 : (me + 1) * 101])
    total = axis.reduce(mine, root=1)
    if me == 1:
        assert np.array_equal(plain(total), want)
    stepwise = np.zeros_like(want)
    for part in values:
        stepwise = rounded_once(stepwise + part, dtype)
    assert not np.array_equal(stepwise, want)  # adding in 16 bits would have been noticed


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_reduce_scatter_adds_in_the_order_of_members_to_the_last_bit(comm, make_grid, kind):
    axis = make_grid(x=comm.size)["x"]
    values = np.random.default_rng(13).standard_normal((comm.size, 7 * comm.size)).astype(np.float32)
    want = values[0].copy()
    for part in values[1:]:
        want += part
    assert not np.array_equal(want, values[::-1].sum(0))  # the order shows
    own = want[7 * comm.rank : 7 * (comm.rank + 1)]
    for _ in range(3):
        for got in (
            axis.reduce_scatter(array(kind, "float32", values[comm.rank])),
            axis.start_reduce_scatter(array(kind, "float32", values[comm.rank])).wait(),
        ):
            assert plain(got).astype(np.float32).tobytes() == own.tobytes()


@pytest.mark.mpi(sizes=(2,))
def test_torch_tensors_with_history_or_a_conjugate_bit_travel_as_plain_values(comm, make_grid):
    import torch

    axis = make_grid(x=2)["x"]
    leaf = torch.full((2, 3), float(comm.rank + 1), dtype=torch.float64, requires_grad=True)
    gathered = axis.all_gather(leaf * 2)
    assert not gathered.requires_grad and gathered[:, 0].tolist() == [2, 2, 4, 4]
    for dtype in (torch.float32, torch.bfloat16):
        total = axis.all_reduce((leaf * 2).to(dtype))
        assert not total.requires_grad and total[0].tolist() == [6, 6, 6]
    conjugated = torch.full((3,), 1 + 1j * (comm.rank + 1), dtype=torch.complex128).conj()
    assert axis.all_gather(conjugated).tolist() == [1 - 1j] * 3 + [1 - 2j] * 3
    assert axis.all_reduce(conjugated).tolist() == [2 - 3j] * 3
