"""Checks of a scheme's sizes and grid, with errors that name the sizes and grids that would work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from ...columns import counted
from ...comm.topology import describe
from ...errors import GridError, LayoutError
from ...gemm.algorithms.plan import misfit
from ...layout.layout import Layout
from ..config import ModelConfig
from .registry import SCHEME_SPECS, SchemeSpec


@dataclass(frozen=True)
class Need:
    """A dim that a product of axes must divide evenly, and why."""

    dim: str
    size: int
    axes: tuple[str, ...]
    why: str

    def num_shards(self, shape: Mapping[str, int]) -> int:
        """The number of shards of the dim on a grid of `shape`."""
        return prod(shape[axis] for axis in self.axes)

    def met(self, shape: Mapping[str, int]) -> bool:
        """Return whether the dim splits evenly on a grid of `shape`."""
        return self.size % self.num_shards(shape) == 0


EVENLY_SPLIT = ("batch", "sequence", "heads", "hidden")
"""The dims that `needs` lists."""


def needs(spec: SchemeSpec, inner: Layout, config: ModelConfig, batch: int, sequence: int) -> list[Need]:
    """List the dims that split evenly where ranks have like parts: of attention, and those that the residual stream splits."""
    outer = spec.residual

    def split(dim: str, axes: tuple[str, ...]) -> str:
        return f"The residual stream's {dim} dim is split by {' then '.join(axes)} ({spec.title})."

    result = [
        Need("batch", batch, outer.dims[0], split("batch", outer.dims[0])),
        Need("batch", batch, inner.dims[0], f"Attention holds whole sequences, split by {' then '.join(inner.dims[0])}."),
        Need("sequence", sequence, outer.dims[1], split("sequence", outer.dims[1])),
        Need("heads", config.heads, inner.dims[-1], f"Attention holds whole heads, split by {' then '.join(inner.dims[-1])}."),
        Need("hidden", config.hidden, outer.dims[-1], split("hidden", outer.dims[-1])),
    ]
    return [need for need in result if need.axes]


def check_sizes(
    spec: SchemeSpec,
    inner: Layout,
    shape: Mapping[str, int],
    config: ModelConfig,
    batch: int,
    sequence: int,
    dims: Collection[str] = EVENLY_SPLIT,
) -> None:
    """Raise LayoutError where axes split one of `dims` into unlike parts; the error names values and grids that fit."""
    wanted = [need for need in needs(spec, inner, config, batch, sequence) if need.dim in dims]
    need = next((need for need in wanted if not need.met(shape)), None)
    if need is None:
        return
    num_shards = need.num_shards(shape)
    below = need.size - need.size % num_shards
    values = [value for value in (below - num_shards, below, below + num_shards, below + 2 * num_shards) if value > 0][:3]
    ranks = prod(shape[axis] for axis in spec.axes)
    grids = [grid for grid in spec.grids(ranks) if all(other.met(grid) for other in wanted)]
    plural = {"batch": "Batches"}.get(need.dim, f"Values of {need.dim}")
    fitting = " · ".join(describe(grid) for grid in grids[:6]) or "none; change the sizes or the number of ranks"
    sizes = dict.fromkeys(f"{other.dim} {other.size}" for other in wanted)
    raise LayoutError(
        f"{need.dim} {need.size} cannot be split over {'·'.join(need.axes)} = {num_shards} (grid {describe(shape)}).\n"
        f"  {need.why}\n"
        f"  {plural} that fit: {', '.join(map(str, values))}. "
        f"Grids of {counted(ranks, 'rank')} that fit {', '.join(sizes)}: {fitting}."
    )


def check_grid(spec: SchemeSpec, shape: Mapping[str, int]) -> None:
    """Raise GridError, naming the grids that would work, where the scheme does not support an inner grid of `shape`.

    An axis of size 1 may be absent. An axis over which the scheme does not split must have size 1.
    """
    own = {axis: shape.get(axis, 1) for axis in spec.axes}
    if own not in spec.grids(prod(shape.values())):
        raise GridError(misfit(f"The {spec.name} scheme", shape, spec.grids))


def check_vectors(spec: SchemeSpec, shape: Mapping[str, int], vectors: str) -> None:
    """Raise LayoutError where the scheme does not support this storage of vectors; GridError for "diagonal" where Y ≠ Z."""
    if vectors not in spec.vectors:
        others = ", ".join(sorted({other.name for other in SCHEME_SPECS.values() if vectors in other.vectors})) or "none"
        raise LayoutError(
            f"vectors {vectors!r}, a storage of γ, β and biases, is not supported by the {spec.name} scheme.\n"
            f"  It supports: {', '.join(spec.vectors)}. Schemes that support {vectors!r}: {others}."
        )
    y, z = shape.get("y", 1), shape.get("z", 1)
    if vectors == "diagonal" and y != z:
        square = [grid for grid in spec.grids(prod(shape.values())) if grid["y"] == grid["z"]]
        raise GridError(
            f"vectors 'diagonal' needs y and z of equal size; the grid has y={y}, z={z}.\n"
            f"  Grids that fit: {' · '.join(map(describe, square))}."
        )
