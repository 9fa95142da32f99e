"""What a run would compute, move and hold on any grid, before any rank is started: its own code, run dry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..comm.device.select import requested_device
from ..dry.rank_classes import steps
from ..dry.step import Setting, Training
from ..node_support import why_no_node_memory
from ..parallel.pipeline import Pipeline
from ..parallel.states import State
from .config import Config, at_least, master_dtype
from .loop import total
from .optimizer import AdamW, global_gradient_norm
from .precision import torch_dtype, working_weights

TERMS = ("parameters", "gradients", "optimizer", "activations", "workspace", "in_flight", "peak", "node")
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
    `messages` received by phase and axis, `bytes` by term (`DryStep.bytes`), `peak`, `operations` (count, flops and bytes read
    and written, by kind), `node_axes` (its axes inside a node; none where this machine's ranks cannot use a node's memory); and
    `mean_bytes` over all ranks.

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
        config.replicas.zero,
        config.replicas.bucket,
        config.replicas.overlap,
    )


def training_of(config: Config) -> Training:
    """What the training loop adds to the ops of a program: 16-bit copies of weights before them, the optimizer behind them."""

    def optimizer(pipeline: Pipeline, states: Sequence[State]) -> tuple[Callable[[], None], int]:
        adamw, replicas = AdamW(states, config.train), pipeline.replicas
        assert replicas is not None

        def update() -> None:
            replicas.finish()
            replicas.total(total([], pipeline.axis))
            global_gradient_norm(adamw.gradients(), replicas.grid)
            replicas.update(lambda: adamw.step(config.train.learning_rate, CLIPPED if config.train.clip else 1.0))

        return update, sum(moment.nbytes for kind in adamw.moments.values() for moment in kind.values())

    return Training(lambda model: working_weights(model, of_model(model), dtype), optimizer)


def _placed(config: Config, ranks_per_node: int, on_device: bool) -> dict[str, Any]:
    """What the ranks do and hold where so many consecutive ones share a node, on the host or on devices."""
    first = setting_of(config, 0, ranks_per_node, on_device)
    first.on(first.place()).check(config.model, config.rows)
    found = {rank: (step, many) for rank, many, step in steps(first, training_of(config))}
    held = {rank: step.bytes() for rank, (step, _) in found.items()}
    fullest = max(held, key=lambda rank: held[rank]["peak"])
    step, ranks = found[fullest][0], sum(many for _, many in found.values())
    operations = step.operations()
    return {
        "parameters": step.elements,
        "flops": operations["product"]["flops"],
        "words": step.words(),
        "messages": step.messages(),
        "ranks_per_node": ranks_per_node,
        "node_axes": list(step.node_axes),
        "fullest_rank": fullest,
        "bytes": held[fullest],
        "peak": step.peak,
        "mean_bytes": {term: sum(held[rank][term] * many for rank, (_, many) in found.items()) / ranks for term in TERMS},
        "operations": operations,
    }
