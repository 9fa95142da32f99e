"""Measured rows from a file: what ran where, and how long a step took; each checked, and priced by its program."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import Any

from ...cluster import Cluster, load
from ...comm.topology import divisors
from ...dtypes import NARROW
from ...errors import ConfigError, Summa3dError
from ...files import text_of
from .bands import kind_of
from .devices import cluster_of, device_of, devices, ports_of
from .experts import nodes_of_experts
from .memory import bytes_of
from .programs import PROGRAMS, SWITCHES, PricedProgram, on_cluster, program_of
from .sizes import FULLY, ffn_of, parts_of, widths_of

KEYS = {
    **{"source": str, "program": str, "cluster": str, "gpu": str, "gpus_per_node": int, "network": str, "model": dict},
    **{"gpus": int, "grid": dict, "chunks": int, "micro_batch": int, "batch": int, "sequence": int, "dtype": str},
    **{"recompute": str, "switches": dict, "seconds": float, "tokens_s_gpu": float, "memory_gib": float, "note": str},
}
NEEDED = ("program", "model", "gpus", "batch", "sequence")
EXPERTS = ("experts", "top_k", "shared", "head_dim")
SIZES = ("layers", "hidden", "heads", "vocabulary")
MODEL = ("family", *SIZES, "kv_heads", "ffn", "sequence", "name", "tied", "tied_head", *EXPERTS)
GRID = ("tp", "sp", "pp", "cp", "ep", "etp", "fsdp", "dp")
MORE = ("zero", "zero_size", "slots", "scatter")
"""Switches that are not on or off."""
RECOMPUTE = ("none", "selective", "full")
BEGINS = {"float8": ("fp8", "float8"), "float4": ("fp4", "float4")}
"""A dtype in which products of blocks run → what is in the name that rows give it, as mxfp8."""
HALVES = ("bf16", "bfloat16", "fp16", "float16", "half", "mixed")
"""How dtypes begin whose products have 16 bits."""
SINGLE = ("fp32", "float32", "tf32")
"""How dtypes begin whose products run as TF32, at half the rate of those in 16 bits."""
FAMILIES = {
    **{"llama": "llama", "mistral": "llama", "qwen": "llama", "gemma": "llama", "bert": "bert"},
    **dict.fromkeys(("gpt", "mpt", "nemotron"), "gpt2"),
}
"""How a family's name begins → the family whose block has as many products."""


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    name : its place in the file and what it is. program : whose step is priced. device : what null models have in common.
    given : as `step.step` takes it. seconds : measured. memory : bytes measured on a rank, 0 where none were. remarks : what of
    the row is not priced, or priced as something else. source : where it is printed.
    """

    name: str
    program: str
    device: str
    cluster: Cluster
    given: Mapping[str, Any]
    seconds: float
    memory: float
    remarks: tuple[str, ...] = ()
    source: str = ""

    @property
    def flops(self) -> float:
        """Operations of a step that computes nothing again: six a parameter and token, and attention's of causal scores."""
        given = self.given
        dense, of_experts = parts_of(given)
        met = dense + of_experts * given["top_k"] // given["experts"] if of_experts else dense
        count = given["layers"] * met + given["vocabulary"] * given["hidden"]
        scores = 6 * given["layers"] * widths_of(given)["attention"] * given["sequence"]
        return float((6 * count + scores) * given["batch"] * given["sequence"])

    @property
    def kind(self) -> str:
        """Key of its band: the program, with experts or without."""
        return kind_of(self.program, self.given.get("experts"))

    def utilisation(self, seconds: float) -> float:
        """The part of the peak at which a step of so many seconds computes."""
        return self.flops / self.given["gpus"] / self.cluster.peak("bfloat16") / seconds


