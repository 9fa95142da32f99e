"""Prices of operations and their replay, against ends known by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from summa3d.cluster import Cluster, load
from summa3d.comm.topology import Topology
from summa3d.dry.record import Op
from summa3d.plan.links import busy_ports
from summa3d.plan.price import Prices, pattern_of
from summa3d.plan.replay import UnorderedWork, replay

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
    in_node = Prices(plain(**{"node.latency": 1e-4}), AXES).seconds(move(1, "x", 6, "all_reduce"))
    assert in_node == pytest.approx(2 * 3 * 1e-4, rel=1e-2)  # where no tree is, twice around


def test_a_message_smaller_than_a_chunk_fills_a_chain_by_itself() -> None:
    cluster = plain(**{"collectives.chunk": 1e9})
    assert Prices(cluster, AXES).seconds(move(1, "x", 1000, "broadcast")) == pytest.approx((3 + 1) * 4e-6)


GATHER = move(1, "x", 3000)  # 12 µs
TRACE = (GATHER, elements(10_000), wait(1), elements(5_000))


def test_communication_runs_behind_arithmetic_until_it_is_waited_for() -> None:
    span = replay(TRACE, Prices(plain(), AXES))
    assert (span.seconds, span.compute, span.exposed["x"]) == (pytest.approx(17e-6), pytest.approx(15e-6), pytest.approx(2e-6))
    assert span.hidden["x"] == pytest.approx(10e-6)


def waiting(trace: Iterable[Op]) -> list[Op]:
    """The trace with each communication waited for at once."""
    return [one for op in trace if op.kind != "wait" for one in ([op, wait(op.id)] if op.kind == "move" else [op])]


def test_without_overlap_the_time_is_the_sum() -> None:
    prices = Prices(plain(), AXES)
    span = replay(waiting(TRACE), prices)
    assert span.seconds == pytest.approx(27e-6) == pytest.approx(sum(prices.seconds(op) for op in TRACE))
    cluster = plain(**{"elements.launch": 1e-6, "collectives.launch": 2e-6})
    once = replay(waiting(TRACE), Prices(cluster, AXES)).seconds
    assert once == pytest.approx(31e-6) and UnorderedWork.of(AXES, TRACE + TRACE, 3).seconds(cluster) == pytest.approx(6 * once)


def test_one_axis_takes_its_communications_in_turn_and_two_run_beside_each_other() -> None:
    both = (move(1, "x", 3000), move(2, "x", 3000), wait(1), wait(2))
    assert replay(both, Prices(plain(), AXES)).seconds == pytest.approx(24e-6)
    beside = (move(1, "x", 3000), move(2, "y", 1000), wait(1), wait(2))
    span = replay(beside, Prices(plain(), AXES))
    assert span.seconds == pytest.approx(16e-6) and span.exposed == pytest.approx({"x": 12e-6, "y": 4e-6})


CROSSING = Topology.checked({"x": 2, "y": 2, "z": 4}, ["z", "x", "y"])
"""z fills a node of four; x and y cross the network, four groups of each behind the one port of a node."""


@pytest.mark.parametrize(
    ("topology", "first", "second", "ends"),
    [
        (CROSSING, ("x", 1000), ("y", 3000), (32e-6, 64e-6)),  # 16 and 48 µs alone: half each, then what is left alone
        (CROSSING, ("x", 1000), ("y", 1000), (32e-6, 32e-6)),
        (CROSSING, ("z", 1000), ("y", 1000), (4e-6, 16e-6)),  # other ports
        (Topology.checked({"x": 8, "y": 2}, ["x", "y"]), ("x", 1000), ("y", 1000), (20e-6, 20e-6)),  # 1 and 4 edges on a port
        (Topology.checked({"x": 8, "y": 2}, ["x", "y"]), ("x", 1000), ("y", 3000), (20e-6, 52e-6)),  # 5 edges, then 4
    ],
)
def test_two_axes_share_the_ports_that_both_use(
    topology: Topology, first: tuple[str, int], second: tuple[str, int], ends: tuple[float, float]
) -> None:
    """Both begin at 0: what is first waited for ends at the first time, the other at the second."""
    trace = (move(1, *first), move(2, *second), wait(1), elements(0), wait(2))
    span = replay(trace, Prices(plain(), topology))
    assert span.seconds == pytest.approx(ends[1]) and span.exposed[first[0]] == pytest.approx(ends[0])
    late = (move(1, *first), elements(round(ends[1] * 1e9)), move(2, *second), wait(1), wait(2))
    assert replay(late, Prices(plain(), topology)).seconds == pytest.approx(
        ends[1] + Prices(plain(), topology).seconds(move(2, *second))
    )


def random_traces(count: int) -> Iterator[tuple[tuple[Op, ...], Prices]]:
    draw = random.Random(5)
    cluster = plain(**{"node.latency": 3e-6, "network.latency": 7e-6, "collectives.launch": 2e-6, "network.duplex": 1.2})
    grids = [Topology.checked({"x": 3, "y": 4, "z": 2}, draw.sample("xyz", 3)) for _ in range(4)]
    for _ in range(count):
        trace: list[Op] = []
        flying: list[int] = []
        for number in range(draw.randrange(2, 14)):
            kind = draw.choice(("elements", "move", "move", "wait"))
            if kind == "move":
                name = draw.choice(("all_gather", "all_reduce", "broadcast", "all_to_all"))
                trace.append(move(number, draw.choice(("x", "y", "z", "x·y")), draw.choice((0, 500, 4000)), name))
                flying.append(number)
            elif kind == "wait" and flying:
                trace.append(wait(flying.pop(draw.randrange(len(flying)))))
            else:
                trace.append(elements(draw.randrange(30_000)))
        yield tuple(trace), Prices(cluster, draw.choice(grids))


def test_a_replay_lies_between_its_longest_stream_and_the_sum_of_all() -> None:
    shared = 0
    for trace, prices in random_traces(150):
        span = replay(trace, prices)
        total = sum(prices.seconds(op) for op in trace)
        assert max(span.compute, *span.moved.values(), 0.0) <= span.seconds * (1 + 1e-9) <= total * (1 + 2e-9)
        assert replay(waiting(trace), prices).seconds == pytest.approx(total)
        assert span.seconds == pytest.approx(span.compute + sum(span.exposed.values()))
        axes = {(op.axis, pattern_of(op)) for op in trace if op.kind == "move" and op.words}
        if len(axes) > 1:
            shared += is_max_min_fair(tuple(sorted(axes)), prices)
    assert shared > 50


def is_max_min_fair(flights: tuple[tuple[str, str], ...], prices: Prices) -> bool:
    """Each flight has a full port on which no other's edges are faster, and no port carries more than it can."""
    speeds, edges = prices.speeds(flights), [(1e9, 2e9), (1e9, 1.2e9)]
    used = [
        ([load / edges[use.level][use.both_ways] for load in use.loads])
        for use in busy_ports(prices.topology, flights, prices.cluster.levels)
    ]
    rates = [speed / max(port[flight] for port in used) for flight, speed in enumerate(speeds)]
    carried = [sum(rate * load for rate, load in zip(rates, port, strict=True)) for port in used]
    assert max(carried) <= 1 + 1e-9
    for flight, rate in enumerate(rates):
        assert any(
            total > 1 - 1e-9
            and port[flight] > 0
            and all(load == 0 or other <= rate * (1 + 1e-9) for load, other in zip(port, rates, strict=True))
            for total, port in zip(carried, used, strict=True)
        )
    return any(speed < 1 - 1e-9 for speed in speeds)


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


