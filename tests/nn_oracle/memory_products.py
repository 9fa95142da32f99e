"""Closed forms of what a product and its gradients hold on one rank, in bytes, whatever its algorithm.

The order of allocations is that of autograd/differentiable.py and autograd/matmul.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from summa3d.errors import ConfigError
from summa3d.gemm.algorithms.cuboid import CuboidPlan
from summa3d.gemm.algorithms.gradients import gradient_plans
from summa3d.gemm.algorithms.oned import OnedPlan, OnedRowPlan
from summa3d.gemm.algorithms.plan import ProductPlan
from summa3d.gemm.algorithms.summa import SummaPlan
from summa3d.gemm.cost import per_rank
from summa3d.gemm.cost.volume import block_words
from summa3d.layout.layout import Layout, without
from summa3d.nn.context import Context


@dataclass(frozen=True)
class Need:
    """Bytes of a product C = A·B with its gradients.

    a, b, c : the blocks. kept_a, kept_b : what is kept for backward, beside the parameter B itself. forward : the most held from
    A to C, both included. backward : the most held from dC to dA and dB, all included. rooms : by name, the buffers that the
    executors share and keep from one call to the next. shares : by axis, of a slot of its node's memory. gathers : B gathered, in
    flight ahead of the product.
    """

    a: int
    b: int
    c: int
    kept_a: int
    kept_b: int
    forward: int
    backward: int
    rooms: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, int] = field(default_factory=dict)
    gathers: int = 0


def product_need(plan: ProductPlan, context: Context, word: int, staged: Collection[str] = (), device: bool = False) -> Need:
    """Return what the product that `context` makes of `plan` needs, `word` bytes an element; `staged`: as in `Grid.staged`.

    On a `device` NCCL adds up what has more than 16 bits, and needs no room for the parts. 16-bit floats are summed in float32:
    on the host beside the parts, on a device in registers.
    """
    half = word == 2
    shape, at = context.grid.shape, context.grid.coordinates
    a, b, c = (
        word * block_words(layout, extents, shape, at)
        for layout, extents in ((plan.a_layout, plan.a_shape), (plan.b_layout, plan.b_shape), (plan.c_layout, plan.c_shape))
    )
    if isinstance(plan, CuboidPlan):
        return _gathered(plan, context, word, staged, device, a, b, c)
    if isinstance(plan, SummaPlan):
        parts = (part for part in (plan, *gradient_plans(plan)) if isinstance(part, SummaPlan))
        used = [_rooms(part, context, half, device) for part in parts]
        return Need(a, b, c, a, 0, a + c, c + a + b, {name: word * size for name, size in largest(used).items()})
    if isinstance(plan, OnedPlan):
        wide = half and plan.y not in staged and shape[plan.y] > 1  # a copy in float32 is summed, and one made of the sum
        if isinstance(plan, OnedRowPlan):
            return Need(a, b, c, a, 0, a + (4 if wide else 1) * c, c + a + b)
        return Need(a, b, c, a, 0, a + c, c + 3 * a + max(a, b) if wide else c + a + b)
    raise ConfigError(
        f"The memory of a {plan.name} product has no closed form here. Those that have: cuboid, oned, summa, tesseract."
    )


def largest(rooms: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """By name, the largest that any asks for."""
    result: dict[str, int] = {}
    for asked in rooms:
        for name, size in asked.items():
            result[name] = max(size, result.get(name, 0))
    return result


def _rooms(plan: SummaPlan, context: Context, half: bool, device: bool) -> dict[str, int]:
    """Words of the buffers of a product on the plane of x and y: panels of what moves, and of a C that is summed.

    16-bit floats have C in float32, and on the host the operands too.
    """
    shape, at, form = context.grid.shape, context.grid.coordinates, plan.form
    a, b, c = (
        layout.local_shape(extents, shape, at)
        for layout, extents in ((plan.a_layout, plan.a_shape), (plan.b_layout, plan.b_shape), (plan.c_layout, plan.c_shape))
    )
    cut = per_rank.cuts(0, {"nn": plan.k, "nt": plan.n, "tn": plan.m}[form], shape[plan.x], shape[plan.y], plan.panel)
    many = (2 if plan.lookahead and cut.count > 1 else 1) * cut.widest
    over_x, over_y = shape[plan.x] > 1, shape[plan.y] > 1
    sums, copies = (2 if half else 1), (2 if half and not device else 0)
    staying = {"nn": 0, "nt": prod(a), "tn": prod(b)}[form]
    rooms = {
        "panel a": many * a[0] * (form != "nt" and over_y),
        "panel b": many * b[1] * (form != "tn" and over_x),
        "partial": sums * many * (c[0] * over_y if form == "nt" else c[1] * over_x if form == "tn" else 0),
        "wide a": copies * cut.widest * a[0] * (form != "nt"),
        "wide b": copies * cut.widest * b[1] * (form != "tn"),
        "wide staying": copies * staying,
        "c": 2 * prod(c) * half,
    }
    return {name: size for name, size in rooms.items() if size}


def _gathered(
    plan: CuboidPlan, context: Context, word: int, staged: Collection[str], device: bool, a: int, b: int, c: int
) -> Need:
    shape, at, keep = context.grid.shape, context.grid.coordinates, not context.regather

    def moved(layout: Layout, axis: str, extents: tuple[int, ...], fine: int, own: int) -> _Moved:
        whole = word * block_words(without(layout, axis), extents, shape, at)
        return _Moved(shape[axis], own, whole, bool(fine), axis in staged, device and word > 2, word == 2 and not device)

    of_a = moved(plan.a_layout, plan.y, plan.a_shape, plan.a_fine, a)
    of_b = moved(plan.b_layout, plan.x, plan.b_shape, plan.b_fine, b)
    of_c = moved(plan.c_layout, plan.z, plan.c_shape, plan.c_fine, c)
    overlap = context.overlap
    ahead = overlap.ahead > 0 and of_b.size > 1  # then B is copied out of a node's memory
    forward = max(
        a + of_a.gathering(keep),
        a + of_a.gathered(keep) + of_b.gathered(keep or ahead) + of_c.summand,
        a + (of_a.gathered(keep) + of_b.gathered(keep)) * keep + of_c.summand + of_c.scattering,
    )
    again_a, again_b = (0, 0) if keep else (of_a.gathered(), of_b.gathered(ahead))
    sum_a = of_a.in_flight if overlap.input_gradient else a
    base = c + of_c.gathered()
    backward = max(
        c + of_c.gathering(),
        base + again_b + of_a.summand,
        base + of_a.in_flight + of_a.turning,
        base + of_a.in_flight + (0 if overlap.input_gradient or of_a.size == 1 else of_a.result),
        base + sum_a + (0 if keep else of_a.gathering()),
        base + sum_a + again_a + of_b.summand,
        base + sum_a + of_b.in_flight + (of_a.result if overlap.input_gradient and of_a.size > 1 else 0),
        base + a + of_b.in_flight + (of_b.result if of_b.size > 1 else 0),
    )
    kept_a = of_a.whole if keep else a
    kept_b = of_b.whole if keep and of_b.size > 1 else 0
    shares = {axis: part.share for axis, part in ((plan.x, of_b), (plan.y, of_a), (plan.z, of_c)) if part.share}
    gathers = of_b.whole if ahead else 0
    return Need(a, b, c, kept_a, kept_b, forward, backward, shares=shares, gathers=gathers)


@dataclass(frozen=True)
class _Moved:
    """An operand that an axis of `size` gathers, or whose summands it scatters, in bytes of torch's memory.

    own : the block. whole : gathered, or the summand. turned : its fine split lies on columns, so that MPI needs it turned
    first. staged : the axis goes through its node's memory, where views are read and summands computed. summing : a scatter
    adds up as it moves, straight into the result. wide : it is added up in float32, in memory.
    """

    size: int
    own: int
    whole: int
    turned: bool
    staged: bool
    summing: bool
    wide: bool

    def gathered(self, copied: bool = False) -> int:
        """Return what a gather leaves: nothing where the node's memory is read in place."""
        return 0 if self.size == 1 or (self.staged and not copied and not self.turned) else self.whole

    def gathering(self, copied: bool = False) -> int:
        """Return what a gather holds at most."""
        return self.gathered(copied) + (0 if self.staged or self.size == 1 else (self.own + self.whole) * self.turned)

    @property
    def summand(self) -> int:
        """Return what a product leaves to be summed; on one rank, the result."""
        return self.own if self.size == 1 else 0 if self.staged else self.whole

    @property
    def turning(self) -> int:
        """The summand again, turned."""
        return self.whole * self.turned if self.size > 1 and not self.staged else 0

    @property
    def in_flight(self) -> int:
        """A started scatter: the summand, and the parts that will be added, or the result."""
        return self.summand + (self.own * (1 if self.summing else self.size) if self.size > 1 and not self.staged else 0)

    @property
    def result(self) -> int:
        """The sum, where it is not there yet; turned, where it was summed turned; a wide one beside two in float32."""
        if self.wide:
            return 5 * self.own
        return self.own * ((self.staged or not self.summing) + (self.turned and not self.staged))

    @property
    def scattering(self) -> int:
        """Return what a blocking scatter holds beside the summand."""
        return 0 if self.size == 1 else self.in_flight - self.summand + self.turning + self.result

    @property
    def share(self) -> int:
        """This rank's share of a slot of the node's memory: for its summand, or of what is gathered."""
        return self.whole if self.staged and self.size > 1 else 0
