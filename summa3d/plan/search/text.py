"""A search's findings as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...columns import counted
from ...parallel.outer import SEARCHED
from ..links import part_of
from ..programs.bands import own_band
from .plans import FAMILIES
from .request import Request
from .search import Found, Priced, flops_of

GIB = 2**30
AXES = ("y", "z", "x", "d")


def utilization(result: Found, candidate: Priced, hardware: bool = False) -> float:
    """MFU of a plan; HFU with `hardware`, which counts what is computed again."""
    flops = flops_of(result.space, hardware and candidate.plan.inner.recompute == "full")
    return flops / candidate.seconds / result.space.ranks / result.cluster.peak(result.space.dtype)


def as_json(result: Found, asked: Request) -> dict[str, Any]:
    """Report that --json prints. Seconds and bytes are of a step on the fullest or busiest rank."""
    places = {str(item.plan): place for place, item in enumerate(result.best, 1)}
    return {
        "model": asked.name,
        "cluster": result.cluster.name,
        "ranks": result.space.ranks,
        "batch": result.space.batch,
        "memory": {"device": result.cluster["device.memory"], "limit": round(result.limit)},
        "plans": [_plan(result, asked, item, rank) for rank, item in enumerate(result.best, 1)],
        "families": {family: _plan(result, asked, item, places.get(str(item.plan))) for family, item in result.families.items()},
        "pareto": [{"plan": str(item.plan), "seconds": item.seconds, "bytes": item.memory.total} for item in result.pareto],
        "considered": result.considered,
        "priced": result.priced,
        "rejected": {f"{family}: {reason}": many for (family, reason), many in sorted(result.rejected.items())},
        "fitted": list(result.cluster.fitted),
    }


def _plan(result: Found, asked: Request, candidate: Priced, rank: int | None) -> dict[str, Any]:
    memory = candidate.memory
    return {
        "rank": rank,
        "plan": str(candidate.plan),
        "family": candidate.plan.family,
        "config": candidate.plan.keys(),
        "seconds": candidate.seconds,
        "band": own_band(result.cluster)[0],
        "validated": own_band(result.cluster)[1],
        "mfu": utilization(result, candidate),
        "hfu": utilization(result, candidate, True),
        "flops": flops_of(result.space),
        "memory": {**dict(zip(memory._fields, memory, strict=True)), "total": memory.total, "limit": round(result.limit)},
        "time": candidate.terms,
    }


def as_text(result: Found, asked: Request) -> Iterator[str]:
    """The lines of the table: the fastest plans, the best of each family, and what the others failed by."""
    cluster, space = result.cluster, result.space
    band, validated = own_band(cluster)
    alike = cluster["band.percent"] / 100
    text = f"±{band:.0%}{'' if validated else ', not validated: nobody has measured this library there'}"
    optimizer = f", {asked.config.train.optimizer}" if asked.config.train.optimizer != "adamw" else ""
    size = f"{counted(space.ranks, 'rank')}, batch {space.batch}"
    yield f"{asked.name} on {cluster.name}, {size}, {space.dtype}{optimizer}; {text}"
    shown = [*result.best, *(family for family in result.families.values() if family not in result.best)]
    width = max(len(str(entry.plan)) for entry in shown)
    further = [axis.name for axis in SEARCHED if any(entry.plan.shape.get(axis.name, 1) > 1 for entry in shown)]
    axes = (*AXES, *further)
    columns = ("s/step", "MFU", "HFU", "GiB", "compute", *axes, "p2p", "bubble", "dp")
    yield f"{'#':>3}   {'plan':<{width}}  {'family':<7}" + "".join(f"{name:>9}" for name in columns)
    for place, item in enumerate(shown):
        mark = "≈" if place and item.seconds <= result.best[0].seconds * (1 + alike) else " "
        number = str(place + 1) if place < len(result.best) else "–"
        yield f"{number:>3} {mark} {item.plan!s:<{width}}  {item.plan.family:<7}" + "".join(
            f"{cell:>9}" for cell in _cells(result, item, axes)
        )
    for family in FAMILIES:
        if family not in result.families and any(key[0] == family for key in result.rejected):
            yield f"    no plan of {family}: {_reasons(result, family)}"
    fitted = ", ".join(cluster.fitted) or "nothing"
    whole = cluster["device.memory"]
    kept_free = f"{result.limit / GIB:.1f} GiB a rank: of {whole / GIB:.1f} GiB {(whole - result.limit) / GIB:.1f} are kept free"
    yield f"≈ within {alike:.0%} of plan 1; {kept_free}; fitted in {cluster.name}: {fitted}"
    yield f"{result.considered} plans divide evenly and hold the weights, {result.priced} were priced"


def _reasons(result: Found, family: str) -> str:
    lines = sorted(((many, reason) for (of, reason), many in result.rejected.items() if of == family), reverse=True)
    return ", ".join(f"{reason} ({many})" for many, reason in lines[:3])


def _cells(result: Found, candidate: Priced, axes: Sequence[str]) -> Iterator[str]:
    """Seconds, utilization and memory; then parts of the step's time."""
    terms: dict[str, Any] = candidate.terms
    exposed: dict[str, float] = {}
    for axis, seconds in terms["axis"].items():
        name = part_of(axis).names[0]
        exposed[name] = exposed.get(name, 0.0) + seconds
    yield f"{candidate.seconds:.4g}"
    yield from (f"{utilization(result, candidate, hardware):.1%}" for hardware in (False, True))
    yield f"{candidate.memory.total / GIB:.1f}"
    parts = [terms["compute"], *(exposed.get(axis, 0.0) for axis in axes), terms["p2p"], terms["bubble"], terms["dp"]]
    yield from (f"{part / candidate.seconds:.1%}" if part else "–" for part in parts)
