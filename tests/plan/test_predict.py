"""Steps put together from cells: the simulated schedule, its shortcuts, and which stage sets the pace."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

import pytest

from summa3d.cli import plan as cli
from summa3d.cluster import load
from summa3d.comm.topology import Topology
from summa3d.dry.record import ENTER, LEAVE, Op
from summa3d.errors import ConfigError
from summa3d.parallel.schedule import build
from summa3d.parallel.simulate import timeline
from summa3d.plan.cells import BLOCK, Cell
from summa3d.plan.formulas import bubble, days, days_by_parameters, hardware_flops, model_flops, parameters
from summa3d.plan.predict import PredictedStep

CLUSTER = load("longhorn").replaced(
    {
        "device.memory_bandwidth": 1e9,
        "elements.efficiency": 1.0,
        "collectives.launch": 0.0,
        "network.latency": 0.0,
        "node.latency": 0.0,
    },
    "assumed",
)
"""A microsecond takes 1,000 bytes."""


def cell(forward: int, backward: int) -> Cell:
    return Cell(*((Op("elements", "forward", "", "add", read=1000 * size),) for size in (forward, backward)))


def step(p: int, m: int, v: int = 1, leave: tuple[int, int] = (0, 0), **more: object) -> PredictedStep:
    cells = {ENTER: cell(0, 0), BLOCK: cell(1, 2), LEAVE: cell(*leave)}
    schedule = "interleaved" if v > 1 else "1f1b"
    whole = PredictedStep(cells, Topology.checked({"y": 1, "dp": 1, "pp": p}, ["y", "dp", "pp"]), schedule, (1,) * (p * v), m)
    return replace(whole, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("p", "m", "v"), [(1, 5, 1), (4, 4, 1), (4, 30, 1), (3, 12, 2), (4, 32, 3)])
def test_equal_stages_take_the_papers_closed_form(p: int, m: int, v: int) -> None:
    whole = step(p, m, v)
    assert whole.seconds(CLUSTER) == pytest.approx(1e-6 * 3 * v * m * (1 + bubble(p, m, v)))
    assert whole.closed(whole.durations(CLUSTER)) == pytest.approx(whole.seconds(CLUSTER))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 20, 1), (4, 40, 1), (3, 24, 2), (4, 32, 2)])
def test_few_simulated_micro_batches_are_the_whole_simulation(p: int, m: int, v: int) -> None:
    whole = step(p, m, v, leave=(1, 1), send=(Op("move", "forward", "", "send", axis="pp", words=700, dtype="float32"),))
    parts = whole.of_stages(whole.durations(CLUSTER))
    assert parts["F", p * v - 1] != parts["F", 0] != parts["B", 0]
    full = timeline(build(whole.schedule, p, m, v), of_stages=parts).time
    assert whole.pipeline(CLUSTER) == pytest.approx(full)


def test_a_stage_sends_onwards_and_back_to_neighbours_on_other_ranks() -> None:
    assert step(3, 4).messages == ((1, 0), (1, 1), (0, 1))
    assert replace(step(2, 4, 2), schedule="zb-v").messages == ((1, 0), (0, 1), (1, 0), (0, 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    plain, head = step(4, 100), step(4, 100, leave=(1, 2))
    assert head.seconds(CLUSTER) == pytest.approx(plain.seconds(CLUSTER) + 100 * 3e-6)
    fewer, more = (replace(head, layers=layers) for layers in ((2, 2, 2, 1), (2, 2, 1, 2)))
    assert more.seconds(CLUSTER) > 1.4 * fewer.seconds(CLUSTER)
    ragged = replace(plain, layers=(2, 2, 1, 1))
    assert ragged.seconds(CLUSTER) > 1.9 * plain.seconds(CLUSTER)


def test_what_comes_after_is_added_and_overlap_hides_what_is_waited_for_later() -> None:
    optimizer = Op("elements", "optimizer", "", "adam", read=5000)
    assert replace(step(2, 4), after=(optimizer,)).seconds(CLUSTER) == pytest.approx(step(2, 4).seconds(CLUSTER) + 5e-6)
    move = Op("move", "forward", "", "all_reduce", axis="y", words=1000, dtype="float32", id=1)
    work = (move, Op("elements", "forward", "", "add", read=10**6), Op("wait", "forward", "", "", id=1))
    wide = Topology.checked({"y": 4, "dp": 1, "pp": 1}, ["y", "dp", "pp"])
    cells = {ENTER: Cell(), BLOCK: Cell(work, ()), LEAVE: Cell()}
    hidden, seen = (replace(step(1, 1), cells=cells, topology=wide, overlap=one).seconds(CLUSTER) for one in (True, False))
    assert hidden == pytest.approx(1e-3) and seen > hidden


def test_the_command_prints_every_formula_with_its_source(capsys: Any) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = (
        "formulas --layers 128 --hidden 25600 --batch 3072 --tokens 450e9 --ranks 3072 --tflops 163 --pp 64 --micro-batches 512"
    )
    assert cli.run(parser.parse_args(words.split())) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith(("parameters", "days of"))] == ["2", "tables"]
    assert cli.run(parser.parse_args([*words.split(), "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == parameters(128, 25600, 51200, 2048) and found["bubble"] == 63 / 512
    assert found["days"] == pytest.approx(85.0, abs=0.05) and found["days_by_parameters"] == pytest.approx(83.9, abs=0.2)
    for wrong, said in (("--hidden 0", "--hidden is 0; it must be positive"), ("--tokens 1e9", "all three")):
        with pytest.raises(ConfigError, match=said):
            cli.run(parser.parse_args(["formulas", "--layers", "2", "--hidden", "8", *wrong.split()]))


def test_formulas_are_those_of_the_paper() -> None:
    gpt, trillion = (96, 12288, 51200, 2048), (128, 25600, 51200, 2048)
    assert parameters(*gpt) == pytest.approx(174.6e9, rel=1e-3) and parameters(*trillion) == pytest.approx(1008e9, rel=1e-3)
    assert hardware_flops(*trillion, 3072) == pytest.approx(5.139051377527358e19)
    logits = 6 * 1536 * 2048 * 12288 * 51200
    blocks = hardware_flops(*gpt, 1536) - logits
    assert model_flops(*gpt, 1536) == pytest.approx(0.75 * blocks + logits)
    assert days_by_parameters(175e9, 300e9, 1024, 140e12) == pytest.approx(33.91, abs=0.01)
    assert days(*trillion, 450e9, 3072, 163e12) == pytest.approx(84.96, abs=0.02)
    assert days(*gpt, 300e9, 384, 153e12) == pytest.approx(84.7, abs=0.1)
