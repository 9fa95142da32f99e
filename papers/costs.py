"""Cost tables of papers and docs beside the closed forms of the library's schemes; isoefficiency, solved numerically; figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import log, log2, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from summa3d.cluster import Cluster
from summa3d.comm.topology import grids_of
from summa3d.dtypes import dtype_of
from summa3d.figures import look
from summa3d.gemm.cost import mean

from .figures import drawn

RANKS = (64, 729, 4096, 15625, 46656)
"""Sixth powers: squares and cubes at once."""
LINEARS = ((3, 1), (1, 1), (4, 1), (1, 4))
"""n and k ÷ hidden size of a layer's linears."""
ROWS = 24
"""Rows of a batch ÷ hidden size, of Optimus' table 2 on 64 GPUs: 384 · 512 ÷ 8192. Batch grows with hidden, as in that paper."""


def forward(name: str, ranks: int, rows: int, hidden: int) -> float:
    """Words that a rank receives in the forward of a layer, which are those of its four linears.

    name : oned, oned-sp (whose gathers and scatters are the halves of oned's sums), summa, summa by trees, or cuboid.
    """
    return sum(_linear(name, ranks, rows, n * hidden, k * hidden, number % 2 == 1) for number, (n, k) in enumerate(LINEARS))


def _linear(name: str, ranks: int, m: int, n: int, k: int, row: bool) -> float:
    if name in ("oned", "oned-sp"):
        return float((mean.oned_row if row else mean.oned_column)("nn", m, n, k, {"y": ranks}).words)
    if name == "cuboid":
        return float(mean.cuboid("nn", m, n, k, dict.fromkeys("xyz", round(ranks ** (1 / 3)))).words)
    side = round(sqrt(ranks))
    words = float(mean.summa("nn", m, n, k, {"x": side, "y": side}).words)
    return words * side * log2(side) / (side - 1) if name == "summa by trees" else words


class Isoefficiency(NamedTuple):
    """How the work W must grow with the ranks P for the efficiency to stay.

    paper : the papers' growth. paper_slope : its slope of log W over log P, over the same ranks. slope : of the solved works.
    """

    name: str
    paper: str
    paper_slope: float
    slope: float


PAPERS: dict[str, tuple[str, Callable[[float], float]]] = {
    "oned": ("P³ (Optimus, section 3.1)", lambda p: p**3),
    "oned-sp": ("none; as oned", lambda p: p**3),
    "summa by trees": ("(√P·log P)³ (Optimus, section 3.1)", lambda p: (sqrt(p) * log(p)) ** 3),
    "summa": ("none; Optimus counts trees", lambda p: (sqrt(p) * log(p)) ** 3),
    "cuboid": ("none; P by the same argument", lambda p: p),
}
"""Name of a scheme → how W grows with P by the papers."""


def isoefficiency(cluster: Cluster, efficiency: float = 0.5, dtype: str = "float32") -> list[Isoefficiency]:
    """The isoefficiency of each scheme where every rank has a port of the cluster's outermost level for itself.

    Latency changes no slope by more than 0.001: at such efficiencies messages are large.
    """
    found = []
    for name, (text, paper) in PAPERS.items():
        works = [_work(name, ranks, cluster, efficiency, dtype) for ranks in RANKS]
        found.append(Isoefficiency(name, text, slope([paper(ranks) for ranks in RANKS]), slope(works)))
    return found


def _work(name: str, ranks: int, cluster: Cluster, efficiency: float, dtype: str) -> float:
    """The operations of a layer's forward at which the efficiency is reached, by bisection over hidden sizes."""
    flop = 1 / (ranks * cluster.peak(dtype) * cluster["product.efficiency"])
    word = dtype_of(dtype).nbytes / cluster.levels[-1].bandwidth
    low, high = 1.0, 1e9
    while high / low > 1.001:
        hidden = round(sqrt(low * high)) or 1
        computed = 24 * ROWS * hidden**3 * flop
        reached = computed / (computed + forward(name, ranks, ROWS * hidden, hidden) * word)
        low, high = (low, hidden) if reached >= efficiency else (hidden, high)
    return 24 * ROWS * high**3


