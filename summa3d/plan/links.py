"""Loads of links: what the busiest port of each level carries when all groups of an axis communicate at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations
from math import prod
from typing import NamedTuple

from ..cluster import Level
from ..comm.topology import Topology, divisors

PATTERNS = ("ring", "chain", "pairs", "next")
"""Who sends to whom in a group: each member to the next and the last to the first; from a root through all members; each to each;
each to the next alone."""
Ports = tuple[tuple[int, int], ...]
"""(size, ports) of each level, innermost first: what loads depend on of a cluster. They do not depend on its speeds."""


Carried = tuple[dict[tuple[int, int], float], dict[tuple[int, int], float], tuple[int, ...]]


class PortUse(NamedTuple):
    """What a port of a level carries for each of several flights, in one direction or in both together."""

    level: int
    both_ways: bool
    loads: tuple[float, ...]


class Load(NamedTuple):
    """Loads of the levels, innermost first, where every edge carries one byte.

    one_way : the most that a port carries in one direction. both_ways : the most in both together. hops : the edges of the group
    that has most of them.
    """

    one_way: tuple[float, ...]
    both_ways: tuple[float, ...]
    hops: tuple[int, ...]


def loads(topology: Topology, axis: str, levels: Sequence[Level], pattern: str) -> tuple[tuple[Load, int], ...]:
    """The loads of a pattern along an axis, each with the number of roots that it holds for.

    Only a chain has roots: all members in turn, as the panels of SUMMA come from all. Members are visited in the order of their
    ranks, as NCCL orders its rings by place. An edge loads the ports of the innermost level that joins its ends. Where the
    members of a group in a unit have several ports, the edge is spread over as many as both ends have: one ring for each port.
    """
    ports = tuple((level.size, level.ports) for level in levels)
    digits = _digits(topology, axis, [size for size, _ in ports if size])
    shape = tuple((str(place), radix) for place, (_, radix) in enumerate(digits))
    plane = "·".join(str(place) for place, (inside, _) in enumerate(digits) if inside)
    return _loads(shape, tuple(name for name, _ in shape), tuple((name, 1) for name, _ in shape), plane, ports, pattern)


def _digits(topology: Topology, axis: str, sizes: Sequence[int]) -> list[tuple[bool, int]]:
    """(Whether it is of the axis, radix) of each digit of a rank, fastest first: all that loads depend on of a topology.

    Neighbours of one kind are one digit. What is outside the axis and slower than it repeats units of links; only as many as fill
    them are kept.
    """
    inside, found = axis.split("·"), [(False, 1)]
    radices = [(name, topology.tile[name]) for name in topology.order]
    radices += [(name, topology.shape[name] // topology.tile[name]) for name in topology.order]
    for name, radix in radices:
        if found[-1][0] == (name in inside):
            found[-1] = found[-1][0], found[-1][1] * radix
        elif radix > 1:
            found.append((name in inside, radix))
    if not found[-1][0]:
        ranks, outer = prod(radix for _, radix in found[:-1]), found[-1][1]
        fewest = next((many for many in divisors(outer) if all(ranks * many % size == 0 for size in sizes)), outer)
        found[-1] = False, fewest
    return found


def busy_ports(topology: Topology, flights: Sequence[tuple[str, str]], levels: Sequence[Level]) -> list[PortUse]:
    """What ports carry for flights, each an axis and a pattern, of which every edge carries one byte; ports in use alike once.

    A chain is that from its first member.
    """
    ports = tuple((level.size, level.ports) for level in levels)
    shape, tile = tuple(topology.shape.items()), tuple(topology.tile.items())
    carried = [_carried(shape, topology.order, tile, axis, ports, pattern, 0) for axis, pattern in flights]
    found: dict[PortUse, None] = {}
    for key in dict.fromkeys(key for out, into, _ in carried for key in (*out, *into)):
        sent = tuple(out.get(key, 0.0) for out, _, _ in carried)
        received = tuple(into.get(key, 0.0) for _, into, _ in carried)
        both = tuple(map(sum, zip(sent, received, strict=True)))
        found |= dict.fromkeys((PortUse(key[0], False, sent), PortUse(key[0], False, received), PortUse(key[0], True, both)))
    return list(found)


@cache
def _loads(
    shape: tuple[tuple[str, int], ...],
    order: tuple[str, ...],
    tile: tuple[tuple[str, int], ...],
    axis: str,
    ports: Ports,
    pattern: str,
) -> tuple[tuple[Load, int], ...]:
    roots = range(prod(dict(shape).get(name, 1) for name in axis.split("·"))) if pattern == "chain" else (0,)
    return tuple(Counter(_load(_carried(shape, order, tile, axis, ports, pattern, root)) for root in roots).items())


@cache
def _carried(
    shape: tuple[tuple[str, int], ...],
    order: tuple[str, ...],
    tile: tuple[tuple[str, int], ...],
    axis: str,
    ports: Ports,
    pattern: str,
    root: int,
) -> Carried:
    """What each port, by its level and number, sends and receives; and the hops of each level."""
    out: defaultdict[tuple[int, int], float] = defaultdict(float)
    into: defaultdict[tuple[int, int], float] = defaultdict(float)
    hops = [0] * len(ports)
    for group in members(Topology(dict(shape), order, dict(tile)), axis):
        used = [_ports_used(group, ports, level) for level in range(len(ports))]
        found = [0] * len(ports)
        for source, target, share in _edges(group[root:] + group[:root], pattern):
            level = level_of(source, target, ports)
            found[level] += 1
            unit = ports[level - 1][0] if level else 1
            ends = used[level][source // unit], used[level][target // unit]
            many = min(map(len, ends))
            for end, total in zip(ends, (out, into), strict=True):
                for port in end[:many]:
                    total[level, port] += share / many
        hops = list(map(max, hops, found))
    return dict(out), dict(into), tuple(hops)


def _load(carried: Carried) -> Load:
    out, into, hops = carried
    one_way, both = [0.0] * len(hops), [0.0] * len(hops)
    for key in {*out, *into}:
        directions = out.get(key, 0.0), into.get(key, 0.0)
        one_way[key[0]], both[key[0]] = max(one_way[key[0]], *directions), max(both[key[0]], sum(directions))
    return Load(tuple(one_way), tuple(both), hops)


def members(topology: Topology, axis: str) -> list[list[int]]:
    """The ranks of every group of an axis, or of a plane such as "x·y", ascending."""
    groups: dict[tuple[int, ...], list[int]] = {}
    inside = axis.split("·")
    for rank in range(topology.size):
        at = topology.coordinates_of(rank)
        groups.setdefault(tuple(index for name, index in at.items() if name not in inside), []).append(rank)
    return list(groups.values())


def level_of(source: int, target: int, ports: Ports) -> int:
    """The innermost level that joins two ranks."""
    return next((level for level, (size, _) in enumerate(ports) if size and source // size == target // size), len(ports) - 1)


def _ports_used(group: list[int], ports: Ports, level: int) -> dict[int, list[int]]:
    """Unit of the level below → the ports that members of the group have there."""
    unit, many = (ports[level - 1][0] if level else 1), ports[level][1]
    found: dict[int, set[int]] = {}
    for rank in group:
        found.setdefault(rank // unit, set()).add(rank // unit * many + rank % unit * many // unit)
    return {key: sorted(value) for key, value in found.items()}


def _edges(group: list[int], pattern: str) -> Iterator[tuple[int, int, float]]:
    """The edges of a group, each with its part of the bytes that a member sends."""
    if pattern == "pairs":
        for source, target in permutations(group, 2):
            yield source, target, 1 / (len(group) - 1)
        return
    for source, target in zip(group, [*group[1:], group[0]], strict=True):
        if pattern == "ring" or target != group[0]:
            yield source, target, 1.0
