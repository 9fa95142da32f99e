"""What papers claim of whole families of runs: the direction of each claim, their numbers, and ours beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from summa3d.cluster import load
from summa3d.comm.topology import Topology
from summa3d.dry.step import Setting
from summa3d.figures import BOTH_COLUMNS, look
from summa3d.nn.config import ModelConfig
from summa3d.parallel.schedule import build
from summa3d.parallel.simulate import timeline
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.formulas import bubble
from summa3d.plan.links import members
from summa3d.plan.price import Prices
from summa3d.plan.programs.step import HALF, step
from summa3d.plan.replay import replay

from . import limits
from .figures import drawn
from .paper import block_work, table_of
from .paper import load as load_paper
from .units import in_unit

GPT3 = {"hidden": 12288, "heads": 96, "layers": 96, "tp": 8, "pp": 12, "gpus": 96, "micro_batch": 1}
SMALL = {"hidden": 3840, "heads": 32, "layers": 32, "gpus": 64, "micro_batch": 1}
"""The model of 5.9 billion parameters of PTD-P's figures 14 and 15."""
BILLION = {"hidden": 4096, "heads": 128, "layers": 4, "tp": 1, "pp": 1, "gpus": 1}
COLUMNS = 4
"""Panels of a figure beside each other."""
COMMON = {"sequence": 2048, "vocabulary": 51200, "profile": "megatron-2021", "tflops": 0}


class Claim(NamedTuple):
    """A claim: where it stands, what it says, the paper's numbers, ours, whether ours have its direction, and what is drawn."""

    where: str
    claim: str
    paper: str
    ours: str
    holds: bool
    values: Mapping[Any, float] = {}


def rate(given: Mapping[str, Any], **changes: Any) -> float:
    """Teraflop/s of a GPU of Selene, by equation 3, with PTD-P's program. Sizes as in papers' tables."""
    whole = {**COMMON, **given, **changes}
    whole["dp"] = whole["gpus"] // (whole["tp"] * whole["pp"])
    return in_unit(whole, step(whole).seconds)(load("selene"))


def listed(values: Mapping[Any, float], digits: int = 0) -> str:
    """The values, each with its key."""
    return ", ".join(f"{key}: {value:.{digits}f}" for key, value in values.items())


def falls(values: Mapping[Any, float]) -> bool:
    """Return whether each value is less than the one before."""
    return all(later < earlier for earlier, later in pairwise(values.values()))


def best(values: Mapping[Any, float]) -> Any:
    """The key of the largest value."""
    return max(values, key=lambda key: values[key])


