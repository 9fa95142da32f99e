"""The text form of layouts, such as ``b:(x,y) s h:z``: parse and print as plain data, without grids or arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple, NoReturn

from ..errors import LayoutError
from ..files import whole

LONGEST = 10_000
"""Characters of a layout's text."""
WORD = re.compile(r"[^\s:(),@=\[\]]+")
INDICES = re.compile(r"\d+(\+\d+)*")
GRAINED = re.compile(r"([^*/]+)([*/])([1-9]\d*)")
"""An axis and the items that it keeps whole: so many elements each, or so many of equal size."""
HELD = "an index, indices such as 0+3, or an axis of the dims"
BLANKS = re.compile(r"\s*")
HELP = (
    "  A layout names each dim in turn and the grid axes that split it, coarse first: 'b:(x,y) s h:z' (s is whole). A number "
    "stands for a dim without a name: '0:x 1:y'. 'n:y*21' splits items of 21, 'm:(x*11,y/11)' what x holds into 11 items.\n"
    "  '@' after the dims names root-only axes: 'm:x k:z @y=0', 'v h @pp=0+3'. Brackets are the block sizes of a block-cyclic "
    "matrix: 'm:x[64] k:y[32]'."
)


class Notation(NamedTuple):
    """The contents of a layout's text."""

    names: tuple[str, ...] | None
    """A label for each dim; None where all are their positions."""
    dims: tuple[tuple[str, ...], ...]
    blocks: tuple[int | None, ...]
    """The block size of each dim of a block-cyclic matrix; None elsewhere."""
    root_only: tuple[str, ...]
    follows: dict[str, str]
    at: dict[str, tuple[int, ...]]
    """The root-only axes whose block is not at index 0 alone → the indices that hold it."""
    grains: tuple[tuple[int, ...], ...] = ()
    """For each dim, the items that its axes keep whole; () where each element counts."""


def written(
    names: Sequence[str] | None,
    dims: Sequence[Sequence[str]],
    root_only: Sequence[str] = (),
    held: Mapping[str, str | Sequence[int]] | None = None,
    blocks: Sequence[int | None] = (),
    grains: Sequence[Sequence[int]] = (),
) -> str:
    """The text that `read` parses: ``m:(x,y) k:z``, ``0:x 1``, ``h:z @y=z``, ``v h @pp=0+3``, ``m:x[64] k:y[32]``, ``n:y*21``.

    held : root-only axis → the axis whose index it follows, or the indices that hold the block; else index 0 does
    """
    items = []
    for position, axes in enumerate(dims):
        item = names[position] if names else str(position)
        if grains and grains[position]:
            kept = ["" if grain == 1 else f"*{grain}" if grain > 0 else f"/{-grain}" for grain in grains[position]]
            axes = [f"{axis}{text}" for axis, text in zip_longest(axes, kept, fillvalue="")]
        if axes:
            item += f":{axes[0]}" if len(axes) == 1 else f":({','.join(axes)})"
        if blocks and blocks[position] is not None:
            item += f"[{blocks[position]}]"
        items.append(item)
    if root_only:
        result = {axis: (held or {}).get(axis, (0,)) for axis in root_only}
        texts = {axis: item if isinstance(item, str) else "+".join(map(str, item)) for axis, item in result.items()}
        items.append("@" + ",".join(f"{axis}={text}" for axis, text in texts.items()))
    return " ".join(items)


@lru_cache(maxsize=1024)
def read(text: str) -> Notation:
    """Parse `text`; cached. Raises LayoutError naming the position that cannot be read, and for a text that no layout has."""
    if len(text) > LONGEST:
        raise LayoutError(f"{text[:40]!r}… has {len(text)} characters; the text of a layout has at most {LONGEST}.")
    return _Reader(text).notation()


