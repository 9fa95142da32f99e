"""Prices of MPI between hosts: every byte of a tree and of an all-to-all, counted over the ports of nodes."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from summa3d.cluster import Cluster, read
from summa3d.comm.topology import Topology
from summa3d.dry.record import Op
from summa3d.plan.host import HostPrices
from summa3d.plan.price import Prices

PORT, WORDS = 1e6, 1 << 16


def cluster(node: int) -> Cluster:
    """Nodes in which everything is free, each with one port."""

    def number(value: float) -> dict[str, object]:
        return {"value": value, "source": "assumed"}

    levels = [
        {"name": "node", "size": number(node), "bandwidth": number(1e14), "latency": number(0.0)},
        {"name": "network", "bandwidth": number(PORT), "latency": number(0.0)},
    ]
    table = {
        "peak": {"float64": number(1e12)},
        "device": {"memory": number(1e9), "memory_bandwidth": number(1e12)},
        "product": {"efficiency": number(1.0)},
        "elements": {"efficiency": number(1.0)},
        "collectives": {"launch": number(0.0)},
        "level": levels,
        "band": {"percent": number(0.0)},
    }
    return read(table, "test")


def messages(prices: HostPrices, name: str, axis: str) -> float:
    """The price of a collective, in blocks of WORDS words over a port."""
    words = WORDS * (1 if name == "broadcast" else prices.topology.shape[axis] - 1)
    return prices.seconds(Op("move", "", "", name, axis=axis, words=words, dtype="float64")) * PORT / (8 * WORDS)


def busiest(topology: Topology, axis: str, node: int, edges: list[tuple[int, int]]) -> int:
    """The messages of the busiest port, where `edges` join places of every group of an axis at once."""
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for rank in range(topology.size):
        at = topology.coordinates_of(rank)
        if at[axis] == 0:
            group = sorted(topology.rank_of({**at, axis: index}) for index in range(topology.shape[axis]))
            for source, target in edges:
                if group[source] // node != group[target] // node:
                    out[group[source] // node] += 1
                    into[group[target] // node] += 1
    return max([*out.values(), *into.values(), 0])


@pytest.mark.parametrize("tile", [None, {"x": 2, "y": 2}])
@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_tree_and_an_all_to_all_load_ports_with_every_message_that_leaves_a_node(
    axis: str, tile: dict[str, int] | None
) -> None:
    topology = Topology.checked({"x": 4, "y": 4}, "yx", tile)
    prices = HostPrices(cluster(4), topology)
    trees = [
        busiest(topology, axis, 4, [(root, (root + 2) % 4)])
        + busiest(topology, axis, 4, [(root, (root + 1) % 4), ((root + 2) % 4, (root + 3) % 4)])
        for root in range(4)
    ]
    assert messages(prices, "broadcast", axis) == pytest.approx(sum(trees) / 4, abs=1e-3)
    assert messages(prices, "reduce", axis) == pytest.approx(sum(trees), abs=4e-3)  # of all four members' words
    everyone = busiest(topology, axis, 4, list(permutations(range(4), 2)))
    assert messages(prices, "reduce_scatter", axis) == pytest.approx(everyone, abs=1e-3)


def test_a_mesh_in_squares_sends_three_quarters_of_what_one_in_rows_sends() -> None:
    naive, bunched = (HostPrices(cluster(4), Topology.checked({"x": 4, "y": 4}, "yx", tile)) for tile in (None, {"x": 2, "y": 2}))
    assert messages(naive, "broadcast", "x") == pytest.approx(8) and messages(naive, "broadcast", "y") == pytest.approx(
        0, abs=1e-3
    )
    assert messages(bunched, "broadcast", "x") == messages(bunched, "broadcast", "y") == pytest.approx(3)


def test_a_tree_of_three_has_two_rounds_and_one_member_has_none() -> None:
    prices = HostPrices(cluster(1), Topology.checked({"x": 3, "y": 1}))
    assert messages(prices, "broadcast", "x") == pytest.approx(2)
    assert messages(prices, "broadcast", "y") == 0


@pytest.mark.parametrize(("words", "copies"), [(1 << 10, 2), (1 << 17, 2), (1 << 18, 1)])
def test_cores_copy_a_message_inside_a_node_and_none_that_leaves_it(words: int, copies: int) -> None:
    free = cluster(2)
    shared = free.replaced({"host.shared": 1.0, "host.slots": 2.0}, "assumed")
    inside, across = (Topology.checked({"in": one, "pp": 2, "out": 2}, ["in", "pp", "out"]) for one in (1, 2))
    op = Op("move", "forward", "", "send", axis="pp", words=words, dtype="float64")
    copied = 2 * copies * 8 * words / 1e12
    assert Prices(shared, inside).seconds(op) == pytest.approx(copied * shared.crowding(4))
    assert Prices(free, inside).seconds(op) == pytest.approx(8 * words / 1e14)
    assert Prices(shared, across).seconds(op) == pytest.approx(2 * 8 * words / PORT)  # two of a node through one port