def read(path: Path) -> list[MeasuredStep]:
    """The rows of a JSON file: a list, or a table whose `rows` is one. Raises ConfigError, which names all faults of all rows."""
    try:
        table = json.loads(text_of(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}.") from None
    rows = table.get("rows") if isinstance(table, dict) else table
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f'{path} has no rows: it takes a list of tables, or {{"rows": […]}}.')
    result, faults = [], []
    for number, row in enumerate(rows, start=1):
        problems = list(_faults(row))
        if not problems:
            try:
                result.append(_row(number, row))
            except Summa3dError as error:
                problems = [str(error)]
        faults += [f"row {number}: {problem}" for problem in problems]
    if faults:
        raise ConfigError(f"{path}: {len(faults)} fault{'s' if len(faults) > 1 else ''}.\n  " + "\n  ".join(faults))
    return result


def _faults(row: Mapping[str, Any]) -> Iterator[str]:
    """All that is wrong with a row by itself."""
    yield from (f"it lacks {key}" for key in NEEDED if row.get(key) is None)
    if isinstance(row.get("model"), str):
        yield f"model = {row['model']!r} is a name, and a row takes a table of {', '.join(MODEL)}"
    for key, kind in KEYS.items():
        value = row.get(key)
        if value is not None and not _is(value, kind) and not (key == "model" and isinstance(value, str)):
            yield f"{key} = {value!r} is no {kind.__name__}"
    if row.get("cluster") is None and row.get("gpu") is None:
        yield "it lacks cluster, or gpu (with gpus_per_node and network)"
    times = {key: row[key] for key in ("seconds", "tokens_s_gpu") if row.get(key) is not None}
    if len(times) != 1:
        yield f"it has {'seconds and' if times else 'neither seconds nor'} tokens_s_gpu: it takes one of them"
    yield from (
        f"{key} = {time!r} is no number above 0" for key, time in times.items() if _is(time, float) and not 0 < time < inf
    )
    sizes = [("", key) for key in ("gpus", "batch", "sequence", "micro_batch", "chunks", "gpus_per_node")]
    sizes += [("model", key) for key in (*SIZES, "kv_heads", "ffn", *EXPERTS)]
    sizes += [("grid", key) for key in GRID if key != "sp"]
    for part, key in sizes:
        table = row.get(part) if part else row
        value = table.get(key) if isinstance(table, dict) else None
        name = f"{part}.{key}" if part else key
        if value is not None and not (_is(value, int) and value >= 1):
            yield f"{name} = {value!r} is no whole number of at least 1"
        if value is None and part == "model" and key in SIZES and isinstance(table, dict):
            yield f"it lacks {name}"
    on: Mapping[str, Any] = row["switches"] if isinstance(row.get("switches"), dict) else {}
    wrong = [key for key in (*SWITCHES, "scatter") if not isinstance(on.get(key, True), bool)]
    yield from (f"switches.{key} = {on[key]!r} is neither true nor false" for key in wrong)
    if _is(row.get("recompute"), str) and recompute_of(row["recompute"]) is None:
        yield f"recompute = {row['recompute']!r} is none of {', '.join(RECOMPUTE)}"


