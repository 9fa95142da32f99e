"""Placement: prices follow the loads of links when order and tile change, and groups behind one port share it."""

from __future__ import annotations

import pytest

from summa3d.cluster import Cluster, load
from summa3d.comm.topology import Topology
from summa3d.dry.record import Op
from summa3d.plan.links import loads
from summa3d.plan.price import Prices

MANY = 1 << 33
"""Words beside which no latency counts."""


def seconds(cluster: Cluster, topology: Topology, axis: str, name: str = "all_gather") -> float:
    return Prices(cluster, topology).seconds(Op("move", "forward", "", name, axis=axis, words=MANY, dtype="float32", id=1))


@pytest.mark.parametrize("name", ["all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize(
    ("order", "tile"),
    [("xyz", {}), ("zyx", {}), ("yxz", {}), ("xyz", {"x": 2, "y": 2}), ("zyx", {"z": 2, "x": 2}), ("xyz", {"y": 2, "z": 4})],
)
def test_a_price_is_that_of_the_busiest_port_under_every_order_and_tile(name: str, order: str, tile: dict[str, int]) -> None:
    cluster = load("frontier")
    topology = Topology.checked({"x": 4, "y": 2, "z": 8}, list(order), tile)
    pattern = {"all_gather": "ring", "broadcast": "chain", "all_to_all": "pairs"}[name]
    for axis in "xyz":
        found = loads(topology, axis, cluster.levels, pattern)
        edges = [(level.bandwidth, level.bandwidth * level.duplex) for level in cluster.levels]
        busiest = [
            max(max(one / way, both / ways) for one, both, (way, ways) in zip(load.one_way, load.both_ways, edges, strict=True))
            for load, times in found
            for _ in range(times)
        ]
        assert seconds(cluster, topology, axis, name) == pytest.approx(4 * MANY * sum(busiest) / len(busiest), rel=1e-2)


def test_what_lies_in_a_node_is_fast_and_a_tile_divides_that_among_axes() -> None:
    shape, cluster = {"x": 8, "y": 8}, load("selene").replaced({"network.ports": 1}, "assumed")
    rows, columns = (Topology.checked(shape, list(order)) for order in ("xy", "yx"))
    tiles = Topology.checked(shape, ["x", "y"], {"x": 2, "y": 4})
    in_rows, in_columns, in_tiles = ([seconds(cluster, one, axis) for axis in "xy"] for one in (rows, columns, tiles))
    assert in_rows == pytest.approx(in_columns[::-1]) and in_rows[0] < in_rows[1] / 50
    assert in_rows[0] < in_tiles[1] < in_tiles[0] < in_rows[1]
    assert in_tiles[0] / in_tiles[1] == pytest.approx(2, rel=1e-3)  # four groups of x and two of y cross a node's port


@pytest.mark.parametrize(("ports", "groups"), [(1, 8), (2, 4), (8, 1)])
def test_eight_groups_behind_ports_take_as_long_as_the_groups_of_one_port(ports: int, groups: int) -> None:
    cluster = load("selene").replaced({"network.ports": ports}, "assumed")
    eight = seconds(cluster, Topology.checked({"x": 8, "y": 8}, ["x", "y"]), "y")
    one = seconds(
        load("selene").replaced({"network.ports": 1, "node.size": 1}, "assumed"), Topology.checked({"y": 8}, ["y"]), "y"
    )
    assert eight == pytest.approx(groups * one, rel=1e-3)


def test_in_a_domain_of_72_no_group_shares_a_port_and_beyond_it_trays_do() -> None:
    cluster = load("gb200-nvl72")
    assert [level.size for level in cluster.levels] == [4, 72, 0]
    inside = Topology.checked({"x": 4, "y": 18}, ["x", "y"])
    assert seconds(cluster, inside, "y") == pytest.approx(4 * MANY / cluster.levels[1].bandwidth, rel=1e-2)
    beyond = Topology.checked({"x": 72, "y": 2}, ["x", "y"])
    ports = cluster.levels[2].ports
    assert seconds(cluster, beyond, "y") == pytest.approx(4 * MANY * 72 / ports / cluster.levels[2].bandwidth, rel=1e-2)
