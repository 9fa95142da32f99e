"""Random products of operands in any layouts: their grids, layouts, forms, letters and sizes, and plain numpy's operands."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np

from summa3d.layout import BlockCyclic, Layout

SIZES = (1, 2, 3, 7, 11, 16, 19)
"""Extents: many are primes, some less than there are parts."""


class Case(NamedTuple):
    """A product C (m×n) = op(A)·op(B). grids : axis → size, of A and of B; orders : of their ranks. c : None, C is left free."""

    form: str
    m: int
    n: int
    k: int
    grids: tuple[dict[str, int], dict[str, int]]
    orders: tuple[str | None, str | None]
    a: Any
    b: Any
    c: Any
    objective: str
    turned: tuple[bool, bool]

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """op(A) and op(B), the same on every rank."""
        random = np.random.default_rng(seed)
        return random.standard_normal((self.m, self.k)), random.standard_normal((self.k, self.n))


def grids_of(ranks: int, axes: str = "xyz") -> list[dict[str, int]]:
    """All grids of three axes, some of them of one member."""
    found = [size for size in range(1, ranks + 1) if ranks % size == 0]
    sizes = [(x, y, ranks // x // y) for x in found for y in found if ranks % (x * y) == 0]
    return [dict(zip(axes, each, strict=True)) for each in sizes]


def random_layout(random: Random, axes: dict[str, int], plain: bool = False, dims: int = 2) -> Any:
    """A layout that splits, copies, holds at one index or two, follows another axis, or deals out; if plain, the first two."""
    names, splits = list(axes), [list[str]() for _ in range(dims)]
    at, follows = dict[str, list[int]](), dict[str, str]()
    random.shuffle(names)
    for name in names:
        kind, alike = random.random(), [one for one in splits[0] if axes[one] == axes[name]]
        if kind < 0.15:
            continue
        if kind < 0.23 and not plain:
            at[name] = sorted(random.sample(range(axes[name]), random.randint(1, min(2, axes[name]))))
        elif kind < 0.27 and alike and not plain:
            follows[name] = alike[0]
        else:
            splits[int(dims * random.random())].append(name)
    if dims == 2 and not (at or follows or plain) and random.random() < 0.3:
        return BlockCyclic(*((tuple(own), random.randint(1, 6)) for own in splits))
    return Layout(*splits, root_only=tuple(follows), follows=follows, at=at)


def random_case(random: Random, ranks: int, two_grids: bool = False, plain: bool = False) -> Case:
    """A product on one grid of so many ranks, or on two of them, of other shapes and orders of ranks."""
    first = random.choice(grids_of(ranks))
    second = random.choice(grids_of(ranks, "uvw")) if two_grids else first
    orders = (None, "".join(random.sample("uvw", 3)) if two_grids else None)
    form = "nn" if random.random() < 0.5 else random.choice(["nt", "tn", "tt"])
    m, n, k = (random.choice(SIZES) for _ in range(3))
    a, b, c = (random_layout(random, grid, plain) for grid in (first, second, first))
    turned = random.random() < 0.3, random.random() < 0.3
    objective = random.choice(["seconds", "words"])
    return Case(form, m, n, k, (first, second), orders, a, b, c if random.random() < 0.6 else None, objective, turned)


def stored(whole: np.ndarray, letter: str) -> np.ndarray:
    """A matrix as it is stored where op is `letter`."""
    return whole if letter == "n" else np.ascontiguousarray(whole.T)


LETTERS = ("bmk,bkn->bmn", "mk,bkn->bmn", "bhsd,bhtd->bhst", "bsh,hf->bsf", "bij,bij->b", "abk,bkc->ac", "mk,kn->nm")


class LetteredCase(NamedTuple):
    """A product of tensors. extents : letter → size. grids, orders, c : as those of a Case."""

    subscripts: str
    extents: dict[str, int]
    grids: tuple[dict[str, int], dict[str, int]]
    orders: tuple[str | None, str | None]
    a: Any
    b: Any
    c: Any
    objective: str

    @property
    def names(self) -> list[str]:
        """The letters of A, of B, of C."""
        return self.subscripts.replace("->", ",").split(",")

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """A and B, the same on every rank."""
        random = np.random.default_rng(seed)
        first, second, _ = ([self.extents[letter] for letter in names] for names in self.names)
        return random.standard_normal(first), random.standard_normal(second)


def random_letters(random: Random) -> str:
    """Letters of which up to two each are batch, A's own, B's own and summed over, in any order."""
    while True:
        groups = [("bc", "mn", "pq", "kl")[kind][: random.choice([0, 1, 1, 2])] for kind in range(4)]
        batch, rows, columns, inner = groups
        names = [
            "".join(random.sample(one, len(one)))
            for one in (batch + rows + inner, batch + inner + columns, batch + rows + columns)
        ]
        if all(names):
            return f"{names[0]},{names[1]}->{names[2]}"


def random_lettered(random: Random, ranks: int, two_grids: bool = False, plain: bool = False) -> LetteredCase:
    """A product of tensors on one grid of so many ranks, or on two of them."""
    subscripts = random.choice(LETTERS) if random.random() < 0.4 else random_letters(random)
    extents = {letter: random.choice((1, 2, 3, 5, 7)) for letter in sorted({*subscripts} - {*",->"})}
    first = random.choice(grids_of(ranks))
    second = random.choice(grids_of(ranks, "uvw")) if two_grids else first
    orders = (None, "".join(random.sample("uvw", 3)) if two_grids else None)
    names = subscripts.replace("->", ",").split(",")
    a, b, c = (random_layout(random, grid, plain, len(own)) for grid, own in zip((first, second, first), names, strict=True))
    objective = random.choice(["seconds", "words"])
    return LetteredCase(subscripts, extents, (first, second), orders, a, b, c if random.random() < 0.6 else None, objective)