def recompute_of(text: str) -> str | None:
    """Kind of recomputation, by the first letters of what a row says; None where it says something else."""
    lower = text.lower()
    return next((kind for kind in RECOMPUTE if lower.startswith(kind[:3])), "none" if lower in ("", "no") else None)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _row(number: int, row: Mapping[str, Any]) -> MeasuredStep:
    """A row without faults of its own. Raises ConfigError and ClusterError where its parts do not fit each other."""
    name, program, remarks = _program_of(row)
    model, switches = row["model"], dict(row.get("switches") or {})
    cluster, device = _cluster_of(row, program, remarks)
    dtype = str(row.get("dtype") or "bfloat16").strip().lower()
    cluster, narrow = _in_dtype(on_cluster(program, cluster), device, dtype, remarks)
    on = {**program.switches, **{key: value for key, value in switches.items() if key in SWITCHES}}
    if on.get("fused_attention") and not _has_fused_attention(row):
        on["fused_attention"] = False
        remarks.append(f"fused attention is not priced: {device} has no kernel of it")
    family = next((own for begin, own in FAMILIES.items() if str(model.get("family", "gpt")).lower().startswith(begin)), "gpt2")
    grid = grid_of(row)
    given = {
        **{key: model[key] for key in (*SIZES, "kv_heads", "ffn") if model.get(key)},
        **{"family": family, "sequence": row["sequence"], "profile": name, "gpus": row["gpus"], "batch": row["batch"]},
        **grid,
        "scheme": "oned-sp" if (row.get("grid") or {}).get("sp") and grid["tp"] > 1 else "oned",
        **{"chunks": row.get("chunks") or 1, "recompute": recompute_of(row.get("recompute") or "none"), "switches": on},
        "narrow": narrow,
        "tied": bool(model.get("tied") or model.get("tied_head")),
        "dropout": 0.0,
        "attention_dropout": 0.0 if on.get("fused_attention", name == "summa3d") else 0.1,
    }
    given |= _experts_of(model, row.get("grid") or {}, given, remarks)
    cluster = cluster.filled(row["gpus"])
    given |= nodes_of_experts(given, cluster)
    zero = switches.get("zero", _zero_of(row.get("grid") or {}))
    if not (_is(zero, int) and 0 <= zero <= FULLY):
        raise ConfigError(f"switches.zero = {zero!r} is no stage of ZeRO: 0, 1, 2 or 3.")
    size = switches.get("zero_size", grid["dp"])
    if not (_is(size, int) and size >= 1 and grid["dp"] % size == 0):
        fitting = ", ".join(map(str, divisors(grid["dp"])))
        raise ConfigError(f"switches.zero_size = {size!r} is no whole number that divides dp {grid['dp']}: {fitting}.")
    slots = switches.get("slots", 0)
    if not (_is(slots, int) and slots in (0, 2)):
        raise ConfigError(f"switches.slots = {slots!r} is neither 2, a place in the pipeline each for embedding and head, nor 0.")
    given |= {"zero": zero, "zero_size": size, "slots": slots, "scatter": switches.get("scatter", True) is True}
    if zero == FULLY and given["shards"] == 1:
        given |= {"shards": given["dp"], "dp": 1}
    given = _that_fits(given, row, cluster, remarks)
    tokens = row["batch"] * row["sequence"]
    seconds = row.get("seconds") or tokens / row["tokens_s_gpu"] / row["gpus"]
    said = f"{number}: {program_name(row, model, given)}"
    remarks += [
        f"{part}{key} is not priced"
        for part, table, known in (
            ("", row, KEYS),
            ("model.", model, MODEL),
            ("grid.", row.get("grid") or {}, GRID),
            ("switches.", switches, (*SWITCHES, *MORE)),
        )
        for key in sorted(table.keys() - set(known))
    ]
    memory = float(row.get("memory_gib") or 0) * 2**30
    return MeasuredStep(said, name, device, cluster, given, float(seconds), memory, tuple(remarks), row.get("source") or "")


