"""Programs as data: what each does otherwise than the library, its switches, and how it computes again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import NamedTuple

from ...cluster import Cluster
from ...errors import ConfigError, nearest
from ..cells import Cell
from .edits import (
    Edit,
    accumulated,
    all_but_qkv_again,
    as_nccl,
    core_again,
    distributed_checkpoints,
    eager,
    fused_softmax,
    half_again,
    inputs_kept,
    strided_attention,
    sums_of_halves,
    uneven_heads,
    unfused,
    whole_square,
    workspace_copies,
)

SWITCHES = {
    "fused_attention": "attention is one kernel that keeps no scores",
    "causal": "that kernel leaves out the blocks of scores above the diagonal",
    "fused_accumulation": "products of weights' gradients add to the sum of the micro-batches themselves",
    "overlap_tp": "gathers and sums of tensor parallelism run behind the product beside them, piece by piece",
    "overlap_inputs": "sums of inputs' gradients over tensor ranks run behind products of weights' gradients",
    "overlap_p2p": "messages of the pipeline run behind other micro-batches",
    "overlap_gradients": "sums of gradients over replicas run behind the last backward",
    "overlap_parameters": "gathers of updated parameters run behind the next forward",
    "prefetch": "gathers of a layer's weights run behind the layer before",
    "tokens_once": "a token travels once to each node that has some of its experts",
    "compile": "element-wise operations beside each other are one kernel",
}
"""Name of a switch → what holds where it is on."""
FSDP = {"fused_attention": True, "causal": True, "prefetch": True, "compile": True, "overlap_gradients": True}
APART = {"fused_accumulation": False}
KERNELS_OF_2021 = (fused_softmax, strided_attention, sums_of_halves)
CHUNK = 524288.0
"""Bytes that NCCL 2 forwards at once along a chain."""
STALLS = 0.7
"""Of the time of gathers and broadcasts that a program starts late: fitted to MosaicML's rows, priced otherwise now, and
borne out by PTD-P's of ZeRO-3 and InternEvo's."""
MODERN = {name: True for name in SWITCHES if name not in ("overlap_tp", "overlap_inputs", "prefetch", "tokens_once", "compile")}
INTERNEVO = {"fused_attention": True, "causal": True, "fused_accumulation": False, "overlap_gradients": True, "compile": False}


class PricedProgram(NamedTuple):
    """A program.

    about : which it is. edits : of a cell of the library. switches : those that are on. selective : the edit of a block that
    computes again what "selective" says there. kernel : of its attention, flash1 or flash2; empty, the best of the device.
    sums : dtype in which gradients are added up, of micro-batches, shards and replicas; those of shards' replicas have 16
    bits. contention, stalls : how long gathers of weights, and sums over replicas, slow down the arithmetic that they run
    behind, as a part of the time in which NCCL copies what they bring inside a node, and as one of their whole time. newer :
    whether its libraries are those of 2022 and later. kept : bytes of a parameter beside its master and moments: 16-bit
    weights, unless they are gathered from masters, and the gradients' sum. masters : bytes of those, which ZeRO cuts. logits
    : bytes of a logit beside its 16 bits, of a loss and gradients in 32. results : what of a block "selective" keeps beside
    its input, where all else is computed again. ports : of a node that it uses, all where 0. host : seconds that a host takes
    to start the work of a block's two passes, below which no device does it. balanced : whether stages have as many
    parameters, of the head too, and not as many blocks, one stage a rank. launch : the least seconds in which an element-wise
    kernel starts, where the host waits for every one. zero : whether replicas cut masters and moments unless a plan says
    otherwise, as those of newer programs do. broadcasts : the tensors of a block, whole ones of which an owner updates and
    broadcasts by itself, one after the other; 0, where all gather from all. sequences : whether it has sequence parallelism,
    and computes as much again as a plan says; newer ones do.
    """

    about: str
    edits: tuple[Edit, ...] = ()
    switches: Mapping[str, bool] = {}
    selective: Edit | None = None
    kernel: str = ""
    sums: str = "bfloat16"
    contention: float = 0.0
    stalls: float = 0.0
    newer: bool = False
    kept: int = 6
    masters: int = 12
    logits: int = 0
    results: tuple[str, ...] = ()
    ports: int = 0
    host: float = 0.0
    balanced: bool = False
    broadcasts: int = 0
    launch: float = 0.0
    zero: bool = False
    sequences: bool = False


PROGRAMS = {
    "summa3d": PricedProgram("this library"),
    "megatron-2020": PricedProgram("Megatron-LM as of 2020", (distributed_checkpoints,)),
    "optimus-2021": PricedProgram("Optimus", (workspace_copies,)),
    "megatron-2021": PricedProgram("Megatron-LM as of 2021 (PTD-P)", KERNELS_OF_2021, APART),
    "megatron-2021-unfused": PricedProgram(
        "the same before its fused kernels", (strided_attention, sums_of_halves, unfused), APART
    ),
    "megatron-2022": PricedProgram(
        "Megatron-LM as of 2022 (Korthikanti et al.)",
        KERNELS_OF_2021,
        {"fused_accumulation": True, "overlap_inputs": True},
        sums="float32",
        sequences=True,
    ),
    "megatron-deepspeed-2021": PricedProgram(
        "DeepSpeed's pipelines of Megatron-LM's layers in bfloat16 (MT-NLG)", KERNELS_OF_2021, APART, sums="float32", kept=10
    ),
    "megatron-deepspeed": PricedProgram(
        "Megatron-DeepSpeed, GPT-NeoX, PaddleNLP and Megatron-LLaMA, 2022 and later",
        (as_nccl, fused_softmax, strided_attention),
        {"fused_attention": True, "causal": True, "compile": False, **APART},
        core_again,
        "flash2",
        newer=True,
    ),
    "fsdp-2023": PricedProgram("MPT by torch's FSDP", (strided_attention,)),
    "megatron-core": PricedProgram("Megatron-Core and NeMo", (as_nccl,), MODERN, core_again, newer=True, kept=4),
    "internevo": PricedProgram(
        "InternEvo",
        (as_nccl,),
        INTERNEVO,
        core_again,
        "flash2",
        stalls=STALLS,
        newer=True,
        kept=4,
        masters=22,
        broadcasts=9,
    ),
    "nanotron": PricedProgram(
        "Nanotron",
        (as_nccl, inputs_kept),
        {"fused_attention": True, "causal": True, "fused_accumulation": False, "compile": False},
        core_again,
        "flash2",
        "float32",
        newer=True,
        logits=6,
        host=4.5e-3,
        balanced=True,
    ),
    "fsdp": PricedProgram(
        "torch's FSDP as of 2023, MosaicML", (as_nccl,), FSDP, core_again, "flash1", contention=1.0, newer=True, kept=4
    ),
    "fsdp2": PricedProgram(
        "torch's FSDP2, torchtitan",
        (as_nccl,),
        FSDP,
        half_again,
        "flash2",
        "float32",
        contention=1.0,
        newer=True,
        kept=4,
        logits=10,
        results=("q", "v", "attention", "gate", "down"),
    ),
    "maxtext": PricedProgram(
        "MaxText, XLA's FSDP", (as_nccl,), FSDP, all_but_qkv_again, newer=True, kept=4, results=("q", "k", "v")
    ),
    "deepspeed-zero": PricedProgram(
        "DeepSpeed's ZeRO", (as_nccl,), {**FSDP, "compile": False}, core_again, "flash2", stalls=STALLS, newer=True, kept=4
    ),
    "deepspeed-zero-2021": PricedProgram(
        "DeepSpeed's ZeRO-3 as of 2021 (PTD-P)",
        KERNELS_OF_2021,
        {"prefetch": True},
        stalls=STALLS,
        kept=4,
        ports=1,
    ),
}
"""Name → program."""
PROGRAMS["bigscience-bf16"] = PROGRAMS["megatron-deepspeed-2021"]._replace(
    about="BLOOM's Megatron-DeepSpeed of 2022, with CUDA_LAUNCH_BLOCKING=1, in bfloat16", launch=2e-4, zero=True
)
PROGRAMS["bigscience"] = PROGRAMS["bigscience-bf16"]._replace(
    about="the same in float16, with sums of gradients in it", sums="bfloat16", kept=6
)
PROGRAMS["fsdp-eager"] = PROGRAMS["fsdp"]._replace(
    about="the same without compiled kernels: IBM, Hugging Face", switches={**FSDP, "compile": False}, kernel="flash2"
)
ALIASES = {
    "megatron-core": ("megatron", "megatron-lm", "megatronlm", "nemo", "megascale", "colossal", "colossalai"),
    "fsdp2": ("torchtitan", "lightning", "litgpt", "lit-gpt", "axolotl", "torchtune", "automodel", "nemo-automodel"),
    "fsdp": ("mosaicml", "llm-foundry", "composer", "mpt"),
    "fsdp-eager": ("ibm", "fms-fsdp", "huggingface", "hf", "accelerate"),
    "deepspeed-zero": ("deepspeed", "zero"),
    "nanotron": ("nanotron",),
    "internevo": ("internlm",),
    "bigscience": ("bloom",),
    "megatron-deepspeed": ("gpt-neox", "neox", "paddlenlp", "megatron-llama"),
}
"""Name of a program → how others begin whose steps are priced as its."""


def program_of(name: str, whole: bool = False) -> tuple[str, PricedProgram]:
    """The program of a name, or of the longest that begins it and ends at a word, and its own name.

    whole : it is that of the whole name alone. Raises ConfigError for others.
    """
    key = re.sub(r"[\s_.]+", "-", name.strip().lower())
    known = {own: own for own in PROGRAMS} | {item: own for own, items in ALIASES.items() for item in items}
    begins = {item: own for item, own in known.items() if key == item or (key.startswith(f"{item}-") and not whole)}
    if begins:
        own = begins[max(begins, key=len)]
        return own, PROGRAMS[own]
    raise ConfigError(f"unknown program {name!r}; the nearest is {nearest(key, list(PROGRAMS))}. Known: {', '.join(PROGRAMS)}.")


def on_cluster(program: PricedProgram, cluster: Cluster) -> Cluster:
    """The cluster with a program's ports, launches, chunks of its broadcasts, and the rate of its kernel of fused attention."""
    if program.broadcasts:
        cluster = cluster.replaced({"collectives.chunk": CHUNK}, "assumed")
    if program.launch:
        cluster = cluster.replaced({"elements.launch": max(program.launch, cluster["elements.launch"])}, "assumed")
    if program.ports:
        cluster = cluster.replaced({"network.ports": float(program.ports)}, "assumed")
    if not program.kernel or not cluster["attention.forward"]:
        return cluster
    part = cluster[f"attention.{program.kernel}"]
    return cluster.replaced({key: part * cluster[key] for key in ("attention.forward", "attention.backward")}, "assumed")


def edited(cell: Cell, edits: Iterable[Callable[[Cell], Cell]]) -> Cell:
    """A cell after all edits."""
    return reduce(lambda result, edit: edit(result), edits, cell)


def edits_of(program: PricedProgram, on: Mapping[str, bool], recompute: str) -> tuple[Edit, ...]:
    """The edits of a program whose switches are these, and which computes so much again."""
    edits = [*program.edits]
    if not on.get("fused_attention"):
        edits.append(uneven_heads)
    elif not on.get("causal"):
        edits.append(whole_square)
    if "fused_accumulation" in on:
        edits.append(accumulated(program.sums, apart=not on["fused_accumulation"]))
    if on.get("compile") is False:
        edits.append(eager)
    if recompute == "selective" and program.selective and on.get("fused_attention"):
        edits.append(program.selective)
    return tuple(edits)
