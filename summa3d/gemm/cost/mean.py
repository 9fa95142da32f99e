"""Mean words, messages and products of a rank in closed form, fast enough to compare thousands of grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from math import gcd
from typing import NamedTuple

Real = Fraction | int
MeanOf = Callable[[str, int, int, int, Mapping[str, int]], "Mean"]


class Mean(NamedTuple):
    """An average rank's part: words gathered and words reduced, messages, and how many local products of which extents."""

    gathered: Real
    reduced: Real
    messages: float
    products: int
    m: float
    n: float
    k: float

    @property
    def words(self) -> Real:
        """Words received."""
        return self.gathered + self.reduced

    def also_reduced(self, words: Real, messages: int) -> Mean:
        """The same, and a sum of so many words in so many messages."""
        return self._replace(reduced=self.reduced + words, messages=self.messages + messages)


def cuboid(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """[(Y−1)mk + (X−1)kn + (Z−1)mn]/P"""
    x, y, z = grid["x"], grid["y"], grid["z"]
    gathered = Fraction((y - 1) * m * k + (x - 1) * k * n, x * y * z)
    return Mean(gathered, Fraction((z - 1) * m * n, x * y * z), x + y + z - 3, 1, m / x, n / y, k / z)


def agarwal(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """(q−1)(mk + kn + mn)/P"""
    q = grid["x"]
    gathered, reduced = Fraction((q - 1) * (m * k + k * n), q**3), Fraction((q - 1) * m * n, q**3)
    return Mean(gathered, reduced, q + 1 - 2 / q, 1, m / q, n / q, k / q)


def summa(form: str, m: Real, n: Real, k: Real, grid: Mapping[str, int]) -> Mean:
    """nn [(C−1)mk + (R−1)kn]/P; nt [(R−1)kn + (C−1)mn]/P; tn [(C−1)mk + (R−1)mn]/P; tt, nn of B·A and its transpose."""
    rows, columns = grid["x"], grid["y"]
    ranks = rows * columns
    cuts = rows + columns - gcd(rows, columns)
    if form == "tt":
        return _with_transpose(summa("nn", n, m, k, grid), m, n, rows, columns)
    if form == "nn":
        gathered = Fraction((columns - 1) * m * k + (rows - 1) * k * n, ranks)
        messages = cuts * (2 - 1 / rows - 1 / columns)
        return Mean(gathered, 0, messages, cuts, float(m / rows), float(n / columns), float(k / cuts))
    if form == "nt":
        gathered, reduced = Fraction((rows - 1) * k * n, ranks), Fraction((columns - 1) * m * n, ranks)
        return Mean(gathered, reduced, cuts * (columns - 1 / rows), cuts, float(m / rows), float(n / cuts), float(k / columns))
    gathered, reduced = Fraction((columns - 1) * m * k, ranks), Fraction((rows - 1) * m * n, ranks)
    return Mean(gathered, reduced, cuts * (rows - 1 / columns), cuts, float(m / cuts), float(n / columns), float(k / rows))


def cannon(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """(q−1)(1 + 1/q) blocks of each operand that moves: q−1 shifts, and a skew on all but one rank of a ring."""
    q = grid["x"]
    if form == "tt":
        return _with_transpose(cannon("nn", n, m, k, grid), m, n, q, q)
    moving = {"nn": m * k + k * n, "nt": k * n + m * n, "tn": m * k + m * n}[form]
    gathered = Fraction((q - 1) * (q + 1) * moving, q**3)
    return Mean(gathered, 0, 2 * (q - 1) * (1 + 1 / q), q, m / q, n / q, k / q)


def tesseract(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """nn (q−1)(mk/d + kn)/q²; nt (q−1)(kn + mn/d)/q²; tn [(q−1)(mk/d + mn) + 2(d−1)/d·mn]/q²; tt, nn of B·A and its transpose."""
    q, d = grid["x"], grid["d"]
    if form == "tt":
        return _with_transpose(tesseract("nn", n, m, k, grid), m, n, q * d, q)
    if form != "tn":
        return summa(form, Fraction(m, d), n, k, grid)
    layer = summa("tn", m, n, Fraction(k, d), grid)
    return layer.also_reduced(Fraction(2 * (d - 1) * m * n, d * q * q), 2 * (d - 1))


def ca25d(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """[(q−1)(mk + kn) + (d−1)mn]/P"""
    q, d = grid["x"], grid["d"]
    return summa("nn", m, n, Fraction(k, d), grid).also_reduced(Fraction((d - 1) * m * n, q * q * d), d - 1)


def oned_column(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """Nothing moves."""
    return Mean(0, 0, 0, 1, m, n / grid["y"], k)


def oned_row(form: str, m: int, n: int, k: int, grid: Mapping[str, int]) -> Mean:
    """2(t−1)/t·mn"""
    t = grid["y"]
    return Mean(0, Fraction(2 * (t - 1) * m * n, t), 2 * (t - 1), 1, m, n, k / t)


def _with_transpose(mean: Mean, m: Real, n: Real, rows: int, columns: int) -> Mean:
    """And C exchanged across the diagonal: about all of it, each block in as many pieces as the splits make of it."""
    ranks, pieces = rows * columns, max(rows, columns) / min(rows, columns)
    return mean._replace(gathered=mean.gathered + Fraction((ranks - 1) * m * n, ranks * ranks), messages=mean.messages + pieces)


def lower_bound(m: int, n: int, k: int, ranks: int) -> float:
    """The fewest words that some rank must receive, whatever the algorithm and its memory, operands spread evenly.

    With the extents sorted d1 ≥ d2 ≥ d3: (1−1/P)·d2·d3 for P ≤ d1/d2; 2(d1·d2·d3²/P)^½ − (d1·d3 + d2·d3)/P for P ≤ d1·d2/d3²;
    3(d1·d2·d3/P)^⅔ − (d1·d2 + d1·d3 + d2·d3)/P beyond. Source: Al Daas, Ballard, Grigori, Kumar, Rouse, SPAA 2022.
    """
    if min(m, n, k) == 0:
        return 0.0
    return max(0.0, used_words(m, n, k, Fraction(1, ranks)) - (m * k + k * n + m * n) / ranks)


def used_words(m: int, n: int, k: int, share: Fraction) -> float:
    """The fewest words of A, B and C that a rank reads or writes which does this share of a product's work.

    A share above 1 is of several products alike: that many whole ones, and a part of one more, for a part's words grow ever less
    than its work. With d1 ≥ d2 ≥ d3 and a share of 1/P, the first terms of `lower_bound`. Source: as there.
    """
    d3, d2, d1 = sorted((m, n, k))
    products, part = divmod(share, 1)
    words = float(products * (d1 * d2 + d1 * d3 + d2 * d3))
    if part * d1 >= d2:
        return words + d2 * d3 + float(part * (d1 * d2 + d1 * d3))
    if part * d1 * d2 >= d3 * d3:
        return words + 2 * float(part * d1 * d2 * d3 * d3) ** 0.5 + float(part * d1 * d2)
    return words + 3 * float(part * d1 * d2 * d3) ** (2 / 3)