def slope(works: Sequence[float]) -> float:
    """The slope of log W over log P, by least squares over RANKS."""
    x, y = [log(ranks) for ranks in RANKS], [log(work) for work in works]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)


class PrintedCost(NamedTuple):
    """A printed cost: its source and formula, its value, the library's count, and why they differ."""

    source: str
    what: str
    formula: str
    printed: float
    ours: float
    erratum: str = ""


def costs(ranks: int, rows: int, hidden: int) -> list[PrintedCost]:
    """The cost tables of Optimus, of the 3-D paper, and of Colossal-AI's docs, on a sixth power of ranks."""
    return [*_of_optimus(ranks, rows, hidden), *_of_the_3d_paper(ranks, rows, hidden), *_of_colossal(ranks)]


def _of_optimus(ranks: int, rows: int, hidden: int) -> list[PrintedCost]:
    table, stream = "Optimus, table 1", rows * hidden
    one, two = 4 * (ranks - 1) / ranks * stream, log2(ranks) / (2 * sqrt(ranks)) * (7 * stream + 12 * hidden**2)
    ours = [forward(name, ranks, rows, hidden) for name in ("oned", "summa")]
    tree = "a tree sends its message log₂ q times, a chain in pieces once"
    return [
        PrintedCost(table, "Megatron, a layer's words forward", "4(p−1)/p·bsh", one, ours[0]),
        PrintedCost(table, "2-D, a layer's words forward", "log p/(2√p)·(7bsh + 12h²)", two, ours[1], tree),
    ]


def _of_the_3d_paper(ranks: int, rows: int, hidden: int) -> list[PrintedCost]:
    section, side, whole = "3-D paper, section 3.1", round(ranks ** (1 / 3)), 2 * rows * hidden + hidden**2
    one = mean.cuboid("nn", rows, hidden, hidden, dict.fromkeys("xyz", side))
    steps = "rings take 3(p − 1) steps, and recursive doubling log p of every collective"
    held = "what is gathered, and the partial result, O(P^−⅔), are left out"
    return [
        PrintedCost(section, "a linear's words", "(MN + NK + MK)/p²", whole / side**2, float(one.words)),
        PrintedCost(section, "a linear's latency, steps", "log p", log2(side), one.messages, steps),
        PrintedCost(section, "words held", "(MN + NK + MK)/P", whole / ranks, whole / ranks + whole / side**2, held),
    ]


def _of_colossal(ranks: int) -> list[PrintedCost]:
    """A linear forward and backward where X, W and Y have one word each, as the docs' last columns have it."""
    docs, side, edge = "Colossal-AI's docs", round(sqrt(ranks)), round(ranks ** (1 / 3))

    def passes(of: Callable[..., mean.Mean], **grid: int) -> tuple[float, float]:
        found = [of(form, 1, 1, 1, grid) for form in ("nn", "nt", "tn")]
        return float(sum(one.words for one in found)), sum(one.messages for one in found)

    flat, deep = passes(mean.summa, x=side, y=side), passes(mean.tesseract, x=edge, y=edge, d=edge)
    one = float(mean.oned_row("nn", 1, 1, 1, {"y": ranks}).words)
    cube = 2 * float(mean.cuboid("nn", 1, 1, 1, dict.fromkeys("xyz", edge)).words)
    block = "whole blocks go around the ring step by step; in pieces a rank receives 1/q of that"
    steps = "blocks that go around the ring take q steps of q − 1 hops"
    depth = block + "; the sum of weights' gradients over the depth is left out"
    return [
        PrintedCost(docs, "1-D, words", "2(P−1)/P", 2 * (ranks - 1) / ranks, one),
        PrintedCost(docs, "2-D, words", "6(q−1)/q", 6 * (side - 1) / side, flat[0], block),
        PrintedCost(docs, "2-D, latency, steps", "6(q−1)", 6 * (side - 1), flat[1], steps),
        PrintedCost(docs, "2.5-D, words", "3(q−1)(d+1)/(dq)", 3 * (edge - 1) * (edge + 1) / edge**2, deep[0], depth),
        PrintedCost(docs, "3-D, words", "6(q−1)/q³", 6 * (edge - 1) / edge**3, cube),
    ]


