"""A training step of Megatron-LM as of 2021: tensor-parallel stages of a pipeline, replicas, messages cut over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...comm.topology import Topology
from ...dry.record import Op
from ...dry.step import Setting
from ...nn.config import ModelConfig
from ..cells import cells
from ..cluster import Cluster
from ..formulas import hardware_flops
from ..predict import Fast, Step, even_layers
from .profiles import edited

ORDER = ("y", "dp", "pp")
"""Ranks of a tensor-parallel group are neighbours, then replicas, then stages."""
OPTIMIZER_BYTES = 46
"""Bytes of memory that a step passes for each parameter: 16-bit gradient to float32 (2 + 4), unscaled (4 + 4), its norm (4), Adam
(16 read, 12 written)."""
HALF = "bfloat16"


def step(given: Mapping[str, Any]) -> Step:
    """The step of a row: hidden, heads, layers, tp, pp, dp, batch, micro_batch; chunks (1), recompute ("full"), and its sizes."""
    tp, pp, dp, chunks = given["tp"], given["pp"], given["dp"], given.get("chunks", 1)
    micro, hidden, sequence, vocabulary = given["micro_batch"], given["hidden"], given["sequence"], given["vocabulary"]
    model = ModelConfig(
        layers=1,
        hidden=hidden,
        heads=given["heads"],
        sequence=sequence,
        vocabulary=-(-vocabulary // tp) * tp,
        dropout=0.1,
        attention_dropout=0.1,
    )
    recompute = given.get("recompute", "full")
    setting = Setting(model, micro, given.get("scheme", "oned"), {"y": tp}, dtype=HALF, recompute=(recompute, 1), on_device=True)
    parts = {name: edited(cell, given["profile"]) for name, cell in cells(setting).items()}
    stages = tuple(even_layers(given["layers"], pp * chunks))
    held = (12 * max(stages) * chunks * hidden**2 + vocabulary * hidden) // tp
    after = (
        _move("all_reduce", "dp", 2 * held * (dp - 1) // dp, "optimizer"),
        Op("elements", "optimizer", "", "adam", read=OPTIMIZER_BYTES * held),
    )
    return Step(
        parts,
        Topology.checked({"y": tp, "dp": dp, "pp": pp}, ORDER),
        "interleaved" if chunks > 1 else "1f1b",
        stages,
        given["batch"] // (dp * micro),
        _messages(micro * sequence * hidden, tp, given.get("scatter", True)) if pp > 1 else (),
        after,
        given.get("overlap", False),
    )


def _messages(words: int, tp: int, scatter: bool) -> tuple[Op, ...]:
    """What a stage sends: with `scatter` each tensor rank sends its part, and the receivers gather the parts."""
    if not scatter:
        return (_move("send", "pp", words),)
    return _move("send", "pp", words // tp), _move("all_gather", "y", words * (tp - 1) // tp)


def _move(name: str, axis: str, words: int, phase: str = "forward") -> Op:
    return Op("move", phase, "", name, axis=axis, words=words, dtype=HALF)


def predictor(given: Mapping[str, Any], cluster: Cluster) -> Callable[[Cluster], float]:
    """The prediction of a row, in the unit of what it reports: tflops (a rank's), sequences (a second) or seconds."""
    timed = Fast(step(given), cluster).seconds
    ranks = given["tp"] * given["pp"] * given["dp"]
    if "tflops" in given:
        sizes = (given[key] for key in ("layers", "hidden", "vocabulary", "sequence", "batch"))
        work = hardware_flops(*sizes) / ranks / 1e12
        return lambda on: work / timed(on)
    if "sequences" in given:
        return lambda on: given["batch"] / timed(on)
    return timed
