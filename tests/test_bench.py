"""The scripts of bench/: a short run of each; where a GPU or a peer is missing, the script says so and claims nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Any

import jobs
import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
HEAT, JAX = BENCH / "build" / "heat", BENCH / "build" / "jax" / "bin" / "python"
SHORT = ("--ranks", "2", "--divide", "32", "--case", "tall", "--dtype", "float64", "--rounds", "2")


def run(script: str, *arguments: str, patience: int = 120, fresh: bool = False, **environ: str) -> str:
    """Output of a script. fresh : in Pythons that are not forked, which cannot end once torch.distributed has run in them."""
    command = [sys.executable if fresh else jobs.python(), str(BENCH / script), *arguments]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=patience, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def overhead(folder: Path, row: str, *arguments: str) -> tuple[str, Any]:
    """Return what overhead.py says of a row, and the row's result."""
    said = run("overhead.py", row, *arguments, "--json", str(folder / "overhead.json"), patience=300)
    return said, json.loads((folder / "overhead.json").read_text())["rows"][row]


@pytest.mark.parametrize("script", ["kernels.py", "gemm_vs_cublas.py", "block_vs_compile.py"])
def test_without_a_gpu_a_script_for_one_says_so_and_claims_nothing(script):
    said = run(script, CUDA_VISIBLE_DEVICES="")
    assert said.startswith("no GPU: ") and "hold" not in said.lower()


def test_the_race_against_cublas_can_be_tried_on_the_host(tmp_path):
    said = run("gemm_vs_cublas.py", "--device", "cpu", "--size", "64", "--rounds", "1", "--json", str(tmp_path / "race.json"))
    rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert [(row["library"], row["dtype"]) for row in rows] == [("numpy", "float64"), ("torch", "bfloat16"), ("torch", "float64")]
    assert all(row["difference"] < 1e-2 and row["share"] > 0 for row in rows) and "hold" not in said.lower()


@pytest.mark.parametrize(
    ("script", "option"),
    [("gemm_vs_heat.py", "--packages"), ("gemm_mixed.py", "--packages"), ("gemm_vs_jax.py", "--python")],
)
def test_without_a_peer_a_race_says_how_it_is_installed_and_claims_nothing(script, option, tmp_path):
    said = run(script, option, str(tmp_path / "nothing"))
    assert "is not compared" in said and "pip install" in said and "hold" not in said.lower()


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        pytest.param(
            "gemm_vs_heat.py", 4, marks=pytest.mark.skipif(not (HEAT / "heat").exists(), reason="heat is not installed")
        ),
        pytest.param("gemm_vs_jax.py", 5, marks=pytest.mark.skipif(not JAX.exists(), reason="JAX is not installed")),
    ],
)
def test_a_race_times_every_split_of_the_peer_beside_ours(script, shown, tmp_path):
    said = run(script, *SHORT, "--json", str(tmp_path / "race.json"))
    (row,) = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert (row["m"], row["n"], row["k"], row["ranks"]) == (256, 16, 16, 2)
    assert len(row["quotients"]) == shown and all(len(times) == 2 and min(times) > 0 for times in row["seconds"].values())
    assert "never behind" in said.splitlines()[-1]


@pytest.mark.skipif(not (HEAT / "heat").exists(), reason="heat is not installed")
def test_words_of_mixed_layouts_are_counted_beneath_every_library(tmp_path):
    said = run("gemm_mixed.py", "--divide", "64", "--count", "--json", str(tmp_path / "race.json"), fresh=True)
    rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert len(rows) == 12 and all(row["words"]["ours"] == row["words"]["our plan"] for row in rows)
    assert "our words through MPI are those of the plan: 12 of 12" in said