class _Reader:
    """A cursor in the text of a layout."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def notation(self) -> Notation:
        """The whole text."""
        names: list[str] = []
        dims: list[tuple[str, ...]] = []
        blocks: list[int | None] = []
        self.grains: list[tuple[int, ...]] = []
        root_only: dict[str, str] = {}
        self.skip_blanks()
        while self.at < len(self.text):
            if self.accept("@"):
                root_only = self.root_only_axes()
                break
            names.append(self.label(len(names)))
            dims.append(self.axes() if self.accept(":") else self.grained([]))
            blocks.append(self.block_size() if self.accept("[") else None)
            self.end_item()
        positions = names == [str(position) for position in range(len(names))]
        at = {axis: tuple(map(int, text.split("+"))) for axis, text in root_only.items() if INDICES.fullmatch(text)}
        follows = {axis: other for axis, other in root_only.items() if axis not in at}
        at = {axis: indices for axis, indices in at.items() if indices != (0,)}
        grains = tuple(self.grains) if any(self.grains) else ()
        return Notation(None if positions else tuple(names), tuple(dims), tuple(blocks), tuple(root_only), follows, at, grains)

    def label(self, position: int) -> str:
        """The name of the dim at `position`; a number must be the position itself."""
        start, name = self.at, self.word("the name of a dim, or '@'")
        if name.isdigit() and name != str(position):
            self.fail(start, f"{position}, which is the number of this dim, or a name")
        return name

    def axes(self) -> tuple[str, ...]:
        """The axes after a colon: one, or several in parentheses."""
        if not self.accept("("):
            return self.grained([self.word("an axis, or '(' and several")])
        result = [self.word("an axis")]
        while not self.accept(")"):
            self.expect(",", "',' or ')'")
            result.append(self.word("an axis"))
        return self.grained(result)

    def grained(self, words: Sequence[str]) -> tuple[str, ...]:
        """The axes of the words of a dim; the items that they keep whole are kept beside."""
        axes, grains = [], []
        for word in words:
            parted = GRAINED.fullmatch(word)
            axes.append(parted[1] if parted else word)
            grains.append(int(parted[3]) * (1 if parted[2] == "*" else -1) if parted else 1)
        self.grains.append(tuple(grains) if any(grain != 1 for grain in grains) else ())
        return tuple(axes)

    def block_size(self) -> int:
        """The number between brackets."""
        start, size = self.at, self.word("the size of a block")
        number = whole(size)
        if not number:
            self.fail(start, "the size of a block, a whole number of at least 1")
        self.expect("]", "']'")
        return number

    def root_only_axes(self) -> dict[str, str]:
        """Axis → the indices that hold the block, or the axis whose index it follows; what stands behind '@', up to the end."""
        result: dict[str, str] = {}
        while True:
            self.skip_blanks()
            start, axis = self.at, self.word("a root-only axis, such as y=0")
            if axis in result:
                self.fail(start, f"another axis ({axis} is named before)")
            self.expect("=", "'='")
            start, result[axis] = self.at, self.word(HELD)
            if result[axis][0].isdigit() and not INDICES.fullmatch(result[axis]):
                self.fail(start, HELD)
            self.skip_blanks()
            if self.at == len(self.text):
                return result
            self.expect(",", "',' or the end")

    def end_item(self) -> None:
        """Step over the blanks between two dims."""
        start = self.at
        self.skip_blanks()
        if self.at == start < len(self.text):
            self.fail(start, "a blank before the next dim (several axes of one dim stand in parentheses)")

    def word(self, wanted: str) -> str:
        """The word at the cursor, which steps behind it."""
        token = WORD.match(self.text, self.at)
        if token is None:
            self.fail(self.at, wanted)
        self.at = token.end()
        return token.group()

    def accept(self, mark: str) -> bool:
        """Step over `mark` where it stands at the cursor."""
        here = self.text.startswith(mark, self.at)
        self.at += here
        return here

    def expect(self, mark: str, wanted: str) -> None:
        """Step over `mark`, which must stand at the cursor."""
        if not self.accept(mark):
            self.fail(self.at, wanted)

    def skip_blanks(self) -> None:
        """Step over blanks."""
        token = BLANKS.match(self.text, self.at)
        self.at = token.end() if token else self.at

    def fail(self, at: int, wanted: str) -> NoReturn:
        """Raise LayoutError for what stands at position `at`."""
        rest = repr(self.text[at:]) if at < len(self.text) else "the end"
        raise LayoutError(f"The layout {self.text!r} cannot be read at position {at}: found {rest}, expected {wanted}.\n{HELP}")
