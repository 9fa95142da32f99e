"""Rows of text in aligned columns, and numbers of things in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def counted(number: int, what: str) -> str:
    """A number of things; of one, in the singular.

    >>> counted(1, "rank"), counted(0, "rank"), counted(1200, "rank")
    ('1 rank', '0 ranks', '1200 ranks')
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


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
