"""Local products in slabs, between which MPI moves what is in flight; and those whose sums over ranks leave in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...comm.axis import Axis
from ...comm.device.arrays import Array
from ...comm.pending import Pending
from ...comm.transport.progress import IN_FLIGHT
from .schedule import pieces_of, slabs


def each_slab(form: str, a: Array, out: Array, whole: int) -> Iterator[tuple[Array, Array]]:
    """The rows of op(A) and of C of each slab of C = op(A)·op(B); after each, MPI moves what is in flight.

    whole : multiply-adds of this rank's product, of which a slab is at most 1/SLABS
    """
    (m, n), k = out.shape, a.shape[1 if form[0] == "n" else 0]
    for ranges in slabs({"m": (0, m), "n": (0, n), "k": (0, k)}, whole):
        rows = slice(*ranges["m"])
        yield a[rows] if form[0] == "n" else a[:, rows], out[rows]
        IN_FLIGHT.advance()


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
    axis: Axis, form: str, a: Array, out: Array, pieces: int, multiply: Callable[[Array, Array], object]
) -> StartedSums:
    """Start C = the sum along `axis` of the members' op(A)·op(B): pieces of rows are summed while others are multiplied.

    multiply : makes rows of C of those of A, as ``multiply(part_of_a, rows)``. Words are those of an all-reduce of each piece.
    """
    whole, sums = out.shape[0] * out.shape[1] * a.shape[1 if form[0] == "n" else 0], []
    for start, stop in pieces_of(out.shape[0], pieces):
        rows = slice(start, stop)
        summand = out[rows]
        for part, slab in each_slab(form, a[rows] if form[0] == "n" else a[:, rows], summand, whole):
            multiply(part, slab)
        sums.append(axis.start_all_reduce(summand, into=summand, in_order=True))
    return StartedSums(out, sums)
