# The tensor-parallel schemes as data: for each name, the layout of the residual stream, the product that a linear is, its grids.
# Imports layout and gemm's plans; no torch, no communication. All other layouts follow from the product's.
# Next: schemes.py, which puts one on a grid; scheme_check.py, which says what sizes it can split.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..gemm.algorithms.agarwal import AgarwalPlan
from ..gemm.algorithms.cuboid import CuboidPlan
from ..gemm.algorithms.oned import OnedColumnPlan, OnedRowPlan
from ..gemm.algorithms.plan import ProductPlan
from ..gemm.algorithms.summa import SummaPlan
from ..gemm.algorithms.tesseract import TesseractPlan
from ..layout.layout import Layout

Grids = Callable[[int], list[dict[str, int]]]


@dataclass(frozen=True)
class Kind:
    """A scheme on no grid yet.

    stream : the layout of the residual stream [b, s, h].
    plan : (layout of an activation, form, m, n, k) → the plan of its product with a weight ("nn") or a table ("nt").
    grids : ranks → every grid of that many that it can use; their axes are those the scheme needs.
    title : what it is called in an error.
    sequence_first : whether activations are stored [s, b, n], so that gathers and scatters over s are contiguous.
    transposed_down : whether the projection that narrows a feed-forward layer is a product of form nt with its transpose.
    vectors : how vectors may be stored: "copied" on the axes that do not split them; "hosted" by index 0 of the axis that splits
        rows; "diagonal", split by the rows' coarse axis as well, on the ranks whose index on the fine one is that of the columns.
    limits : why only single layers run on it, not whole models; or nothing.
    """

    name: str
    title: str
    stream: Layout
    plan: Callable[[Layout, str, int, int, int], ProductPlan]
    grids: Grids
    sequence_first: bool = False
    transposed_down: bool = False
    vectors: tuple[str, ...] = ("copied",)
    limits: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the scheme needs, of any size."""
        return tuple(self.grids(1)[0])


def row_axes(layout: Layout) -> tuple[str, ...]:
    """The axes that split the rows (b, s) of an activation, coarse first."""
    return tuple(axis for axes in layout.dims[:-1] for axis in axes)


def is_sequence_fine(layout: Layout) -> bool:
    """Whether an activation [b, s, n] of a cuboid has its fine split on s (outside) or on the columns (inside), not on b."""
    return len(layout.dims) == 3 and (layout.dims[1] != () or len(layout.dims[2]) == 2)


def cuboid(layout: Layout, form: str, m: int, n: int, k: int) -> CuboidPlan:
    """y and z change places from one product to the next; a sequence-fine input has its fine split on s, its output on n."""
    if is_sequence_fine(layout) and layout.dims[1] == ():
        (x,), (z, y) = layout.dims[0], layout.dims[2]
        return CuboidPlan(form, m, n, k, x, y, z, a_fine=1)
    (x, y), (z,) = row_axes(layout), layout.dims[-1]
    return CuboidPlan(form, m, n, k, x, y, z, c_fine=int(is_sequence_fine(layout)))


def oned(layout: Layout, form: str, m: int, n: int, k: int) -> OnedColumnPlan | OnedRowPlan:
    """By columns of a whole activation, by rows of a split one."""
    return OnedRowPlan(form, m, n, k, "y") if layout.dims[-1] else OnedColumnPlan(form, m, n, k, "y")


def summa(layout: Layout, form: str, m: int, n: int, k: int) -> SummaPlan:
    """Every activation and every weight lies as rows:x columns:y."""
    (x,), (y,) = row_axes(layout), layout.dims[-1]
    return SummaPlan(form, m, n, k, x, y)


def tesseract(layout: Layout, form: str, m: int, n: int, k: int) -> TesseractPlan:
    """As summa on each depth, weights copied."""
    (d, x), (y,) = row_axes(layout), layout.dims[-1]
    return TesseractPlan(form, m, n, k, x, y, d=d)


def agarwal(layout: Layout, form: str, m: int, n: int, k: int) -> AgarwalPlan:
    """Operands on three faces of the cube; y and z change places from one product to the next, and with them the faces."""
    (x,), (z,), (y,) = row_axes(layout), layout.dims[-1], layout.hosted
    return AgarwalPlan(form, m, n, k, x, y, z)


def _one_rank(ranks: int) -> list[dict[str, int]]:
    return [{"x": 1, "y": 1, "z": 1}] if ranks == 1 else []


def _one_line(ranks: int) -> list[dict[str, int]]:
    return [{"x": 1, "y": ranks, "z": 1}]


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("serial", "one rank", Layout("b:(x,y) s h:z"), cuboid, _one_rank),
        Kind("oned", "1-D", Layout("b s h"), oned, OnedColumnPlan.grids),
        Kind("oned-sp", "sequence-parallel 1-D", Layout("b:x s:y h:z"), cuboid, _one_line, sequence_first=True),
        Kind("summa", "2-D", Layout("b:x s h:y"), summa, SummaPlan.grids, vectors=("copied", "hosted")),
        Kind(
            "summa-transposed",
            "2-D, down projection stored transposed",
            Layout("b:x s h:y"),
            summa,
            SummaPlan.grids,
            transposed_down=True,
            vectors=("copied", "hosted"),
        ),
        Kind("tesseract", "2.5-D", Layout("b:(d,x) s h:y"), tesseract, TesseractPlan.grids),
        Kind(
            "cuboid",
            "batch-fine cuboid",
            Layout("b:(x,y) s h:z"),
            cuboid,
            CuboidPlan.grids,
            vectors=("copied", "diagonal"),
        ),
        Kind(
            "cuboid-sequence",
            "sequence-fine cuboid",
            Layout("b:x s:y h:z"),
            cuboid,
            CuboidPlan.grids,
            sequence_first=True,
        ),
        Kind(
            "agarwal",
            "3-D as first published",
            Layout("m:x h:z @y=0"),
            agarwal,
            AgarwalPlan.grids,
            limits="its activations lie on one face of the cube, [rows, h] rows:x h:z, where attention cannot be split evenly",
        ),
    )
}
