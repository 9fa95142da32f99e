"""The tensor-parallel schemes as data: for each name its residual stream's layout, its products and its grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...gemm.algorithms.agarwal import AgarwalPlan
from ...gemm.algorithms.cuboid import CuboidPlan
from ...gemm.algorithms.oned import OnedColumnPlan, OnedRowPlan
from ...gemm.algorithms.plan import ProductPlan
from ...gemm.algorithms.summa import SummaPlan
from ...gemm.algorithms.tesseract import TesseractPlan
from ...layout.layout import Layout

Grids = Callable[[int], list[dict[str, int]]]
SERIAL = "serial"
"""The scheme of one rank alone."""


@dataclass(frozen=True)
class SchemeSpec:
    """A tensor-parallel scheme, not bound to a grid.

    Attributes
    ----------
    title : its name in error messages
    residual : the layout of the residual stream [b, s, h]
    plan : maps (layout of an activation, form, m, n, k) to the plan of its product with a weight ("nn") or a table ("nt")
    grids : maps a number of ranks to every grid of that many ranks that the scheme supports, with the axes that it needs
    sequence_first : whether activations are stored [s, b, n], so that all-gathers and reduce-scatters over s are contiguous
    transposed_down : whether the down projection of a feed-forward layer is a product of form nt with its weight's transpose
    vectors : the supported storages of vectors (γ, β, biases). "copied": replicated on the axes that do not split them.
        "root-only": on index 0 alone of the axis that splits rows. "diagonal": split by the rows' coarse axis as well, on
        the ranks whose index on the rows' fine axis equals their index on the columns' axis.
    limits : why only single layers run on it, not whole models; empty where whole models run
    repeats : maps a grid of all its axes to whether a simpler scheme is the same program on it
    """

    name: str
    title: str
    residual: Layout
    plan: Callable[[Layout, str, int, int, int], ProductPlan]
    grids: Grids
    sequence_first: bool = False
    transposed_down: bool = False
    vectors: tuple[str, ...] = ("copied",)
    limits: str = ""
    repeats: Callable[[Mapping[str, int]], bool] = lambda shape: False

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes that the scheme needs."""
        return tuple(self.grids(1)[0])


def row_axes(layout: Layout) -> tuple[str, ...]:
    """The axes that split the rows (b, s) of an activation, coarse first.

    >>> row_axes(Layout("b:(x,y) s h:z"))
    ('x', 'y')
    """
    return tuple(axis for axes in layout.dims[:-1] for axis in axes)


def is_sequence_fine(layout: Layout) -> bool:
    """True if an activation [b, s, n] of a cuboid has its fine split on s (residual stream) or on n (inside a branch), not on b.

    >>> is_sequence_fine(Layout("b:x s:y h:z")), is_sequence_fine(Layout("b:(x,y) s h:z"))
    (True, False)
    """
    return len(layout.dims) == 3 and (layout.dims[1] != () or len(layout.dims[2]) == 2)


def cuboid(layout: Layout, form: str, m: int, n: int, k: int) -> CuboidPlan:
    """The plan of a cuboid product; y and z swap roles from one product to the next.

    A sequence-fine input has its fine split on s, and its output has it on n.
    """
    if is_sequence_fine(layout) and layout.dims[1] == ():
        (x,), (z, y) = layout.dims[0], layout.dims[2]
        return CuboidPlan(form, m, n, k, x, y, z, a_fine=1)
    (x, y), (z,) = row_axes(layout), layout.dims[-1]
    return CuboidPlan(form, m, n, k, x, y, z, c_fine=int(is_sequence_fine(layout)))


def oned(layout: Layout, form: str, m: int, n: int, k: int) -> OnedColumnPlan | OnedRowPlan:
    """The plan of a 1-D product: column-parallel for a replicated activation, row-parallel for a split one."""
    return OnedRowPlan(form, m, n, k, "y") if layout.dims[-1] else OnedColumnPlan(form, m, n, k, "y")


def summa(layout: Layout, form: str, m: int, n: int, k: int) -> SummaPlan:
    """The plan of a SUMMA product; every activation and every weight has the layout rows:x columns:y."""
    (x,), (y,) = row_axes(layout), layout.dims[-1]
    return SummaPlan(form, m, n, k, x, y)


def tesseract(layout: Layout, form: str, m: int, n: int, k: int) -> TesseractPlan:
    """The plan of a Tesseract product: SUMMA on each layer of depth d, with weights replicated over d."""
    (d, x), (y,) = row_axes(layout), layout.dims[-1]
    return TesseractPlan(form, m, n, k, x, y, d=d)


def agarwal(layout: Layout, form: str, m: int, n: int, k: int) -> AgarwalPlan:
    """The plan of Agarwal's product, with the operands on three faces of the cube; y and z swap roles with each product."""
    (x,), (z,), (y,) = row_axes(layout), layout.dims[-1], layout.root_only
    return AgarwalPlan(form, m, n, k, x, y, z)


def _lines(shape: Mapping[str, int]) -> int:
    """Number of axes with more than one rank."""
    return sum(size > 1 for size in shape.values())


def _one_rank(ranks: int) -> list[dict[str, int]]:
    return [{"x": 1, "y": 1, "z": 1}] if ranks == 1 else []


def _one_line(ranks: int) -> list[dict[str, int]]:
    return [{"x": 1, "y": ranks, "z": 1}]


SCHEME_SPECS: dict[str, SchemeSpec] = {
    kind.name: kind
    for kind in (
        SchemeSpec(SERIAL, "one rank", Layout("b:(x,y) s h:z"), cuboid, _one_rank),
        SchemeSpec("oned", "1-D", Layout("b s h"), oned, OnedColumnPlan.grids),
        SchemeSpec(
            "oned-sp",
            "sequence-parallel 1-D",
            Layout("b:x s:y h:z"),
            cuboid,
            _one_line,
            sequence_first=True,
            repeats=lambda shape: shape["y"] == 1,
        ),
        SchemeSpec(
            "summa",
            "2-D",
            Layout("b:x s h:y"),
            summa,
            SummaPlan.grids,
            vectors=("copied", "root-only"),
            repeats=lambda shape: _lines(shape) < 2,
        ),
        SchemeSpec(
            "summa-transposed",
            "2-D, down projection stored transposed",
            Layout("b:x s h:y"),
            summa,
            SummaPlan.grids,
            transposed_down=True,
            vectors=("copied", "root-only"),
            repeats=lambda shape: _lines(shape) < 2,
        ),
        SchemeSpec(
            "tesseract",
            "2.5-D",
            Layout("b:(d,x) s h:y"),
            tesseract,
            TesseractPlan.grids,
            repeats=lambda shape: 1 in (shape["x"], shape["d"]),
        ),
        SchemeSpec(
            "cuboid",
            "batch-fine cuboid",
            Layout("b:(x,y) s h:z"),
            cuboid,
            CuboidPlan.grids,
            vectors=("copied", "diagonal"),
            repeats=lambda shape: _lines(shape) == 0,
        ),
        SchemeSpec(
            "cuboid-sequence",
            "sequence-fine cuboid",
            Layout("b:x s:y h:z"),
            cuboid,
            CuboidPlan.grids,
            sequence_first=True,
            repeats=lambda shape: shape["y"] == 1 or _lines(shape) == 1,  # the cuboid, and oned-sp
        ),
        SchemeSpec(
            "agarwal",
            "3-D as first published",
            Layout("m:x h:z @y=0"),
            agarwal,
            AgarwalPlan.grids,
            limits="its activations lie on one face of the cube, [rows, h] rows:x h:z, where attention cannot be split evenly",
        ),
    )
}
