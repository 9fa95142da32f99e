"""A training step of Megatron-LM as of 2021: tensor-parallel stages of a pipeline, replicas, messages cut over tensor ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...cluster import Cluster
from ...comm.topology import Topology
from ...dry.record import Op
from ...dry.step import Setting
from ...layout import split_sizes
from ...nn.config import ModelConfig
from ..cells import cells
from ..formulas import hardware_flops, model_flops
from ..predict import Fast, PredictedStep
from ..price import move
from .fit import Predict
from .profiles import edited

ORDER = ("y", "dp", "pp")
"""Ranks of a tensor-parallel group are neighbours, then replicas, then stages."""
OPTIMIZER_BYTES = 46
"""Bytes of memory that a step passes for each parameter: 16-bit gradient to float32 (2 + 4), unscaled (4 + 4), its norm (4), Adam
(16 read, 12 written)."""
HALF = "bfloat16"


def step(given: Mapping[str, Any]) -> PredictedStep:
    """The step of a row: hidden, heads, layers, tp, pp, dp, batch, micro_batch; chunks (1), recompute ("full"), and its sizes.

    slots : layers' places in the pipeline that the embedding and the head take, one each. zero : 1, where each replica updates
    a part of the parameters.
    """
    tp, pp, dp, chunks = given["tp"], given["pp"], given["dp"], given.get("chunks", 1)
    micro, hidden = given["micro_batch"], given["hidden"]
    stages = stage_layers(given["layers"], pp * chunks, given.get("slots", 0))
    held = (block_parameters(given) * max(stages) * chunks + given["vocabulary"] * hidden) // tp
    return PredictedStep(
        {name: edited(cell, given["profile"]) for name, cell in cells(setting(given)).items()},
        Topology.checked({"y": tp, "dp": dp, "pp": pp}, ORDER),
        "interleaved" if chunks > 1 else "1f1b",
        stages,
        given["batch"] // (dp * micro),
        _messages(micro * given["sequence"] * hidden, tp, given.get("scatter", True)) if pp > 1 else (),
        _after(held, dp, given.get("zero", 0)),
        given.get("overlap", False),
    )


def setting(given: Mapping[str, Any]) -> Setting:
    """The cells of a row: one micro-batch on a stage's tensor-parallel ranks."""
    tp, dropout = given["tp"], given.get("dropout", 0.1)
    model = ModelConfig(
        layers=1,
        hidden=given["hidden"],
        heads=given["heads"],
        sequence=given["sequence"],
        vocabulary=-(-given["vocabulary"] // tp) * tp,
        dropout=dropout,
        attention_dropout=dropout,
        **{key: given[key] for key in ("family", "kv_heads", "ffn") if key in given},
    )
    recompute = (given.get("recompute", "full"), 1)
    scheme = given.get("scheme", "oned")
    return Setting(model, given["micro_batch"], scheme, {"y": tp}, dtype=HALF, recompute=recompute, on_device=True)


def block_parameters(given: Mapping[str, Any]) -> int:
    """Parameters of a block: GPT's, or Llama's with its heads of k and v and its gated feed-forward."""
    hidden = int(given["hidden"])
    if given.get("family") != "llama":
        return 12 * hidden**2
    return 2 * hidden**2 + 2 * hidden**2 * given["kv_heads"] // given["heads"] + 3 * hidden * given["ffn"]


def stage_layers(layers: int, stages: int, slots: int) -> tuple[int, ...]:
    """The layers of each stage; with two `slots`, the first and the last have one less."""
    found = split_sizes(layers + slots, stages)
    if slots:
        found[0], found[-1] = found[0] - 1, found[-1] - 1
    return tuple(found)


def in_flight(ranks: int, chunks: int, micro_batches: int) -> float:
    """Micro-batches whose inputs the first rank of a pipeline keeps, a fraction where it has chunks."""
    return min(micro_batches, ranks * (1 + (ranks - 1) / (ranks * chunks))) if chunks > 1 else min(micro_batches, ranks)


def _after(held: int, dp: int, zero: int) -> tuple[Op, ...]:
    """Sums of gradients over replicas and the optimizer, of a rank that holds so many parameters."""
    sums = move("all_reduce", "dp", 2 * held * (dp - 1) // dp, HALF, "optimizer")
    if not zero:
        return sums, optimizer(held)
    return sums, optimizer(-(-held // dp)), move("all_gather", "dp", held * (dp - 1) // dp, HALF, "optimizer")


def optimizer(held: int) -> Op:
    """The update of so many parameters."""
    return Op("elements", "optimizer", "", "adam", read=OPTIMIZER_BYTES * held)


def _messages(words: int, tp: int, scatter: bool) -> tuple[Op, ...]:
    """What a stage sends: with `scatter` each tensor rank sends its part, and the receivers gather the parts."""
    if not scatter:
        return (move("send", "pp", words, HALF),)
    return move("send", "pp", words // tp, HALF), move("all_gather", "y", words * (tp - 1) // tp, HALF)


def predictor(given: Mapping[str, Any], cluster: Cluster) -> Predict:
    """The prediction of a row, in the unit of what it reports."""
    timed = Fast(step(given), cluster).seconds
    return in_unit(given, lambda numbers: timed(numbers.cluster))


def in_unit(given: Mapping[str, Any], seconds: Predict) -> Predict:
    """Seconds of a step in the unit of what a row reports: tflops (a rank's), mfu (percent), sequences (a second) or seconds."""
    sizes = [given[key] for key in ("layers", "hidden", "vocabulary", "sequence", "batch")]
    if "tflops" in given:
        work = hardware_flops(*sizes) / given["gpus"] / 1e12
        return lambda numbers: work / seconds(numbers)
    if "model_tflops" in given:  # six operations a parameter and token, and attention's, which is not recomputed
        layers, hidden, vocabulary, sequence, batch = sizes
        count = layers * block_parameters(given) + 2 * vocabulary * hidden
        rate = (6 * count + 12 * layers * hidden * sequence) * batch * sequence / given["gpus"] / 1e12
        return lambda numbers: rate / seconds(numbers)
    if "mfu" in given:
        share = 100 * model_flops(*sizes) / given["gpus"]
        return lambda numbers: share / numbers.cluster.peak(HALF) / seconds(numbers)
    if "sequences" in given:
        return lambda numbers: given["batch"] / seconds(numbers)
    return seconds
