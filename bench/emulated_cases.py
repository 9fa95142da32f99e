"""What emulated_nodes.py races: products, blocks and training steps on emulated nodes, each with its predicted seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

MATRICES = "float64"
PORTS = ("1gbit", "250mbit")
SHAPES = ((2048, 2048, 256), (512, 2048, 2048), (2048, 512, 2048))
CUBE, WIDE = {"x": 2, "y": 2, "z": 2}, 1024
PER_NODE = {"placement": 2, "algorithms": 4, "arrangement": 4, "pipeline": 2, "strong": 2}
"""Part → ranks of a node."""
MICRO_BATCHES = 4
DEMO_BATCH, STEP_BATCH = 24, 12
ENDLESS = 1e13
"""Bytes per second of what takes no time."""
OPTIMIZER_BYTES = 28
"""Bytes that AdamW reads and writes for a parameter."""
PLANS = 5
"""How many of the plans of a block that are predicted the fastest are raced, besides the fastest of each scheme."""


@dataclass(frozen=True)
class Facts:
    """What one rank a core does while all cores work.

    flops : operations per second of products, by dtype. half : the side at which a product has half its rate. memory : bytes per
    second. kernel : seconds of an element-wise kernel of little. function : of an element of GELU, beside its bytes. layer : of
    the Python of an operation of a layer.
    """

    flops: Mapping[str, float]
    half: float
    memory: float
    kernel: float
    cores: int
    function: float
    layer: float


@dataclass(frozen=True)
class Race:
    """Contenders that run in turn in one job. part : what it is about. nodes, port : the network."""

    part: str
    nodes: int
    port: str
    cases: tuple[Case, ...] = field(default=(), repr=False)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * PER_NODE[self.part]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a port in each direction."""
        from summa3d.launcher.emulate import network_of

        return network_of(f"nodes={self.nodes},port={self.port}").bandwidth

    @property
    def name(self) -> str:
        """Its name in results."""
        return f"{self.part} {self.nodes} nodes {self.port}"


@dataclass(frozen=True)
class Case:
    """A contender. kind : product, block or step. what : algorithm or scheme; axes, order, tile : its grid. sizes : m, n, k."""

    label: str
    kind: str
    what: str
    axes: Mapping[str, int]
    order: str | None = None
    tile: Mapping[str, int] | None = None
    sizes: tuple[int, ...] = ()


def races(facts: Facts) -> Iterator[Race]:
    """All races."""
    for port in PORTS:
        cases = [
            Case(f"{'·'.join(map(str, sizes))}, {order[0]} in the node", "product", "cuboid", CUBE, order, None, sizes)
            for sizes in SHAPES
            for order in ("zyx", "yxz", "xyz")
        ]
        yield Race("placement", 4, port, tuple(cases))
    yield Race("algorithms", 4, "250mbit", tuple(algorithms()))
    yield Race("arrangement", 4, "250mbit", tuple(arrangements()))
    yield Race("pipeline", 4, "250mbit", tuple(pipelines()))
    for nodes in (1, 2, 4):
        race = Race("strong", nodes, "100mbit")
        yield replace(race, cases=tuple(plans(race, facts)))


def algorithms() -> Iterator[Case]:
    """One product on 16 ranks by algorithms of one, two, two and a half and three dims."""
    sizes = (WIDE,) * 3
    for what, axes in (
        ("oned-row", {"y": 16}),
        ("summa", {"x": 4, "y": 4}),
        ("ca25d", {"x": 2, "y": 2, "d": 4}),
        ("cuboid", {"x": 2, "y": 2, "z": 4}),
        ("cuboid", {"x": 2, "y": 4, "z": 2}),
    ):
        yield Case(f"{what} {text(axes)}", "product", what, axes, sizes=sizes)


