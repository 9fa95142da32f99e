"""What a run would compute, move and hold on any grid, before any rank is started: its own code, run dry; as a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..columns import counted
from ..comm.device.select import requested_device
from ..comm.grid import Place
from ..dry.bounds import bounded_products
from ..dry.rank_classes import steps
from ..dry.step import DryStep, Ending, Setting, Training
from ..errors import ConfigError
from ..files import grid_of
from ..nn.config import ModelConfig
from ..nn.context import scheme
from ..nn.experts.load import GivenLoad
from ..nn.gradients import norm_and_votes
from ..nn.models.registry import build
from ..nn.muon.groups import Grouping, group_plan, grouped
from ..nn.muon.matrices import LogicalMatrix, matrices_of
from ..nn.muon.newton_schulz import NewtonSchulz
from ..node_support import why_no_node_memory
from ..parallel.expert_load import ExpertLoads
from ..parallel.pipeline import Pipeline
from ..parallel.states import ParameterState, named_parameters
from ..table import Column, Table
from . import toml
from .checkpoint.folder import own_blocks
from .config import Config, at_least, from_table, master_dtype, numbers_of, read_table, to_table
from .loop import total
from .optimizer import MUON_MOMENTS, moments_of, new_optimizer
from .precision import torch_dtype, working_weights

MEBI, GIGA = 1 << 20, 1e9
TERMS = ("parameters", "gradients", "optimizer", "activations", "workspace", "in_flight", "peak", "node")
STAGE_TERMS = ("parameters", "activations", "peak")
TellCounts = Callable[[int, int], None]
"""Is told how many programs of ranks are traced, of how many."""
CLIPPED = 0.5
"""What a dry step multiplies gradients by where the configuration clips them: any number but 1."""


@dataclass(frozen=True, kw_only=True)
class PlacedStep:
    """A training step of ranks that lie on nodes in one way; of the rank that holds most, where nothing else is said.

    Attributes
    ----------
    parameters : of the whole model
    flops : of the rank's products
    words, messages, received : words, messages and bytes that it receives, by phase and axis
    bytes, mean_bytes : bytes by term, of it and on the mean of all ranks; "peak" is the most of all at any time, beside "node"
    peak : the most bytes that it holds at any time
    operations : kind → count, flops, and bytes read and written
    checkpoint : bytes of its file
    products : of a block's weights and of the head: sizes of a micro-batch's, times in a step, words received in their layers,
        and the sum of so many single products' bounds; `bound` is the sum of all
    ranks_per_node, node_axes, fullest_rank : consecutive ranks that share a node, the axes inside a node, and which rank it is
    stages : of a pipeline, what the fullest rank of each of its ranks holds, and what it receives on axis pp
    """

    parameters: int
    flops: int
    words: Mapping[str, Mapping[str, int]]
    messages: Mapping[str, Mapping[str, int]]
    received: Mapping[str, Mapping[str, int]]
    ranks_per_node: int
    node_axes: Sequence[str]
    fullest_rank: int
    bytes: Mapping[str, int]
    peak: int
    mean_bytes: Mapping[str, float]
    operations: Mapping[str, Mapping[str, int]]
    checkpoint: int
    products: Sequence[Mapping[str, Any]]
    bound: float
    stages: Sequence[Mapping[str, Any]] = ()

    @property
    def total_words(self) -> int:
        """All words that the rank receives in a step."""
        return sum(words for axes in self.words.values() for words in axes.values())

    def carried_by(self, device: str) -> str:
        """Say what communicates; of a node's memory, along which axes."""
        return "NCCL" if device == "cuda" else f"node: {' '.join(self.node_axes)}" if self.node_axes else "MPI"


