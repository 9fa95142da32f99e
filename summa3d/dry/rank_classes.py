"""Classes of ranks that hold and do the same: equal blocks, roles and neighbours in the node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from ..comm.topology import replica_axes
from ..layout.layout import Layout
from ..nn.config import ModelConfig
from ..nn.schemes.scheme import Scheme
from .place import DryPlace
from .step import Setting


def classes(setting: Setting) -> dict[int, int]:
    """The classes of ranks of the setting's grid: first rank → number of ranks.

    Two ranks are in one class if the blocks of all their activations and parameters have the same shapes, if they own the same
    root-only blocks, and if the same axes lie inside their nodes. The bytes of a class are equal; its words may differ
    where a collective's parts are uneven.
    """
    place = setting.place()
    on_grid = setting.on(place)
    shapes = list(_tensors(on_grid, setting.model, setting.batch))
    replicas = replica_axes(place.shape)
    if replicas:  # each owns a part of every parameter, and the larger ones come first
        shapes += [(layout.sharded_over(replicas), shape) for layout, shape in shapes]
    found: dict[object, list[int]] = {}
    for rank in range(prod(setting.axes.values())):
        at = place.coordinates_of(rank)
        blocks = tuple(layout.local_shape(shape, place.shape, at) for layout, shape in shapes)
        first = tuple(at[axis] == 0 for axis in on_grid.residual.dims[1])
        found.setdefault((blocks, first, _inside(place, at, setting.ranks_per_node)), []).append(rank)
    return {ranks[0]: len(ranks) for ranks in found.values()}


def _tensors(on_grid: Scheme, config: ModelConfig, batch: int) -> Iterable[tuple[Layout, tuple[int, ...]]]:
    """The layouts and shapes of activations and parameters."""
    stream, inner, s = on_grid.residual, on_grid.after_linear(on_grid.residual), config.sequence
    h, f, v = config.hidden, config.ffn_dim, config.vocabulary
    kv = 2 * config.num_kv_heads * h // config.heads
    yield stream, (batch, s, h)
    yield Layout(*on_grid.lookup.tokens.dims), (batch, s)
    yield on_grid.table(stream), (v, h)
    yield on_grid.pooled, (batch, h)
    yield on_grid.vector(stream), (h,)
    for columns in (h, h + kv, f, v):
        yield inner, (batch, s, columns)
        yield on_grid.weight(stream), (h, columns)
        yield on_grid.vector(inner), (columns,)
    for rows in (h, f):
        yield on_grid.weight(inner, on_grid.spec.transposed_down and rows == f), (rows, h)


def _inside(place: DryPlace, at: Mapping[str, int], ranks_per_node: int) -> tuple[str, ...]:
    """The axes whose members share the node of the rank at `at`."""
    if ranks_per_node == 1:
        return ()
    if ranks_per_node >= place.size:
        return tuple(place.shape)

    def nodes(name: str) -> set[int]:
        return {place.rank_of({**at, name: index}) // ranks_per_node for index in range(place.shape[name])}

    return tuple(name for name in place.shape if len(nodes(name)) == 1)