def arrangements() -> Iterator[Case]:
    """A 4×4 mesh with a row of it on each node, and with a square: the naive and the bunched arrangement of the 2-D paper."""
    for sizes in ((WIDE,) * 3, (2 * WIDE, WIDE // 2, WIDE)):
        for how, tile in (("naive", None), ("bunched", {"x": 2, "y": 2})):
            label = f"summa {'·'.join(map(str, sizes))}, {how}"
            yield Case(label, "product", "summa", {"x": 4, "y": 4}, "yx", tile, sizes)


def pipelines() -> Iterator[Case]:
    """A training step on 8 ranks with more and more of them in the pipeline, and fewer that split each layer."""
    for stages in (1, 2, 4):
        axes = {"y": 8 // stages, "pp": stages}
        yield Case(f"1-D over {axes['y']} ranks, {stages} stage{'s' * (stages > 1)}", "step", "oned", axes)


def plans(race: Race, facts: Facts) -> list[Case]:
    """The plans of the demo's block on these nodes that are predicted the fastest, and the fastest of each scheme."""
    from summa3d.bench.blocks import Case as Block
    from summa3d.bench.blocks import grids_for

    block = Block(demo_model(1), DEMO_BATCH)
    found = [
        Case(f"{scheme} {text(axes)}", "block", scheme, axes)
        for scheme in ("oned", "oned-sp", "summa", "tesseract", "cuboid")
        for axes in grids_for(scheme, race.ranks, block)
    ]
    found.sort(key=lambda case: sum(predicted(case, race, facts)))
    best = {case.what: case for case in reversed(found)}
    return [case for place, case in enumerate(found) if place < PLANS or case in best.values()]


def text(axes: Mapping[str, int]) -> str:
    """A grid in a label."""
    return ",".join(f"{name}{size}" for name, size in axes.items() if size > 1)


def settings(case: Case) -> list[str]:
    """Settings of the demo for a training step."""
    axes = [f"grid.{name}={size}" for name, size in case.axes.items()]
    accumulate = MICRO_BATCHES if case.axes.get("pp", 1) > 1 else 1
    quiet = ("train.steps=100000", "train.evaluate_every=0", "train.checkpoint_every=0", "train.keep=0")
    return [f"scheme={case.what}", *axes, f"train.batch={STEP_BATCH}", f"train.accumulate={accumulate}", *quiet]


@cache
def demo_model(layers: int) -> Any:
    """The demo's model with this many layers."""
    from summa3d.train.config import load

    return replace(load("demo", []).model, layers=layers)


def cluster_of(race: Race, facts: Facts) -> Any:
    """The emulated nodes as a cluster, whose ranks share this machine's cores: the ports as shaped, nothing fitted."""
    from summa3d.cluster import read

    def number(value: float, source: str = "measured") -> dict[str, Any]:
        return {"value": value, "source": source}

    share, none = min(1.0, facts.cores / race.ranks), number(0.0, "assumed")
    network = {"name": "network", "bandwidth": number(race.bandwidth, "assumed"), "latency": none}
    node = {"name": "node", "size": number(PER_NODE[race.part]), "bandwidth": number(facts.memory * share), "latency": none}
    launch, function = number(facts.kernel / share), number(facts.function / share)
    table = {
        "peak": {name: number(rate) for name, rate in facts.flops.items()},
        "device": {"memory": number(1e9), "memory_bandwidth": number(facts.memory)},
        "product": {"efficiency": number(share), "half": number(facts.half)},
        "elements": {"efficiency": number(share), "launch": launch, "function": function},
        "layers": {"launch": number(facts.layer / share)},
        "collectives": {"launch": none},
        "level": [node, network],
        "band": {"percent": number(20.0, "assumed")},
    }
    return read(table, "emulated")


def predicted(case: Case, race: Race, facts: Facts) -> tuple[float, float]:
    """Predicted seconds of a contender: of communication, and of arithmetic."""
    prices = prices_of(case, cluster_of(race, facts))
    if case.kind == "step":
        return _of_step(case, prices, PER_NODE[race.part])
    ops = ops_of(case, PER_NODE[race.part])
    of = {moves: sum(prices.seconds(op) for op in ops if (op.kind == "move") == moves) for moves in (True, False)}
    return of[True], of[False]


def port_bytes(case: Case, race: Race, facts: Facts) -> float | None:
    """The bytes that the busiest port carries in a product or a block; None where MPI goes a way of its own, or nothing goes."""
    ops = [] if case.kind == "step" else [op for op in ops_of(case, PER_NODE[race.part]) if op.kind == "move"]
    prices = prices_of(case, cluster_of(race, facts).replaced({"node.bandwidth": ENDLESS}, "assumed"))
    free = any(op.name not in ("all_gather", "reduce_scatter") for op in ops)
    return None if free or race.nodes == 1 or not ops else sum(map(prices.seconds, ops)) * race.bandwidth


def prices_of(case: Case, cluster: Any) -> Any:
    """The prices of a contender's operations on a cluster."""
    from summa3d.comm.topology import Topology
    from summa3d.plan.host import HostPrices

    return HostPrices(cluster, Topology.checked(case.axes, case.order, case.tile))


def ops_of(case: Case, per_node: int) -> list[Any]:
    """The operations of a product or a block."""
    return product_ops(case, per_node) if case.kind == "product" else block_ops(case, per_node)


def product_ops(case: Case, per_node: int) -> list[Any]:
    """The operations of a product, on the first rank; broadcasts with the words of those that it receives."""
    import torch

    from summa3d.dry.place import DryPlace
    from summa3d.dry.trace import Tracer
    from summa3d.gemm.algorithms.registry import ALGORITHMS

    found, tracer = ALGORITHMS[case.what], Tracer()
    plan = found.plan("nn", *case.sizes)
    place = DryPlace(case.axes, 0, case.order, dict(case.tile or {}), per_node, ledger=tracer.ledger)
    with torch.device("meta"):
        dtype = getattr(torch, MATRICES)
        shapes = [at.local_shape(shape, place.shape, place.coordinates) for at, shape in plan.stored]
        blocks = [torch.empty(shape, dtype=dtype) for shape in shapes]
        executor = found.executor(plan, place)
        with tracer.recording() as parts:
            executor.run(*blocks)
    ops = [op for segments in parts for segment in segments for op in segment.ops]
    words = {axis: max(op.words for op in ops if op.axis == axis) for axis in {op.axis for op in ops}}
    return [op._replace(words=words[op.axis]) if op.name == "broadcast" else op for op in ops]


def block_ops(case: Case, per_node: int) -> list[Any]:
    """The operations of the demo's block, forward and backward."""
    from summa3d.dry.step import Setting
    from summa3d.plan.cells import BLOCK, cells

    setting = Setting(demo_model(1), DEMO_BATCH, case.what, dict(case.axes), ranks_per_node=per_node)
    cell = cells(setting)[BLOCK]
    return [*cell.forward, *cell.backward]


def _of_step(case: Case, prices: Any, per_node: int) -> tuple[float, float]:
    """A training step: stages of cells by the schedule, then the optimizer. What is not arithmetic is the rest."""
    from summa3d.dry.record import Op
    from summa3d.dry.step import Setting
    from summa3d.plan.cells import cells
    from summa3d.plan.predict import Durations, PredictedStep

    stages, tensor = case.axes["pp"], case.axes["y"]
    many = MICRO_BATCHES if stages > 1 else 1
    model, rows = demo_model(4), STEP_BATCH // many
    setting = Setting(demo_model(1), rows, case.what, {"y": tensor}, ranks_per_node=per_node)
    parts = cells(setting)
    stream = rows * model.sequence * model.hidden
    sent = Op("move", "", "", "send", axis="pp", words=stream // tensor, dtype="float32")
    gathered = Op("move", "", "", "all_gather", axis="y", words=stream * (tensor - 1) // tensor, dtype="float32")
    held = 12 * model.hidden**2 * model.layers // prod(case.axes.values())
    adam = Op("elements", "optimizer", "", "adamw", read=OPTIMIZER_BYTES * held)
    step = PredictedStep(parts, prices.topology, "1f1b", (model.layers // stages,) * stages, many)

    def seconds(moves: bool) -> float:
        def of(ops: Any) -> float:
            return sum(prices.seconds(op) for op in ops if moves or op.kind != "move")

        send = of((sent, gathered)) if stages > 1 else 0.0
        ways = [{name: of(cell[way]) for name, cell in parts.items()} for way in (False, True)]
        return step.closed(Durations(*ways, send, 0.0)) + of((adam,))

    arithmetic = seconds(False)
    return seconds(True) - arithmetic, arithmetic
