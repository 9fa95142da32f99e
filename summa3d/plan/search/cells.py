"""A model's cells as functions of the micro-batch: traced at two sizes, evaluated at any, and what each holds and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...comm.topology import replica_axes
from ...dry.record import ENTER, LEAVE, Op
from ...dtypes import dtype_of
from ...errors import ConfigError
from ...gemm.pieces.timing import CHOICES
from ...nn.config import ModelConfig
from ...nn.overlap import Overlap
from ...nn.schemes.products import B, LaidOutProduct, alone, products_of
from ...train import toml
from ...train.config import Config, DataConfig, GridConfig, ReplicasConfig, TrainConfig, master_dtype, numbers_of
from ..cells import BLOCK, largest, with_messages

PASSES = ("F", "B", "W")
"""The passes over a cell: forward; backward, of inputs alone where it is split; then of weights. Else W is empty."""
SIZES = ("m", "n", "k", "batch", "read", "written", "words", "messages")
"""The fields of an operation that depend on the size of the micro-batch."""
NEAR, FAR = 2, 16
"""The sizes at which cells are traced, in units. Ranks with single rows save a copy or two, which lines count."""
BEFORE, BEHIND = "before", "behind"
AHEAD = (BEFORE, BLOCK, BEHIND)
"""The blocks of a model that gathers weights ahead: the first, one of those between, whose gathers begin in the block before
it, and the last."""
DEPTHS = (1, 2, 3)
"""Weights gathered ahead that are tried. With more, further blocks at both ends would differ from those between."""
ACCUMULATE = 3
"""Micro-batches of a traced step: the first makes gradients, the last frees copies of weights, and one is like all between."""


@dataclass(frozen=True)
class StageGrid:
    """What the cells of a stage depend on: the model's sizes, its scheme and inner grid, what is kept, and the dtype.

    unit : the fewest rows of a micro-batch that the grid divides. replicas : of the weights' shards with ZeRO-3, else 1. shared :
    ranks that share a node's memory. split : whether backward is two ops, of the gradients of inputs, then of weights. outer :
    further axes around the grid (`parallel.outer`) of several ranks, and options, their keys of a configuration. pieces : what
    products move between nodes is cut into so many. ahead : weights that are gathered ahead of the layers that use them
    """

    model: ModelConfig
    scheme: str
    axes: tuple[tuple[str, int], ...]
    recompute: str
    regather: bool
    dtype: str
    device: str
    unit: int
    replicas: int = 1
    shared: int = 1
    split: bool = False
    outer: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    pieces: int = 1
    ahead: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(tuple(vars(self).values())))

    def __reduce__(self) -> tuple[type[StageGrid], tuple[Any, ...]]:
        """Make it anew in another process, where texts have other hashes."""
        return StageGrid, tuple(getattr(self, field_.name) for field_ in fields(self))

    def __hash__(self) -> int:
        """Hash once what many tables are asked for."""
        return self._hash  # type: ignore[attr-defined]

    @cached_property
    def shape(self) -> dict[str, int]:
        """Axis → size of the inner grid."""
        return dict(self.axes)

    @cached_property
    def products(self) -> tuple[LaidOutProduct, ...]:
        """The products of a block with its weights, in order."""
        return products_of(self.scheme, self.model)

    @property
    def gathers(self) -> bool:
        """Return whether its products gather their operands whole, so that backward may gather them again."""
        return self.products[0].gathers

    @cached_property
    def weight_axes(self) -> frozenset[str]:
        """The axes, or planes of them, along which a weight is gathered before it is used."""
        moving = {axis for product in self.products for axis in product.apart(B) if self.shape[axis] > 1 and self.gathers}
        return frozenset(moving | ({self.plane} if self.replicas > 1 else set()))

    @cached_property
    def plane(self) -> str:
        """The axes along which replicas share weights."""
        return "·".join(replica_axes({**self.shape, **dict(self.outer), "dp": self.replicas // self.copies}))

    @property
    def in_pieces(self) -> list[StageGrid]:
        """The same with products in more and more pieces, on hosts: ranks that all share a node's memory move nothing to hide."""
        apart = self.device != "cuda" and self.shared < self.ranks
        return [replace(self, pieces=count) for count in CHOICES[1:]] if apart else []

    @property
    def with_prefetch(self) -> list[StageGrid]:
        """The same with more and more weights gathered ahead, on hosts in pieces."""
        pays = self.weight_axes and (self.device == "cuda" or self.pieces > 1)
        return [replace(self, ahead=depth) for depth in DEPTHS] if pays else []

    @property
    def split_stream(self) -> frozenset[str]:
        """The axes that split the residual stream; ranks along others hold copies of it."""
        return alone(self.scheme).residual.axes

    @cached_property
    def ranks(self) -> int:
        """Ranks of the inner grid, among which a layer's weights are split."""
        return prod(self.shape.values())

    @cached_property
    def copies(self) -> int:
        """Grids along the further axes, which share a micro-batch and hold copies of its weights."""
        return prod(size for _, size in self.outer)

    @cached_property
    def expert_groups(self) -> int:
        """The ranks along ep, which hold different experts; 1 for a model without experts."""
        return dict(self.outer).get("ep", 1) if self.model.num_experts else 1

    @property
    def own_experts(self) -> int:
        """The most experts of a layer that a rank holds."""
        return -(-self.model.num_experts // self.expert_groups)

    def config(self, units: int) -> Config:
        """The configuration of a step of a model of one block, or of three, with micro-batches of `units` units."""
        dp = max(1, self.replicas // self.copies)
        result = Config(
            scheme=self.scheme,
            dtype=self.dtype,
            recompute=self.recompute,
            regather=self.regather,
            device=self.device,
            overlap=Overlap(self.ahead, pieces=self.pieces),
            grid=toml.build(GridConfig, {**self.shape, **dict(self.outer), "dp": dp}),
            replicas=ReplicasConfig(zero=3 if self.replicas > 1 else 0 if self.outer else 1),
            model=replace(self.model, layers=len(AHEAD) if self.ahead else 1),
            train=TrainConfig(batch=ACCUMULATE * units * self.unit * dp, accumulate=ACCUMULATE),
            data=DataConfig(tokenizer=numbers_of(self.model)),
        )
        for key, value in self.options:
            table, _, name = key.partition(".")
            result = replace(result, **{table: replace(getattr(result, table), **{name: value})})
        return result

    def key(self, single: bool) -> dict[str, Any]:
        """All that a trace depends on, as JSON: of one unit (`single`), or of the line through two sizes."""
        around = {"outer": dict(self.outer), "options": dict(self.options)}
        return {**asdict(self), "model": asdict(replace(self.model, layers=1)), "axes": self.shape, **around, "single": single}


def bucket_of(inner: StageGrid, ranks: Any) -> Any:
    """Bytes of a bucket of gradients: those that are asked for, or of the largest weight's."""
    model, matrices = inner.model, inner.model.matrices
    if model.num_experts:
        matrices = *matrices[:2], (2 * model.hidden, max(model.expert_width, model.shared_width))
    largest = max(rows * columns for rows, columns in (*matrices, (model.vocabulary, model.hidden))) // ranks
    return np.maximum(ReplicasConfig.bucket, largest * dtype_of(master_dtype(inner.dtype)).nbytes)


class LinearSize(NamedTuple):
    """An integer that grows evenly with the micro-batch: base + slope · units."""

    base: int
    slope: int

    def at(self, units: Any) -> Any:
        """The number at `units` units, or at those of a column."""
        return self.base + self.slope * units


class PassOps(NamedTuple):
    """A stretch of one cell's operations in one pass.

    net : bytes held at its end beyond those before it. top : the most held meanwhile. ops : (number of the kind, id) of each.
    """

    cell: str
    net: LinearSize
    top: LinearSize
    ops: tuple[tuple[int, int], ...]


class OpLine(NamedTuple):
    """Operations that differ in their place and id alone.

    op : the operation at no units. slopes : (place in an operation, what it grows by for a unit) of those fields that do.
    """

    op: Op
    slopes: tuple[tuple[int, int], ...]

    def at(self, units: int) -> Op:
        """The operation at `units` units."""
        if not self.slopes:
            return self.op
        sizes: list[Any] = [*self.op]
        for place, slope in self.slopes:
            sizes[place] += slope * units
        return Op._make(sizes)


@dataclass(frozen=True)
class Cells:
    """The cells of a stage on the rank that has the largest blocks.

    kinds : the operations, each once. passes : of PASSES, stretches, in order. copies, optimizer : what is made before the first
    and done behind the last micro-batch, by cell. elements, tensors : of parameters and how many these are, by cell; "tied"
    counts those of ENTER that LEAVE uses too, "experts" those of BLOCK that ranks along ep hold no copies of. kept : bytes that
    stay from step to step.
    """

    kinds: tuple[OpLine, ...]
    passes: Mapping[str, tuple[PassOps, ...]]
    copies: tuple[PassOps, ...]
    optimizer: tuple[PassOps, ...]
    elements: Mapping[str, int]
    tensors: Mapping[str, int]
    kept: LinearSize

    @cached_property
    def counts(self) -> dict[tuple[str, str], dict[int, int]]:
        """(cell, pass) → kind → how often it is there."""
        passes = ((cell, way) for cell in (ENTER, BLOCK, LEAVE) for way in PASSES)
        return {at: Counter(kind for kind, _ in self.numbered(*at)) for at in passes}

    def numbered(self, cell: str, way: str) -> Iterator[tuple[int, int]]:
        """(kind, id) of a cell's operations in one pass, in order."""
        return (op for piece in self.passes[way] if piece.cell == cell for op in piece.ops)

    @cached_property
    def extents(self) -> dict[tuple[str, int, bool, bool, int], tuple[int, int]]:
        """(Pass, layers, whether first, whether last, units) of a stage → net and peak of its bytes, where they are known."""
        return {}

    @cached_property
    def hidden(self) -> dict[tuple[str, str], dict[int, int]]:
        """(cell, pass) → kind → how many of its operations may take no time, since others run beside them.

        Those are communications during which a product is computed or another one issued, and element-wise work during others.
        """
        result: dict[tuple[str, str], dict[int, int]] = {}
        for key in self.counts:
            ops = [(self.kinds[kind].op.kind, kind, number) for kind, number in self.numbered(*key)]
            many = result.setdefault(key, {})
            ends = {number: place for place, (what, _, number) in enumerate(ops) if what == "wait"}
            for place, (what, kind, number) in enumerate(ops):
                if what != "move":
                    continue
                between = ops[place + 1 : ends.get(number, len(ops))]
                waited = number in ends and all(item[0] in ("elements", "wait") for item in between)
                for other in [item[1] for item in between if item[0] == "elements"] if waited else [kind]:
                    many[other] = many.get(other, 0) + 1
        return result

    def in_order(self, way: str, units: int) -> list[tuple[str, tuple[Op, ...]]]:
        """The cell and the operations of each stretch of a pass, of a micro-batch of `units` units."""
        known = cache(lambda kind: self.kinds[kind].at(units))
        return [(pass_.cell, tuple(_numbered(known(kind), number) for kind, number in pass_.ops)) for pass_ in self.passes[way]]

    def prefetched(self, units: int) -> int:
        """The most bytes that a block leaves on their way to the next one."""
        most = 0
        for way in PASSES:
            ops = self.trace(BLOCK, way, units)
            ended = {op.id for op in ops if op.kind == "wait"}
            most = max(most, sum(op.written for op in ops if op.kind == "move" and op.id not in ended))
        return most

    def trace(self, cell: str, way: str, units: int) -> tuple[Op, ...]:
        """The operations of a cell in one pass, of a micro-batch of `units` units."""
        ops = {kind: self.kinds[kind].at(units) for kind in self.counts[cell, way]}
        return tuple(_numbered(ops[kind], number) for kind, number in self.numbered(cell, way))


def _numbered(op: Op, number: int) -> Op:
    return op if number == op.id else op._replace(id=number)


class TracedCells(NamedTuple):
    """What one trace gives: as `Cells`, with sizes as they are; the stretches of PASSES, copies and the optimizer."""

    passes: tuple[tuple[tuple[str, int, int, tuple[Op, ...]], ...], ...]
    elements: dict[str, int]
    tensors: dict[str, int]
    kept: int


def traced(inner: StageGrid, single: bool) -> Cells | None:
    """The cells, traced now; None where the sizes at NEAR and FAR units are not those of the same operations.

    single : of one unit alone. Raises LayoutError, GridError and ConfigError where a run would.
    """
    if single:
        sample = _sample(inner, 1)
        return _between(sample, sample, (0, 1))
    return _between(_sample(inner, NEAR), _sample(inner, FAR), (NEAR, FAR))


def _sample(inner: StageGrid, units: int) -> TracedCells:
    """Trace a step of its blocks on the first rank, and, where parts are uneven, the communications of the last."""
    from ...dry.rank_classes import even
    from ...train.dry_run import setting_of

    config = inner.config(units)
    setting = setting_of(config, 0, inner.shared, inner.device == "cuda")
    first = _traced(setting, config, inner.split)
    if even(setting):
        return first._replace(passes=tuple(tuple((*item[:3], with_messages(item[3])) for item in of) for of in first.passes))
    last = _traced(replace(setting, rank=prod(setting.axes.values()) - 1), config, inner.split)
    merged = []
    for ours, others in zip(first.passes, last.passes, strict=True):
        if [piece[0] for piece in ours] != [piece[0] for piece in others]:
            raise ConfigError("ranks of one grid run their cells in different orders.")
        pairs = zip(ours, others, strict=True)
        merged.append(tuple((*pair[:3], largest(pair[3], other[3])) for pair, other in pairs))
    return first._replace(passes=tuple(merged))


def _traced(setting: Any, config: Config, split: bool) -> TracedCells:
    from ...dry.step import OpKey, Rank
    from ...train.dry_run import training_of

    rank = Rank.traced(setting, training_of(config), between=True, split=split)
    step = rank.step([])
    kinds = ("F", "X", "W") if split else ("F", "B")
    passes = [rank.ops[OpKey(kind, 0, 1)].parts for kind in kinds] + [()] * (len(PASSES) - len(kinds))
    blocks = (BLOCK,) if config.model.layers == 1 else AHEAD
    names = {str(number): name for number, name in enumerate(blocks)}
    result = [
        [(names.get(part.cell, part.cell), part.net, part.top, tuple(part.ops)) for part, _ in parts if part.ops or part.net]
        for parts in (*passes, step.copies, step.optimizer)
    ]
    result[-2:] = [[part for part in parts if part[0] not in (BEFORE, BEHIND)] for parts in result[-2:]]
    elements, tensors = ({ENTER: 0, BLOCK: 0, LEAVE: 0, "tied": 0, "experts": 0} for _ in range(2))
    for state in rank.states:
        tied, expert = state.name == "embedding.weight" and config.model.tied, ".experts." in state.name
        held = _cell_of(state.name, blocks)
        if held in (BEFORE, BEHIND):
            continue
        for cell in (held, *["tied"] * tied, *["experts"] * expert):
            elements[cell] += state.shardings.numel
            tensors[cell] += state.shardings.numel > 0
    return TracedCells(tuple(map(tuple, result)), elements, tensors, rank.kept)


def _cell_of(name: str, blocks: Sequence[str]) -> str:
    """The cell of a parameter: that which the first stage of a pipeline, one of the blocks, or the last stage holds."""
    if name.startswith("blocks."):
        return blocks[int(name.split(".")[1])]
    return ENTER if name.startswith(("embedding", "positions", "token_types")) else LEAVE


def _line(low: int, high: int, at: tuple[int, int]) -> LinearSize:
    """The line through two numbers, or, where its slope is no integer, through the first one and just above the second."""
    slope, left = divmod(high - low, at[1] - at[0])
    slope += bool(left)
    return LinearSize(low - slope * at[0], slope)


def _between(near: TracedCells, far: TracedCells, at: tuple[int, int]) -> Cells | None:
    """Cells whose sizes are lines through two samples; None where these are not of the same operations."""
    numbers: dict[OpLine, int] = {}
    known: dict[object, OpLine | None] = {}  # of two operations but for their layer and id
    passes = []
    for ours, others in zip(near.passes, far.passes, strict=True):
        if [(piece[0], len(piece[3])) for piece in ours] != [(piece[0], len(piece[3])) for piece in others]:
            return None
        pieces = []
        for (cell, net, top, ops), (_, other_net, other_top, other_ops) in zip(ours, others, strict=True):
            result = []
            for item, other in zip(ops, other_ops, strict=True):
                key = item[:_LAYER] + item[_LAYER + 1 : -1], other[:_LAYER] + other[_LAYER + 1 : -1]
                if key not in known:
                    known[key] = _kind(item, other, at)
                kind = known[key]
                if kind is None or (item.layer, item.id) != (other.layer, other.id):
                    return None
                result.append((numbers.setdefault(kind, len(numbers)), item.id))
            pieces.append(PassOps(cell, _line(net, other_net, at), _line(top, other_top, at), tuple(result)))
        passes.append(tuple(pieces))
    *of_micro_batches, copies, optimizer = passes
    kept, in_order = _line(near.kept, far.kept, at), dict(zip(PASSES, of_micro_batches, strict=True))
    return Cells(tuple(numbers), in_order, copies, optimizer, near.elements, near.tensors, kept)


def _kind(op: Op, other: Op, at: tuple[int, int]) -> OpLine | None:
    """The kind of an operation of two samples; None where they are not one operation, or what it moves grows unevenly.

    Its layer and id count for nothing.
    """
    other = other._replace(layer=op.layer, id=op.id)
    if op._replace(**_NO_SIZES) != other._replace(**_NO_SIZES):
        return None
    sizes = ((name, getattr(op, name), getattr(other, name)) for name in SIZES)
    lines = {name: _line(size, larger, at) for name, size, larger in sizes if size != larger}
    base: dict[str, Any] = {name: line.base for name, line in lines.items()}
    slopes = tuple((Op._fields.index(name), line.slope) for name, line in lines.items() if line.slope)
    kind = OpLine(op._replace(**base, layer="", id=-1), slopes)
    if op.kind != "elements" and kind.at(at[1])._replace(layer=op.layer, id=op.id) != other:
        return None  # a kernel's sums in lanes make steps; sizes of products and communications make none
    return kind


_NO_SIZES: dict[str, Any] = dict.fromkeys(SIZES, 0)
_LAYER = Op._fields.index("layer")