@dataclass(frozen=True, kw_only=True)
class Report(PlacedStep):
    """A training step on a grid: as `PlacedStep`, with each rank on a node of its own unless it was told otherwise.

    Printed, it is the text of ``summa3d train --dry-run``; in a notebook, two tables.

    Attributes
    ----------
    scheme, grid, ranks, dtype, recompute, device : of the configuration
    one_node : the same step with all ranks on one node; None where that makes no difference, or `ranks_per_node` was given
    """

    scheme: str
    grid: Mapping[str, int]
    ranks: int
    dtype: str
    recompute: str
    device: str
    one_node: PlacedStep | None = None

    @property
    def placements(self) -> list[PlacedStep]:
        """The step with its ranks on nodes in each way that it was asked for."""
        return [self, *filter(None, [self.one_node])]

    @property
    def need(self) -> int:
        """The most bytes that a rank holds at any time, its share of a node's memory included, in any placement."""
        return max(placement.bytes["peak"] + placement.bytes["node"] for placement in self.placements)

    def as_json(self) -> dict[str, Any]:
        """The fields, as ``summa3d train --dry-run --json`` prints them; those that say nothing are left out."""
        fields = asdict(self)
        for placed in (fields, fields["one_node"] or {}):
            if not placed.get("stages"):
                placed.pop("stages", None)
        return {name: value for name, value in fields.items() if value is not None}

    def tables(self) -> tuple[Table, Table]:
        """Bytes by term, of the fullest rank and on the mean; then words, messages and bytes received by phase and axis."""
        placements, columns = self.placements, [Column("MiB of a rank", list(self.bytes), left=True)]
        for placement in placements:
            fullest, mean = ([held[term] / MEBI for term in self.bytes] for held in (placement.bytes, placement.mean_bytes))
            columns.append(
                Column(f"rank {placement.fullest_rank}, {placement.carried_by(self.device)}", fullest, "{:,.2f}".format)
            )
            columns.append(Column("mean", mean, "{:,.2f}".format))
        share = max(item.mean_bytes["peak"] + item.mean_bytes["node"] for item in placements) / MEBI
        all_ranks = f"{share * self.ranks:,.1f} MiB on all ranks, beside Python itself"
        need = f"needs at most {self.need / MEBI:,.1f} MiB on a rank and {all_ranks}"
        grid = ",".join(f"{name}={size}" for name, size in self.grid.items())
        title = f"{self.scheme} on {counted(self.ranks, 'rank')}, grid {grid}, {self.dtype}, recompute {self.recompute}"
        lines = [(phase, axis) for phase, axes in self.words.items() for axis in axes]
        moved = [
            Column("phase", [phase for phase, _ in lines], left=True),
            Column("axis", [axis for _, axis in lines], left=True),
            *(
                Column(name, [amounts[phase][axis] for phase, axis in lines], "{:,}".format)
                for name, amounts in (("words", self.words), ("messages", self.messages), ("bytes", self.received))
            ),
        ]
        words = f"{self.total_words:,} words received by rank {self.fullest_rank} in a step"
        return Table(title, columns, [need]), Table(words, moved)

    def to_frame(self) -> Any:
        """Words, messages and bytes received by phase and axis, as a DataFrame. ConfigError where pandas is not installed."""
        return self.tables()[1].to_frame()

    def _repr_html_(self) -> str:
        return "\n".join(table.html() for table in self.tables())

    def __str__(self) -> str:
        held, moved = self.tables()
        return "\n\n".join(table.text() for table in (held, *self._of_stages(), self._operations(), self._products(), moved))

    def _of_stages(self) -> Iterator[Table]:
        """Yield the table of what the fullest rank of each rank of a pipeline holds, and what it receives on axis pp."""
        if self.stages:
            columns = [Column(name, [stage[name] for stage in self.stages]) for name in ("pp", "rank")]
            columns.append(Column("layers", [",".join(map(str, stage["layers"])) for stage in self.stages], left=True))
            for term in STAGE_TERMS:
                columns.append(Column(term, [stage[term] / MEBI for stage in self.stages], "{:,.2f}".format))
            columns.append(Column("words on pp", [stage["words"] for stage in self.stages], "{:,}".format))
            yield Table(f"MiB of the pipeline's ranks, {self.carried_by(self.device)}", columns)

    def _operations(self) -> Table:
        """Return the table of what the fullest rank computes and moves in a step, by kind."""
        columns, of = [Column("operations", list(self.operations), left=True)], self.operations.values()
        columns.append(Column("count", [item["count"] for item in of], "{:,}".format))
        columns.append(Column("GFLOP", [item["flops"] / GIGA for item in of], "{:,.3f}".format))
        columns.append(Column("MiB", [item["bytes"] / MEBI for item in of], "{:,.2f}".format))
        return Table(f"{self.parameters:,} parameters; rank {self.fullest_rank} in a step", columns)

    def _products(self) -> Table:
        """Return the table of the products' words and bounds, and in its last line of all words of the step."""
        rows, total = self.products, [self.total_words]
        columns = [Column("product", [*(row["product"] for row in rows), "step"], left=True)]
        for name in ("m", "n", "k", "times"):
            columns.append(Column(name, [*(row[name] for row in rows), None], lambda size: "" if size is None else f"{size:,}"))
        columns.append(Column("words", [row["words"] for row in rows] + total, "{:,}".format))
        columns.append(Column("bound", [row["bound"] for row in rows] + [self.bound], "{:,.0f}".format))
        title = "words received in the layers of products, and the sum of the bounds of single products"
        return Table(title, columns)


