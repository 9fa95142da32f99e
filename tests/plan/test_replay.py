"""Prices of operations and their replay, against ends known by hand."""

from __future__ import annotations

import pytest

from summa3d.cluster import Cluster, load
from summa3d.comm.topology import Topology
from summa3d.dry.record import Op
from summa3d.plan.price import Prices
from summa3d.plan.replay import Work, replay

AXES = Topology.checked({"x": 4, "y": 2}, ["x", "y"])


def plain(**more: float) -> Cluster:
    """Ten operations or bytes take 1e-8 s; links of 1e9 bytes/s, no launches or latencies."""
    numbers = {"peak.float32": 1e9, "product.efficiency": 1.0, "device.memory_bandwidth": 1e9, "elements.efficiency": 1.0}
    numbers |= dict.fromkeys(("collectives.launch", "node.latency", "network.latency"), 0.0)
    numbers |= {f"{level}.{key}": value for level in ("node", "network") for key, value in (("bandwidth", 1e9), ("duplex", 2.0))}
    return load("longhorn").replaced({**numbers, **more}, "assumed")


def product(side: int, small: int | None = None) -> Op:
    return Op("product", "forward", "layer", "nn", side, side, small or side, dtype="float32")


def elements(size: int) -> Op:
    return Op("elements", "forward", "layer", "add", read=size, written=0)


def move(number: int, axis: str, words: int, name: str = "all_gather") -> Op:
    return Op("move", "forward", "layer", name, axis=axis, words=words, dtype="float32", id=number)


def wait(number: int) -> Op:
    return Op("wait", "forward", "layer", "", id=number)


def test_a_product_runs_at_its_peak_or_at_the_speed_of_its_smallest_side_or_of_memory() -> None:
    prices = Prices(plain(), AXES)
    assert prices.seconds(product(100)) == pytest.approx(2e-3)
    half = Prices(plain(**{"product.half": 50}), AXES)
    assert half.seconds(product(100, 50)) == pytest.approx(2 * 1e-3)
    assert prices.seconds(product(100)._replace(read=3_000_000)) == pytest.approx(3e-3)
    assert Prices(plain(**{"elements.launch": 1e-5}), AXES).seconds(elements(1000)) == pytest.approx(1.1e-5)


@pytest.mark.parametrize(
    ("name", "axis", "words", "seconds"),
    [
        ("all_gather", "x", 3000, 12e-6),  # inside a node: 3 of 4 blocks over each edge
        ("reduce_scatter", "x", 3000, 12e-6),
        ("all_reduce", "x", 6000, 24e-6),
        ("all_gather", "y", 1000, 16e-6),  # 4 groups share the node's port
        ("broadcast", "x", 1000, 4e-6),
        ("reduce", "x", 750, 4e-6),  # 3/4 of the sum's words are received
        ("broadcast", "y", 1000, 16e-6),
        ("send", "y", 1000, 16e-6),
        ("all_gather", "x", 0, 0),
    ],
)
def test_a_communication_takes_its_volume_over_its_busiest_port(name: str, axis: str, words: int, seconds: float) -> None:
    cluster = plain(**{"collectives.chunk": 1})
    assert Prices(cluster, AXES).seconds(move(1, axis, words, name)) == pytest.approx(seconds, rel=4e-3)


def test_a_half_duplex_port_carries_both_ways_in_turn() -> None:
    one = Prices(plain(**{"network.duplex": 1.0}), AXES).seconds(move(1, "y", 1000))
    assert one == pytest.approx(2 * Prices(plain(), AXES).seconds(move(1, "y", 1000)))


def test_latency_grows_with_the_members_and_a_tree_with_their_logarithm() -> None:
    line = Topology.checked({"x": 64}, ["x"])
    cluster = plain(**{"network.latency": 1e-4})
    ring = Prices(cluster, line).seconds(move(1, "x", 63, "reduce_scatter"))
    assert ring == pytest.approx(63 * 16 / 64 * 1e-4, rel=1e-2)
    assert Prices(cluster, line).seconds(move(1, "x", 126, "all_reduce")) == pytest.approx(2 * 4 * 1e-4, rel=1e-2)


GATHER = move(1, "x", 3000)  # 12 µs
TRACE = (GATHER, elements(10_000), wait(1), elements(5_000))


def test_communication_runs_behind_arithmetic_until_it_is_waited_for() -> None:
    span = replay(TRACE, Prices(plain(), AXES))
    assert (span.seconds, span.compute, span.exposed["x"]) == (pytest.approx(17e-6), pytest.approx(15e-6), pytest.approx(2e-6))
    assert span.hidden["x"] == pytest.approx(10e-6)


def test_without_overlap_the_time_is_the_sum() -> None:
    prices = Prices(plain(), AXES)
    span = replay(TRACE, prices, overlap=False)
    assert span.seconds == pytest.approx(27e-6) == pytest.approx(sum(prices.seconds(op) for op in TRACE))
    assert Work.of(AXES, TRACE, 3).seconds(plain()) == pytest.approx(3 * span.seconds)


def test_one_axis_takes_its_communications_in_turn_and_two_run_beside_each_other() -> None:
    both = (move(1, "x", 3000), move(2, "x", 3000), wait(1), wait(2))
    assert replay(both, Prices(plain(), AXES)).seconds == pytest.approx(24e-6)
    beside = (move(1, "x", 3000), move(2, "y", 1000), wait(1), wait(2))
    span = replay(beside, Prices(plain(), AXES))
    assert span.seconds == pytest.approx(16e-6) and span.exposed == pytest.approx({"x": 12e-6, "y": 4e-6})


def test_what_is_still_in_flight_at_the_end_is_waited_for() -> None:
    assert replay((GATHER, elements(1000)), Prices(plain(), AXES)).seconds == pytest.approx(12e-6)


def test_infinite_links_leave_the_arithmetic_and_half_the_bandwidth_doubles_what_is_exposed() -> None:
    fast = plain(**{"node.bandwidth": 1e14, "network.bandwidth": 1e14})
    span = replay(TRACE, Prices(fast, AXES))
    assert span.seconds == pytest.approx(span.compute, rel=1e-5)
    moves = (move(1, "x", 3000), move(2, "y", 1000), wait(1), wait(2), move(3, "x", 5000), wait(3))
    slow = plain(**{"node.bandwidth": 5e8, "network.bandwidth": 5e8})
    exposed, doubled = (replay(moves, Prices(cluster, AXES)).exposed for cluster in (plain(), slow))
    assert doubled == pytest.approx({axis: 2 * seconds for axis, seconds in exposed.items()})


def test_half_the_bytes_of_a_word_halve_exactly_what_depends_on_bytes() -> None:
    prices = Prices(plain(), AXES)
    assert prices.seconds(GATHER._replace(dtype="bfloat16")) == pytest.approx(prices.seconds(GATHER) / 2)
    assert prices.seconds(elements(500)) == pytest.approx(prices.seconds(elements(1000)) / 2)
