"""Training with experts on axis ep: losses, norms and validation losses are those of the serial run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dry_real import lines_moved, lines_of
from mpi4py import MPI
from nn_parity import global_weights
from plain_mixtral import PlainMixtral
from small_runs import metrics_of, shared_corpus, small_config, tensors_of, train_in_legs, train_small

from summa3d.dry.step import run as run_dry
from summa3d.errors import ConfigError
from summa3d.nn.experts.load import GivenLoad
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

EXPERTS: dict[str, Any] = {
    "model.family": "mixtral",
    "model.layers": 2,
    "model.ffn": 12,
    "model.experts": 5,
    "model.balance": 0.2,
    "model.moe.z_loss": 0.01,
    "model.moe.bias_rate": 0.02,
    "train.accumulate": 2,
    "train.batch": 24,
    "train.clip": 0.5,
    "train.steps": 3,
    "train.evaluate_batches": 1,
    "train.keep": 0,
    "train.checkpoint_every": 0,
    "scheme": "serial",
}
CUBOID = {"scheme": "cuboid"}
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [{"grid.ep": 2, "replicas.zero": 3, "recompute": "full"}, {"grid.ep": 2}, {"grid.pp": 2, "pipeline.schedule": "zb-h1"}],
    3: [{"grid.ep": 3, "replicas.zero": 2}],
    4: [
        {"grid.ep": 2, "grid.z": 2, **CUBOID},
        {"grid.ep": 2, "grid.y": 2, "scheme": "oned"},
        {"grid.ep": 2, "grid.dp": 2, "replicas.zero": 3},
        {"grid.ep": 2, "grid.dp": 2, "replicas.zero": 0},
        {"grid.ep": 2, "grid.pp": 2, "model.layers": 4, "pipeline.schedule": "zb-v", "pipeline.chunks": 2},
        {"grid.ep": 2, "grid.cp": 2, "replicas.zero": 2},
        {"grid.ep": 2, "grid.y": 2, "scheme": "cuboid-sequence"},
        {"grid.ep": 4, "replicas.zero": 1, "train.batch": 48},
        {"grid.cp": 2, "grid.y": 2, "scheme": "cuboid-sequence", "model.moe.capacity": 0.7},
        {"grid.ep": 2, "grid.cp": 2, "context.kind": "ring", "model.moe.capacity": 0.9},
    ],
    8: [
        {"grid.ep": 2, "grid.x": 2, "grid.y": 2, "scheme": "summa"},
        {"grid.pp": 2, "grid.ep": 2, "grid.z": 2, **CUBOID},
        {"grid.ep": 2, "grid.x": 2, "grid.y": 2, "grid.d": 1, "scheme": "tesseract", "overlap.gather": 1},
    ],
}


OF_MODELS = ("model.layers", "train.batch", "model.moe.capacity")
"""Keys of a grid that the serial run has too."""


def keys(**changes: Any) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in {**EXPERTS, **changes}.items()}


def lines(comm: MPI.Intracomm, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    if comm.rank == 0:
        folder.mkdir(parents=True)
    comm.Barrier()
    train_small(comm, folder, **keys(**changes))
    found: list[dict[str, Any]] = comm.bcast(metrics_of(folder) if comm.rank == 0 else None)
    return found


@pytest.mark.mpi(sizes=(2, 4))
def test_losses_norms_and_validation_are_the_serial_runs(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    check(comm, GRIDS[world_size][:1], shared_tmp_path)


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_so_they_are_on_every_grid(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    check(comm, GRIDS[world_size], shared_tmp_path)


def check(comm: MPI.Intracomm, grids: list[dict[str, Any]], shared_tmp_path: Path) -> None:
    alone: dict[Any, list[dict[str, Any]]] = {}
    for number, how in enumerate(grids):
        sizes = {name: how[name] for name in OF_MODELS if name in how}
        key = tuple(sizes.items())
        if key not in alone:
            one = lines(MPI.COMM_SELF, shared_tmp_path / f"serial{len(alone)}", **sizes) if comm.rank == 0 else None
            alone[key] = comm.bcast(one)
        found = lines(comm, shared_tmp_path / str(number), **how)
        assert len(found) == len(alone[key]) == EXPERTS["train.steps"]
        for ours, theirs in zip(found, alone[key], strict=True):
            assert ours["expert_tokens"] == theirs["expert_tokens"], (how, ours["step"])
            chosen, taken = 2 * 16 * how.get("train.batch", 24), [sum(of) for of in ours["expert_tokens"]]
            assert all(of < chosen if "model.moe.capacity" in how else of == chosen for of in taken)
            for name in ("loss", "grad_norm", "validation_loss"):
                assert (name in ours) == (name in theirs), name
                if name in theirs:
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), (how, name, ours["step"])


@pytest.mark.mpi(sizes=(1,))
def test_a_steps_gradients_and_biases_are_those_of_a_plain_model_with_router_losses(comm: Any, shared_tmp_path: Path) -> None:
    """In two micro-batches, with router losses as large as the loss, beside a plain model that takes the batch at once."""
    changes = {"train.clip": 0.0, "model.balance": 3.0, "model.moe.z_loss": 1.0}
    run = prepare(small_config(shared_corpus(comm, shared_tmp_path), **keys(**changes)), comm, shared_tmp_path / "r")
    settings = run.config.train
    plain = PlainMixtral(run.config.model, global_weights(run.model), seed=settings.seed)
    before = [block.moe.router.bias.clone() for block in run.model.blocks]
    batch = run.objective.training(settings.seed, 0, 0, settings.batch)
    loss = plain.loss(*batch.values(), step=0, step_rows=settings.batch)
    loss.backward()
    want = sum(weight.grad.square().sum().item() for weight in plain.weights.values() if weight.grad is not None) ** 0.5
    step = take_step(run, 1)
    assert step.grad_norm == pytest.approx(want, rel=1e-10)
    for layer, (bias, counts) in enumerate(zip(before, plain.counts(), strict=True)):
        moved = [0.02 * ((sum(counts) > 5 * count) - (sum(counts) < 5 * count)) for count in counts]
        assert torch.equal(run.model.blocks[layer].moe.router.bias, bias + torch.tensor(moved, dtype=bias.dtype)), counts
    assert step.expert_tokens == plain.counts()
    assert plain.terms.item() > 1.0 and step.loss == pytest.approx(loss.item(), rel=1e-10)


@pytest.mark.mpi(sizes=(2, 4))
@pytest.mark.parametrize("node", ["yes", "no"])
def test_a_dry_run_given_the_runs_own_counts_moves_the_words_of_its_ledger(
    comm: Any, world_size: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    """By phase and axis, on every rank, with balance and moving biases; other counts move other words."""
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", node)
    how = {2: {"grid.ep": 2}, 4: {"grid.ep": 2, "grid.y": 2, "scheme": "oned-sp"}}[world_size]
    config = small_config(shared_corpus(comm, shared_tmp_path), **keys(**how, **{"model.layers": 3}))
    run = prepare(config, comm, shared_tmp_path / "r")
    for block in run.model.blocks:
        block.moe.router.weight.data *= 30.0
    take_step(run, 1)  # whose first calls are compared
    own = np.zeros((config.train.accumulate, config.model.layers, config.model.num_experts), np.int64)
    for layer, block in enumerate(run.model.blocks):
        block.moe.router.register_forward_hook(
            lambda module, inputs, routing, layer=layer: own.__setitem__(
                (run.model.context.state.key.micro, layer),
                np.bincount(routing.choices.flatten().numpy(), minlength=own.shape[-1]),
            )
        )
    with run.grid.ledger.watch() as moved:
        step = take_step(run, 2)
    load = np.array(comm.allgather(own))
    assert step.expert_tokens is not None and np.ptp(step.expert_tokens) > 0
    setting = replace(
        setting_of(config, comm.rank, comm.size), load=GivenLoad.of(load, config.model, comm.size, config.train.accumulate)
    )
    dry = run_dry(setting, training_of(config))
    assert lines_of(dry) == lines_moved(moved)
    by_axis = {
        axis: sum(row.amounts.words for row in moved.rows if row.axis == axis) for axis in {row.axis for row in moved.rows}
    }
    assert step.words_by_axis == {axis: words for axis, words in by_axis.items() if words} and "ep" in step.words_by_axis
    even = run_dry(replace(setting, load=None), training_of(config))
    assert comm.allreduce(even.words() != dry.words()) > 0


@pytest.mark.mpi(sizes=(4,))
def test_a_checkpoint_of_experts_goes_on_on_any_grid(comm: Any, shared_tmp_path: Path) -> None:
    legs = [
        (4, {"grid__ep": 2, "grid__z": 2, "scheme": "cuboid"}),
        (4, {"grid__pp": 2, "grid__ep": 2, "replicas__zero": 3, "scheme": "serial"}),
    ]
    settings = {
        name: value
        for name, value in keys().items()
        if name not in ("train__steps", "train__keep", "train__checkpoint_every", "scheme")
    }
    for part, step in train_in_legs(comm, shared_tmp_path, legs, **settings, train__keep=9, train__decay_to=1.0):
        if part.rank == 0:
            whole, legged = (tensors_of(shared_tmp_path / name / f"run/checkpoints/step-{step}") for name in ("whole", "legs"))
            assert whole.keys() == legged.keys()
            assert {"model.blocks.1.moe.experts.4.up.weight", "model.blocks.0.moe.router.bias"} <= whole.keys()
            for name, want in whole.items():
                assert (legged[name] - want).norm() <= 1e-9 * max(want.norm().item(), 1e-12), (step, name)


@pytest.mark.mpi(sizes=(2,))
def test_16_bits_and_sharded_weights_hold_what_they_say(comm: Any, shared_tmp_path: Path) -> None:
    """Each rank of ep holds its experts alone, and half of all else's moments; a step has finite losses in bfloat16."""
    run = prepare(
        small_config(shared_corpus(comm, shared_tmp_path), **keys(**{"grid.ep": 2, "dtype": "bfloat16"})),
        comm,
        shared_tmp_path / "r",
    )
    first = take_step(run, 1)
    assert take_step(run, 2).loss < 1.05 * first.loss
    own = {name.split(".")[4] for name, state in run.optimizer.states.items() if ".experts." in name and state.shardings.numel}
    assert own == ({"0", "1", "2"} if comm.rank == 0 else {"3", "4"})
    counts = [block.moe.counts for block in run.model.blocks]
    assert all(of.sum() == 2 * 12 * 16 for of in counts)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grid.ep": 6, "train.batch": 48}, ["grid.ep is 6", "model.experts = 5", "1 to 5"]),
        ({"grid.ep": 2, "model.family": "llama", "model.experts": "none"}, ["llama has no experts", "grid.dp"]),
        ({"grid.ep": 5}, ["train.batch 24", "grid.dp · grid.ep = 5"]),
    ],
)
def test_ranks_that_would_hold_no_experts_are_refused(tmp_path: Path, change: dict[str, Any], says: list[str]) -> None:
    own = ("model.balance", "model.moe.z_loss", "model.moe.bias_rate")
    plain = dict.fromkeys(own, "none") if "model.family" in change else {}
    with pytest.raises(ConfigError) as raised:
        small_config(tmp_path, **keys(**plain, **change))
    for text in says:
        assert text in str(raised.value), str(raised.value)
