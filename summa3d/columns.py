"""Rows of text in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """A line for each row: columns `left`, counted from 0, begin together, the others end together.

    >>> aligned([("name", "ms"), ("a", "1.5")], left=[0])
    ['name   ms', 'a     1.5']
    """
    columns = [
        [cell.ljust(width) if place in left else cell.rjust(width) for cell in column]
        for place, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
