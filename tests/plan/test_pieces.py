"""Products in pieces in a priced trace: what travels does so behind arithmetic, and what is exposed is less."""

from __future__ import annotations

from dataclasses import replace

from summa3d.cluster import load
from summa3d.comm.topology import Topology
from summa3d.dry.step import Setting
from summa3d.nn import ModelConfig
from summa3d.nn.overlap import Overlap
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.price import Prices
from summa3d.plan.replay import replay
from summa3d.plan.search.find import find_plans
from summa3d.train.config import Config


def test_a_block_in_pieces_exposes_less_and_multiplies_and_moves_the_same():
    model = ModelConfig(family="gpt2", layers=1, hidden=96, heads=8, sequence=512, vocabulary=64)
    prices, spans = Prices(load("server"), Topology.checked({"y": 2})), {}
    for pieces in (1, 4):
        setting = Setting(model, 8, "oned-sp", {"y": 2}, overlap=Overlap(pieces=pieces))
        traces = [list(trace) for trace in cells(setting)[BLOCK]]
        found = [replay(trace, prices) for trace in traces]
        sums = {"flops": sum(op.flops for trace in traces for op in trace)}
        sums["words"] = sum(op.words for trace in traces for op in trace if op.kind == "move")
        spans[pieces] = sums, sum(span.exposed.get("y", 0.0) for span in found)
    assert spans[1][0] == spans[4][0]
    assert spans[4][1] < 0.5 * spans[1][1]


def test_the_search_takes_pieces_where_they_gain_and_says_so():
    """Ranks of one host each: pieces hide what one piece exposes."""
    model = ModelConfig(family="gpt2", layers=2, hidden=96, heads=8, sequence=128, vocabulary=256)
    config = Config(model=model, device="cpu", dtype="float32")
    found = find_plans(config, "server", 2, 8, fix={"scheme": "oned-sp", "y": 2, "dp": 1, "pp": 1}, top=1)
    best = found[0]
    whole = replace(best.plan, inner=replace(best.plan.inner, pieces=1))
    assert best.plan.inner.pieces > 1 and found.config().overlap.pieces == best.plan.inner.pieces
    assert f"· {best.plan.inner.pieces} pieces" in str(found)
    one = found.searched.priced(whole, best.memory)
    assert best.seconds < one.seconds and best.terms["axis"]["y"] < one.terms["axis"]["y"]


def test_beside_pieces_the_search_gathers_weights_ahead_on_hosts_too():
    """Where a port has as much to do as a core. Within a node, and without pieces, nothing is."""
    model = ModelConfig(family="gpt2", layers=3, hidden=96, heads=8, sequence=128, vocabulary=256)
    config = Config(model=model, device="cpu", dtype="float32")
    cluster = load("server").replaced({"network.bandwidth": 6e7}, "assumed")
    fixed = {"scheme": "cuboid", "x": 2, "y": 1, "z": 1, "dp": 1, "pp": 1, "regather": True, "recompute": "none"}
    found = find_plans(config, cluster, 2, 4, fix=fixed, top=1)
    best = found[0]
    assert best.plan.inner.pieces > 1 and best.plan.inner.ahead > 0
    assert (found.config().overlap.pieces, found.config().overlap.gather) == (best.plan.inner.pieces, best.plan.inner.ahead)
    without = replace(best.plan, inner=replace(best.plan.inner, ahead=0))
    assert best.seconds < found.searched.priced(without, best.memory).seconds
    held = found.searched.memory(without)
    assert held.prefetched == 0 < best.memory.prefetched and held.total < best.memory.total
    assert not replace(without.inner, pieces=1).with_prefetch and not replace(without.inner, shared=2).in_pieces
