"""Loads of links: what the busiest port of each level carries when all groups of an axis communicate at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from ..cluster import Level
from ..comm.topology import RUNS, Topology, divisors

PATTERNS = ("ring", "chain", "pairs", "next")
"""Who sends to whom in a group: each member to the next and the last to the first; from a root through all members; each to each;
each to the next alone."""
Ports = tuple[tuple[int, int], ...]
"""(size, ports) of each level, innermost first: what loads depend on of a cluster. They do not depend on its speeds."""


DIGITS = 12
"""Of loads: thirds of a byte add up to whole ones."""


class TopologyKey(NamedTuple):
    """A topology as the key of a cache."""

    shape: tuple[tuple[str, int], ...]
    order: tuple[str, ...]
    tile: tuple[tuple[str, int], ...]


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
    part = part_of(axis)
    if not part.size and not part.indices:
        return _loads_along(tuple(_digits(topology, axis, [size for size, _ in ports if size])), ports, pattern)
    placement = TopologyKey(tuple(topology.shape.items()), topology.order, tuple(topology.tile.items()))
    return _loads(placement, axis, ports, pattern)


class GroupLabel(NamedTuple):
    """What the label of an axis says: its names, the size of runs of consecutive members, the places of those members alone."""

    names: tuple[str, ...]
    size: int = 0
    indices: tuple[int, ...] = ()


@cache
def part_of(label: str) -> GroupLabel:
    """The names of an axis or plane, and which members of it the label is of (`Grid.contiguous_sub_axis`, `Grid.sub_axis`).

    The label of one member alone is a name.

    >>> part_of("x·y"), part_of("cp·runs of 2").size, part_of("cp=0+2").indices
    (GroupLabel(names=('x', 'y'), size=0, indices=()), 2, (0, 2))
    """
    *names, last = label.split("·")
    if last.startswith(RUNS):
        return GroupLabel(tuple(names), size=int(last.removeprefix(RUNS)))
    name, _, places = last.partition("=")
    if "+" not in places:
        return GroupLabel((*names, last))
    return GroupLabel((*names, name), indices=tuple(map(int, places.split("+"))))


def group_size(shape: Mapping[str, int], label: str) -> int:
    """The members of each group of an axis, a plane, or a part of one, on a grid of this shape."""
    part = part_of(label)
    return part.size or len(part.indices) or prod(shape.get(name, 1) for name in part.names)


@cache
def _loads_along(digits: tuple[tuple[bool, int], ...], ports: Ports, pattern: str) -> tuple[tuple[Load, int], ...]:
    """The loads along an axis that a topology's digits (`_digits`) describe."""
    shape = tuple((str(place), radix) for place, (_, radix) in enumerate(digits))
    plane = "·".join(str(place) for place, (inside, _) in enumerate(digits) if inside)
    placement = TopologyKey(shape, tuple(name for name, _ in shape), tuple((name, 1) for name, _ in shape))
    return _loads(placement, plane, ports, pattern)


