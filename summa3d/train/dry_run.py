"""What a run would compute, move and hold on any grid, before any rank is started: its own code, run dry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..comm.device.select import requested_device
from ..dry.rank_classes import steps
from ..dry.step import DryStep, Ending, Setting, Training
from ..nn.gradients import norm_and_votes
from ..node_support import why_no_node_memory
from ..parallel.pipeline import Pipeline
from ..parallel.states import ParameterState
from .checkpoint.folder import own_blocks
from .config import Config, at_least, master_dtype
from .loop import total
from .optimizer import AdamW
from .precision import torch_dtype, working_weights

TERMS = ("parameters", "gradients", "optimizer", "activations", "workspace", "in_flight", "peak", "node")
STAGE_TERMS = ("parameters", "activations", "peak")
CLIPPED = 0.5
"""What a dry step multiplies gradients by where the configuration clips them: any number but 1."""


def predict(config: Config, ranks_per_node: int | None = None) -> dict[str, Any]:
    """What a step of the configuration would take on its grid, on any number of ranks.

    ranks_per_node : how many consecutive ranks share a node. Axes inside a node communicate through its memory, where blocks are
        read and summands added as they lie; the others through MPI, which takes more workspace. Without it, of a grid with every
        rank on a node of its own, and under "one_node" of one with all ranks on one. On a device NCCL carries all axes alike.

    Returns
    -------
    dict with `parameters` (of the whole model); of the fullest rank, `fullest_rank`: `flops` (of its products), `words` and
    `messages` received by phase and axis, the same in bytes (`received`), `bytes` by term (`DryStep.bytes`), `peak`, `operations`
    (count, flops and bytes read and written, by kind), `checkpoint` (bytes of its file), `node_axes` (its axes inside a node;
    none where this machine's ranks cannot use a node's memory); `mean_bytes` over all ranks; and of a pipeline `stages`: for each
    of its ranks (pp) the fullest rank, the layers of its chunks, bytes of parameters, activations in flight and peak, and words
    and messages received on axis pp.

    Raises, as the run itself would, GridError and LayoutError for a grid or sizes that do not fit, and ConfigError for less than
    one rank a node.
    """
    ranks = prod(config.grid.axes.values())
    if ranks_per_node is not None:
        at_least("ranks per node", ranks_per_node, 1)
    found = {"scheme": config.scheme, "grid": config.grid.axes, "ranks": ranks, "dtype": config.dtype}
    on_device = requested_device(config.device) == "cuda"
    found |= {"recompute": config.recompute, "device": "cuda" if on_device else "cpu"}
    found |= _placed(config, ranks_per_node or 1, on_device)
    if ranks_per_node is not None or ranks == 1 or on_device:
        return found
    return found | {"one_node": _placed(config, ranks, False)}


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
        config.overlap,
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
    )


def training_of(config: Config) -> Training:
    """What the training loop adds to the ops of a program: 16-bit copies of weights before them, the optimizer behind them."""

    def optimizer(pipeline: Pipeline, states: Sequence[ParameterState]) -> Ending:
        adamw, replicas = AdamW(states, config.train), pipeline.replicas
        assert replicas is not None

        def update() -> None:
            replicas.finish()
            replicas.settle(total([], pipeline.axis))
            norm_and_votes(adamw.counted_gradients(), replicas.grid)
            replicas.update(lambda: adamw.step(config.train.learning_rate, CLIPPED if config.train.clip else 1.0))

        written = sum(block.tensor.nbytes for block in own_blocks(adamw) if block.sharding.is_primary(replicas.grid))
        moments = (moment.nbytes for kind in adamw.moments.values() for moment in kind.values())
        on_host = requested_device(config.device) == "cpu"
        return Ending(update, sum(moments), written, written if config.train.copies_checkpoints and on_host else 0)

    return Training(lambda model, states: working_weights(model, states, torch_dtype(config.dtype)), optimizer)


def _placed(config: Config, ranks_per_node: int, on_device: bool) -> dict[str, Any]:
    """What the ranks do and hold where so many consecutive ones share a node, on the host or on devices."""
    first = setting_of(config, 0, ranks_per_node, on_device)
    first.layouts.check(config.model, config.rows)
    found = {rank: (step, many) for rank, many, step in steps(first, training_of(config))}
    held = {rank: step.bytes() for rank, (step, _) in found.items()}
    fullest = max(held, key=lambda rank: held[rank]["peak"])
    step, ranks = found[fullest][0], sum(many for _, many in found.values())
    operations = step.operations()
    stages = {"stages": _by_stage(first, held, {rank: step for rank, (step, _) in found.items()})} if config.grid.pp > 1 else {}
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
        "mean_bytes": {term: sum(held[rank][term] * many for rank, (_, many) in found.items()) / ranks for term in TERMS},
        "operations": operations,
        "checkpoint": step.checkpoint,
        **stages,
    }


def _by_stage(setting: Setting, held: Mapping[int, dict[str, int]], steps: Mapping[int, DryStep]) -> list[dict[str, Any]]:
    """What the fullest of each pipeline rank's ranks hold, and what they receive on axis pp."""
    place, stages = setting.place(), setting.stages
    assert stages is not None
    ranks: dict[int, list[int]] = {}
    for rank in held:
        ranks.setdefault(place.coordinates_of(rank)["pp"], []).append(rank)
    rows = []
    for index, those in sorted(ranks.items()):
        rank = max(those, key=lambda rank: held[rank]["peak"])
        layers = [many for many, home in zip(stages.layers, stages.homes, strict=True) if home == index]
        found = {"pp": index, "rank": rank, "layers": layers, **{term: held[rank][term] for term in STAGE_TERMS}}
        for what, moved in (("words", steps[rank].words()), ("messages", steps[rank].messages())):
            found[what] = sum(many for axes in moved.values() for axis, many in axes.items() if axis.startswith("pp"))
        rows.append(found)
    return rows
