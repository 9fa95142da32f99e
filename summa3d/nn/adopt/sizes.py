"""Which sizes of an adopted model the axes of a scheme must divide, and what to say where they do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from typing import NamedTuple

from ...columns import counted
from ...comm.topology import describe
from ...errors import LayoutError
from ..context import Context
from ..schemes.registry import SCHEME_SPECS
from ..schemes.validate import Need
from .roles import owner_of


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
    larger = next(value for value in count(need.size + 1) if replace(need, size=value).met(shape))
    smaller = next((value for value in range(need.size, 0, -1) if replace(need, size=value).met(shape)), None)
    grids = [describe(grid) for grid in scheme.scheme.spec.grids(ranks) if all(item.met(grid) for item in wanted)]
    sizes = ", ".join(dict.fromkeys(f"{item.dim} {item.size}" for item in wanted))
    axes = f"{'·'.join(need.axes)} = {need.num_shards(shape)}"
    raise LayoutError(
        f"{need.dim} {need.size} cannot be split over {axes} (grid {describe(shape)}).\n  {need.why}\n"
        f"  Values that fit: {', '.join(str(value) for value in (smaller, larger) if value)}.\n"
        f"  Grids of {counted(ranks, 'rank')} that fit {sizes}: {' · '.join(grids[:6]) or 'none in this scheme'}."
    )


class SharedHeads(NamedTuple):
    """Heads of `size` elements, of each of which `sharing` consecutive ranks hold an equal piece."""

    heads: int
    size: int
    sharing: int

    @property
    def columns(self) -> int:
        """Columns of all of them."""
        return self.heads * self.size


def sharing_of(heads: int, size: int, num_shards: int) -> int:
    """Number of ranks that hold a head together: 1 where each has whole ones, 0 where they would have unlike parts."""
    if heads % num_shards == 0:
        return 1
    sharing = num_shards // heads
    return sharing if num_shards % heads == 0 and size % sharing == 0 else 0


@dataclass(frozen=True)
class KvHeads(Need):
    """Heads of k and v, of `head_size` elements: whole ones on each rank, or equal pieces of one."""

    head_size: int

    def met(self, shape: Mapping[str, int]) -> bool:
        """Return whether a grid of `shape` splits them so."""
        return sharing_of(self.size, self.head_size, self.num_shards(shape)) > 0


def of_heads(scheme: Context, heads: int, kv_heads: int, head_size: int) -> list[Need]:
    """That each rank gets whole heads."""
    axes = scheme.scheme.after_linear(scheme.residual).dims[-1]
    why = "Attention runs the model's own code on whole heads; ranks share one of k and v where each has an equal piece."
    wanted = [Need("num_attention_heads", heads, axes, why), KvHeads("num_key_value_heads", kv_heads, axes, why, head_size)]
    return wanted if axes else []


def shared_heads(cuts: Mapping[str, Collection[tuple[int, int]]], num_shards: int) -> dict[str, SharedHeads]:
    """Name of a module → those heads in its output that ranks share.

    They are k's and v's: fewer than shards, and a layer beside it, or itself, makes more, the queries', whole on each rank.

    cuts : module's name → how many heads its output is reshaped into, and of how many elements
    """
    queries: dict[str, int] = {}
    for name, own in cuts.items():
        queries[owner_of(name)] = max(queries.get(owner_of(name), 0), *(heads for heads, _ in own))
    result: dict[str, SharedHeads] = {}
    for name, own in cuts.items():
        for heads, size in own:
            sharing = sharing_of(heads, size, num_shards)
            if sharing > 1 and heads < queries[owner_of(name)]:
                result[name] = SharedHeads(heads, size, sharing)
    return result


def of_batch(scheme: Context, rows: int) -> list[Need]:
    """That the residual stream and attention have as many sequences on each rank."""
    stream, inner = scheme.residual, scheme.scheme.after_linear(scheme.residual)
    wanted = [
        Need("batch", rows, stream.dims[0], "The residual stream holds whole sequences."),
        Need("batch", rows, inner.dims[0], "Attention holds whole sequences."),
    ]
    return [item for item in wanted if item.axes]
