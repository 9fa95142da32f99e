"""Local products in slabs, between which MPI moves what is in flight; and those whose sums over ranks leave in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...comm.axis import Axis
from ...comm.device.arrays import Array, dtype_name
from ...comm.pending import Pending
from ...dtypes import LETTERS
from ..local.blas import adds_in_place
from .schedule import pieces_of, slabs, within

if TYPE_CHECKING:
    from ..algorithms.workspace import Workspace


def cut_dims(out: Array) -> str:
    """The dims that slabs of a product into `out` may cut: k, too, where a BLAS adds to C without rounding to 16 bits."""
    dtype = dtype_name(out)
    return "mnk" if dtype in LETTERS and adds_in_place(dtype) else "mn"


def multiply_in_slabs(
    workspace: Workspace,
    form: str,
    a: Array,
    b: Array,
    out: Array,
    whole: int,
    alpha: Any = 1,
    beta: Any = 0,
    scratch: Array | None = None,
) -> None:
    """out = α·op(A)·op(B) + β·out, slab by slab, behind each of which MPI moves what is in flight.

    whole : multiply-adds of this rank's product, of which a slab is at most 1/SLABS
    """
    (m, n), k = out.shape, a.shape[1 if form[0] == "n" else 0]
    letters = ("mk" if form[0] == "n" else "km", "kn" if form[1] == "n" else "nk", "mn")
    for ranges in slabs({"m": (0, m), "n": (0, n), "k": (0, k)}, whole, cut_dims(out)):
        of_a, of_b, of_c = (within(ranges, names) for names in letters)
        memory = None if scratch is None else scratch[of_c]
        workspace.accumulate(a[of_a], b[of_b], form, out[of_c], alpha, 1 if ranges["k"][0] else beta, memory)


class StartedSums(Pending):
    """Sums over ranks of the rows of an array, piece by piece in flight; `wait` returns the array."""

    def __init__(self, out: Array, sums: Sequence[Pending]) -> None:
        self._result, self._sums = out, sums

    @property
    def done(self) -> bool:
        """Return whether every piece has been summed."""
        return all(sum_.done for sum_ in self._sums)

    def wait(self) -> Array:
        """The array, summed; a second call returns the same."""
        for sum_ in self._sums:
            sum_.wait()
        return self._result


def start_sums(
    axis: Axis,
    workspace: Workspace,
    form: str,
    a: Array,
    b: Array,
    out: Array,
    pieces: int,
    alpha: Any = 1,
    beta: Any = 0,
    scratch: Array | None = None,
) -> StartedSums:
    """Start out = the sum along `axis` of the members' α·op(A)·op(B) + β·out: rows are summed while others are multiplied.

    Words are those of an all-reduce of each piece.
    """
    whole, sums = out.shape[0] * out.shape[1] * a.shape[1 if form[0] == "n" else 0], []
    for start, stop in pieces_of(out.shape[0], pieces):
        rows = slice(start, stop)
        part, summand = a[rows] if form[0] == "n" else a[:, rows], out[rows]
        multiply_in_slabs(workspace, form, part, b, summand, whole, alpha, beta, None if scratch is None else scratch[rows])
        sums.append(axis.start_all_reduce(summand, into=summand, in_order=True))
    return StartedSums(out, sums)
