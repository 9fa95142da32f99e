"""Prints docs/contexts.svg: which positions each context holds and attends to, folded and not, and the words of each kind.

Run `python docs/contexts.py > docs/contexts.svg`; a test compares the two, and the words with those of dry runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2

from picture import COLOURS, text

from summa3d.nn.context_parallel.options import ContextOptions
from summa3d.nn.context_parallel.split import ContextSplit

CONTEXTS, SEQUENCE, CELL = 4, 16, 13
COUNTS = (2, 4, 8, 16, 32)
KINDS = {"gather": "#219ebc", "ring": "#fb8500", "heads": "#2a9d8f"}
SHARED = 8
"""Heads that share keys and values in the second set of lines."""
WIDTH, HEIGHT, TOP = 940, 320, 70


def words(kind: str, size: int, shared: int = 1) -> float:
    """Words that a rank receives in a layer's attention, forward and backward, ÷ the keys and values of the whole sequence.

    size : contexts. shared : heads that share keys and values, each as wide as a query
    """
    if kind == "heads":
        return 2 * (size - 1) / size**2 * (1 + shared)  # beside keys and values queries and outputs, `shared` times as many
    return (2 if kind == "gather" else 3) * (size - 1) / size


def scores(left: float, fold: bool) -> Iterator[str]:
    """The causal scores of a sequence, in the colour of the context that computes them, and how many are each one's."""
    first = ContextSplit(CONTEXTS, 0, ContextOptions(fold=fold))
    yield text(left + CELL * SEQUENCE / 2, TOP - 30, "folded" if fold else "not folded", 15, weight="bold")
    yield text(left + CELL * SEQUENCE / 2, TOP - 10, "keys →", 13)
    for index in range(CONTEXTS):
        rows = [row for run in replace(first, index=index).runs(SEQUENCE) for row in run]
        for row in rows:
            for column in range(row + 1):
                at = f'x="{left + CELL * column:g}" y="{TOP + CELL * row:g}"'
                yield f'<rect {at} width="{CELL}" height="{CELL}" fill="{COLOURS[index]}" stroke="#fff"/>'
        said = f"context {index}: {sum(row + 1 for row in rows)} scores"
        yield text(left + (index % 2) * 128, TOP + CELL * SEQUENCE + 20 + 18 * (index // 2), said, 11, "start")


def lines(left: float) -> Iterator[str]:
    """Words against the number of contexts, of each kind; dashed where heads share keys and values."""
    wide, high, most = 270, CELL * SEQUENCE, 4.5
    yield text(left + wide / 2, TOP - 30, "words a rank receives in a layer", 15, weight="bold")
    yield text(left + wide / 2, TOP - 10, "÷ keys and values of the sequence", 12)
    yield f'<path d="M {left} {TOP} V {TOP + high} H {left + wide}" fill="none" stroke="#444"/>'

    def place(size: int, value: float) -> str:
        return f"{left + wide * log2(size) / log2(COUNTS[-1]):.1f} {TOP + high * (1 - value / most):.1f}"

    for value in range(5):
        yield text(left - 8, TOP + high * (1 - value / most) + 4, str(value), 12, "end")
    for size in COUNTS:
        yield text(left + wide * log2(size) / log2(COUNTS[-1]), TOP + high + 16, str(size), 12)
    yield text(left + wide / 2, TOP + high + 36, f"contexts; dashed: {SHARED} heads share keys and values", 12)
    for kind, colour in KINDS.items():
        for shared, dashes in ((1, "none"), (SHARED, "6 4")):
            if shared > 1 and kind != "heads":
                continue  # the same
            path = "M " + " L ".join(place(size, words(kind, size, shared)) for size in COUNTS)
            yield f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
        x, y = place(COUNTS[-1], words(kind, COUNTS[-1])).split()
        yield text(float(x) + 8, float(y) + 4, kind, 13, "start")


def page() -> str:
    """The whole picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    white = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    return "\n".join([head, white, *scores(30, False), *scores(290, True), *lines(590), "</svg>"]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
