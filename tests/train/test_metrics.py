"""Metrics: the lines, the account over ranks, what a resumed run keeps, and the plot."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_clock import FakeClock
from mpi4py import MPI

from summa3d.comm.profile.ledger import Amounts, Ledger
from summa3d.errors import DataError
from summa3d.train import metrics
from summa3d.train.config import load, to_table, write
from summa3d.train.loss_plot import draw_load, draw_loss
from summa3d.train.metrics import CoreTime, MetricsWriter, StepMetrics, Stopwatch
from summa3d.train.progress import TERMINAL_VARIABLE, Progress
from summa3d.train.utilization import StepWork

KEYS = ["step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "words_per_rank"]
SHARES = ["arithmetic_share", "communication_share", "idle_share", "waited_seconds", "exposed_communication"]
RATES = ["model_flops_per_second", "mfu"]
WORDS = ["words_by_axis"]


def step(number: int, **changes: Any) -> StepMetrics:
    usual = {"step": number, "loss": 1 / 3, "grad_norm": 0.1, "learning_rate": 1e-3, "tokens": 64, "seconds": 2.0}
    return StepMetrics(**(usual | changes))


def test_the_learning_rate_of_older_metrics_is_found_by_its_name_of_today(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": 0.5}\n{"step": 2, "loss": 1.0, "lr": "x"}\n')
    assert metrics.read(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0, "learning_rate": 0.5}]


@pytest.mark.mpi(sizes=(1, 3))
def test_a_line_holds_the_largest_words_and_floats_in_full(comm: Any, shared_tmp_path: Path) -> None:
    recorder = MetricsWriter(shared_tmp_path / "metrics.jsonl", comm, resumed_at=0, work=StepWork(flops=3e9, peak=6e9))
    spent = {"arithmetic_seconds": 0.25, "communication_seconds": 0.125, "waited_seconds": 0.5 + comm.rank}
    recorder.post(step(1, words_by_axis={"y": 4, "z": 6 + comm.rank}, **spent))
    recorder.post(step(2, words_by_axis={"z": 10 - comm.rank}, **spent, validation_loss=2 / 3))
    recorder.close()
    comm.Barrier()
    lines = [json.loads(text) for text in (shared_tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [
        [*KEYS, *SHARES, *RATES, *WORDS],
        [*KEYS, *SHARES, *RATES, *WORDS, "validation_loss"],
    ]
    assert [line["words_per_rank"] for line in lines] == [10 + comm.size - 1, 10]
    assert (lines[0]["loss"], lines[1]["validation_loss"], lines[0]["tokens_per_second"]) == (1 / 3, 2 / 3, 32.0)
    if comm.rank == 0:
        cores = len(os.sched_getaffinity(0))
        assert recorder.account.cores == cores
        used, waited = min(cores, comm.size), 0.5 + (comm.size - 1) / 2
        whole = used * 2.0  # seconds of the cores that ranks are on
        arithmetic = comm.size * 0.25 / whole
        waits = comm.size * waited / whole
        if comm.size > cores:  # others compute while a rank waits
            waits = min(waits, 1 - comm.size * 0.375 / whole)
        communication = comm.size * 0.125 / whole + waits
        idle = 1 - arithmetic - communication
        assert [lines[0][name] for name in SHARES] == pytest.approx([arithmetic, communication, idle, waited, communication])
        assert [lines[0][name] for name in RATES] == [1.5e9, 0.25]  # 3 GFLOP in 2 s
        for found, times in ((recorder.core_time, waited), (recorder.account.core_time, 2 * waited)):
            wanted = (arithmetic, communication, idle, times, communication, 1.5e9, 0.25)
            assert found == CoreTime(used, *(pytest.approx(part, abs=1e-12) for part in wanted))


@pytest.mark.parametrize("seed", range(20))
def test_no_figure_contradicts_another(seed: int) -> None:
    random = np.random.default_rng(seed)
    cores, ranks, seconds = int(random.integers(1, 9)), int(random.integers(1, 17)), float(random.uniform(0.1, 9))
    inside = random.uniform(0, seconds, ranks)  # wall seconds of each rank in communication calls
    shared = min(cores / ranks, 1)
    cpu = [float((seconds - inside).sum() * shared * 0.999), float(inside.sum() * shared * 0.3), float(inside.sum() * 0.7)]
    arithmetic_flops = 1e9 * cpu[0] * 0.9  # of a peak of 1 Gflop/s a core
    found = CoreTime.of(cores, seconds, 5, ranks, cpu, StepWork(arithmetic_flops, 1e9 * min(cores, ranks)))
    assert found.communication == found.exposed is not None and found.utilization is not None
    assert found.arithmetic + found.communication + found.idle == pytest.approx(1) and min(found.idle, found.communication) >= 0
    assert found.utilization + found.exposed <= 1 + 1e-9


def test_a_run_that_moves_no_word_has_no_figure_of_communication() -> None:
    alone = CoreTime.of(cores=2, seconds=10.0, words=0, ranks=1, cpu=(8.0, 0.0, 0.0))
    assert alone == CoreTime(1, 0.8, None, pytest.approx(0.2), None)  # the other core is no rank's
    assert str(alone) == "arithmetic 80%, idle 20% of 1 core"
    team = CoreTime.of(cores=2, seconds=10.0, words=0, ranks=1, cpu=(8.0, 0.0, 0.0), threads=2)
    assert team.entries() == {"arithmetic_share": 0.4, "idle_share": 0.6} and team.cores == 2


def test_the_cores_time_is_arithmetic_communication_and_the_rest() -> None:
    found = CoreTime.of(cores=4, seconds=10.0, words=7, ranks=8, cpu=(20.0, 6.0, 16.0))
    assert found == CoreTime(4, 0.5, 0.5, 0, 2.0, exposed=0.5)  # of 16 s that ranks wait, cores are idle in 14
    assert str(found) == "arithmetic 50%, communication 50%, idle 0% of 4 cores · waited 2.00 s"
    alone = CoreTime.of(cores=64, seconds=10.0, words=7, ranks=2, cpu=(3.0, 0.2, 16.0))
    assert alone == CoreTime(2, 0.15, pytest.approx(0.81), pytest.approx(0.04), 8.0, exposed=alone.communication)
    team = CoreTime.of(cores=64, seconds=10.0, words=7, ranks=2, cpu=(24.0, 1.0, 3.0), threads=2)
    assert team == CoreTime(4, 0.6, 0.2, pytest.approx(0.2), 1.5, exposed=0.2)
    above = CoreTime.of(2, 1.0, 7, 2, (1.0, 0.1, 0.0), StepWork(9e9, 8e9))
    assert above.flops_per_second == 9e9 and above.utilization is None and "mfu" not in above.entries()
    assert CoreTime.of(2, 1.0, 7, 2, (2.0, 0.1, 0.0)).idle == 0  # clocks are no exacter than that


@pytest.mark.parametrize("words", [0, 5])
def test_the_progress_line_says_where_the_cores_time_went(capsys: pytest.CaptureFixture[str], words: int) -> None:
    with Progress(3, speak=True) as progress:
        progress.step(step(3, words_by_axis={"x": words}), CoreTime.of(2, 1.0, words, 1, (0.5, 0.125, 0.25), StepWork(2e9, 8e9)))
    said = capsys.readouterr().err
    assert said.startswith("step 3/3 100% · 0:00 left · loss 0.3333 · 32 tok/s · MFU 25%")
    assert said.endswith("2.0 Gflop/s\n") and ("communication 38%" in said) == (words > 0) == ("communication" in said)
    assert CoreTime.of(2, 1.0, words, 1, (0.5, 0.1, 0.2), StepWork(on_host=False)).exposed is None  # a device hides it, or not


@pytest.mark.parametrize("columns", [None, 60])
def test_lines_fit_and_say_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None
) -> None:
    if columns:
        monkeypatch.setenv(TERMINAL_VARIABLE, str(columns))  # as `summa3d launch` does in a terminal
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with Progress(200_000, speak=True) as progress:
        progress.doing("encoding the corpus")
        progress.start(100_000)
        progress.step(
            step(100_020, tokens=10**9, validation_loss=2.5), CoreTime.of(2, 1.0, 5, 1, (0.5, 0.1, 0.2), StepWork(9e14))
        )
    said = capsys.readouterr().err
    assert ("\x1b[2K" in said) == bool(columns) and "encoding the corpus" in said
    lines = [re.sub(r"\x1b\[[?0-9]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", said)]
    assert max(map(len, lines)) <= (columns or 100)
    assert any(line.startswith("step 100020/200000 50% · 138:51:40 left · loss 0.3333") for line in lines)  # 99,980 · 5 s


@pytest.mark.mpi(sizes=(1,))
def test_a_full_disk_ends_no_run_and_loses_no_line(comm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = MetricsWriter(tmp_path / "metrics.jsonl", comm, resumed_at=0)
    with open("/dev/full", "wb", buffering=0) as full:
        file, recorder._file = recorder._file, full
        for number in (1, 2, 3):
            recorder.post(step(number))
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl cannot be written: No space left on device. The run goes on") == 1
    recorder._file = file
    recorder.close()
    assert [line["step"] for line in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("spoilt", ["9" * 309, "-" + "9" * 4000, "NaN", "[" * 100_000])
def test_lines_end_where_one_is_none(tmp_path: Path, spoilt: str) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": 1, "loss": 2, "note": "{"9" * 400}"}}', f'{{"step": 2, "loss": {spoilt}}}', '{"step": 3, "loss": 1}']
    path.write_text("\n".join(lines) + "\n")
    assert [line["step"] for line in metrics.read(path)] == [1]


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number}) + "\n" for number in (1, 2, 3)) + '{"step": 4, "lo')
    metrics.open_at(path, 2).close()
    assert metrics.read(path) == [{"step": 1}, {"step": 2, "resumed": True}]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_stopwatch_leaves_communication_out_of_arithmetic(clock: FakeClock, threads: int) -> None:
    ledger = Ledger()
    ledger.line("all_gather", "x", "float64").add(Amounts(words=7, seconds=20.0, cpu_seconds=9.0))
    stopwatch, done = Stopwatch(ledger, threads), step(1)
    clock.passes(2, cpu=1)
    ledger.line("all_gather", "x", "float64").add(Amounts(words=3, seconds=0.5, cpu_seconds=0.125))
    stopwatch.stop(done)
    assert (done.words_by_axis, done.seconds, done.arithmetic_seconds) == ({"x": 3}, 2, 0.875)
    assert (done.communication_seconds, done.waited_seconds) == (0.125, 0.375)


def test_tensorboard_gets_every_number_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 3)

        def add_scalar(self, name: str, value: float, number: int) -> None:
            written.append((name, value, number))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    recorder = MetricsWriter(tmp_path / "metrics.jsonl", MPI.COMM_SELF, resumed_at=2, tensorboard=True)
    recorder.post(step(3, loss=float("nan"), validation_loss=0.5))
    recorder.close()
    line = metrics.read(tmp_path / "metrics.jsonl")[0]
    assert written[:-1] == [(name, value, 3) for name, value in line.items() if name != "step" and value is not None]
    assert written[-1][0] == "closed" and ("validation_loss", 0.5, 3) in written


def test_peak_memory_is_at_least_what_was_held_and_of_its_order() -> None:
    size = 200 << 20
    block = bytearray(os.urandom(1)) * size
    assert size < metrics.peak_memory() < 40 * size
    del block
    assert metrics.peak_memory() > size


def a_run(folder: Path, steps: int, batch: int, *settings: str, **resumed: bool) -> Path:
    """A run folder as `train` writes it, with one line of metrics per step."""
    folder.mkdir()
    write(to_table(load("demo", ["grid.x=2", f"train.batch={batch}", "model.layers=1", *settings])), folder / "config.toml")
    lines = [
        {"step": number, "loss": 5 / number, "tokens_per_second": 128.0 * batch / 0.7, "seconds": 0.7}
        for number in range(1, steps + 1)
    ]
    lines[-1]["validation_loss"] = 2.0
    lines[steps // 2] |= resumed
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_runs_are_drawn_over_steps_and_tokens_with_their_titles_and_resumptions(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole, resumed, wide = a_run(tmp_path / "a", 9, 8), a_run(tmp_path / "b", 9, 8, resumed=True), a_run(tmp_path / "c", 9, 24)
    svg = {}
    for name, runs in (("one", [whole]), ("resumed", [resumed]), ("two", [whole, wide])):
        draw_loss(runs, [tmp_path / f"{name}.svg"])
        svg[name] = (tmp_path / f"{name}.svg").read_text()
    h, vocabulary, sequence = 256, 256, 128
    count = (vocabulary + sequence) * h + (12 * h * h + 13 * h) + 2 * h  # embeddings, a block, the last norm
    assert f"a: gpt2, {count:,} parameters, cuboid x=2,y=1,z=1, float32" in svg["one"]
    assert all(text.count("<!-- tokens -->") == 1 and "<!-- step -->" in text for text in svg.values())
    panels = {name: text.count("<!-- loss (nats) -->") for name, text in svg.items()}
    assert panels == {"one": 1, "resumed": 1, "two": 2}  # equal tokens per step share a panel
    dotted = "stroke-dasharray: 0.8,1.32"
    assert (dotted in svg["resumed"]) > (dotted in svg["one"])
    assert ("dotted: resumed" in svg["resumed"]) > ("dotted: resumed" in svg["one"])


def test_a_plot_says_all_grids_of_a_run_what_differs_and_which_lines_are_there(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    moved, other = a_run(tmp_path / "moved", 9, 8), a_run(tmp_path / "other", 60, 8, "data.path=a.txt")
    for step, size in ((10, 3), (9, 4), (12, 4)):
        write(to_table(load("demo", [f"grid.x={size}"])), moved / f"config-{step}.toml")
    draw_loss([moved], [tmp_path / "one.svg"])
    draw_loss([moved, other], [tmp_path / "two.svg"])
    one, two = ((tmp_path / f"{name}.svg").read_text() for name in ("one", "two"))
    assert "cuboid x=4,y=1,z=1" in one and one.index("x=4,") < one.index("x=3,") < one.rindex("x=4,") < one.index("x=2,")
    assert "line: loss of each step" in one and "differ" not in one and "thin: " not in one
    assert "thin: loss of each step" in two and "corpora differ" in two and "tokenizers" not in two


def test_the_loads_of_experts_are_drawn_over_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = a_run(tmp_path / "a", 9, 8)
    with pytest.raises(DataError, match="no expert_tokens"):
        draw_load(run, [tmp_path / "load.svg"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    more = {"expert_tokens": [[3, 5, 1], [0, 9, 0]], "expert_entropy": [0.9, 0.0]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in lines))
    draw_load(run, [tmp_path / "load.svg"])
    svg = (tmp_path / "load.svg").read_text()
    assert all(f"<!-- {label} -->" in svg for label in ("expert", "tokens / mean", "step", "entropy"))


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run"):
        draw_loss([tmp_path], [tmp_path / "loss.png"])