def test_ranks_that_share_cores_and_memory_take_longer_and_move_by_copies_that_the_trace_has() -> None:
    slow = plain(**{"host.slots": 2, "node.latency": 1e-6})
    for op in (product(100), elements(1000), GATHER):
        assert Prices(slow, AXES).seconds(op) == pytest.approx(2 * Prices(plain(**{"node.latency": 1e-6}), AXES).seconds(op))
    between = move(1, "y", 1000)  # through ports, which cores do not share
    assert Prices(slow, AXES).seconds(between) == pytest.approx(Prices(plain(**{"node.latency": 1e-6}), AXES).seconds(between))
    shared = Prices(plain(**{"host.shared": 1, "node.latency": 1e-6}), AXES)
    assert shared.seconds(GATHER) == pytest.approx(3e-6) == shared.seconds(GATHER._replace(words=30_000))
    assert shared.seconds(move(1, "y", 1000)) == pytest.approx(16e-6)  # between nodes it moves


def test_half_the_bytes_of_a_word_halve_exactly_what_depends_on_bytes() -> None:
    prices = Prices(plain(), AXES)
    assert prices.seconds(GATHER._replace(dtype="bfloat16")) == pytest.approx(prices.seconds(GATHER) / 2)
    assert prices.seconds(elements(500)) == pytest.approx(prices.seconds(elements(1000)) / 2)