def dry_run(
    config: Config | ModelConfig | str | Path,
    grid: Mapping[str, int] | str | None = None,
    *,
    ranks_per_node: int | None = None,
    tell: TellCounts = lambda done, total: None,
    load: Any = None,
    **settings: Any,
) -> Report:
    """Report what a training step takes of each rank, found by running its own program on tensors without memory.

    Nothing is computed, allocated or moved, no rank is started, and MPI is not initialized.

    Parameters
    ----------
    config : a configuration, the name of one that is shipped, the path of a TOML file; or a model, with the other keys' defaults
    grid : sizes of its axes, as {"x": 2, "z": 2} or "x=2,z=2", in place of the configuration's
    ranks_per_node : consecutive ranks that share a node's memory; without it, 1, and `Report.one_node` has all on one
    tell : is given how many programs of ranks are traced, of how many
    load : of a mixture's experts, whole numbers of tokens in a step, [layers of experts, E], or of each rank and micro-batch,
        [ranks, micro-batches, layers of experts, E] (`GivenLoad`); without it all experts take as many
    settings : further keys of the configuration, as scheme="cuboid", train={"batch": 16} or **{"train.batch": 16}

    Returns
    -------
    the words, messages and bytes of the fullest rank, exact for the program that would run

    Raises ConfigError for an unknown key, naming the nearest, and for values that no run can have; GridError and LayoutError, as
    the run would, for a grid or sizes that do not fit.

    >>> report = dry_run("demo", "x=2,y=2,z=2")
    >>> report.ranks, report.total_words == sum(report.tables()[1].columns[2].values)
    (8, True)
    """
    if isinstance(config, ModelConfig):
        table: dict[str, Any] = {"model": toml.dump(config), "data": {"tokenizer": numbers_of(config)}}
    else:
        table = to_table(config) if isinstance(config, Config) else read_table(str(config))
    if grid is not None:
        sizes = grid_of(grid) if isinstance(grid, str) else dict(grid)
        if sizes is None:
            raise ConfigError(f"{grid!r} is no grid; write it as x=2,y=2,z=2.")
        others = {key: value for key, value in table.get("grid", {}).items() if not isinstance(value, int)}
        table = {**table, "grid": {**others, **sizes}, "chosen": ""}
    for key, value in settings.items():
        inner = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, Mapping) else {key: value}
        for name, item in inner.items():
            toml.assign(table, name, item)
    result = predict(from_table(table), ranks_per_node, tell, load)
    one_node = result.pop("one_node", None)
    return Report(**result, one_node=one_node and PlacedStep(**one_node))


def predict(
    config: Config, ranks_per_node: int | None = None, tell: TellCounts = lambda done, total: None, load: Any = None
) -> dict[str, Any]:
    """Predict what a step of the configuration would take on its grid, on any number of ranks.

    ranks_per_node : how many consecutive ranks share a node. Axes inside a node communicate through its memory, where blocks are
        read and summands added as they lie; the others through MPI, which takes more workspace. Without it, of a grid with every
        rank on a node of its own, and under "one_node" of one with all ranks on one. On a device NCCL carries all axes alike.
    tell, load : as of `dry_run`

    Returns
    -------
    dict with `parameters` (of the whole model); of the fullest rank, `fullest_rank`: `flops` (of its products), `words` and
    `messages` received by phase and axis, the same in bytes (`received`), `bytes` by term (`DryStep.bytes`), `peak`, `operations`
    (count, flops and bytes read and written, by kind), `products` and `bound` (`bounded_products`, and the sum of their bounds),
    `checkpoint` (bytes of its file), `node_axes` (its axes inside a node;
    none where this machine's ranks cannot use a node's memory); `mean_bytes` over all ranks; and of a pipeline `stages`: for each
    of its ranks (pp) the fullest rank, the layers of its chunks, bytes of parameters, activations in flight and peak, and words
    and messages received on axis pp.

    Raises, as the run itself would, GridError and LayoutError for a grid or sizes that do not fit, and ConfigError for less than
    one rank a node.
    """
    ranks = prod(config.grid.axes.values())
    if ranks_per_node is not None:
        at_least("ranks per node", ranks_per_node, 1)
    result = {"scheme": config.scheme, "grid": config.grid.axes, "ranks": ranks, "dtype": config.dtype}
    on_device = requested_device(config.device) == "cuda"
    result |= {"recompute": config.recompute, "device": "cuda" if on_device else "cpu"}
    given = None if load is None else GivenLoad.of(load, config.model, ranks, config.train.accumulate)
    result |= _placed(config, ranks_per_node or 1, on_device, tell, given)
    if ranks_per_node is not None or ranks == 1 or on_device:
        return result
    return result | {"one_node": _placed(config, ranks, False, tell, given)}