def of_bubbles() -> Iterator[Claim]:
    """PTD-P, figure 6: n GPUs, d replicas, b' micro-batches of all of them."""
    for ranks, micro_batches in ((32, 32), (32, 128)):
        found = {}
        for replicas in (1, 2, 4, 8, 16):
            drawn = timeline(build("1f1b", ranks // replicas, micro_batches // replicas))
            found[replicas] = (drawn.time - drawn.ideal) / drawn.ideal
        yield Claim(
            "PTD-P, figure 6",
            f"the bubble of {ranks} GPUs and b' = {micro_batches} shrinks with replicas",
            "(n − d)/b'",
            listed(found, 2),
            falls(found),
            found,
        )


def of_micro_batches() -> Iterator[Claim]:
    """PTD-P, figures 7, 8 and 16, and takeaway 3."""
    one = {size: rate(BILLION, micro_batch=size, batch=size) for size in (1, 2, 4, 8, 16)}
    gain = max(one.values()) / one[1]
    claim = "throughput of one GPU grows with the micro-batch"
    yield Claim("PTD-P, figure 7", claim, "up to 1.3×", f"{gain:.2f}×; {listed(one)}", gain > 1.1, one)
    optima = []
    for batch in (128, 512):
        pipelined = {size: value / (1 + bubble(8, batch // size)) for size, value in one.items()}
        optima.append(best(pipelined))
        claim = f"best micro-batch by equation 1 for 8 stages, batch {batch}"
        yield Claim("PTD-P, figure 8", claim, "4", f"{best(pipelined)}; {listed(pipelined)}", best(pipelined) == 4, pipelined)
    for batch in (128, 512):
        whole = {"hidden": 15360, "heads": 128, "layers": 32, "tp": 8, "pp": 8, "gpus": 64, "batch": batch}
        found = {size: rate(whole, micro_batch=size) for size in (1, 2, 4, 8)}
        optima.append(best(found))
        claim = f"best micro-batch of 91B, t = p = 8, batch {batch}"
        yield Claim("PTD-P, figure 16", claim, "2", f"{best(found)}; {listed(found)}", best(found) == 2, found)
    claim = "the best micro-batch depends on model, pipeline and batch"
    yield Claim("PTD-P, takeaway 3", claim, "2 and 4", ", ".join(map(str, optima)), len(set(optima)) > 1)


def of_zero_3() -> Iterator[Claim]:
    """PTD-P, figure 10."""
    zero = {row.name: row.predict(row.cluster) for row in load_paper("ptdp-zero3").rows}
    large = {"hidden": 20480, "heads": 128, "layers": 105, "tp": 8, "pp": 35, "micro_batch": 1, "chunks": 3}
    ours = {
        "175B, 768 GPUs": rate(GPT3, gpus=768, batch=1536, chunks=4) / zero["175B, 768 GPUs"],
        "530B, 1120 GPUs": rate(large, gpus=1120, batch=2240) / zero["530B, 1120 GPUs"],
    }
    claim = "PTD-P is faster than ZeRO-3 on twice the GPUs"
    yield Claim("PTD-P, figure 10", claim, "by 70 %", f"× {listed(ours, 2)}", min(ours.values()) > 1)


def of_pipelines() -> Iterator[Claim]:
    """PTD-P, figures 11, 12 and 18."""
    kept = {}
    for batch in (8, 128):
        given = {"hidden": 20480, "heads": 128, "tp": 8, "batch": batch, "micro_batch": 1}
        found = {p: rate(given, layers=3 * p, pp=p, gpus=8 * p) for p in (1, 2, 4, 8)}
        kept[batch] = found[8] / found[1]
    claim = "the larger batch keeps more of its throughput from 1 to 8 stages"
    yield Claim("PTD-P, figure 11", claim, "as the bubble (p − 1)/m", listed(kept, 2), kept[128] > kept[8])
    rates = {
        (batch, v, scatter): rate(GPT3, batch=batch, chunks=v, scatter=scatter)
        for batch in (12, 24, 36, 48, 60, 240)
        for v in (1, 4)
        for scatter in (True, False)
    }
    batches = dict.fromkeys(batch for batch, _, _ in rates)
    gains, plain = (
        {batch: rates[batch, 4, scatter] / rates[batch, 1, scatter] for batch in batches} for scatter in (True, False)
    )
    claim = "interleaving is faster, and the gap closes with the batch"
    yield Claim("PTD-P, figure 12", claim, "10 % and more", f"× {listed(gains, 2)}", falls(gains) and gains[60] > 1.05, gains)
    claim = "without scatter and gather the default schedule is faster at large batches"
    yield Claim("PTD-P, section 5.3.2", claim, "yes", f"× {listed(plain, 2)}", plain[12] > 1 > plain[240], plain)
    scattered = {f"v = {v}": rates[240, v, True] / rates[240, v, False] for v in (4, 1)}
    claim = "scatter and gather help, interleaved schedules more"
    yield Claim("PTD-P, figure 18", claim, "up to 11 %", f"× {listed(scattered, 3)}", falls(scattered) and scattered["v = 1"] > 1)


def of_shapes() -> Iterator[Claim]:
    """PTD-P, figures 13, 14 and 15, and takeaways 1 and 2."""
    for batch in (32, 128):
        given = {"hidden": 20480, "heads": 128, "layers": 32, "gpus": 64, "micro_batch": 1, "batch": batch}
        found = {t: rate(given, tp=t, pp=64 // t) for t in (2, 4, 8, 16, 32)}
        claim = f"tensor parallelism up to the node, then pipeline (162B, batch {batch})"
        yield Claim(
            "PTD-P, figure 13, takeaway 1", claim, "t = 8", f"t = {best(found)}; {listed(found)}", best(found) == 8, found
        )
    for batch in (32, 128, 512):
        stages = {p: rate(SMALL, batch=batch, tp=1, pp=p) for p in (2, 4, 8, 16, 32) if batch >= 64 // p}
        claim = f"replicas beat stages (5.9B, batch {batch})"
        yield Claim("PTD-P, figure 14", claim, "falls with p", listed(stages), falls(stages), stages)
        tensors = {t: rate(SMALL, batch=batch, tp=t, pp=1) for t in (2, 4, 8, 16, 32) if batch >= 64 // t}
        claim = f"replicas beat tensor ranks (5.9B, batch {batch})"
        yield Claim("PTD-P, figure 15", claim, "falls with t", listed(tensors), falls(tensors), tensors)
        both = {**{f"p = {p}": value for p, value in stages.items()}, **{f"t = {t}": value for t, value in tensors.items()}}
        claim = f"the smallest t·p that fits, then replicas (batch {batch})"
        yield Claim("PTD-P, takeaway 2", claim, "t·p = 2", best(both), best(both) in ("p = 2", "t = 2"))


def of_kernels() -> Iterator[Claim]:
    """PTD-P, section 5.8 and section 3.5."""
    large = {"hidden": 20480, "heads": 128, "layers": 105, "tp": 8, "pp": 35, "gpus": 280, "batch": 280, "micro_batch": 1}
    gains = {}
    for name, given in (("175B", {**GPT3, "batch": 96}), ("530B", large)):
        gains[name] = rate(given) / rate(given, profile="megatron-2021-unfused")
    holds = gains["175B"] > gains["530B"] > 1
    claim = "fused kernels help, the smaller model more"
    yield Claim("PTD-P, section 5.8", claim, "175B: 1.19, 530B: 1.11", f"× {listed(gains, 2)}", holds)
    peaks = limits.recomputed_peaks()
    least = min(peaks, key=lambda every: peaks[every])
    claim = "memory is least where every layer or two are computed again (145B, a stage of 10 layers)"
    yield Claim("PTD-P, section 3.5", claim, "1 or 2", f"{least}; GB by layers: {listed(peaks, 1)}", least in (1, 2), peaks)


def of_optimus() -> Iterator[Claim]:
    """Optimus, figures 8 and 9."""
    table = table_of("optimus")
    cluster, columns, whole = load("frontera-rtx"), {}, {}
    for given in table["row"]:
        if given["series"] == "weak, 2-D" and given.get("tile") and given["axes"]["x"] > 2:
            natural, bunched = (block_work(table, given, {"tile": tile}) for tile in (None, given["tile"]))
            whole[given["axes"]["x"] ** 2] = natural.seconds(cluster) / bunched.seconds(cluster)
            alone = [
                replace(work, ops=tuple(one for one in work.ops if one[0].axis == "x"), size=0.0, launches=0.0)
                for work in (natural, bunched)
            ]
            columns[given["axes"]["x"] ** 2] = alone[0].seconds(cluster) / alone[1].seconds(cluster)
    where, claim = "Optimus, figure 8", "2×2 of the mesh in a node beat a row of it, communication of columns"
    yield Claim(where, claim, "yes", f"GPUs: × {listed(columns, 2)}", min(columns.values()) > 1, columns)
    claim = "2×2 of the mesh in a node beat a row of it, whole step of table 2"
    yield Claim(where, claim, "yes", f"GPUs: × {listed(whole, 2)}", min(whole.values()) > 1, whole)
    found = {ranks: limits.largest_batches(ranks) for ranks in limits.SIZES}
    ratios = {ranks: one["optimus"] / one["megatron"] for ranks, one in found.items()}
    last, where = found[64], "Optimus, figure 9"
    claim = "largest batch of Optimus on 64 GPUs, by its buffers"
    yield Claim(where, claim, "480", str(last["optimus"]), abs(last["optimus"] - 480) <= 16)
    claim = "Optimus' largest batch over Megatron's, by the buffers of both"
    grows = all(later > earlier for earlier, later in pairwise(ratios.values()))
    yield Claim(where, claim, "64 GPUs: 8", f"GPUs: {listed(ratios, 1)}", 7 <= ratios[64] <= 8 and grows, ratios)
    claim = "the same of this library's oned, oned-sp and summa, by dry runs"
    own = {ranks: limits.own_largest(ranks) for ranks in (4, 64)}
    ours = "; ".join(f"{ranks} GPUs: {', '.join(map(str, one.values()))}" for ranks, one in own.items())
    yield Claim(where, claim, "2-D holds more", ours, all(one["summa"] > one["oned"] for one in own.values()))


def of_two_dims() -> Iterator[Claim]:
    """MindSpeed's 2-D tensor parallelism, and the groups of a blog on 3-D parallelism. Reported, whatever comes out."""
    model = ModelConfig(
        family="llama", layers=1, hidden=16384, heads=128, kv_heads=8, ffn=53248, sequence=8192, vocabulary=128256
    )
    for name in ("dgx-h100", "gb200-nvl72"):
        seconds = {}
        for y, z in ((16, 1), (8, 2), (4, 4), (2, 8)):
            scheme, axes = ("oned-sp", {"y": 16}) if z == 1 else ("cuboid-sequence", {"x": 1, "y": y, "z": z})
            cell = cells(Setting(model, 1, scheme, axes, dtype=HALF, on_device=True))[BLOCK]
            prices = Prices(load(name), Topology.checked(axes, ("y",) if z == 1 else ("y", "z", "x")))
            seconds[f"{y}×{z}"] = sum(replay(way, prices).seconds for way in cell)
        gains = {shape: seconds["16×1"] / value for shape, value in seconds.items()}
        claim = f"Llama 3.1 405B at t = 16: 8×2 beats 1-D, other splits may not ({name})"
        yield Claim("MindSpeed, TP-2D", claim, "1.05, with overlap 1.10", f"× {listed(gains, 2)}", gains["8×2"] > 1)
    grid = Topology.checked({"y": 2, "dp": 2, "pp": 2}, ("y", "dp", "pp"))
    groups = [members(grid, axis)[0] for axis in ("pp", "dp")]
    claim = "order t, d, p of 8 ranks: the first groups of pipeline and replicas"
    yield Claim("Blog on 3-D parallelism", claim, "[0, 2] and [0, 4]", " and ".join(map(str, groups)), groups == [[0, 2], [0, 4]])


SOURCES: tuple[Callable[[], Iterator[Claim]], ...] = (
    of_bubbles,
    of_micro_batches,
    of_zero_3,
    of_pipelines,
    of_shapes,
    of_kernels,
    of_optimus,
    of_two_dims,
)


def report() -> dict[str, Any]:
    """Return what `python -m papers claims --json` prints: every claim, and how many of them hold."""
    found = [claim for source in SOURCES for claim in source()]
    return {
        "paper": "claims",
        "claims": [one._asdict() for one in found],
        "hold": sum(one.holds for one in found),
        "of": len(found),
    }


def write(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the values of the claims that have a series of them; returns the files. Raises DataError as `figures.drawn` does."""
    return drawn(partial(_fill, series=[one for one in found["claims"] if one["values"]]), folder, "claims")


def _fill(figure: Any, series: Sequence[Mapping[str, Any]]) -> None:
    figure.set_size_inches(BOTH_COLUMNS, 1.2 * BOTH_COLUMNS)
    panels = figure.subplots(-(-len(series) // COLUMNS), min(COLUMNS, len(series)), squeeze=False).ravel()
    for panel, one in zip(panels, series, strict=False):
        panel.plot(list(one["values"]), list(one["values"].values()), **look(0 if one["holds"] else 1))
        panel.set_xscale("log", base=2)
        panel.set_title(f"{one['where']}\n{one['claim'][:44]}", fontsize=5)
    for panel in panels[len(series) :]:
        panel.set_axis_off()


def as_text(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `report`."""
    yield "Claims of papers; selene's numbers, fitted to PTD-P's tables 1 and 2, and frontera-rtx's\n"
    for one in found["claims"]:
        yield f"{'✓' if one['holds'] else '✗'} {one['where']}: {one['claim']}"
        yield f"    paper: {one['paper']}"
        yield f"    ours:  {one['ours']}"
    yield f"\n{found['hold']} of {found['of']} hold; ✗ marks a miss"