def as_text(table: Sequence[PrintedCost], growths: Sequence[Isoefficiency]) -> Iterator[str]:
    """The lines of `costs` and `isoefficiency`."""
    for cost in table:
        yield f"{cost.source}: {cost.what}: {cost.formula} = {cost.printed:.4g}, ours {cost.ours:.4g}"
        if cost.erratum:
            yield f"    erratum: {cost.erratum}"
    for one in growths:
        yield f"work of {one.name} grows as P^{one.slope:.2f}; {one.paper}, P^{one.paper_slope:.2f} over the same ranks"


AXES = ("x", "y", "z")
ROOTS = {"oned": 1, "summa": 2, "cuboid": 3}
"""Scheme → of which powers its ranks are."""
RANKS_DRAWN = tuple(2**power for power in range(1, 13))
TOKENS = tuple(2**power for power in range(4, 15))
"""Of a GPU: the batch's rows ÷ ranks."""
FAMILIES = {
    "": "one rank",
    "x": "x: weights gathered (FSDP)",
    "y": "y: 1-D, sequence parallel",
    "xy": "x·y",
    "yz": "y·z: 2-D",
    "xyz": "x·y·z: 3-D",
}
"""The axes that a cuboid grid has → what it is; y and z are exchanged from one linear to the next."""


def write(hidden: int, rows: int, folder: Path) -> list[Path]:
    """Write both figures of a layer of this hidden size; returns the files. Raises DataError where they cannot be written."""
    words = drawn(partial(_words, hidden=hidden, rows=rows), folder, "words")
    return words + drawn(partial(_winners, hidden=hidden), folder, "grids")


def _words(figure: Any, hidden: int, rows: int) -> None:
    axes = figure.subplots()
    for number, (name, root) in enumerate(ROOTS.items()):
        ranks = [side**root for side in range(2, 4097) if side**root <= 4096 and (root > 1 or side in RANKS_DRAWN)]
        axes.plot(ranks, [forward(name, one, rows, hidden) for one in ranks], label=name, markevery=0.1, **look(number))
    best = [min(words(grid, rows, hidden) for grid in grids_of(ranks, AXES)) for ranks in RANKS_DRAWN]
    axes.plot(RANKS_DRAWN, best, label="cuboid, its best grid", **look(len(ROOTS)))
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="words received by a rank, a layer's forward")
    axes.set_title(f"hidden {hidden:,}, {rows:,} rows")
    axes.legend()


def words(grid: dict[str, int], rows: int, hidden: int) -> float:
    """Words that a rank receives in the forward of a layer on a cuboid grid."""
    turned = {"x": grid["x"], "y": grid["z"], "z": grid["y"]}
    return sum(
        float(mean.cuboid("nn", rows, n * hidden, k * hidden, turned if number % 2 else grid).words)
        for number, (n, k) in enumerate(LINEARS)
    )


def winner(ranks: int, tokens: int, hidden: int) -> str:
    """The axes of the grid that moves the fewest words; of equal ones that with fewer axes."""

    def order(grid: dict[str, int]) -> tuple[float, int]:
        return words(grid, ranks * tokens, hidden), len(_axes(grid))

    return _axes(min(grids_of(ranks, AXES), key=order))


def _axes(grid: dict[str, int]) -> str:
    """The axes longer than 1; z alone and y alone are one family, as are x·z and x·y."""
    found = "".join(name for name, size in grid.items() if size > 1)
    return {"z": "y", "xz": "xy"}.get(found, found)


def _winners(figure: Any, hidden: int) -> None:
    axes, names = figure.subplots(), list(FAMILIES)
    found = [[winner(ranks, tokens, hidden) for ranks in RANKS_DRAWN] for tokens in TOKENS]
    for number, name in enumerate(names):
        points = [
            (RANKS_DRAWN[column], TOKENS[row]) for row, line in enumerate(found) for column, one in enumerate(line) if one == name
        ]
        if points:
            axes.plot(*zip(*points, strict=True), linestyle="none", label=FAMILIES[name], **look(number))
    axes.set(xlabel="ranks", ylabel="tokens of a GPU", title=f"fewest words of a layer's forward, hidden {hidden:,}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