def setting_of(config: Config, rank: int = 0, ranks_per_node: int = 1, on_device: bool = False) -> Setting:
    """The configuration's model on one rank's place of its grid."""
    grid, shared = config.grid, 1 if why_no_node_memory() else ranks_per_node
    return Setting(
        config.model,
        config.rows,
        config.scheme,
        grid.axes,
        rank,
        grid.rank_order,
        grid.tile,
        config.regather,
        config.vectors,
        config.overlap_on(on_device),
        master_dtype(config.dtype),
        (config.recompute, config.recompute_layers, config.distribute_saved_activations),
        config.train.accumulate,
        shared,
        on_device,
        config.pipeline.schedule,
        config.pipeline.chunks,
        config.pipeline.counts,
        config.dtype,
        config.pipeline.scatter,
        config.replicas.zero,
        config.replicas.bucket,
        config.replicas.overlap,
        config.context,
    )


def training_of(config: Config) -> Training:
    """Additions of the training loop to the ops of a program: 16-bit copies of weights before them, the optimizer behind them."""

    def optimizer(pipeline: Pipeline, states: Sequence[ParameterState]) -> Ending:
        replicas = pipeline.replicas
        assert replicas is not None
        taken, loads = new_optimizer(states, config.train, replicas.grid), ExpertLoads.of(pipeline.model, states)

        def update() -> None:
            replicas.finish()
            replicas.settle(total([], pipeline.axis))
            norm_and_votes(taken.counted_gradients(), replicas.grid)
            if loads is not None:
                loads.take()
            replicas.update(lambda: taken.step(config.train.learning_rate, CLIPPED if config.train.clip else 1.0))
            replicas.gathers.finish()  # in a run, during the next forward

        written = sum(block.tensor.nbytes for block in own_blocks(taken) if block.sharding.is_primary(replicas.grid))
        moments = (moment.nbytes for kind in taken.moments.values() for moment in kind.values())
        on_host = requested_device(config.device) == "cpu"
        return Ending(update, sum(moments), written, written if config.train.copies_checkpoints and on_host else 0)

    shares = MatrixShares(config).of if config.train.optimizer == "muon" else Training.shares
    return Training(lambda model, states: working_weights(model, states, torch_dtype(config.dtype)), optimizer, shares)


class MatrixShare(NamedTuple):
    """What a rank orthogonalises: the shapes of its matrices, ascending; of how many ranks of a group it is which."""

    shapes: tuple[tuple[int, int], ...]
    size: int
    place: int


