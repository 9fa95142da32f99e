"""The plans that labs took, ranked among all that their program of 2021 could run, and what a rule takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from summa3d.cluster import Cluster, load
from summa3d.plan.formulas import hardware_flops
from summa3d.plan.programs.sizes import in_flight
from summa3d.plan.programs.step import step

from .paper import table_of

TENSOR = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6)
BYTES = 18
"""Bytes of a parameter: 16-bit weights and gradients, float32 copies, and two moments."""
RESERVE = 2.5e9
"""Bytes of the context and the libraries: assumed."""
LAST = ("174.6B, 1536 GPUs", "529.6B, 2240 GPUs")
"""The rows of table 2 on the most GPUs."""
PLAN = ("tp", "pp", "dp", "micro_batch", "chunks")
RULE = (
    "the smallest t·p that fits in memory, of them the largest t up to a node; then the micro-batch and chunks that are fastest"
)


def choices() -> list[dict[str, Any]]:
    """Each row of PTD-P's table 1, and the largest of each model of table 2: its plan's rank among all plans that fit."""
    rows = table_of("ptdp")["row"]
    taken = [row for row in rows if row["series"] == "table 1"] + [row for row in rows if row["name"].endswith(LAST)]
    cluster = load("selene")
    return [_ranked({**table_of("ptdp")["step"], **row}, cluster) for row in taken]


def _ranked(row: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """The lab's plan of a row among all: rank and loss of its t and p, with their best micro-batch and chunks."""
    found = sorted(_plans(row, cluster), key=lambda one: -one["tflops"])
    best = found[0]
    taken = next((place for place, one in enumerate(found) if (one["tp"], one["pp"]) == (row["tp"], row["pp"])), None)
    least = min(one["tp"] * one["pp"] for one in found)
    ruled = max((one for one in found if one["tp"] * one["pp"] == least), key=lambda one: (one["tp"], one["tflops"]))
    return {
        "name": row["name"],
        "plans": len(found),
        "taken": {"tp": row["tp"], "pp": row["pp"]},
        "rank": None if taken is None else taken + 1,
        "behind": None if taken is None else best["tflops"] / found[taken]["tflops"] - 1,
        "best": best,
        "rule": ruled,
        "rule_behind": best["tflops"] / ruled["tflops"] - 1,
    }


def _plans(row: Mapping[str, Any], cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Every plan that fits, with its teraflop/s of a GPU, by the closed form of its schedule."""
    sizes = [row[key] for key in ("layers", "hidden", "vocabulary", "sequence", "batch")]
    work = hardware_flops(*sizes) / row["gpus"] / 1e12
    for tp in TENSOR:
        for pp in (p for p in range(1, row["layers"] + 1) if row["layers"] % p == 0 and row["gpus"] % (tp * p) == 0):
            dp = row["gpus"] // (tp * pp)
            for micro in (b for b in MICRO_BATCHES if row["batch"] % (dp * b) == 0):
                many = row["batch"] // (dp * micro)
                for chunks in (v for v in CHUNKS if v == 1 or (pp > 1 and many % pp == 0 and row["layers"] % (pp * v) == 0)):
                    plan = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro, "chunks": chunks}
                    if held({**row, **plan}, many) <= 0.95 * cluster["device.memory"]:
                        whole = step({**row, **plan})
                        parts = whole.durations(cluster)
                        yield {**plan, "tflops": work / (whole.closed(parts) + parts.after)}


def held(given: Mapping[str, Any], micro_batches: int) -> float:
    """Bytes of a rank of the first stage: states, inputs of the layers in flight, one layer computed again, logits."""
    tp, pp, hidden, layers = given["tp"], given["pp"], given["hidden"], given["layers"]
    rows = given["micro_batch"] * given["sequence"]
    states = BYTES * (12 * layers * hidden**2 / (tp * pp) + given["vocabulary"] * hidden / tp)
    inputs = in_flight(pp, given["chunks"], micro_batches) * layers / pp * 2 * rows * hidden
    layer = rows * hidden * (10 + 24 / tp) + 5 * given["micro_batch"] * given["heads"] * given["sequence"] ** 2 / tp
    return states + inputs + layer + 10 * rows * given["vocabulary"] / tp + RESERVE


def report() -> dict[str, Any]:
    """Return what `python -m papers choices --json` prints."""
    rows = choices()
    near = sum(row["rank"] is not None and row["behind"] <= 0.05 for row in rows)
    return {"paper": "choices", "rule": RULE, "rows": rows, "near": near, "of": len(rows)}


def as_text(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `report`."""
    yield "Plans that labs took, among all that fit, by predicted time on selene; nothing here is measured\n"
    for row in found["rows"]:
        place = "does not fit" if row["rank"] is None else f"rank {row['rank']} of {row['plans']}, {row['behind']:.1%} behind"
        yield f"{row['name']}: t = {row['taken']['tp']}, p = {row['taken']['pp']}: {place}"
        yield f"    best: {_plan(row['best'])}"
        yield f"    rule: {_plan(row['rule'])}, {row['rule_behind']:.1%} behind"
    yield f"\nfirst, or within 5 % of the first: {found['near']} of {found['of']}"
    yield f"rule: {found['rule']}"


def _plan(one: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{letter} = {one[key]}" for letter, key in zip("tpdbv", PLAN, strict=True))
    return f"{sizes}: {one['tflops']:.0f} TFLOP/s"