def _digits(topology: Topology, axis: str, sizes: Sequence[int]) -> list[tuple[bool, int]]:
    """(Whether it is of the axis, radix) of each digit of a rank, fastest first: all that loads depend on of a topology.

    Neighbours of one kind are one digit. What is outside the axis and slower than it repeats units of links; only as many as fill
    them are kept.
    """
    inside, result = axis.split("·"), [(False, 1)]
    radices = [(name, topology.tile[name]) for name in topology.order]
    radices += [(name, topology.shape[name] // topology.tile[name]) for name in topology.order]
    for name, radix in radices:
        if result[-1][0] == (name in inside):
            result[-1] = result[-1][0], result[-1][1] * radix
        elif radix > 1:
            result.append((name in inside, radix))
    if not result[-1][0]:
        ranks, outer = prod(radix for _, radix in result[:-1]), result[-1][1]
        fewest = next((many for many in divisors(outer) if all(ranks * many % size == 0 for size in sizes)), outer)
        result[-1] = False, fewest
    return result


def busy_ports(topology: Topology, flights: Sequence[tuple[str, str]], levels: Sequence[Level]) -> list[PortUse]:
    """Bytes that ports carry for flights, each an axis and a pattern, of which each edge carries a byte; ports in use alike once.

    A chain is that from its first member.
    """
    ports = tuple((level.size, level.ports) for level in levels)
    placement = TopologyKey(tuple(topology.shape.items()), topology.order, tuple(topology.tile.items()))
    flows = [_flow(placement, axis, ports, pattern) for axis, pattern in flights]
    ends = [
        flow.from_root(0) if pattern == "chain" else (flow.out, flow.into)
        for flow, (_, pattern) in zip(flows, flights, strict=True)
    ]
    sent, received = np.array([end[0] for end in ends]).round(DIGITS), np.array([end[1] for end in ends]).round(DIGITS)
    result: dict[PortUse, None] = {}
    used = np.flatnonzero((sent > 0).any(0) | (received > 0).any(0))
    levels_of = flows[0].level_of_port[used]
    _, first = np.unique(np.vstack([levels_of, sent[:, used], received[:, used]]), axis=1, return_index=True)
    for port in used[np.sort(first)]:
        level = int(flows[0].level_of_port[port])
        for both_ways, loads in ((False, sent[:, port]), (False, received[:, port]), (True, sent[:, port] + received[:, port])):
            result[PortUse(level, both_ways, tuple(loads.tolist()))] = None
    return list(result)


@cache
def _loads(placement: TopologyKey, axis: str, ports: Ports, pattern: str) -> tuple[tuple[Load, int], ...]:
    flow = _flow(placement, axis, ports, pattern)
    if pattern != "chain":
        return ((flow.load(flow.out, flow.into, flow.hops.max(0)), 1),)
    return tuple(Counter(flow.load(*flow.from_root(root)) for root in range(flow.edges)).items())


@dataclass(frozen=True)
class Flow:
    """The edges of all groups of an axis, of which each carries one byte, and what ports carry for them.

    Ports are numbered through all levels. edges : of a group. out_ports, into_ports, shares : [groups, edges, ports of an edge],
    a port and the part of the byte that passes it. level_of_edge : [groups, edges]. out, into : [ports], of all edges.
    hops : [groups, levels].
    """

    edges: int
    level_of_port: np.ndarray
    out_ports: np.ndarray
    into_ports: np.ndarray
    shares: np.ndarray
    level_of_edge: np.ndarray
    out: np.ndarray
    into: np.ndarray
    hops: np.ndarray

    def from_root(self, root: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`out`, `into` and the most hops of each level of a chain from the member `root`: a ring without the edge to it."""
        closing = (root - 1) % self.edges
        size, shares = len(self.out), self.shares[:, closing].ravel()
        out = self.out - np.bincount(self.out_ports[:, closing].ravel(), shares, size)
        into = self.into - np.bincount(self.into_ports[:, closing].ravel(), shares, size)
        hops = self.hops.copy()
        hops[np.arange(len(hops)), self.level_of_edge[:, closing]] -= 1
        return out, into, hops.max(0)

    def load(self, out: np.ndarray, into: np.ndarray, hops: np.ndarray) -> Load:
        """The busiest port of each level."""

        def most(of: np.ndarray) -> tuple[float, ...]:
            return tuple(round(float(of[self.level_of_port == level].max()), DIGITS) for level in range(len(hops)))

        return Load(most(np.maximum(out, into)), most(out + into), tuple(int(many) for many in hops))


@cache
def _flow(placement: TopologyKey, axis: str, ports: Ports, pattern: str) -> Flow:
    topology = Topology(dict(placement.shape), placement.order, dict(placement.tile))
    groups = _groups(topology, axis)
    many = groups.shape[1]
    ends, part = _edges(many, pattern)
    sources, targets = groups[:, ends[0]], groups[:, ends[1]]
    level = level_of(sources, targets, ports)
    units = [ports[index - 1][0] if index else 1 for index in range(len(ports))]
    sizes = [-(-topology.size // unit) * rails for unit, (_, rails) in zip(units, ports, strict=True)]
    first = np.concatenate(([0], np.cumsum(sizes)))
    most = max(rails for _, rails in ports)
    out_ports, into_ports = (np.zeros((*level.shape, most), int) for _ in range(2))
    shares = np.zeros((*level.shape, most))
    for index, (unit, (_, rails)) in enumerate(zip(units, ports, strict=True)):
        rail, of_unit = _rails(groups, unit, rails)
        a, b = ends
        used = np.minimum(of_unit[:, a], of_unit[:, b])
        for slot in range(rails):
            here = (level == index) & (slot < used)
            out_ports[here, slot] = (first[index] + rail[:, a, slot])[here]
            into_ports[here, slot] = (first[index] + rail[:, b, slot])[here]
            shares[here, slot] = part / used[here]
    out, into = (np.bincount(of.ravel(), shares.ravel(), first[-1]) for of in (out_ports, into_ports))
    hops = np.stack([(level == index).sum(1) for index in range(len(ports))], axis=1)
    return Flow(many, np.repeat(np.arange(len(ports)), sizes), out_ports, into_ports, shares, level, out, into, hops)


def _rails(groups: np.ndarray, unit: int, rails: int) -> tuple[np.ndarray, np.ndarray]:
    """[groups, members, rails] the ports that members of the group have in a member's unit, ascending; and how many these are."""
    number, port = groups // unit, groups // unit * rails + groups % unit * rails // unit
    starts, fresh = (np.diff(of, axis=1, prepend=-1) != 0 for of in (number, port))  # of a unit, and of a port
    place = np.cumsum(starts, axis=1) - 1
    slot = np.cumsum(fresh, axis=1) - 1
    slot -= np.maximum.accumulate(np.where(starts, slot, 0), axis=1)
    result, many = np.zeros((*groups.shape, rails), int), np.zeros(groups.shape, int)
    rows, columns = np.nonzero(fresh)
    units = place[rows, columns]
    result[rows, units, slot[rows, columns]] = port[rows, columns]
    np.add.at(many, (rows, units), 1)
    every = np.arange(len(groups))[:, None]
    return result[every, place], many[every, place]


def members(topology: Topology, axis: str) -> list[list[int]]:
    """The ranks of every group of an axis, or of a plane such as "x·y", ascending."""
    result: list[list[int]] = _groups(topology, axis).tolist()
    return result


def _groups(topology: Topology, axis: str) -> np.ndarray:
    """[groups, members] ranks, ascending.

    Members at places of an axis that are evenly apart, all along it, have others like them at all other places.
    """
    part = part_of(axis)
    inside, wanted = part.names, np.array(part.indices)
    digits = [(name in inside, topology.tile[name]) for name in topology.order]
    digits += [(name in inside, topology.shape[name] // topology.tile[name]) for name in topology.order]
    ranks = np.arange(topology.size).reshape([radix for _, radix in reversed(digits)])
    of_axis = [place for place, (mine, _) in enumerate(reversed(digits)) if mine]
    moved = np.moveaxis(ranks, of_axis, range(-len(of_axis), 0)) if of_axis else ranks[..., None]
    many = prod(radix for mine, radix in digits if mine)
    groups = moved.reshape(-1, many)
    if part.size:
        return groups.reshape(-1, part.size)
    if not part.indices:
        return groups
    apart = many // len(wanted)
    if many % len(wanted) == 0 and (np.diff(wanted) == apart).all():
        return groups.reshape(-1, len(wanted), apart).swapaxes(1, 2).reshape(-1, len(wanted))
    return groups[:, wanted]


def level_of(source: np.ndarray, target: np.ndarray, ports: Ports) -> np.ndarray:
    """The innermost level that joins two ranks, of each pair."""
    level = np.full(np.shape(source), len(ports) - 1)
    for index, (size, _) in reversed([*enumerate(ports)]):
        if size:
            level[source // size == target // size] = index
    return level


def _edges(many: int, pattern: str) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """The places of both ends of the edges of a group of so many, and the part of the bytes of a member that each carries."""
    if pattern == "pairs":
        sources, targets = np.nonzero(~np.eye(many, dtype=bool))
        return (sources, targets), 1 / max(1, many - 1)
    sources = np.arange(many - (pattern == "next"))
    return (sources, (sources + 1) % many), 1.0