@pytest.mark.skipif(which("cc") is None, reason="there is no C compiler")
def test_a_library_between_a_program_and_mpi_counts_what_each_rank_receives(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    pmpi, common = importlib.import_module("pmpi"), importlib.import_module("common")
    program = """
import numpy as np, pmpi
from mpi4py import MPI
world, found = MPI.COMM_WORLD, []
a, b, c = np.zeros(6), np.zeros(18), np.zeros(9)
for act in (lambda: world.Allgather(a, b), lambda: world.Allreduce(MPI.IN_PLACE, a), lambda: world.Bcast(a, 1),
            lambda: world.Ialltoallv([b, [1, 2, 3]], [c, [world.rank + 1] * 3]).Wait(),
            lambda: world.Isend(b[:6], (world.rank + 1) % 3) and world.Recv(a, (world.rank - 1) % 3)):
    before = pmpi.received_bytes()
    act()
    found.append((pmpi.received_bytes() - before) / 8)
found = world.gather(found)
if world.rank == 0:
    print(found)
"""
    with pmpi.preloaded():
        monkeypatch.setenv("PYTHONPATH", str(BENCH))
        said = common.on_ranks(3, ["-c", program])
    assert json.loads(said.splitlines()[-1]) == [[12, 8, 6, 2, 6], [12, 8, 0, 4, 6], [12, 8, 6, 6, 6]]


def test_a_race_claims_half_as_much_again_where_the_peer_is_slow_and_no_loss_elsewhere(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    claims = importlib.import_module("race").claims
    row = {"case": "square", "dtype": "float64", "ranks": 2}
    slow = {**row, "parts": {"peer": [0.5]}, "quotients": {"peer": [1.6]}}
    fast = {**row, "parts": {"peer": [0.9]}, "quotients": {"peer": [1.1]}}
    assert [held for _, held in claims("peer", [slow, fast])] == [True, True]
    assert [held for _, held in claims("peer", [slow | {"quotients": {"peer": [1.4]}}, fast])] == [False, True]
    assert [held for _, held in claims("peer", [slow, fast | {"quotients": {"peer": [0.9]}}])] == [True, False]
    assert [held for _, held in claims("peer", [fast])] == [True]


def test_torchs_products_are_timed_beside_numpys_blas_by_shape(tmp_path):
    said = run("local_blas.py", "--quick", "--rounds", "1", "--json", str(tmp_path / "table.json"))
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert {(row["form"], row["dtype"]) for row in rows} == {
        (form, dtype) for form in ("nn", "nt", "tn") for dtype in ("float32", "float64")
    }
    assert all(row["product"]["median"] > 0 and row["sum"]["median"] > 0 for row in rows)
    assert len([line for line in said.splitlines() if "never the slower" in line]) == 4


def test_reads_of_files_stand_beside_bare_ones(tmp_path):
    pytest.importorskip("h5py")
    said = run("files.py", "--ranks", "2", "--rows", "64", "--rounds", "1", "--json", str(tmp_path / "files.json"))
    found = json.loads((tmp_path / "files.json").read_text())
    assert {case: [*times] for case, times in found["seconds"].items()} == {
        "raw rows": ["ours", "memmap", "preadv"],
        "hdf5 rows": ["ours", "h5py"],
        "raw columns": ["ours", "memmap", "preadv"],
        "hdf5 columns": ["ours", "h5py"],
    }
    assert found["bytes"] == 64 * 16384 * 8 and "holds: no word is moved" in said


def test_a_linears_overhead_is_that_of_its_calls(tmp_path):
    said, found = overhead(tmp_path, "linear", "--rounds", "1")
    rows = found["rows"]
    assert list(rows) == ["torch", "serial", "cuboid"] and said.count("at most 100 µs") == 2
    assert rows["torch"]["calls"]["forward"] < min(rows[name]["calls"]["forward"] for name in ("serial", "cuboid"))


def test_the_executors_overhead_is_that_of_its_operations(tmp_path):
    said, found = overhead(tmp_path, "executor", "--rounds", "1")
    assert found["ops"] == 128 and all(len(times) == 1 and times[0] > 0 for times in found["seconds"].values())
    assert "at most 50 µs of Python an operation" in said.splitlines()[-1]


def test_products_in_pieces_stand_beside_their_arithmetic_and_their_messages_alone():
    command = [str(BENCH / "overlap_nodes.py"), "--on-ranks", "--case", "1", "--scale", "16", "--rate", "1e9", "--rounds", "1"]
    ended = jobs.run(command, 2)
    assert ended.status == 0, ended.stderr
    row = json.loads(ended.stdout.splitlines()[-1])
    assert set(row["seconds"]) == {"arithmetic", "messages", "1", "2", "4", "8", "16"}
    assert row["predicted"]["1"] == pytest.approx(row["seconds"]["arithmetic"][0] + row["seconds"]["messages"][0])


@pytest.mark.wide
def test_a_ring_of_contexts_stands_beside_its_arithmetic_and_its_messages_alone():
    ended = jobs.run([str(BENCH / "context_nodes.py"), "--on-ranks", "--positions", "64", "--rounds", "1"], 2)
    assert ended.status == 0, ended.stderr
    row = json.loads(ended.stdout.splitlines()[-1])
    assert {"messages", "whole blocks", "backward", *row["kinds"]} < set(row["seconds"])
    assert row["nodes"] == 2 and row["computed"] > 0 and row["as_predicted"] > 0
    assert row["words"] == {"folded": 65536, "gather": 65536, "heads": 65536}


@pytest.mark.wide
def test_a_step_stands_beside_torchs_on_the_same_ranks(tmp_path):
    """Losses agree first: a pair that trains another model raises an error."""
    pairs, file = ("zb-v", "ddp"), tmp_path / "torch.json"
    words = ("--small", "--ranks", "2", "--rounds", "1", "--pairs", *pairs, "--json", str(file))
    said = run("step_vs_torch.py", *words, patience=300, fresh=True)
    rows = json.loads(file.read_text())["rows"]
    assert tuple(row["pair"] for row in rows) == pairs
    assert all(len(times) == 1 and times[0] > 0 for row in rows for times in row["seconds"].values())
    assert "geometric mean of 2 pairs ≥ 1.15" in said.splitlines()[-1]


@pytest.mark.wide
def test_attention_over_contexts_stands_beside_gloos(tmp_path):
    """Outputs and gradients agree first: a side that computes another attention raises an error."""
    file = tmp_path / "contexts.json"
    said = run("context_race.py", "--small", "--ranks", "2", "--rounds", "1", "--json", str(file), fresh=True)
    rows = json.loads(file.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["gather", "ring", "heads"]
    assert all(len(row[side]) == 1 and row[side][0] > 0 for row in rows for side in ("ours", "peer"))
    assert "context_parallel on 2 ranks without a GPU: NotImplementedError" in said


@pytest.mark.wide
def test_experts_on_ranks_stand_beside_gloos_and_transformers(tmp_path):
    """Outputs and gradients agree first: a side that computes another layer raises an error."""
    file = tmp_path / "experts.json"
    run("experts_race.py", "--small", "--ranks", "2", "--rounds", "1", "--json", str(file), fresh=True)
    rows = json.loads(file.read_text())["rows"]
    assert rows[0]["peer"] == "gloo"
    assert all(len(row[side]) == 1 and row[side][0] > 0 for row in rows for side in ("ours", "theirs"))


@pytest.mark.wide
def test_every_pair_of_steps_trains_torchs_model(tmp_path):
    file = tmp_path / "torch.json"
    run("step_vs_torch.py", "--small", "--rounds", "1", "--json", str(file), patience=600, fresh=True)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 1 + 2 * 8 and {row["ranks"] for row in rows} == {1, 2, 4}


def test_a_race_of_steps_claims_that_no_pair_is_behind(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    claims = importlib.import_module("step_vs_torch").claims

    def row(peer: float, ranks: int = 2) -> dict[str, Any]:
        return {"pair": "ddp", "ranks": ranks, "seconds": {"ours": [1.0, 1.0], "peer": [peer, peer]}}

    assert [held for _, held in claims([row(1.1, ranks=1), row(1.2), row(1.2, ranks=4)])] == [True, True, True]
    assert [held for _, held in claims([row(0.9, ranks=1)])] == [False]
    assert [held for _, held in claims([row(0.9), row(2.0, ranks=4)])] == [False, True]
    assert [held for _, held in claims([row(1.1), row(1.1, ranks=4)])] == [True, False]


@pytest.mark.wide
def test_a_step_on_eight_ranks_stands_beside_one_ranks(tmp_path):
    said = run("step.py", "--model", "tiny", "--rounds", "1", "--json", str(tmp_path / "step.json"))
    found = json.loads((tmp_path / "step.json").read_text())["models"]["tiny"]
    assert (
        found["alone"][0] > 0 and found["together"][0] > 0 and abs(sum(part[0] for part in found["shares"].values()) - 1) < 1e-9
    )
    assert "at most 40 ms a step on 8 ranks" in said.splitlines()[-1]


@pytest.mark.wide
def test_what_a_step_waits_for_stands_beside_ranks_with_equal_addresses(tmp_path):
    said, found = overhead(tmp_path, "waits", "--rounds", "1", "--calls", "2")  # starts 16 ranks
    starts = found["starts"]
    for name, row in ((name, row) for name, rows in starts.items() for row in rows):
        assert not (row["equal_addresses"] and name == "own addresses")
        calls, sleeps = row["communications"], row["sleeps"]
        assert set(sleeps) <= set(calls) and calls["x"] == 18 + 18  # of 16 weights of blocks, and twice of the tied embedding
        assert 0 < sum(sleeps.values()) < 2 * sum(calls.values())
        assert all(micros > 0 for ways in row["collectives"].values() for micros in ways.values())
    equal = [row["equal_addresses"] for row in starts.get("equal addresses", [])]  # not of ranks that are forked
    assert ("at most 0.9 of it" if equal == [True] else "are not compared") in said.splitlines()[-1]


def test_a_linears_rate_stands_beside_that_of_the_cores(tmp_path):
    said = run("linear_rate.py", "--size", "64", "--grid", "1,1,2", "--rounds", "2", "--json", str(tmp_path / "rate.json"))
    seconds = json.loads((tmp_path / "rate.json").read_text())["seconds"]
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values()) and len(seconds) == 3
    assert "≥ 0.6 of the cores' rate" in said.splitlines()[-1]


@pytest.mark.wide
def test_two_checkouts_are_raced_case_by_case(tmp_path):
    file = tmp_path / "against.json"
    names = "product-cuboid-64-p1", "all_gather-small-node"
    said = run("against.py", str(BENCH.parent), "--cases", ",".join(names), "--rounds", "1", "--json", str(file), patience=300)
    found = json.loads(file.read_text())
    assert tuple(found["seconds"]) == names
    for name, sides in found["seconds"].items():
        rounds = 3 if name in found["again"] else 1
        assert all(len(seconds) == rounds and min(seconds) > 0 for seconds in (sides["old"], sides["new"]))
    assert "geometric mean of 2 cases" in said and "no case below 0.93" in said.splitlines()[-1]


def test_a_race_of_checkouts_refuses_what_is_not_the_checkout_that_it_was_given(tmp_path):
    command = [jobs.python(), str(BENCH / "against.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "is no checkout of summa3d" in done.stderr
    for package in ("summa3d", "kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    # ranks of this checkout that are told to measure another one
    done = jobs.run([str(BENCH / "against_cases.py"), str(tmp_path), "product-cuboid-64-p1"], 1)
    assert done.status != 0 and f"not from {tmp_path / 'summa3d'}" in done.stderr


def test_claims_on_two_checkouts_are_those_of_medians_and_their_geometric_mean(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    against = importlib.import_module("against")
    even = {"old": [2.0, 2.0, 9.0], "new": [2.0, 2.0, 2.0]}
    slow = {"old": [1.0, 1.0], "new": [2.0, 2.0]}
    fast = {"old": [2.0, 2.0], "new": [1.0, 1.0]}
    assert [against.ratio(sides) for sides in (even, slow, fast)] == [1.0, 0.5, 2.0]
    assert against.interval({"slow": slow, "fast": fast}) == pytest.approx((1.0, 1.0))
    low, high = against.interval({"even": even})
    assert low == 1.0 and high > 1.0
    assert [held for _, held in against.claims({"even": even})] == [True, True]
    assert [held for _, held in against.claims({"slow": slow, "fast": fast})] == [True, False]
    assert [held for _, held in against.claims({"slow": {"old": [0.95], "new": [1.0]}})] == [False, True]


def test_claims_on_prepared_collectives_are_shares_of_the_other_checkouts_own(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    claims = importlib.import_module("overhead").claims_on_collectives
    other = {"all_reduce, MPI": 10.0, "whole all_gather, MPI": 20.0}
    assert [held for _, held in claims(other, other)] == [True, True]
    assert [held for _, held in claims(other | {"prepared whole all_gather, MPI": 16.0}, other)] == [True, True, True]
    slower = {"all_reduce, MPI": 12.5, "whole all_gather, MPI": 22.0, "prepared whole all_gather, MPI": 16.5}
    assert [held for _, held in claims(slower, other)] == [False, False, False]


@pytest.fixture
def emulated(monkeypatch):
    """The cases on emulated nodes, and the predictions that were written before they were raced."""
    monkeypatch.syspath_prepend(str(BENCH))
    modules = (importlib.import_module(f"emulated_{name}") for name in ("cases", "report"))
    return *modules, json.loads((BENCH / "emulated_predictions.json").read_text())


def test_predictions_for_emulated_nodes_are_those_of_the_planner_and_of_the_words_that_leave_a_node(emulated):
    cases, _, plan = emulated
    facts = cases.Facts(**plan["facts"])
    placements = [race for race in plan["races"] if race["part"] == "placement"]
    assert [(race["nodes"], race["ranks"], race["port"]) for race in placements] == [(4, 8, "1gbit"), (4, 8, "250mbit")]
    for race in placements:
        bandwidth = {"1gbit": 125e6, "250mbit": 31.25e6}[race["port"]]
        assert len(race["cases"]) == 9
        for row in race["cases"]:
            m, n, k = row["sizes"]
            words = {"y": m * k, "x": k * n, "z": m * n}  # of A, B and C, of which a rank receives an eighth
            leave = 2 * 8 * sum(words[axis] / 8 for axis in words if axis != row["order"][0])
            assert row["port_bytes"] == pytest.approx(leave, rel=1e-3)
            assert leave / bandwidth < row["wire"] < 1.5 * leave / bandwidth and row["seconds"] == row["wire"] + row["arithmetic"]
    here = next(cases.races(facts))
    again = [sum(cases.predicted(case, here, facts)) for case in here.cases[:3]]
    assert again == pytest.approx([row["seconds"] for row in placements[0]["cases"][:3]])


def test_the_page_of_emulated_nodes_has_the_times_that_were_measured(emulated):
    _, report, plan = emulated
    result = json.loads((BENCH / "emulated_measured.json").read_text())
    page = (BENCH.parent / "docs" / "emulated.md").read_text()
    assert report.replaced(page, result) == page, "run: python bench/emulated_nodes.py --show FILE --page docs/emulated.md"
    for race, before in zip(result["races"], plan["races"], strict=True):
        assert [row["seconds"] for row in race["cases"]] == [row["seconds"] for row in before["cases"]]
        assert all(len(row["times"]) == result["rounds"] >= 7 for row in race["cases"])


def test_claims_on_emulated_nodes_hold_near_the_prediction_alone(emulated):
    _, report, _ = emulated
    rows = [{"seconds": wanted, "times": [wanted, 9.0], "port_bytes": 100, "carried": 101} for wanted in (1.0, 1.1, 2.0)]
    race = {"part": "placement", "nodes": 4, "port": "1gbit", "cases": rows}
    assert [holds for _, holds in report.claims([race])] == [True, True, True]
    late = [{**rows[0], "times": [1.3]}, *rows[1:]]
    assert [holds for _, holds in report.claims([race | {"cases": late}])] == [False, True, True]
    assert [
        holds for _, holds in report.claims([race | {"cases": [{**rows[0], "times": [3.0], "carried": 120}, *rows[1:]]}])
    ] == [
        False,
        False,
        False,
    ]
    strong = race | {"part": "strong", "cases": [{**rows[0], "times": [1.0]}, {**rows[1], "times": [0.9]}]}
    assert [holds for _, holds in report.claims([strong])] == [False]


def test_the_planner_is_judged_by_errors_the_order_and_what_its_pick_of_each_group_loses(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    here = importlib.import_module("this_machine")
    assert sum(len(group.fixes) for group in here.JUDGED) == 16 and {group.ranks for group in here.JUDGED} == {2, 4}

    def row(group, predicted, measured, noise=0.01):
        about = {"group": group, "predicted": predicted, "measured": measured, "noise": noise}
        return about | {"error": predicted / measured - 1}

    rows = [row("a", 1.0, 1.1), row("a", 1.2, 1.0, 0.05), row("b", 2.0, 2.0, 0.02), row("b", 3.0, 4.0)]
    found = here.judgement(rows)
    assert found["regrets"] == pytest.approx([0.1, 0.0]) and found["regret"] == pytest.approx(0.05)
    assert found["kendall"] == pytest.approx(4 / 6) and found["kendall_of_groups"] == 0
    assert found["error"] == pytest.approx((1 / 11 + 0.2) / 2) and found["noise"] == pytest.approx(0.015)
    assert [held for _, held in here.claimed(found)] == [False, False, False]
    assert [held for _, held in here.claimed({**found, "error": 0.1, "kendall": 0.8, "noise": 0.06})] == [True, True, True]


def test_the_race_of_one_matrix_prints_times_words_and_multiply_adds_of_half_the_work(tmp_path):
    said = run("symmetric.py", "--size", "96", "--rounds", "2", "--json", str(tmp_path / "race.json"))
    rows = json.loads((tmp_path / "race.json").read_text())["rows"]
    assert len(rows) == 2 and all(row["difference"] < 1e-14 and len(row["seconds"]["packed"]) == 2 for row in rows)
    lines = said.splitlines()
    assert lines[0].startswith("load ") and all(
        line.startswith("holds: ") for line in lines if "multiply-adds" in line and "hold" in line.lower()
    )
    assert sum("of the busiest rank's words" in line for line in lines) == 4
