"""`plan --try`: the fastest plans run on ranks of this machine; what they took refits few numbers, which a file keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import CompletedProcess
from typing import Any

import jobs
import numpy as np
import pytest

from summa3d import find_plans
from summa3d.cluster import DEVICE, FITTED, Cluster, load, read_text, write
from summa3d.errors import CapacityError, ConfigError, LaunchError
from summa3d.launcher import trial
from summa3d.plan import refit as module
from summa3d.plan.refit import candidates, chosen, dependence, fitted, refit
from summa3d.plan.search.timing import Times
from summa3d.train import config as configuration

SIZES = ("layers=2", "hidden=24", "heads=6", "sequence=8", "vocabulary=67", "kv_heads=6")
MODEL = ("--model", "gpt3-125m", *SIZES, "--cluster", "host", "--batch", "12")
HOST = load("host")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of cells of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMMA3D_CACHE", str(tmp_path_factory.mktemp("cells")))
        yield


def test_the_refit_is_the_likeliest_as_an_optimizer_finds_it() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    work = np.array([[2e9, 3e8, 110.0], [1e9, 5e8, 70.0], [3e9, 1e8, 130.0], [2e9, 1e9, 50.0]])
    keys = ["peak.float32", "node.bandwidth", "collectives.launch"]

    def predict(cluster: Cluster) -> list[float]:
        rate, links, launch = (cluster[key] for key in keys)
        return list(work @ [1 / rate, 1 / links, launch])

    truth = HOST.replaced({"peak.float32": 61e9, "node.bandwidth": 7e9, "collectives.launch": 2e-4}, "assumed")
    measured, first = np.array(predict(truth)), np.array([HOST[key] for key in keys])

    def unlikely(logs: np.ndarray) -> float:
        rate, links, launch = first * np.exp(logs)
        off = np.log(work @ [1 / rate, 1 / links, launch] / measured)
        return float(np.square(off / 0.05).sum() + np.square(logs / np.log(2)).sum())

    want = first * np.exp(
        optimize.minimize(unlikely, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9}).x
    )
    found = fitted(predict, HOST, keys, list(measured))
    assert [found[key] for key in keys] == pytest.approx(want, rel=1e-3)
    assert predict(found) == pytest.approx(measured, rel=0.03)
    assert set(found.fitted) == set(keys) == {key for key in HOST.numbers if HOST[key] != found[key]}


def test_a_number_that_the_steps_say_nothing_of_stays_and_one_beyond_its_range_is_not_taken() -> None:
    seconds = fitted(lambda cluster: [1e9 / cluster["peak.float32"]] * 2, HOST, ["peak.float32", "layers.launch"], [0.02, 0.02])
    assert seconds["peak.float32"] == pytest.approx(50e9, rel=0.01) and seconds["layers.launch"] == HOST["layers.launch"]
    most = DEVICE["collectives.launch"].most
    slow = fitted(lambda cluster: [cluster["collectives.launch"]], HOST, ["collectives.launch"], [50 * most])
    assert HOST["collectives.launch"] < slow["collectives.launch"] <= most
    assert fitted(lambda cluster: [1.0], HOST, [], [2.0]) is HOST


def test_the_numbers_that_seconds_depend_on_most_are_chosen_and_never_more_than_a_file_may_have() -> None:
    slopes = {"a": 0.5, "b": 0.01, "c": 0.3, "d": 0.9, "e": 0.1}
    assert chosen(slopes, (), 3) == ["d", "a", "c"] and chosen(slopes, (), 1) == ["d"]
    assert chosen(slopes, ("e",), 3) == ["e", "d", "a"], "a number that was fitted is fitted again"
    assert chosen(slopes, ("b", "other"), 3) == ["d"], "two that stay fitted leave one"
    assert FITTED == 3


def test_dependence_is_the_derivative_of_logarithms() -> None:
    found = dependence(lambda cluster: [7 / cluster["peak.float32"] ** 0.5, 3.0], HOST, ["peak.float32", "layers.launch"])
    assert found == {"peak.float32": pytest.approx((0.25 / 2) ** 0.5, rel=1e-6), "layers.launch": 0.0}


@pytest.mark.wide
def test_plans_that_ran_as_on_another_cluster_are_predicted_as_on_it() -> None:
    plans = find_plans(["gpt3-125m", *SIZES], HOST.replaced({"host.slots": 2}, "measured"), 4, 12, fix={"pp": 1}, top=6)
    truth = plans.result.cluster.replaced({"layers.launch": 9e-5, "collectives.launch": 4e-5}, "assumed")
    times = Times(truth, plans.searched.times.store)
    steps = [
        [1.5 * took, took, 0.9 * took, 1.1 * took, 0.7 * took] for one in plans.result.best for took in [times.seconds(one.plan)]
    ]
    found = refit(plans, steps[:5])
    before, after = found.errors
    assert before > 0.2 and after < 0.01 and len(found.keys) <= 3 and "layers.launch" in found.keys
    assert [one.measured for one in found.plans] == [median(one) for one in steps[:5]]
    priced = Times(found.after, plans.searched.times.store)
    expected = {(at, str(one.plan)): priced.seconds(one.plan) for at, one in enumerate(plans.result.best, 1)}
    assert {(at, plan): seconds for at, plan, seconds in found.order} == expected and len(expected) == 6
    assert [seconds for *_, seconds in found.order] == sorted(expected.values())
    assert [one.refitted for one in found.plans] == [expected[one.number, one.plan] for one in found.plans]
    said = "\n".join(found.as_text())
    assert all(f"{key} {found.before[key]:.4g} → {found.after[key]:.4g}" in said for key in found.keys)
    assert set(found.keys) <= set(candidates(found.before, "bfloat16"))


def test_of_one_plan_one_number_is_refitted() -> None:
    plans = find_plans(["gpt3-125m", *SIZES], HOST, 2, 12, fix={"pp": 1, "scheme": "oned", "dp": 1}, top=2)
    assert len(refit(plans, [[1.0]]).keys) == 1


@pytest.mark.parametrize("name", ["host", "selene", "gb200-nvl72"])
def test_a_cluster_that_is_written_is_read_as_the_same(name: str, tmp_path: Path) -> None:
    cluster = load(name).replaced({"device.memory": 12345678901.25}, "measured")
    write(cluster, tmp_path / "own.toml", "a comment")
    found = load(str(tmp_path / "own.toml"))
    assert (found.name, found.level_names, dict(found.numbers)) == (cluster.name, cluster.level_names, dict(cluster.numbers))


def test_levels_may_have_the_names_of_tables(tmp_path: Path) -> None:
    text = jobs.run_serial(["-m", "summa3d", "plan", "cluster", "--template"]).stdout
    odd = read_text(text.replace('name = "node"', 'name = "device"').replace('name = "network"', 'name = "a.b"'), "odd")
    write(odd, tmp_path / "odd.toml", "")
    assert load(str(tmp_path / "odd.toml")) == odd


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
@pytest.mark.wide
def test_the_fastest_plans_are_run_and_their_refit_is_a_cluster(ranks: int, tmp_path: Path) -> None:
    limits = ("--fix", "pp=1", "--limit", "x<=2", "--top", "1", "--try", "2", "--write", str(tmp_path))
    words = ["-m", "summa3d", "plan", *MODEL, "--ranks", str(ranks), *limits, "--json"]
    ended = jobs.run_serial(words, fresh=True)
    assert ended.status == 0, ended.stderr
    found = json.loads(ended.stdout)
    tried = found["try"]
    assert [one["plan"] for one in tried["plans"]] == [one["plan"] for one in found["plans"]]
    for one, planned in zip(tried["plans"], found["plans"], strict=True):
        assert len(one["steps"]) == trial.STEPS and one["measured"] == median(one["steps"]) > 0
        assert one["predicted"] == planned["seconds"]
    assert f"2/2: {1 + trial.STEPS} steps of" in ended.stderr and f"on {ranks} ranks" in ended.stderr
    after = load(str(tmp_path / "cluster.toml"))
    assert set(after.fitted) == set(tried["numbers"]) and len(after.fitted) == 1
    assert all(after[key] == change["after"] != change["before"] for key, change in tried["numbers"].items())
    plans = find_plans(["gpt3-125m", *SIZES], after, ranks, 12, fix={"pp": 1}, limit=["x<=2"], top=100)
    seconds = {str(one.plan): one.seconds for one in plans.result.best}
    for one in tried["plans"]:
        assert seconds[one["plan"]] == pytest.approx(one["refitted"], rel=1e-12)
    assert tried["fastest"] == min(tried["plans"], key=lambda one: one["measured"])["number"]


def metrics(folder: Path, seconds: list[float]) -> None:
    folder.mkdir()
    lines = (json.dumps({"step": step, "seconds": took}) for step, took in enumerate(seconds, 1))
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_a_run_is_of_the_configuration_with_few_steps_on_random_tokens_and_its_first_step_does_not_count() -> None:
    asked = configuration.load("bert-base", ["train.checkpoint_every=3", "model.layers=1"])
    other, seen, said = replace(asked, scheme="summa"), [], []

    def start(words: Any) -> CompletedProcess[str]:
        command, file, _, run, _ = words
        found = configuration.load(file)
        tokens = np.fromfile(found.data.path, np.int32)
        assert command == "train" and tokens.min() >= 0 and tokens.max() < found.data.vocabulary == 30592 - 3
        assert len(tokens) >= 20 * found.model.sequence
        seen.append(found)
        metrics(Path(run), [9.0, 1.0, 2.0, 3.0, 4.0, 5.0 * len(seen)])
        return CompletedProcess([], 0, "", "")

    assert trial.measure([asked, other], start, said.append) == [[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 10.0]]
    for one, config in zip(seen, (asked, other), strict=True):
        assert one == replace(config, train=one.train, data=one.data)
        assert (one.train.steps, one.train.keep, one.train.batch) == (1 + trial.STEPS, 0, config.train.batch)
    assert len(said) == 3 and not Path(seen[0].data.path).exists()


def test_a_run_that_fails_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(LaunchError, match=r"the run of plan 1 ended with status 3:\n  no room\n  at all"):
        trial.measure([configuration.load("demo")], lambda words: CompletedProcess([], 3, "", "no room\nat all\n"), print)


def test_plans_that_do_not_fit_this_machine_are_an_error_with_what_would() -> None:
    trial.check_memory(4, 10, 4 * (10 + trial.PYTHON))
    with pytest.raises(CapacityError, match=r"has 2 GiB of memory free; 4 ranks take 9.17 GiB: 2 GiB.*at most 0.207 GiB a rank"):
        trial.check_memory(4, 2 << 30, 2 << 30)
    assert trial.free_memory() > 1 << 20


def test_the_cores_of_this_machine_take_the_place_of_assumed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "usable_cores", lambda: 3)
    said: list[str] = []
    assert trial.cluster_here(HOST, 8, said.append)["host.slots"] == 3 and "is 8; this machine has 3" in said[0]
    measured = HOST.replaced({"host.slots": 5}, "measured")
    assert trial.cluster_here(measured, 2, said.append) is measured and len(said) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "dgx-h100", "--ranks", "8", "--try", "5"), "dgx-h100 describes devices"),
        (("--ranks", "16", "--try", "5"), "16 ranks are 2 nodes of host, which has 8 ranks a node"),
        (("--ranks", "2,4", "--try", "5"), "--try is of one count of --ranks, not of 2,4"),
        (("--ranks", "2", "--try", "0"), "--try is 0; it must be at least 1"),
        (("--ranks", "2", "--try", "2", "--program", "fsdp2"), "not those of fsdp2"),
        (("--ranks", "2", "--try", "2", "--model", "vit-tiny"), "A vit model cannot be trained on text"),
    ],
)
def test_what_cannot_be_tried_is_one_line_before_the_search(words: tuple[str, ...], said: str) -> None:
    ended = jobs.run_serial(["-m", "summa3d", "plan", *MODEL, *words])
    assert ended.status == 1 and said in ended.stderr.splitlines()[-1], ended.stderr
    assert "cells traced" not in ended.stderr


def test_no_plan_is_tried_where_a_launcher_has_started_the_command() -> None:
    job = jobs.run(["-m", "summa3d", "plan", *MODEL, "--ranks", "2", "--try", "1"], 1)
    assert job.status == 1 and "start summa3d plan without a launcher" in job.stderr
    assert module.NOISE > 0
    with pytest.raises(ConfigError, match="describes devices"):
        trial.cluster_here(load("selene"), 1, print)