class MatrixShares:
    """The matrices that each rank orthogonalises with train.optimizer = "muon", alone or in a group."""

    def __init__(self, config: Config) -> None:
        muon = config.train.muon
        self._config, self._how = config, NewtonSchulz(steps=muon.steps)
        self._dtype = "bfloat16" if muon.dtype == "bfloat16" else master_dtype(config.dtype)
        self._grouped = cache(self._of_stage)
        self._places: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}

    def of(self, setting: Setting, rank: int) -> MatrixShare:
        """Matrices that a rank orthogonalises."""
        topology = setting.topology
        at, layers, stages = topology.coordinates_of(rank), setting.model.layers, setting.stages
        if stages is not None:
            layers = sum(many for many, home in zip(stages.layers, stages.homes, strict=True) if home == at["pp"])
        key = topology.order, *topology.shape.items(), *topology.tile.items(), at.get("pp")
        if key not in self._places:
            members = topology.members([axis for axis in topology.shape if axis != "pp"], at)
            ordered = {member: place for place, member in enumerate(sorted(members))}
            self._places[key] = {member: (number, ordered[member]) for number, member in enumerate(members)}
        number, place = self._places[key][rank]
        shapes, result = self._grouped(layers, len(self._places[key]))
        size = result.size
        group = number if size == 1 else place // size
        own = (shape for shape, owner in zip(shapes, result.owners, strict=True) if owner == group)
        return MatrixShare(tuple(sorted(own)), size, place % size)

    def flops_of(self, setting: Setting, rank: int) -> int:
        """The flops of what a rank orthogonalises; of a group, those of the member that does most."""
        share = self.of(setting, rank)
        if share.size == 1:
            return sum(self._how.flops(*shape) for shape in share.shapes)
        plans = (group_plan(*sorted(shape), share.size, self._dtype) for shape in share.shapes)
        return sum(2 * self._how.steps * plan.multiply_adds for plan in plans)

    def _of_stage(self, layers: int, members: int) -> tuple[list[tuple[int, int]], Grouping]:
        """The shapes of the matrices of a stage of so many layers, and who computes them."""
        shapes = layers * [matrix.shape for matrix in self._of_block]
        return shapes, grouped(shapes, members, self._how, self._dtype, self._config.train.muon.group)

    @cached_property
    def _of_block(self) -> list[LogicalMatrix]:
        """The matrices of a block, in the order of its parameters."""
        with torch.device("meta"):
            model = build(replace(self._config.model, layers=1), scheme("serial", Place(dict.fromkeys("xyz", 1))))
        hidden = [p for name, p in named_parameters(model) if moments_of(name, p.dim(), "muon") == MUON_MOMENTS]
        return [matrix for p in hidden for matrix in matrices_of("", p.sharding, p.joined)]


def _placed(config: Config, ranks_per_node: int, on_device: bool, tell: TellCounts, load: GivenLoad | None) -> dict[str, Any]:
    """Work and memory of the ranks where so many consecutive ones share a node, on the host or on devices."""
    first = replace(setting_of(config, 0, ranks_per_node, on_device), load=load)
    first.check()
    result = {rank: (step, many) for rank, many, step in steps(first, training_of(config), tell)}
    held = {rank: step.bytes() for rank, (step, _) in result.items()}
    fullest = max(held, key=lambda rank: held[rank]["peak"])
    step, ranks = result[fullest][0], sum(many for _, many in result.values())
    operations, products = step.operations(), bounded_products(replace(first, rank=fullest), step)
    stages = {"stages": _by_stage(first, held, {rank: step for rank, (step, _) in result.items()})} if config.grid.pp > 1 else {}
    return {
        "parameters": step.elements,
        "flops": operations["product"]["flops"],
        "words": step.words(),
        "messages": step.messages(),
        "received": step.received(),
        "ranks_per_node": ranks_per_node,
        "node_axes": list(step.node_axes),
        "fullest_rank": fullest,
        "bytes": held[fullest],
        "peak": step.peak,
        "mean_bytes": {term: sum(held[rank][term] * many for rank, (_, many) in result.items()) / ranks for term in TERMS},
        "operations": operations,
        "checkpoint": step.checkpoint,
        "products": [product._asdict() for product in products],
        "bound": sum(product.bound for product in products),
        **stages,
    }


def _by_stage(setting: Setting, held: Mapping[int, dict[str, int]], steps: Mapping[int, DryStep]) -> list[dict[str, Any]]:
    """Memory of the fullest rank of each pipeline stage, and words that it receives on axis pp."""
    place, stages = setting.place(), setting.stages
    assert stages is not None
    ranks: dict[int, list[int]] = {}
    for rank in held:
        ranks.setdefault(place.coordinates_of(rank)["pp"], []).append(rank)
    rows = []
    for index, those in sorted(ranks.items()):
        rank = max(those, key=lambda rank: held[rank]["peak"])
        layers = [many for many, home in zip(stages.layers, stages.homes, strict=True) if home == index]
        result = {"pp": index, "rank": rank, "layers": layers, **{term: held[rank][term] for term in STAGE_TERMS}}
        for what, moved in (("words", steps[rank].words()), ("messages", steps[rank].messages())):
            result[what] = sum(many for axes in moved.values() for axis, many in axes.items() if axis.startswith("pp"))
        rows.append(result)
    return rows
