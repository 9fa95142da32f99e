"""Whether a product fits into the memory of its nodes; asked before anything is allocated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import CapacityError

MEMORY = Path("/proc/meminfo")
MAKING = {False: 24, True: 32}
"""Bytes per element that `gemm.element` holds while it computes a block: temporaries in float64, int64 or complex128."""
RACED = 8
"""Bytes per element that `bench.products.element` holds beside the block: float64."""
SERIAL = 4
"""Arrays of C's size on rank 0 while --check compares, beside the result: C before, the serial product, the sum, a difference."""
GIB = 2**30


def available_bytes() -> int | None:
    """The memory that this node can give to new allocations (MemAvailable); None where the system does not say."""
    line = re.search(r"^MemAvailable: +(\d+) kB$", MEMORY.read_text(), re.MULTILINE) if MEMORY.exists() else None
    return int(line[1]) * 1024 if line else None


def peak_bytes(algorithm: Any, plan: Any, grid: Any, dtype: str, device: str, check: bool = False, raced: bool = False) -> int:
    """The host memory that a product takes on this rank at its peak, beyond what it holds before it makes operands.

    Operands are made one after the other. Then there are A, B, C, a copy of C unless products are `raced`, the executor's
    workspace, and the blocks that others read in the node's memory. With `check` every rank holds C as a whole, and rank 0 the
    serial product's arrays too.
    """
    from ..dtypes import dtype_of
    from ..gemm.cost.steps import block_words

    at, size = grid.coordinates, dtype_of(dtype).nbytes
    a, b, c = (block_words(layout, shape, grid.shape, at) for layout, shape in plan.stored)
    each = RACED + size if raced else MAKING[dtype.startswith("complex")]
    making = _made_in_turn(a, b, c, size, each)
    if device == "cuda":
        return making
    staged = grid.staged
    held = a + b + (2 - raced) * c + algorithm.volume(plan, grid.shape, dtype, staged).workspace_of(at)
    if algorithm.reads_in_place:
        held += a * (plan.y in staged) + b * (plan.x in staged) + c * grid.shape[plan.z] * (plan.z in staged)
    serial = 0
    if check:
        mk, kn, mn = plan.m * plan.k, plan.k * plan.n, plan.m * plan.n
        wide = max(size, 4)  # 16-bit floats are multiplied in float32
        serial = size * mn
        if grid.rank == 0:
            serial += max(_made_in_turn(mk, kn, mn, wide, each), wide * (mk + kn + SERIAL * mn))
    return max(making, size * held + serial)


def serial_bytes(m: int, n: int, k: int, dtype: str) -> int:
    """The host memory that a raced product of whole matrices takes at its peak, which are made one after the other."""
    from ..dtypes import dtype_of

    size = dtype_of(dtype).nbytes
    return max(_made_in_turn(m * k, k * n, 0, size, RACED + size), size * (m * k + k * n + m * n))


def _made_in_turn(a: int, b: int, c: int, size: int, each: int) -> int:
    """The peak while A, B and C of these numbers of elements are made one after the other."""
    return max(each * a, size * a + each * b, size * (a + b) + each * c)


def require(nbytes: int, comm: Any) -> None:
    """Raise CapacityError on every rank where the ranks of some node need more than it has; collective over `comm`."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    together, most = node.allreduce(nbytes), node.allreduce(nbytes, MPI.MAX)
    node.Free()
    answers = comm.allgather((together, most, available_bytes(), MPI.Get_processor_name()))
    short = [item for item in answers if item[2] is not None and item[0] > item[2]]
    if short:
        together, most, available, name = max(short, key=lambda item: item[0] - item[2])
        raise CapacityError(
            f"The product needs up to {most / GIB:,.1f} GiB a rank, {together / GIB:,.1f} GiB on node {name}, which has "
            f"{available / GIB:,.1f} GiB available. More nodes, smaller sizes or a narrower dtype may fit."
        )
