"""Loads of links are what a count of every byte over every port gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest

from summa3d.cluster import Level
from summa3d.comm.topology import Topology, divisors
from summa3d.plan.links import busy_ports, group_size, loads, members

BYTES = 2520
"""Bytes of a message: every number of rails up to 10, and 12, divides it."""


def sent(group: list[int], pattern: str, root: int) -> Iterator[tuple[int, int]]:
    """The messages of a collective, simulated step by step."""
    n = len(group)
    if pattern == "ring":  # an all-gather: in every step each member passes on the block that it received last
        holds = [{index} for index in range(n)]
        for step in range(n - 1):
            for index in range(n):
                assert (index - step) % n in holds[index]
                holds[(index + 1) % n].add((index - step) % n)
                yield group[index], group[(index + 1) % n]
        assert all(len(blocks) == n for blocks in holds)
    elif pattern == "chain":  # a broadcast
        for hop in range(n - 1):
            yield group[(root + hop) % n], group[(root + hop + 1) % n]
    elif pattern == "next":
        yield from pairwise(group)
    else:
        yield from ((one, other) for one in group for other in group if one != other)


def counted(topology: Topology, axis: str, levels: list[Level], pattern: str, root: int) -> list[tuple[Fraction, Fraction]]:
    """Per level, the bytes of the busiest port one way, and both ways together, for each byte that an edge carries."""
    places = {rank: topology.coordinates_of(rank) for rank in range(topology.size)}
    out: Counter[tuple[int, int]] = Counter()
    into: Counter[tuple[int, int]] = Counter()
    others = [{name: index for name, index in at.items() if name != axis} for at in places.values()]
    for group in {tuple(rank for rank, at in places.items() if {**at, **other} == at) for other in others}:
        for source, target in sent(list(group), pattern, root):
            level = 0
            while levels[level].size and source // levels[level].size != target // levels[level].size:
                level += 1
            unit = levels[level - 1].size if level else 1
            many = levels[level].ports

            def ports(end: int, unit: int = unit, many: int = many, group: tuple[int, ...] = group) -> list[int]:
                neighbours = [rank for rank in group if rank // unit == end // unit]
                return sorted({end // unit * many + (rank - end // unit * unit) * many // unit for rank in neighbours})

            rails = min(len(ports(source)), len(ports(target)))
            for rail in range(rails):
                out[level, ports(source)[rail]] += BYTES // rails
                into[level, ports(target)[rail]] += BYTES // rails
    size = topology.shape[axis]
    edge = BYTES * ({"ring": size - 1, "pairs": size - 1}.get(pattern, 1))
    found = []
    for level in range(len(levels)):
        ends = {key for key in (*out, *into) if key[0] == level}
        one_way = max((max(out[key], into[key]) for key in ends), default=0)
        found.append((Fraction(one_way, edge), Fraction(max((out[key] + into[key] for key in ends), default=0), edge)))
    return found


def cases() -> Iterator[tuple[Topology, str, list[Level], str, int]]:
    draw = random.Random(17)
    while True:
        shape = {name: draw.choice((1, 2, 2, 3, 4)) for name in "xyz"}
        order = draw.sample("xyz", 3)
        tile = {name: draw.choice(divisors(size)) for name, size in shape.items()}
        axis = draw.choice("xyz")
        if shape[axis] == 1:
            continue
        inner = draw.choice((2, 3, 4))
        levels = [Level("a", inner, 1, 1e9, 2, 0)]
        if draw.random() < 0.4:
            levels.append(Level("b", inner * draw.choice((2, 3)), draw.choice(divisors(inner)), 1e9, 2, 0))
        levels.append(Level("c", 0, draw.choice(divisors(levels[-1].size)), 1e9, 2, 0))
        pattern = draw.choice(("ring", "ring", "chain", "next", "pairs"))
        yield Topology.checked(shape, order, tile), axis, levels, pattern, draw.randrange(shape[axis])


def test_loads_are_those_of_a_count_of_all_bytes_over_all_ports() -> None:
    seen = Counter()
    for (topology, axis, levels, pattern, root), _ in zip(cases(), range(300), strict=False):
        roots = range(topology.shape[axis]) if pattern == "chain" else [0]
        want = [counted(topology, axis, levels, pattern, one) for one in (roots if topology.size <= 8 else [root])]
        found = loads(topology, axis, levels, pattern)
        have = [list(zip(load.one_way, load.both_ways, strict=True)) for load, _ in found]
        assert sum(times for _, times in found) == len(roots)
        for one in want:
            flat = pytest.approx([float(x) for pair in one for x in pair])
            assert any(flat == [x for pair in load for x in pair] for load in have)
        seen[pattern, len(levels)] += 1
    assert len(seen) == 8


def test_eight_groups_share_one_port_and_spread_over_eight() -> None:
    grid = Topology.checked({"x": 8, "y": 8}, ["x", "y"])
    node = Level("node", 8, 1, 1e9, 2, 0)
    for ports, load in ((1, 8.0), (8, 1.0), (4, 2.0)):
        ((found, _),) = loads(grid, "y", [node, Level("network", 0, ports, 1e9, 2, 0)], "ring")
        assert found.one_way == (0.0, load) and found.hops == (0, 8)
    ((inside, _),) = loads(grid, "x", [node, Level("network", 0, 1, 1e9, 2, 0)], "ring")
    assert inside.one_way == (1.0, 0.0) and inside.hops == (8, 0)
    ((rack, _),) = loads(grid, "y", [Level("tray", 4, 1, 1e9, 2, 0), Level("rack", 72, 4, 1e9, 2, 0), node], "ring")
    assert rack.one_way == (0.0, 1.0, 0.0)


def test_a_plane_is_the_axis_of_its_ranks() -> None:
    grid = Topology.checked({"x": 2, "y": 2, "z": 2}, ["x", "y", "z"])
    levels = [Level("node", 4, 1, 1e9, 2, 0), Level("network", 0, 1, 1e9, 2, 0)]
    flat = Topology.checked({"a": 4, "z": 2}, ["a", "z"])
    assert loads(grid, "x·y", levels, "ring") == loads(flat, "a", levels, "ring")


def test_a_chain_has_one_hop_less_than_a_ring_where_it_ends() -> None:
    levels = [Level("node", 2, 1, 1e9, 2, 0), Level("network", 0, 1, 1e9, 2, 0)]
    grid = Topology.checked({"x": 4, "y": 2}, ["x", "y"])
    found = loads(grid, "x", levels, "chain")  # 0→1→2→3 ends in a node; 1→2→3→0 ends between nodes
    assert sorted((load.hops, roots) for load, roots in found) == [((1, 2), 2), ((2, 1), 2)]
    assert [load.hops for load, _ in loads(grid, "x", levels, "ring")] == [(2, 2)]
    line = Topology.checked({"x": 3}, ["x"])  # 0→1 in a node, 1→2 out of it, and nothing back
    both = [use.loads for use in busy_ports(line, [("x", "chain")], levels) if use.both_ways and use.level == 1]
    assert both == [(1.0,)]


@pytest.mark.parametrize("tile", [{}, {"cp": 2, "dp": 2}])
def test_parts_of_an_axis_have_the_members_and_loads_of_a_grid_that_has_them_as_axes(tile: dict[str, int]) -> None:
    """Contexts in groups that exchange heads, and rings of these; both ends of a pipeline."""
    whole = Topology.checked({"y": 3, "cp": 6, "dp": 2, "pp": 4}, tile=tile)
    levels = [
        Level("device", 2, 1, 1e11, 1.0, 1e-6),
        Level("node", 12, 2, 1e10, 1.0, 1e-6),
        Level("network", 0, 1, 1e9, 1.0, 1e-5),
    ]
    every = members(whole, "cp")
    runs = sorted(group[start : start + 2] for group in every for start in (0, 2, 4))
    rings = sorted(group[start::2] for group in every for start in (0, 1))
    assert sorted(members(whole, "cp·runs of 2")) == runs and group_size(whole.shape, "cp·runs of 2") == 2
    for label in ("cp=0+2+4", "cp=1+3+5"):
        assert sorted(members(whole, label)) == rings and group_size(whole.shape, label) == 3
    assert sorted(members(whole, "pp=0+3")) == sorted([group[0], group[3]] for group in members(whole, "pp"))
    if not tile:
        parts = Topology.checked({"y": 3, "heads": 2, "rings": 3, "dp": 2, "pp": 4}, ["y", "heads", "rings", "dp", "pp"])
        for pattern in ("ring", "chain", "pairs"):
            assert loads(whole, "cp·runs of 2", levels, pattern) == loads(parts, "heads", levels, pattern)
            assert loads(whole, "cp=0+2+4", levels, pattern) == loads(parts, "rings", levels, pattern)
