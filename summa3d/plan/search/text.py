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


def utilization(found: Found, one: Priced, hardware: bool = False) -> float:
    """MFU of a plan; HFU with `hardware`, which counts what is computed again."""
    flops = flops_of(found.space, hardware and one.plan.inner.recompute == "full")
    return flops / one.seconds / found.space.ranks / found.cluster.peak(found.space.dtype)


def as_json(found: Found, asked: Request) -> dict[str, Any]:
    """What --json prints. Seconds and bytes are of a step on the fullest or busiest rank."""
    return {
        "model": asked.name,
        "cluster": found.cluster.name,
        "ranks": found.space.ranks,
        "batch": found.space.batch,
        "memory": {"device": found.cluster["device.memory"], "limit": round(found.limit)},
        "plans": [_plan(found, asked, one, rank) for rank, one in enumerate(found.best, 1)],
        "families": {family: _plan(found, asked, one, _rank(found, one)) for family, one in found.families.items()},
        "pareto": [{"plan": str(one.plan), "seconds": one.seconds, "bytes": one.memory.total} for one in found.pareto],
        "considered": found.considered,
        "priced": found.priced,
        "rejected": {f"{family}: {reason}": many for (family, reason), many in sorted(found.rejected.items())},
        "fitted": list(found.cluster.fitted),
    }


def _rank(found: Found, one: Priced) -> int | None:
    """The place of a plan among the fastest; None where it is not among them."""
    return found.best.index(one) + 1 if one in found.best else None


def _plan(found: Found, asked: Request, one: Priced, rank: int | None) -> dict[str, Any]:
    memory = one.memory
    return {
        "rank": rank,
        "plan": str(one.plan),
        "family": one.plan.family,
        "config": one.plan.keys(),
        "seconds": one.seconds,
        "band": own_band(found.cluster)[0],
        "validated": own_band(found.cluster)[1],
        "mfu": utilization(found, one),
        "hfu": utilization(found, one, True),
        "flops": flops_of(found.space),
        "memory": {**dict(zip(memory._fields, memory, strict=True)), "total": memory.total, "limit": round(found.limit)},
        "time": one.terms,
    }


def as_text(found: Found, asked: Request) -> Iterator[str]:
    """The lines of the table: the fastest plans, the best of each family, and what the others failed by."""
    cluster, space = found.cluster, found.space
    band, validated = own_band(cluster)
    alike = cluster["band.percent"] / 100
    text = f"±{band:.0%}{'' if validated else ', not validated: nobody has measured this library there'}"
    optimizer = f", {asked.config.train.optimizer}" if asked.config.train.optimizer != "adamw" else ""
    size = f"{counted(space.ranks, 'rank')}, batch {space.batch}"
    yield f"{asked.name} on {cluster.name}, {size}, {space.dtype}{optimizer}; {text}"
    shown = [*found.best, *(one for one in found.families.values() if one not in found.best)]
    width = max(len(str(one.plan)) for one in shown)
    further = [axis.name for axis in SEARCHED if any(one.plan.shape.get(axis.name, 1) > 1 for one in shown)]
    axes = (*AXES, *further)
    columns = ("s/step", "MFU", "HFU", "GiB", "compute", *axes, "p2p", "bubble", "dp")
    yield f"{'#':>3}   {'plan':<{width}}  {'family':<7}" + "".join(f"{name:>9}" for name in columns)
    for place, one in enumerate(shown):
        mark = "≈" if place and one.seconds <= found.best[0].seconds * (1 + alike) else " "
        number = str(place + 1) if place < len(found.best) else "–"
        yield f"{number:>3} {mark} {one.plan!s:<{width}}  {one.plan.family:<7}" + "".join(
            f"{cell:>9}" for cell in _cells(found, one, axes)
        )
    for family in FAMILIES:
        if family not in found.families and any(key[0] == family for key in found.rejected):
            yield f"    no plan of {family}: {_reasons(found, family)}"
    fitted = ", ".join(cluster.fitted) or "nothing"
    whole = cluster["device.memory"]
    kept_free = f"{found.limit / GIB:.1f} GiB a rank: of {whole / GIB:.1f} GiB {(whole - found.limit) / GIB:.1f} are kept free"
    yield f"≈ within {alike:.0%} of plan 1; {kept_free}; fitted in {cluster.name}: {fitted}"
    yield f"{found.considered} plans divide evenly and hold the weights, {found.priced} were priced"


def _reasons(found: Found, family: str) -> str:
    lines = sorted(((many, reason) for (of, reason), many in found.rejected.items() if of == family), reverse=True)
    return ", ".join(f"{reason} ({many})" for many, reason in lines[:3])


def _cells(found: Found, one: Priced, axes: Sequence[str]) -> Iterator[str]:
    """Seconds, utilization and memory; then parts of the step's time."""
    terms: dict[str, Any] = one.terms
    exposed: dict[str, float] = {}
    for axis, seconds in terms["axis"].items():
        name = part_of(axis).names[0]
        exposed[name] = exposed.get(name, 0.0) + seconds
    yield f"{one.seconds:.4g}"
    yield from (f"{utilization(found, one, hardware):.1%}" for hardware in (False, True))
    yield f"{one.memory.total / GIB:.1f}"
    parts = [terms["compute"], *(exposed.get(axis, 0.0) for axis in axes), terms["p2p"], terms["bubble"], terms["dp"]]
    yield from (f"{part / one.seconds:.1%}" if part else "–" for part in parts)
