"""The letters of a product: which dims of its operands are batch, rows, columns, and summed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ShapeError

EXAMPLE = "'bmk,bkn->bmn'"


class Subscripts(NamedTuple):
    """A letter for each dim of A, B and C, as they are stored. A product of matrices is mk,kn->mn.

    >>> letters = Subscripts.read("bhsd,bhtd->bhst")
    >>> letters.batch, letters.rows, letters.columns, letters.inner
    ('bh', 's', 't', 'd')
    """

    a: str
    b: str
    c: str

    @classmethod
    def read(cls, text: str) -> Subscripts:
        """The letters of a text. Raises ShapeError for one that is no product of two operands."""
        if not isinstance(text, str):
            raise ShapeError(f"The letters of a product are a text such as {EXAMPLE}, not {text!r}.")
        operands, arrow, c = text.replace(" ", "").partition("->")
        names = [*operands.split(","), c]
        if not arrow or len(names) != 3:
            raise ShapeError(f"{text!r}: einsum takes two operands and says what C is, such as {EXAMPLE}.")
        for name, letters in zip(("A", "B", "C"), names, strict=True):
            if not letters or not (letters.isascii() and letters.isalpha()):
                raise ShapeError(
                    f"{text!r}: {name} is {letters!r}; each of A, B and C has a letter for each dim, and one at least."
                )
            for letter in letters:
                if letters.count(letter) > 1:
                    raise ShapeError(f"{text!r}: {name} has {letter} twice; a letter stands for one dim.")
        result = cls(*names)
        result._check(text)
        return result

    def _check(self, text: str) -> None:
        """Raise ShapeError for a letter of C that no operand has, or of one operand alone that C has not."""
        for letter in self.c:
            if letter not in self.a + self.b:
                raise ShapeError(f"{text!r}: C has {letter}, which neither A nor B has.")
        for name, own, other in (("A", self.a, self.b), ("B", self.b, self.a)):
            for letter in own:
                if letter not in other + self.c:
                    raise ShapeError(f"{text!r}: {letter} is in {name} alone, and not in C. Sum {name} over it first.")

    @property
    def batch(self) -> str:
        """The letters of both operands and of C."""
        return "".join(letter for letter in self.c if letter in self.a and letter in self.b)

    @property
    def rows(self) -> str:
        """The letters of C that A alone has."""
        return "".join(letter for letter in self.c if letter not in self.b)

    @property
    def columns(self) -> str:
        """The letters of C that B alone has."""
        return "".join(letter for letter in self.c if letter not in self.a)

    @property
    def inner(self) -> str:
        """The letters that are summed over."""
        return "".join(letter for letter in self.a if letter not in self.c)

    @property
    def letters(self) -> str:
        """Those of C, then those that are summed over."""
        return self.c + self.inner

    def extents(self, a: Sequence[int], b: Sequence[int]) -> dict[str, int]:
        """Letter → its size, of the shapes of A and B. Raises ShapeError where they do not fit the letters, or each other."""
        sizes: dict[str, int] = {}
        for name, letters, shape in (("A", self.a, a), ("B", self.b, b)):
            if len(shape) != len(letters):
                raise ShapeError(f"{self}: {name} has {len(letters)} letters, {letters}, and the shape {tuple(shape)}.")
            for letter, size in zip(letters, shape, strict=True):
                if sizes.setdefault(letter, size) != size:
                    raise ShapeError(f"{self}: {letter} is {sizes[letter]} in A {tuple(a)} and {size} in B {tuple(b)}.")
        return {letter: sizes[letter] for letter in self.letters}

    def __str__(self) -> str:
        return f"{self.a},{self.b}->{self.c}"
