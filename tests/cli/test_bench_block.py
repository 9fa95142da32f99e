"""`summa3d bench block` from outside, on tiny blocks: what the JSON holds, what is drawn, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jobs
import pytest
from nn_oracle.volume import GPTVolume

from summa3d.comm.grid import Place
from summa3d.nn import ModelConfig, scheme

ROOT = Path(__file__).parents[2]
SIZES = ("--blocks", "2", "--batch", "4", "--sequence", "5", "--hidden", "24", "--heads", "4")


def summa3d(*arguments, ranks=None, timeout=300):
    launch = [] if ranks is None else ["launch", "-n", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [jobs.python(), "-m", "summa3d", *launch, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


@pytest.mark.wide
def test_every_grid_of_a_scheme_races_and_is_drawn(tmp_path):
    file = tmp_path / "blocks.json"
    chosen = [
        "--scheme",
        "cuboid",
        "--scheme",
        "summa:2,2",
        "--scheme",
        "oned",
        "--regather",
        "both",
        "--dtype",
        "float64",
        "--rounds",
        "2",
    ]
    done = summa3d("bench", "block", *SIZES, *chosen, "--json", file, ranks=4)
    assert done.returncode == 0, done.stderr
    assert "2 gpt2 blocks, b=4 s=5 h=24 a=4 float64, 4 ranks, medians of 2 rounds" in done.stdout and "USDT" not in done.stderr
    result = json.loads(file.read_text())
    assert len({row["label"] for row in result["rows"]}) == len(result["rows"]) == 2 * 6 + 1 + 1
    config = ModelConfig(layers=2, hidden=24, heads=4, sequence=5)
    for row in result["rows"]:
        for phase in ("forward", "backward", "both"):
            seconds = row["seconds"][phase]
            assert len(seconds["all"]) == 2 and 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
        assert row["relative_difference"] < 1e-12
        assert 0 < row["saved_bytes"] < row["peak_bytes"]
        block = GPTVolume(config, scheme(row["scheme"], Place(row["grid"]), row["regather"]), 4, 5).block().times(2)
        assert row["words_per_rank"] == {"forward": block.forward.words, "backward": block.backward.words}
    shown = summa3d("report", file, "--format", "svg")
    assert shown.returncode == 0 and done.stdout.strip() in shown.stdout, shown.stderr
    drawn = (tmp_path / "blocks.svg").read_text()
    assert "words received per rank, forward and backward" in drawn and "2 gpt2 blocks, b=4 s=5 h=24 a=4 float64" in drawn


def test_a_papers_shape_is_scaled_by_the_factor_it_states():
    done = summa3d("bench", "block", "--paper-shape", "optimus-strong", "--factor", "32", "--rounds", "1", "--json", "-", ranks=1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [result["case"][name] for name in ("batch", "sequence", "hidden", "heads")] == [24, 16, 96, 24]
    assert (result["paper"]["hidden"], result["paper"]["sequence"], result["paper"]["factor"]) == (3072, 512, 32)


BAD = [
    (["--scheme", "diagonal"], "ConfigError: --scheme diagonal: 'diagonal' is not a scheme. Schemes: "),
    (["--scheme", "cuboid:x=3"], "no such grid of 2 ranks can run this block. Grids of cuboid that can: x=1,y=1,z=2 ·"),
    (["--paper-shape", "3d-strong", "--factor", "5"], "--factor 5 does not divide the sequence 512 of 3d-strong (24 heads)."),
    (["--blocks", "0"], "ConfigError: --blocks is 0; it must be at least 1."),
]


def test_bad_input_is_refused_on_every_rank():
    commands = [["bench", "block", *SIZES, *arguments] for arguments, _ in BAD]
    for done, (_, message) in zip(jobs.commands(commands, 2), BAD, strict=True):
        assert done.status != 0 and done.stdout == "" and done.stderr.count(message) == 1, done
