"""Runs with Muon: torch's own weights after twenty steps on every grid, the words of the dry run, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_real import lines_moved, lines_of
from mpi4py import MPI
from plain_gpt import PlainGPT
from plain_llama import PlainLlama
from plain_muon import PlainMuon
from small_runs import metrics_of, shared_corpus, small_config, tensors_of, train_in_legs, train_small

from summa3d.dry.step import run as run_dry
from summa3d.errors import CheckpointError, ConfigError
from summa3d.layout import collect
from summa3d.nn.muon.groups import group_axes
from summa3d.train.dry_run import predict, setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.optimizer import learning_rate
from summa3d.train.prepare import prepare

MUON: dict[str, Any] = {
    "train__optimizer": "muon",
    "train__muon__adjust": "original",
    "train__muon__momentum": 0.9,
    "train__steps": 20,
    "train__clip": 0.7,
    "train__weight_decay": 0.2,
    "train__keep": 0,
    "train__batch": 24,
    "train__accumulate": 2,
    "model__dropout": 0.0,
    "model__layers": 2,
    "model__ffn": 37,
}
LLAMA = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
PIPED = {"scheme": "serial", "grid__pp": 2, "grid__dp": 2}
GROUPS: tuple[dict[str, Any], ...] = ({}, {"train__muon__ranks": 2}, {}, {"train__muon__ranks": 2})
"""With each ZeRO: both ranks of a stage own other matrices, or compute each together."""
GRIDS: dict[int, list[dict[str, Any]]] = {
    1: [{"scheme": "serial"}],
    2: [
        {"scheme": "cuboid", "grid__x": 2},
        {"scheme": "oned", "grid__y": 2, **LLAMA},
        {"scheme": "cuboid", "grid__y": 2, **LLAMA},
    ],
    3: [{"scheme": "cuboid", "grid__y": 3}, {"scheme": "serial", "grid__dp": 3, "replicas__zero": 0}],
    4: [
        {"scheme": "summa", "grid__x": 2, "grid__y": 2},
        {"scheme": "oned", "grid__y": 4, "model__heads": 4, **LLAMA},
        *({**PIPED, "replicas__zero": zero, "replicas__bucket": 5000, **GROUPS[zero]} for zero in range(4)),
    ],
    6: [
        {"scheme": "cuboid", "grid__y": 3, "grid__z": 2},
        {"scheme": "summa-transposed", "grid__x": 3, "grid__y": 2, "train__muon__ranks": 3},
    ],
    8: [
        {"scheme": "tesseract", "grid__x": 2, "grid__y": 2, "grid__d": 2},
        {"scheme": "cuboid", "grid__y": 2, "grid__z": 2, "grid__dp": 2, "replicas__zero": 2, "train__muon__ranks": 4, **LLAMA},
        {"scheme": "cuboid-sequence", "grid__y": 2, "grid__z": 4, "model__heads": 8},
    ],
    12: [{"scheme": "cuboid", "grid__x": 2, "grid__y": 3, "grid__z": 2, "train__muon__ranks": 12}],
}
"""Ranks → grids, each with a scheme and a family; without muon.ranks each matrix, as small as these are, has one owner."""


def wholes(run: Any) -> dict[str, torch.Tensor]:
    return {
        one.name: collect(one.parameter.data, run.grid, one.shardings.stored.layout, one.shardings.stored.shape)
        for one in run.optimizer.states.values()
    }


def torchs(config: Any, run: Any, steps: int) -> list[dict[str, torch.Tensor]]:
    """The weights of plain torch after each step, from those that a serial run begins with."""
    plain = (PlainLlama if config.model.family == "llama" else PlainGPT)(config.model, wholes(run))
    train, muon = config.train, config.train.muon
    settings = {"momentum": muon.momentum, "nesterov": muon.nesterov, "ns_steps": muon.steps, "eps": muon.eps}
    settings |= {"ns_coefficients": muon.coefficients, "adjust_lr_fn": muon.adjust}
    optimizer = PlainMuon(plain.weights, config.model.heads, config.model.num_kv_heads, train.weight_decay, settings)
    found = []
    for step in range(1, steps + 1):
        for weight in plain.weights.values():
            weight.grad = None
        inputs = run.objective.training(train.seed, step - 1, 0, train.batch)
        plain.loss(**inputs, training=False).backward()
        optimizer.step(learning_rate(step, train), train.clip)
        found.append({name: weight.data.clone() for name, weight in plain.weights.items()})
    return found


def check(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], case: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        assert (ours[name] - want).abs().max() <= 1e-9 * want.abs().max(), (case, name)


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.wide)])
def test_steps_on_every_grid_are_torchs_on_whole_matrices(comm: Any, world_size: int, shared_tmp_path: Path, steps: int) -> None:
    """Raw weights after the last step, and what the first one changes; words and messages are the dry run's and the plan's."""
    corpus = shared_corpus(comm, shared_tmp_path)
    for number, grid in enumerate(GRIDS[world_size]):
        oracle = None
        if comm.rank == 0:
            alone = small_config(corpus, **MUON | {key: one for key, one in grid.items() if key.startswith("model")})
            run = prepare(alone, MPI.COMM_SELF, shared_tmp_path / f"alone{number}")
            before, (first, *_, last) = wholes(run), torchs(alone, run, steps)
            oracle = {name: one - before[name] for name, one in first.items()}, last
        want_update, want = comm.bcast(oracle)
        run = prepare(small_config(corpus, **{**MUON, **grid}), comm, shared_tmp_path / f"grid{number}")
        before = wholes(run)
        for step in range(1, steps):
            take_step(run, step)
            if step == 1:
                check({name: one - before[name] for name, one in wholes(run).items()}, want_update, grid)
        with run.grid.ledger.watch() as moved:
            take_step(run, steps)
        check(wholes(run), want, grid)
        owners = run.optimizer.owners
        assert owners.plan.size == int(grid.get("train__muon__ranks", 1))
        inside = [row for row in moved.rows if row.phase == "optimizer" and group_axes(row.axis)]
        assert bool(inside) == (owners.plan.size > 1)
        outside = (row for row in moved.rows if row.collective == "all_to_all" and row.phase == "optimizer")
        rows = [row.amounts for row in [*inside, *(row for row in outside if not group_axes(row.axis))]]
        assert sum(one.words for one in rows) == owners.plan.words_of(owners.axis.index)
        assert sum(one.messages for one in rows) == owners.plan.messages_of(owners.axis.index)
        dry = run_dry(setting_of(run.config, comm.rank, comm.size), training_of(run.config))
        assert lines_of(dry) == lines_moved(moved), grid
        run.grid.free()


LEGS = [
    (2, {"scheme": "serial", "grid__dp": 2, "replicas__zero": 2}),
    (4, {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "replicas__zero": 3}),
    (1, {"scheme": "serial"}),
    (4, {"scheme": "summa", "grid__x": 2, "grid__y": 2}),
    (3, {"scheme": "cuboid", "grid__x": 3}),
]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("model", [{}, pytest.param(LLAMA, marks=pytest.mark.wide)], ids=["gpt2", "llama"])
def test_a_run_goes_on_from_its_checkpoint_on_other_grids(comm: Any, shared_tmp_path: Path, model: dict[str, Any]) -> None:
    keys = {"train__optimizer": "muon", "train__decay_to": 1.0, "model__layers": 2, "train__accumulate": 2, "train__keep": 1}
    legs = [*train_in_legs(comm, shared_tmp_path, LEGS, **keys, **model)]
    assert len(legs) == sum(comm.rank < ranks for ranks, _ in LEGS)
    got, want = ([line["loss"] for line in metrics_of(shared_tmp_path / name)] for name in ("legs", "whole"))
    assert got == pytest.approx(want, rel=1e-9)
    ours, theirs = (tensors_of(shared_tmp_path / name / "run" / "checkpoints" / "step-10") for name in ("legs", "whole"))
    names = {name.split(".")[1] for name in ours if name.startswith("optimizer.") and "blocks.1.mlp.up.weight" in name}
    assert ours.keys() == theirs.keys() and names == {"momentum_buffer"}
    for name, one in theirs.items():
        assert (ours[name] - one).abs().max() <= 1e-9 * one.abs().max(), name


@pytest.mark.mpi(sizes=(2,))
def test_a_run_that_was_ended_goes_on_on_its_grid_with_the_same_bits(comm: Any, shared_tmp_path: Path) -> None:
    keys = {"train__optimizer": "muon", "train__decay_to": 1.0, "scheme": "cuboid", "grid__z": 2, "train__keep": 1}
    for name in ("whole", "parts") if comm.rank == 0 else ():
        (shared_tmp_path / name).mkdir()
    comm.Barrier()
    train_small(comm, shared_tmp_path / "whole", train__steps=6, **keys)
    for part in (3, 6):
        train_small(comm, shared_tmp_path / "parts", resume=part == 6, train__steps=part, **keys)
    found = [tensors_of(shared_tmp_path / name / "run" / "checkpoints" / "step-6") for name in ("whole", "parts")]
    assert all(torch.equal(found[1][name], one) for name, one in found[0].items())


@pytest.mark.mpi(sizes=(1,))
def test_a_run_does_not_go_on_with_another_optimizer(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, train__optimizer="muon", train__steps=2)
    with pytest.raises(CheckpointError, match=r"Set train\.optimizer to 'muon'"):
        train_small(comm, shared_tmp_path, resume=True, train__steps=4)


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("zero", [0, 1])
def test_copied_and_sharded_momentum_have_the_same_bits(comm: Any, shared_tmp_path: Path, zero: int) -> None:
    """So do both of a 16-bit run, whose master weights are sharded as well."""
    found = []
    for dtype in ("float64", "bfloat16"):
        for other in (0, 1):
            folder = shared_tmp_path / f"{dtype}-{other}-{zero}"
            if comm.rank == 0:
                folder.mkdir()
            comm.Barrier()
            keys = {"dtype": dtype, "scheme": "serial", "grid__dp": 2, "replicas__zero": other, "train__optimizer": "muon"}
            train_small(comm, folder, train__steps=3, train__keep=1, **keys)
            found.append(tensors_of(folder / "run" / "checkpoints" / "step-3"))
        assert all(torch.equal(found[-2][name], one) for name, one in found[-1].items()), dtype


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("optimizer", "lion", "Use one of adamw, muon"),
        ("muon.adjust", "none", "match_rms_adamw, original"),
        ("muon.dtype", "float16", "master, bfloat16"),
        ("muon.momentum", 1.0, r"lie in \[0, 1\)"),
        ("muon.steps", 0, "at least 1"),
        ("muon.eps", 0.0, "positive"),
        ("muon.ranks", "all", 'neither "auto" nor a whole number'),
        ("muon.ranks", 0, 'neither "auto" nor a whole number'),
        ("muon.nesterow", True, "train.muon.nesterov"),
    ],
)
def test_what_no_run_can_have_is_refused(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        small_config("stdlib", **{f"train__{key.replace('.', '__')}": value})


def flops(short: int, long: int) -> int:
    return 5 * (4 * short * short * long + 2 * short**3)


def test_a_dry_run_counts_the_momentum_the_words_and_the_flops() -> None:
    keys = {"scheme": "cuboid", "grid__z": 2, "model__layers": 3, "train__checkpoint_every": 0}
    muon, adamw = (predict(small_config("stdlib", train__optimizer=name, **keys), 2) for name in ("muon", "adamw"))
    hidden = 3 * 12 * 24 * 24
    assert adamw["mean_bytes"]["optimizer"] - muon["mean_bytes"]["optimizer"] == 8 * hidden / 2
    products = 3 * (4 * flops(24, 24) + 2 * flops(24, 96))  # of all layers: q, k, v, out; up and down
    assert products / 2 <= muon["flops"] - adamw["flops"] < 0.6 * products
    assert muon["words"]["optimizer"]["x·y·z"] - adamw["words"]["optimizer"]["x·y·z"] == hidden / 2


@pytest.mark.parametrize(
    "grid",
    [
        {"scheme": "cuboid", "grid__y": 2, "grid__z": 2, "model__layers": 1},
        {"scheme": "serial", "grid__pp": 2, "grid__dp": 2, "model__layers": 3},
        {"scheme": "cuboid", "grid__x": 2, "grid__z": 2, "model__layers": 1, "model__ffn": 37, "train__muon__ranks": 2},
        {"scheme": "oned", "grid__y": 2, "grid__dp": 2, "replicas__zero": 2, "train__accumulate": 2, **LLAMA},
    ],
)
def test_the_report_of_a_dry_run_knows_ranks_that_own_more_matrices_than_others(grid: dict[str, Any]) -> None:
    """The fullest rank, the mean of all, and the flops are those of runs of each rank by itself."""
    config = small_config("stdlib", train__optimizer="muon", train__checkpoint_every=0, **grid)
    steps = [run_dry(setting_of(config, rank), training_of(config)) for rank in range(4)]
    found, peaks = predict(config, 1), [step.peak for step in steps]
    assert found["peak"] == max(peaks) and found["fullest_rank"] == peaks.index(max(peaks))
    assert found["mean_bytes"]["peak"] == sum(peaks) / 4
    assert found["flops"] == steps[found["fullest_rank"]].operations()["product"]["flops"]
    assert len({step.operations()["product"]["flops"] for step in steps}) > 1
