"""Products in pieces in a priced trace: what travels does so behind arithmetic, and what is exposed is less."""

from __future__ import annotations

from summa3d.cluster import load
from summa3d.comm.topology import Topology
from summa3d.dry.step import Setting
from summa3d.nn import ModelConfig
from summa3d.nn.overlap import Overlap
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.price import Prices
from summa3d.plan.replay import replay


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
