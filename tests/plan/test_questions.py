"""Questions beside the grid: tokens a batch, days and money, efficiency over ranks, other numbers of a cluster, a template."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

import jobs
import pytest

from summa3d.cli import main as entry
from summa3d.cluster import load, read_text
from summa3d.errors import ClusterError, ConfigError
from summa3d.plan import questions
from summa3d.plan.search.request import request

MODEL = ("--model", "llama3-8b", "layers=8", "sequence=2048", "--cluster", "dgx-h100", "--program", "nemo", "--fix", "pp=1")


def planned(*words: str) -> dict[str, Any]:
    ended = jobs.run_serial(["-m", "summa3d", "plan", "--json", *MODEL, *words], fresh=True)
    assert ended.status == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def test_a_batch_of_tokens_is_a_number_of_sequences_that_grids_divide() -> None:
    assert questions.sequences("4Mtokens", 8192) == 512 and questions.sequences("1000 tokens", 1000) == 1
    assert questions.sequences("1.6Mtokens", 2048) == 768 and questions.sequences("7", 2048) == 7
    for text in ("0", "many", "1token", "-4Mtokens", "2.5"):
        with pytest.raises(ConfigError, match="is no batch"):
            questions.sequences(text, 2048)


def test_days_hours_and_cost_are_those_of_whole_steps() -> None:
    found = questions.training(2.0, 64, 1000, 2.5e6 + 1, 3.0)
    assert found["steps"] == 2501 and found["days"] == pytest.approx(2501 * 2 / 86400)
    assert found["gpu_hours"] == pytest.approx(2501 * 2 * 64 / 3600) and found["cost"] == pytest.approx(3 * found["gpu_hours"])
    assert "cost" not in questions.training(2.0, 64, 1000, 1e6, None)


def test_a_number_of_a_cluster_is_replaced_or_multiplied() -> None:
    base, twice = load("dgx-h100"), questions.cluster_with("dgx-h100", ["network.bandwidth=2x", "node.latency=1e-6"])
    assert twice["network.bandwidth"] == 2 * base["network.bandwidth"] and twice["node.latency"] == 1e-6
    for text in ("network.bandwidth", "network.bandwidth=fast", "network.bandwidth=nan"):
        with pytest.raises(ConfigError, match="not of the form"):
            questions.cluster_with("dgx-h100", [text])
    with pytest.raises(ClusterError, match=r"nearest is 'network.bandwidth'"):
        questions.cluster_with("dgx-h100", ["network.bandwith=2x"])


def test_the_template_is_a_whole_cluster() -> None:
    ended = jobs.run_serial(["-m", "summa3d", "plan", "cluster", "--template"], fresh=True)
    assert [level.name for level in read_text(ended.stdout, "mine").levels] == ["node", "network"]


def test_a_folder_of_transformers_is_a_model_with_its_own_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 132, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_key_value_heads": 2, **sizes}))
    model = request([str(tmp_path), "sequence=64"], 8, load("dgx-h100")).config.model
    assert (model.family, model.layers, model.hidden, model.kv_heads, model.sequence) == ("hf", 3, 48, 2, 64)


@pytest.mark.wide
def test_efficiency_over_ranks_is_that_of_the_fastest_plans(tmp_path: Path) -> None:
    lines = planned("--ranks", "4,8", "--batch", "16", "--tokens", "1e9", "--price", "2", "--plots", str(tmp_path))["scaling"]
    assert [line["ranks"] for line in lines] == [4, 8] and lines[0]["efficiency"] == 1
    (plan,) = planned("--ranks", "8", "--batch", "16", "--top", "1")["plans"]
    assert (lines[1]["plan"], lines[1]["seconds"]) == (plan["plan"], plan["seconds"])
    for line in lines:
        assert line["efficiency"] == pytest.approx(lines[0]["seconds"] * 4 / (line["seconds"] * line["ranks"]))
        assert line["steps"] == ceil(1e9 / (16 * 2048)) and line["tokens_s"] == pytest.approx(16 * 2048 / line["seconds"])
        assert line["cost"] == pytest.approx(2 * line["gpu_hours"])
    assert {file.name for file in tmp_path.iterdir()} == {"ranks.png", "ranks.svg"}


@pytest.mark.wide
def test_a_faster_network_never_makes_the_fastest_plan_slower() -> None:
    base, faster = (
        planned("--ranks", "8", "--batch", "8", "--top", "1", *more)["plans"][0]["seconds"]
        for more in ((), ("--set", "network.bandwidth=2x"))
    )
    assert faster <= base


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "8,8", "--batch", "8"), "is no number of ranks"),
        (("--ranks", "8,16", "--batch", "8", "--explain", "1"), "--explain is of one count"),
        (("--ranks", "7,11", "--batch", "8"), "no count of ranks has a plan"),
        (("--ranks", "8", "--batch", "8", "--price", "2"), "--price is of --tokens"),
        (("--ranks", "8", "--batch", "8", "--tokens", "-1"), "--tokens is -1"),
        (("--ranks", "8", "--batch", "8", "--plots", "x"), "a search of one has none"),
    ],
)
def test_what_cannot_be_asked_is_one_line(words: tuple[str, ...], said: str) -> None:
    ended = jobs.run_serial(["-m", "summa3d", "plan", *MODEL, *words], fresh=True)
    assert ended.status == 1 and said in ended.stderr.splitlines()[-1], ended.stderr


def test_wrong_input_is_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    search = ["--model", "demo", "--cluster", "selene", "--ranks", "4", "--batch", "8"]
    for words, message in (
        ([], "say what to plan"),
        ([*search, "--plots", "figures"], "--plots draws several counts"),
        ([*search, "--top", "0"], "--top is 0"),
        ([*search, "--explain", "0"], "--explain is 0"),
        ([*search, "--explain", "1", "--json"], "--explain prints text"),
    ):
        assert entry.main(["plan", *words]) == 1
        error = capsys.readouterr().err
        told = [line for line in error.splitlines() if not line.startswith("summa3d plan: ")]
        assert message in error and len(told) == 1


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (["--paper", "optimus", "--json"], "python -m papers NAME"),
        (["--paper"], "python -m papers NAME"),
        (["formulas", "--layers", "2", "--hidden", "8", "--costs", "64"], "python -m papers formulas --hidden H --costs …"),
    ],
)
def test_an_option_that_is_no_longer_here_says_what_to_type(
    words: list[str], now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        entry.main(["plan", *words])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and f"type `{now}`" in error and error.count("\n") == 1
