"""Classes of ranks that hold and do the same: equal blocks, roles and neighbours in the node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache

from ..comm.topology import Topology, replica_axes
from ..layout.layout import Layout
from ..nn.schemes.heads import heads_of
from .step import DryStep, OpKey, Rank, Setting, Training, kinds_of


def classes(setting: Setting) -> dict[int, int]:
    """The classes of ranks of the setting's grid: first rank → number of ranks.

    Two ranks are in one class if they are the same rank of the pipeline, if both hold the first, the last or another block of a
    sequence, if the blocks of all their activations and parameters have the same shapes, if they own the same root-only blocks,
    and if the same axes lie inside their nodes. The bytes of a class are equal; its words may differ where a collective's parts
    are uneven, and the arithmetic of contexts that are not folded.
    """
    return {ranks[0]: len(ranks) for ranks in _classes(setting, Training()).values()}


def steps(
    setting: Setting, training: Training, tell: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[tuple[int, int, DryStep]]:
    """The first rank of each class, the number of its ranks, and its step.

    Ranks that differ in the order of their program alone are traced once; what replicas share is traced for each part of it, and
    so is the end of a step where ranks differ by it (`Training.shares`). `tell` is given how many are traced, of how many.
    Raises LayoutError, GridError and ConfigError where the run itself would.
    """
    whole: dict[object, Rank] = {}
    traced: dict[object, Rank] = {}
    programs: dict[int, list[OpKey]] = {}
    ranks_of = _classes(setting, training)
    kinds = {key: (tuple(kinds_of(key[0], setting.stages)), key[1]) for key in ranks_of}
    every = len({(kind, key[2]) for key, kind in kinds.items()})
    for key, ranks in ranks_of.items():
        (stage, _, shares), kind = key, kinds[key]
        if (kind, shares) not in traced:
            tell(len(traced), every)
            traced[kind, shares] = Rank.traced(replace(setting, rank=ranks[0]), training, whole.get(kind))
            if setting.zero < 2:  # else forwards and backwards use what replicas share
                whole.setdefault(kind, traced[kind, shares])
        rank = traced[kind, shares]
        if stage not in programs:
            programs[stage] = rank.keys(stage)
        yield ranks[0], len(ranks), rank.step(programs[stage])


def _classes(setting: Setting, training: Training) -> dict[tuple[int, object, object], list[int]]:
    """The ranks of each class by their rank of the pipeline, what else forwards differ by, and their parts of what is shared."""
    topology, scheme = setting.topology, setting.layouts
    shape, replicas = topology.shape, replica_axes(topology.shape)
    layouts = list(_tensors(setting))
    shares = [(layout.sharded_over(replicas), whole) for layout, whole in layouts if replicas]  # the larger ones come first

    @cache
    def block(layout: Layout, whole: tuple[int, ...], at: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
        return layout.local_shape(whole, shape, {**dict.fromkeys(shape, 0), **dict(at)})

    def blocks(of: list[tuple[Layout, tuple[int, ...]]], at: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            block(layout, whole, tuple((axis, at[axis]) for axis in (*layout.axes, *layout.root_only))) for layout, whole in of
        )

    ranks: dict[tuple[int, object, object], list[int]] = {}
    for rank in range(topology.size):
        at = topology.coordinates_of(rank)
        first = tuple(at[axis] == 0 for axis in scheme.residual.dims[1])
        role = setting.contexts.role(at.get("cp", 0)), at.get("ep", 0)
        alone = rank if setting.load is not None and setting.load.by_rank else None
        inner = blocks(layouts, at), first, (role, alone), _inside(topology, at, setting.ranks_per_node)
        own = blocks(shares, at), training.shares(setting, rank)
        ranks.setdefault((at.get("pp", 0), inner, own), []).append(rank)
    return ranks


def even(setting: Setting) -> bool:
    """Return whether the blocks of all activations and parameters have the same shapes on all ranks: larger parts come first."""
    topology = setting.topology
    ends = [topology.coordinates_of(rank) for rank in (0, topology.size - 1)]
    shapes = ([layout.local_shape(whole, topology.shape, at) for at in ends] for layout, whole in _tensors(setting))
    return all(first == last for first, last in shapes)


def _tensors(setting: Setting) -> Iterable[tuple[Layout, tuple[int, ...]]]:
    """The layouts and shapes of activations, of the positions of a context, and of parameters."""
    scheme, config, batch = setting.layouts, setting.model, setting.batch
    s = setting.contexts.local(config.sequence)
    stream, inner = scheme.residual, scheme.after_linear(scheme.residual)
    h, f, v = config.hidden, config.ffn_dim, config.vocabulary
    a, kv = config.attention_width, 2 * config.num_kv_heads * config.head_size
    widths = {a, f, config.expert_width, *([config.shared_width] if config.shared_width else [])}
    yield stream, (batch, s, h)
    yield Layout(*scheme.lookup.tokens.dims), (batch, s)
    yield scheme.table(stream), (v, h)
    yield scheme.pooled, (batch, h)
    yield scheme.vector(stream), (h,)
    heads = heads_of(config, scheme)
    for columns, together in ((a, heads.of_q), (kv if config.grouped else 3 * a, heads.of_kv)):
        if together > 1:
            yield scheme.after_linear(stream, together), (batch, s, columns)
            yield scheme.weight(scheme.after_linear(stream, together)), (columns, h)
    for columns in sorted({h, a + kv, v, *widths}):
        yield inner, (batch, s, columns)
        yield scheme.weight(stream), (h, columns)
        yield scheme.vector(inner), (columns,)
    for rows in sorted(widths):
        yield scheme.weight(inner, scheme.spec.transposed_down and rows != a), (rows, h)


def _inside(topology: Topology, at: Mapping[str, int], ranks_per_node: int) -> tuple[str, ...]:
    """The axes whose members share the node of the rank at `at`."""
    if ranks_per_node == 1:
        return ()
    if ranks_per_node >= topology.size:
        return tuple(topology.shape)

    def nodes(name: str) -> set[int]:
        return {topology.rank_of({**at, name: index}) // ranks_per_node for index in range(topology.shape[name])}

    return tuple(name for name in topology.shape if len(nodes(name)) == 1)
