"""Claims of papers, their cost tables, and isoefficiency: directions, sources, and counts that the dry run gives too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from papers import choices, claims, costs, limits
from papers.__main__ import main
from papers.paper import load as load_paper
from papers.paper import table_of
from papers.report import report
from summa3d.cluster import load
from summa3d.dry.step import Setting
from summa3d.nn.config import ModelConfig
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.formulas import bubble
from summa3d.plan.programs.sizes import in_flight

pytestmark = pytest.mark.papers
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
    words = f"formulas --hidden 8192 --rows {384 * 512} --costs 64 --isoefficiency frontera-rtx"
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    assert "2-D, a layer's words forward: log p/(2√p)·(7bsh + 12h²) = 4.53e+09, ours 1.321e+09\n    erratum: a tree" in text
    assert re.search(r"work of summa grows as P\^1\.56; .*P\^1\.93", text)
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["costs"]) == 10 and len(found["isoefficiency"]) == 5
    assert main(["formulas", "--hidden", "8192", "--costs", "65"]) == 1
    assert "65 is no sixth power" in capsys.readouterr().err


def test_the_grid_that_moves_least_goes_from_weights_to_three_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [costs.winner(64, tokens, 4096) for tokens in (1 << 14, 16)] == ["x", "yz"]
    found = {costs.winner(ranks, tokens, 4096) for ranks in costs.RANKS_DRAWN for tokens in costs.TOKENS}
    assert "xyz" in found and found <= set(costs.FAMILIES)
    assert costs.words({"x": 4, "y": 4, "z": 4}, 4096, 512) == pytest.approx(costs.forward("cuboid", 64, 4096, 512))
    pytest.importorskip("matplotlib")
    assert main(["formulas", "--hidden", "512", "--plots", str(tmp_path)]) == 0
    assert "written" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("words", "grids") for kind in ("png", "svg")
    }


def test_bubbles_and_pipelines_are_as_claimed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(claims, "SOURCES", (claims.of_bubbles, claims.of_pipelines))
    assert main(["claims", "--json", "--plots", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"claims.png", "claims.svg"}
    found = json.loads(capsys.readouterr().out)
    assert found["hold"] == found["of"] == len(found["claims"]) == 6
    assert set(found["claims"][0]) == {"where", "claim", "paper", "ours", "holds", "values"}
    assert f"2: {bubble(16, 16):.2f}" in found["claims"][0]["ours"]
    monkeypatch.setattr(claims, "SOURCES", (lambda: iter([claims.Claim("there", "that", "1", "2", False)]),))
    assert main(["claims"]) == 0
    assert "✗ there: that\n    paper: 1\n    ours:  2\n\n0 of 1 hold" in capsys.readouterr().out


def test_the_largest_batches_of_optimus_and_megatron_are_the_papers_within_its_figure() -> None:
    found = {ranks: limits.largest_batches(ranks) for ranks in limits.SIZES}
    assert abs(found[64]["optimus"] - 480) <= 16 and 7 <= found[64]["optimus"] / found[64]["megatron"] <= 8
    used = {4: (96, 60), 16: (192, 60), 36: (288, 40), 64: (384, 30)}  # the batches of table 2 ran
    assert all(one["optimus"] >= used[ranks][0] and one["megatron"] >= used[ranks][1] for ranks, one in found.items())


def plan(**sizes: int) -> dict[str, float]:
    return {"tflops": 100.0, "dp": 1, "micro_batch": 1, "chunks": 1, **sizes}


def test_a_labs_plan_is_ranked_by_its_sizes_and_the_rule_takes_the_smallest_model_parallel_size_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        plan(tp=8, pp=1, tflops=90),
        plan(tp=2, pp=4, tflops=120),
        plan(tp=4, pp=2, tflops=110),
        plan(tp=8, pp=2, tflops=100),
    ]
    monkeypatch.setattr(choices, "_plans", lambda row, cluster: iter(found))
    ranked = choices._ranked({"name": "one", "tp": 8, "pp": 2}, load("selene"))
    assert (ranked["plans"], ranked["rank"], ranked["behind"]) == (4, 3, pytest.approx(0.2))
    assert (ranked["rule"]["tp"], ranked["rule"]["pp"], ranked["rule_behind"]) == (8, 1, pytest.approx(1 / 3))
    assert choices._ranked({"name": "one", "tp": 16, "pp": 1}, load("selene"))["rank"] is None


def test_papers_plans_fit_in_memory_and_a_model_whole_on_one_gpu_does_not() -> None:
    table = table_of("ptdp")
    for row in table["row"]:
        given = {**table["step"], "chunks": 1, **row}
        many = given["batch"] // (given["gpus"] // (given["tp"] * given["pp"]) * given["micro_batch"])
        assert choices.held(given, many) < 80e9, row["name"]
    assert choices.held({**given, "tp": 1, "pp": 1}, many) > 80e9
    assert in_flight(4, 1, 2) == 2 and in_flight(4, 1, 9) == 4 and in_flight(4, 2, 16) == 4 * (1 + 3 / 8)


@pytest.mark.wide
def test_labs_plans_are_ranked_among_all_that_fit() -> None:
    found = choices.report()
    assert found["of"] == 12 and found["near"] >= 6
    ranks = {row["name"]: row["rank"] for row in found["rows"]}
    assert ranks["table 1, 1008B, 3072 GPUs"] == ranks["table 1, 529.6B, 2520 GPUs"] == 1


@pytest.mark.wide
@pytest.mark.parametrize(("name", "rows", "most"), [("mt-nlg", 3, 0.3), ("llama3-405b", 2, 0.15)])
def test_what_is_only_reported_is_never_fitted(name: str, rows: int, most: float) -> None:
    found = report(load_paper(name))
    assert {row["use"] for row in found["rows"]} == {"never"} and found["summary"]["fitted"] == 0
    assert found["summary"]["n"] == rows and found["summary"]["max"] <= most


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
