"""Classes of ranks that hold and do the same: equal blocks, roles and neighbours in the node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod

from ..comm.topology import replica_axes
from ..layout.layout import Layout
from ..nn.config import ModelConfig
from ..nn.schemes.scheme import Scheme
from .place import DryPlace
from .step import DryStep, Key, Rank, Setting, Training, kinds_of


def classes(setting: Setting) -> dict[int, int]:
    """The classes of ranks of the setting's grid: first rank → number of ranks.

    Two ranks are in one class if they are the same rank of the pipeline, if the blocks of all their activations and parameters
    have the same shapes, if they own the same root-only blocks, and if the same axes lie inside their nodes. The bytes of a class
    are equal; its words may differ where a collective's parts are uneven.
    """
    return {ranks[0]: len(ranks) for ranks in _classes(setting).values()}


def steps(setting: Setting, training: Training) -> Iterator[tuple[int, int, DryStep]]:
    """The first rank of each class, the number of its ranks, and its step.

    Ranks that differ in the order of their program alone are traced once; what replicas share is traced for each part of it.
    Raises LayoutError, GridError and ConfigError where the run itself would.
    """
    whole: dict[object, Rank] = {}
    traced: dict[object, Rank] = {}
    programs: dict[int, list[Key]] = {}
    for (stage, inner, shares), ranks in _classes(setting).items():
        kind = tuple(kinds_of(stage, setting.stages)), inner
        if (kind, shares) not in traced:
            traced[kind, shares] = Rank.traced(replace(setting, rank=ranks[0]), training, whole.get(kind))
            if setting.zero < 2:  # else forwards and backwards use what replicas share
                whole.setdefault(kind, traced[kind, shares])
        rank = traced[kind, shares]
        if stage not in programs:
            programs[stage] = rank.keys(stage)
        yield ranks[0], len(ranks), rank.step(programs[stage])


def _classes(setting: Setting) -> dict[tuple[int, object, object], list[int]]:
    """The ranks of each class by their rank of the pipeline, what else forwards differ by, and their parts of what is shared."""
    place = setting.place()
    on_grid, replicas = setting.on(place), replica_axes(place.shape)
    layouts = list(_tensors(on_grid, setting.model, setting.batch))
    shares = [(layout.sharded_over(replicas), shape) for layout, shape in layouts if replicas]  # the larger ones come first

    @cache
    def block(layout: Layout, shape: tuple[int, ...], at: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        return layout.local_shape(shape, place.shape, {**place.coordinates, **dict(at)})

    def blocks(of: list[tuple[Layout, tuple[int, ...]]], at: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            block(layout, shape, tuple((axis, at[axis]) for axis in (*layout.axes, *layout.root_only))) for layout, shape in of
        )

    found: dict[tuple[int, object, object], list[int]] = {}
    for rank in range(prod(setting.axes.values())):
        at = place.coordinates_of(rank)
        first = tuple(at[axis] == 0 for axis in on_grid.residual.dims[1])
        inner = blocks(layouts, at), first, _inside(place, at, setting.ranks_per_node)
        found.setdefault((at.get("pp", 0), inner, blocks(shares, at)), []).append(rank)
    return found


def even(setting: Setting) -> bool:
    """Whether the blocks of all activations and parameters have the same shapes on all ranks: larger parts come first."""
    place = setting.place()
    tensors = _tensors(setting.on(place), setting.model, setting.batch)
    ends = [place.coordinates_of(rank) for rank in (0, place.size - 1)]
    shapes = ([layout.local_shape(shape, place.shape, at) for at in ends] for layout, shape in tensors)
    return all(first == last for first, last in shapes)


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
