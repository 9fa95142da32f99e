"""The logical matrices of weights: those that a fused weight holds side by side are orthogonalised each by itself."""

from __future__ import annotations

from dataclasses import dataclass

from ...layout.cyclic import Runs
from ...layout.layout import Sharding


@dataclass(frozen=True)
class LogicalMatrix:
    """A matrix [inputs, outputs]: all rows, and some columns, of a weight of which ranks hold blocks.

    Attributes
    ----------
    weight : the weight's name
    held : how the blocks lie that ranks give, and get back
    columns : ranges of the weight's columns
    """

    weight: str
    held: Sharding
    columns: Runs

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.held.shape[0], sum(run.stop - run.start for run in self.columns)


def matrices_of(weight: str, held: Sharding, joined: tuple[int, int] = (1, 1)) -> list[LogicalMatrix]:
    """The logical matrices of a weight.

    joined : numbers of groups and parts; the weight's columns are ordered [group][part][the rest], and each part is a matrix

    >>> from summa3d.layout import Layout
    >>> [one.columns for one in matrices_of("kv", Sharding(Layout("k n"), (5, 8)), joined=(2, 2))]
    [(slice(0, 2, None), slice(4, 6, None)), (slice(2, 4, None), slice(6, 8, None))]
    """
    groups, parts = joined
    columns = held.shape[1]
    if parts == 1:
        return [LogicalMatrix(weight, held, (slice(0, columns),))]
    width = columns // (groups * parts)
    firsts = [[(group * parts + part) * width for group in range(groups)] for part in range(parts)]
    return [LogicalMatrix(weight, held, tuple(slice(first, first + width) for first in of_part)) for of_part in firsts]