def _that_fits(given: Mapping[str, Any], row: Mapping[str, Any], cluster: Cluster, remarks: list[str]) -> dict[str, Any]:
    """Fill in what a row leaves open, and say so: as little is computed again as fits, then as many rows a micro-batch do.

    In a pipeline a micro-batch has one. Where nothing fits, all is computed again, of one row.
    """
    free = cluster["device.memory"]
    many = max(1, row["batch"] // (given["dp"] * given["shards"]))
    powers = [1] if given["pp"] > 1 else [n for n in divisors(many) if n & (n - 1) == 0]
    least, *more = [row["micro_batch"]] if row.get("micro_batch") else powers
    *less, most = (given["recompute"],) if row.get("recompute") is not None else RECOMPUTE
    result = {**given, "micro_batch": least}
    result["recompute"] = next((kind for kind in less if bytes_of({**result, "recompute": kind}) <= free), most)
    for size in more:
        larger = {**result, "micro_batch": size}
        if bytes_of(larger) > free:
            break
        result = larger
    remarks += [f"{key} is not given: {result[key]} is taken" for key in ("micro_batch", "recompute") if row.get(key) is None]
    return result


def _cluster_of(row: Mapping[str, Any], program: PricedProgram, remarks: list[str]) -> tuple[Cluster, str]:
    """The cluster that a row names, or that of its GPU and network, and what its rows are judged with."""
    if row.get("cluster") is not None:
        return load(row["cluster"]), row["cluster"]
    network = row.get("network")
    cluster = cluster_of(row["gpu"], row.get("gpus_per_node"), network, program.newer)
    if network and ports_of(network) == (0, 0.0):
        remarks.append(f"network {network!r} says no rate, as 8x400Gb/s does: that of {cluster.name} is taken")
    return cluster, device_of(row["gpu"])


def _experts_of(
    model: Mapping[str, Any], grid: Mapping[str, Any], given: Mapping[str, Any], remarks: list[str]
) -> dict[str, Any]:
    """Sizes that a row gives of experts, whose `ffn` is that of one, and of heads wider than hidden ÷ heads.

    Raises ConfigError where the experts, or the ranks of its grid, do not divide so.
    """
    experts, chosen, ep = model.get("experts"), model.get("top_k"), grid.get("ep") or 1
    if not experts:
        if chosen:
            remarks.append(f"experts are priced as a feed-forward of {chosen} times the width, without model.experts")
        if model.get("head_dim") not in (None, model["hidden"] // model["heads"]):
            remarks.append("model.head_dim is not priced without experts")
        return {"ffn": chosen * (model.get("ffn") or 4 * model["hidden"])} if chosen else {}
    etp = grid.get("etp") or given["tp"]
    if not chosen or chosen > experts:
        raise ConfigError(f"model.experts is {experts}, and model.top_k {chosen}, to how many a token goes: 1 to {experts}.")
    if experts % ep or given["tp"] % etp:
        raise ConfigError(
            f"grid.ep = {ep} does not divide model.experts = {experts}, or grid.etp = {etp} tp = {given['tp']}. "
            f"ep: {', '.join(map(str, divisors(experts)))}; etp: {', '.join(map(str, divisors(given['tp'])))}."
        )
    ranks = given["gpus"] // given["pp"]
    if ranks % (ep * etp):
        raise ConfigError(f"grid.ep·etp = {ep * etp} ranks do not divide the {ranks} of a stage.")
    result = {"experts": experts, "top_k": chosen, "ep": ep, "etp": etp, "family": "llama", "ffn": ffn_of({**given, **model})}
    return result | {key: model[key] for key in ("head_dim", "shared") if model.get(key)}


def _zero_of(grid: Mapping[str, Any]) -> int:
    """The stage of ZeRO that a row's grid says: weights are cut over shards, where `fsdp` is 1 over contexts without replicas."""
    contexts = grid.get("fsdp") and (grid.get("cp") or 1) > 1 and not grid.get("dp")
    return FULLY if (grid.get("fsdp") or 1) > 1 or contexts else 1


def _program_of(row: Mapping[str, Any]) -> tuple[str, PricedProgram, list[str]]:
    """The name of a row's program, the program, and what there is to say of it: one that is not known is priced as its like."""
    try:
        name, _ = program_of(row["program"])
    except ConfigError:
        grid = row.get("grid") or {}
        alone = (grid.get("tp") or 1) * (grid.get("pp") or 1) == 1
        sharded, fused = (grid.get("fsdp") or 1) > 1, _has_fused_attention(row)
        name = "fsdp2" if sharded or (alone and fused) else "megatron-core" if fused else "megatron-2021"
    if name == "megatron-core" and _is_of_2022(row):
        name = "megatron-2022"
    return name, PROGRAMS[name], [f"program {row['program']} is priced as {name}"] * (row["program"].lower() != name)


def _is_of_2022(row: Mapping[str, Any]) -> bool:
    """Return whether a row's Megatron-LM, of which nothing says that its attention is fused, ran on a GPU of before 2022."""
    plain = re.fullmatch(r"megatron([\s_.-]*lm)?", row["program"].strip().lower())
    fused = (row.get("switches") or {}).get("fused_attention")
    return bool(plain) and not fused and "newer" in _of_gpu(row)


def _of_gpu(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is known of a row's GPU; nothing where the row names a cluster."""
    return devices()[device_of(row["gpu"])] if row.get("cluster") is None else {}


def _has_fused_attention(row: Mapping[str, Any]) -> bool:
    """Return whether a row's GPU has a kernel of fused attention: all but those of which it is known that they have none."""
    return bool(_of_gpu(row).get("attention.forward", True))


def _in_dtype(cluster: Cluster, device: str, dtype: str, remarks: list[str]) -> tuple[Cluster, str]:
    """The cluster with its rate of products in a dtype, and theirs if it has less than 16 bits; `remarks` get what is assumed."""
    if dtype.startswith(SINGLE):
        remarks.append(f"products in {dtype} are assumed at half the rate of those in 16 bits")
        return cluster.replaced({"product.efficiency": cluster["product.efficiency"] / 2}, "assumed"), ""
    narrow = next((name for name, parts in BEGINS.items() if any(part in dtype for part in parts)), "")
    if not narrow and not dtype.startswith(HALVES):
        remarks.append(f"dtype {dtype!r} is priced as bfloat16")
    wider = [name for name in NARROW if narrow and NARROW[name] >= NARROW[narrow] and f"peak.{name}" in cluster.numbers]
    priced = min(wider, key=NARROW.__getitem__, default="")
    if priced != narrow:
        bits = NARROW.get(priced, 16)
        remarks.append(f"products in {dtype} are priced in {bits} bits: {device} has no peak.{narrow}")
    return cluster, priced


def program_name(row: Mapping[str, Any], model: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """A row in a few words."""
    size = model.get("name") or f"{given['layers']} × {given['hidden']}"
    axes = " ".join(f"{key} {given[key]}" for key in ("tp", "pp", "cp", "shards", "dp", "ep") if given.get(key, 1) > 1)
    where = f"{given['gpus']} {row.get('gpu') or row.get('cluster')}"
    return f"{row['program']}, {size}, {where}, {axes or 'tp 1'}, b {given['micro_batch']}"


def grid_of(row: Mapping[str, Any]) -> dict[str, int]:
    """tp, pp, cp, shards and dp of a row, whose product are its GPUs; contexts and experts may lie within shards or replicas.

    Raises ConfigError where no reading of its grid has as many ranks.
    """
    grid, gpus = row.get("grid") or {}, row["gpus"]
    tp, pp, cp, shards = (grid.get(key) or 1 for key in ("tp", "pp", "cp", "fsdp"))
    inner = tp * pp
    dp = grid.get("dp") or max(1, gpus // (inner * cp * shards))
    for result in (
        {"cp": cp, "shards": shards, "dp": dp},
        {"cp": cp, "shards": shards, "dp": max(1, dp // shards)},
        {"cp": cp, "shards": max(1, shards // cp), "dp": dp},
        {"cp": cp, "shards": max(1, shards // cp), "dp": 1},
        {"cp": cp, "shards": 1, "dp": max(1, dp // cp)},
        *([] if grid.get("dp") else [{"cp": cp, "shards": shards, "dp": max(1, gpus // (inner * cp * shards))}]),
    ):
        if inner * prod(result.values()) == gpus:
            return {"tp": tp, "pp": pp, **result}
    raise ConfigError(
        f"grid {dict(grid)} has tp·pp·cp·fsdp·dp = {inner * cp * shards * dp} ranks, and the row {gpus} GPUs; "
        f"with tp {tp}, pp {pp}, cp {cp}, fsdp {shards}, dp {gpus / (inner * cp * shards):g} would fit."
    )
