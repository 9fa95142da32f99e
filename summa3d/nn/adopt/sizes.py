"""Which sizes of an adopted model the axes of a scheme must divide, and what to say where they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ...columns import counted
from ...comm.topology import describe
from ...errors import LayoutError
from ..context import Context
from ..schemes.registry import SCHEME_SPECS
from ..schemes.validate import Need


def check_scheme(scheme: Context) -> None:
    """Raise LayoutError for a scheme, or a context, that splits sequences; or one for single layers alone."""
    layouts, fits = scheme.scheme, [name for name, spec in SCHEME_SPECS.items() if not spec.sequence_first and not spec.limits]
    why = layouts.spec.limits or (
        "it splits sequences, whose length the model's own code reads" if layouts.residual.dims[1] else ""
    )
    if why:
        raise LayoutError(f"The {layouts.name} scheme adopts no module: {why}.\n  Schemes that do: {', '.join(fits)}.")
    if scheme.contexts.size > 1:
        raise LayoutError(f"Adopted modules hold whole sequences; axis cp has {scheme.contexts.size} ranks. Use cp=1.")


def check_needs(scheme: Context, wanted: Sequence[Need]) -> None:
    """Raise LayoutError, naming the grids that fit, for the first size that its axes do not divide."""
    shape = scheme.scheme.shape
    need = next((item for item in wanted if not item.met(shape)), None)
    if need is None:
        return
    ranks = prod(shape.values())
    grids = [describe(grid) for grid in scheme.scheme.spec.grids(ranks) if all(item.met(grid) for item in wanted)]
    step, sizes = need.num_shards(shape), ", ".join(dict.fromkeys(f"{item.dim} {item.size}" for item in wanted))
    below = need.size - need.size % step
    raise LayoutError(
        f"{need.dim} {need.size} cannot be split over {'·'.join(need.axes)} = {step} (grid {describe(shape)}).\n  {need.why}\n"
        f"  Values that fit: {', '.join(str(value) for value in (below, below + step) if value)}.\n"
        f"  Grids of {counted(ranks, 'rank')} that fit {sizes}: {' · '.join(grids[:6]) or 'none in this scheme'}."
    )


def of_heads(scheme: Context, sizes: Mapping[str, int]) -> list[Need]:
    """That each rank holds whole heads: sizes, such as {"num_attention_heads": 8}."""
    axes = scheme.scheme.after_linear(scheme.residual).dims[-1]
    why = "Attention runs the model's own code on a rank's whole heads."
    return [Need(name, size, axes, why) for name, size in sizes.items()] if axes else []


def of_batch(scheme: Context, rows: int) -> list[Need]:
    """That the residual stream and attention have as many sequences on each rank."""
    stream, inner = scheme.residual, scheme.scheme.after_linear(scheme.residual)
    wanted = [
        Need("batch", rows, stream.dims[0], "The residual stream holds whole sequences."),
        Need("batch", rows, inner.dims[0], "Attention holds whole sequences."),
    ]
    return [item for item in wanted if item.axes]
