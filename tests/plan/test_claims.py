"""Claims of papers, their cost tables, and isoefficiency: directions, sources, and counts that the dry run gives too."""

from __future__ import annotations

import json
import re

import pytest

from summa3d.cli import main as entry
from summa3d.dry.step import Setting
from summa3d.nn.config import ModelConfig
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.cluster import load
from summa3d.plan.formulas import bubble
from summa3d.plan.papers import claims, costs, limits

LINEARS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


@pytest.mark.parametrize(("scheme", "axes", "ranks"), [("oned", {"y": 4}, 4), ("cuboid", {"x": 2, "y": 2, "z": 2}, 8)])
def test_words_of_a_layer_are_those_of_the_dry_run(scheme: str, axes: dict[str, int], ranks: int) -> None:
    model = ModelConfig(layers=1, hidden=64, heads=8, sequence=8, vocabulary=64)
    cell = cells(Setting(model, 8, scheme, axes, on_device=True))[BLOCK]
    words = sum(op.words for op in cell.forward if op.kind == "move" and op.layer.endswith((*LINEARS, "dropout")))
    assert words == costs.forward(scheme, ranks, 64, 64) > 0


def test_work_grows_with_ranks_as_the_papers_say_and_less_by_chains() -> None:
    found = {one.name: one for one in costs.isoefficiency(load("frontera-rtx"))}
    assert found["oned"].slope == pytest.approx(3, abs=0.02)
    trees = found["summa by trees"]
    assert trees.slope == pytest.approx(trees.paper_slope, abs=0.01) == pytest.approx(1.93, abs=0.01)
    assert found["summa"].slope == pytest.approx(1.5, abs=0.1)
    assert found["cuboid"].slope == pytest.approx(1, abs=0.15)
    other = {one.name: one.slope for one in costs.isoefficiency(load("longhorn"), efficiency=0.8)}
    assert other == pytest.approx({name: one.slope for name, one in found.items()}, abs=0.02)  # a growth, not a machine's


def test_the_command_prints_costs_with_errata_and_growths(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan formulas --layers 24 --hidden 8192 --batch 384 --sequence 512 --costs 64 --isoefficiency frontera-rtx"
    assert entry.main(words.split()) == 0
    text = capsys.readouterr().out
    assert "2-D, a layer's words forward: log p/(2√p)·(7bsh + 12h²) = 4.53e+09, ours 1.321e+09\n    erratum: a tree" in text
    assert re.search(r"work of summa grows as P\^1\.56; .*P\^1\.93", text)
    assert entry.main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["costs"]) == 10 and len(found["isoefficiency"]) == 5
    assert entry.main(["plan", "formulas", "--layers", "24", "--hidden", "8192", "--costs", "65"]) == 1
    assert "65 is no sixth power" in capsys.readouterr().err


def test_bubbles_and_pipelines_are_as_claimed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SOURCES", (claims.of_bubbles, claims.of_pipelines))
    assert entry.main(["plan", "--paper", "claims", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hold"] == found["of"] == len(found["claims"]) == 6
    assert set(found["claims"][0]) == {"where", "claim", "paper", "ours", "holds"}
    assert f"2: {bubble(16, 16):.2f}" in found["claims"][0]["ours"]
    monkeypatch.setattr(claims, "SOURCES", (lambda: iter([claims.Claim("there", "that", "1", "2", False)]),))
    assert entry.main(["plan", "--paper", "claims"]) == 0
    assert "✗ there: that\n    paper: 1\n    ours:  2\n\n0 of 1 hold" in capsys.readouterr().out


def test_the_largest_batches_of_optimus_and_megatron_are_the_papers_within_its_figure() -> None:
    found = {ranks: limits.largest_batches(ranks) for ranks in limits.SIZES}
    assert abs(found[64]["optimus"] - 480) <= 16 and 7 <= found[64]["optimus"] / found[64]["megatron"] <= 8
    used = {4: (96, 60), 16: (192, 60), 36: (288, 40), 64: (384, 30)}  # the batches of table 2 ran
    assert all(one["optimus"] >= used[ranks][0] and one["megatron"] >= used[ranks][1] for ranks, one in found.items())


@pytest.mark.wide
def test_all_claims_but_five_hold() -> None:
    found = claims.report()
    missed = [(one["where"], one["claim"]) for one in found["claims"] if not one["holds"]]
    assert missed == [
        ("PTD-P, figure 8", "best micro-batch by equation 1 for 8 stages, batch 128"),
        ("PTD-P, figure 16", "best micro-batch of 91B, t = p = 8, batch 128"),
        ("Optimus, figure 8", "2×2 of the mesh in a node beat a row of it, whole step of table 2"),
        ("MindSpeed, TP-2D", "Llama 3.1 405B at t = 16: 8×2 beats 1-D, other splits may not (dgx-h100)"),
        ("Blog on 3-D parallelism", "order t, d, p of 8 ranks: the first groups of pipeline and replicas"),
    ]
    assert found["of"] - found["hold"] == 5 and found["of"] >= 30
