"""16-bit runs: they reach float32's loss, keep float32 weights and sums, and skip a bad step on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from small_runs import metrics_of, micro_batch, shared_corpus, small_config, train_small

from summa3d.errors import CheckpointError, ConfigError, Summa3dError
from summa3d.layout import collect
from summa3d.nn.gradients import norm_and_votes
from summa3d.nn.parameter import ShardedParameter
from summa3d.train import config
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.loop import take_step, total
from summa3d.train.optimizer import clip_factor
from summa3d.train.precision import LossScale
from summa3d.train.prepare import Run, prepare

GRIDS = {1: (1, 1, 1), 2: (1, 2, 1), 4: (1, 1, 1), 8: (2, 2, 2)}
SCHEMES = {
    "oned": {"grid__y": 4},
    "oned-sp": {"grid__y": 4},
    "summa": {"grid__x": 2, "grid__y": 2},
    "tesseract": {"grid__d": 4},
    "cuboid": {"grid__y": 2, "grid__z": 2},
    "cuboid-sequence": {"grid__y": 2, "grid__z": 2},
}


def grid_of(size: int) -> dict[str, object]:
    return {f"grid__{name}": length for name, length in zip("xyz", GRIDS[size], strict=True)}


def prepared(comm: Any, folder: Path, name: str = "run", **changes: object) -> Run:
    """A run ready for its first step."""
    settings = small_config(shared_corpus(comm, folder), **{**grid_of(comm.size), **changes})
    return prepare(settings, comm, folder / name)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.mpi(sizes=(1, 8))
def test_16_bit_runs_reach_the_loss_of_float32_within_2_percent(comm: Any, shared_tmp_path: Path) -> None:
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        folder = shared_tmp_path / dtype
        if comm.rank == 0:
            folder.mkdir()
        comm.Barrier()
        changes = {**grid_of(comm.size), "dtype": dtype, "train__steps": 12, "train__learning_rate": 0.02}
        changes |= {"train__accumulate": 1, "train__keep": 0, "train__evaluate_every": 12}
        found[dtype] = train_small(comm, folder, **changes)
        if comm.rank == 0 and comm.size == 8:
            carried = found[dtype]["bytes_by_dtype"]
            assert list(carried) == sorted({dtype, "complex128", "float32", "float64"})
            assert max(carried, key=lambda name: carried[name]) == dtype
    for dtype in ("bfloat16", "float16"):
        for key in ("loss", "validation_loss"):
            assert found[dtype][key] == pytest.approx(found["float32"][key], rel=0.02)
            assert found[dtype][key] != found["float32"][key]
    assert found["float32"]["loss"] < 2.4


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_are_near_float64s_in_every_scheme(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    llama = {"model__family": "llama", "model__heads": 12, "model__kv_heads": 2, "train__batch": 8}
    exact = prepared(MPI.COMM_SELF, shared_tmp_path, f"exact-{comm.rank}", scheme="serial", **llama)
    loss, want = micro_batch(exact, 1, 0).item(), {name: p.grad for name, p in exact.model.named_parameters()}
    for name, axes in SCHEMES.items():
        run = prepared(comm, shared_tmp_path, scheme=name, dtype=dtype, **axes, **llama)
        run.loss_scale.value = 1024.0 if dtype == "float16" else 1.0
        assert micro_batch(run, 1, 0).item() == pytest.approx(loss, rel=2e-3), name
        for one, p in run.model.named_parameters():
            whole = collect(p.grad, run.grid, p.sharding.layout, p.sharding.shape).double() / run.loss_scale.value
            assert (whole - want[one]).norm() < 0.03 * want[one].norm(), (name, one)
        run.grid.free()


@pytest.mark.mpi(sizes=(1, 8))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_micro_batches_are_added_in_float32_to_float32_weights(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    run = prepared(comm, shared_tmp_path, dtype=dtype, train__batch=24, train__accumulate=2)
    for row in (0, 12):
        micro_batch(run, 1, row)
    both = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    total = {name: torch.zeros_like(grad) for name, grad in both.items()}
    for row in (0, 12):
        run.model.zero_grad()
        micro_batch(run, 1, row)
        for name, p in run.model.named_parameters():
            total[name] += p.grad
    rounded = 0
    for name, p in run.model.named_parameters():
        assert p.dtype == both[name].dtype == torch.float32
        assert torch.equal(both[name], total[name]), name
        rounded += int((both[name].to(getattr(torch, dtype)).float() != both[name]).sum())
    assert rounded > 0  # sums that 16 bits cannot hold
    assert {moment.dtype for moments in run.optimizer.moments.values() for moment in moments.values()} == {torch.float32}


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_16_bit_copies_are_made_once_a_step_and_change_no_bit(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """Against a step whose micro-batches make their own, one after the other."""
    keys = {"dtype": "bfloat16", "train__batch": 24, "train__accumulate": 3, "recompute": recompute, "overlap.gather": 1}
    run = prepared(comm, shared_tmp_path, **keys, **(SCHEMES["cuboid"] if comm.size == 4 else {}))
    made, convert = [], torch.Tensor.to

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made.append(isinstance(tensor, ShardedParameter))
        return convert(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    step = take_step(run, 1)
    assert sum(made) == len(list(run.model.parameters()))
    assert not any(type(p) is torch.Tensor for module in run.model.modules() for p in module._parameters.values())
    once = {name: p.grad.clone() for name, p in run.model.named_parameters()}
    apart = prepared(comm, shared_tmp_path, "apart", **keys, **(SCHEMES["cuboid"] if comm.size == 4 else {}))
    loss = total([micro_batch(apart, 1, row) for row in (0, 8, 16)])
    norm = norm_and_votes(apart.optimizer.counted_gradients(), apart.grid)[0]
    factor = clip_factor(norm, apart.config.train.clip)
    assert (loss, norm) == (step.loss, step.grad_norm)
    for name, p in apart.model.named_parameters():
        assert torch.equal(p.grad * factor, once[name]), name
    run.grid.free()
    apart.grid.free()


@pytest.mark.mpi(sizes=(8,))
def test_weights_and_activations_travel_in_16_bits_statistics_and_norm_do_not(comm: Any, shared_tmp_path: Path) -> None:
    run = prepared(comm, shared_tmp_path, dtype="bfloat16")
    with run.grid.ledger.watch() as moved:
        take_step(run, 1)
    carried = {(row.collective, row.phase): row.dtype for row in moved.rows}
    assert {row.dtype for row in moved.rows if row.collective in ("all_gather", "reduce_scatter")} == {"bfloat16"}
    assert {row.dtype for row in moved.rows if row.collective == "all_reduce" and row.phase == "forward"} == {
        "float32",
        "float64",
    }
    assert carried["all_reduce", "optimizer"] == "complex128"  # the norm, beside the votes


@pytest.mark.mpi(sizes=(1, 2))
def test_a_step_whose_gradients_overflow_is_skipped_and_halves_the_scale(comm: Any, shared_tmp_path: Path) -> None:
    largest = {"loss_scale__initial": 2.0**24, "loss_scale__growth_every": 2}
    run = prepared(comm, shared_tmp_path, dtype="float16", **largest)
    before = weights(run)
    steps = [take_step(run, 1)]
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert not any(moment.any() for moments in run.optimizer.moments.values() for moment in moments.values())
    steps += [take_step(run, number) for number in range(2, 12)]
    assert any(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    scales = [step.loss_scale for step in steps]
    assert scales[:2] == [2.0**24, 2.0**23] and (steps[0].skipped_steps, steps[0].grad_norm == steps[0].grad_norm) == (1, False)
    kept = [
        step
        for previous, step in zip([0, *(s.skipped_steps for s in steps)], steps, strict=False)
        if step.skipped_steps == previous
    ]
    assert len(kept) + run.loss_scale.skipped == 11 and all(0 < step.grad_norm < 10 for step in kept)
    assert int(next(iter(run.optimizer._steps.values()))) == len(kept)
    assert comm.allgather(scales) == [scales] * comm.size


@pytest.mark.mpi(sizes=(2, 8))
def test_one_ranks_bad_gradient_is_every_ranks_skipped_step(comm: Any, shared_tmp_path: Path) -> None:
    run = prepared(comm, shared_tmp_path, dtype="float16", loss_scale__initial=1024.0)
    before = weights(run)
    p = run.model.get_parameter("blocks.0.mlp.up.bias" if comm.size == 8 else "norm.weight")
    last = comm.rank == comm.size - 1
    assert not last or not p.sharding.is_primary(run.grid)  # a copy: the norm alone would not see it

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf) if last else grad

    handle = p.register_hook(spoil)
    step = take_step(run, 1)
    handle.remove()
    assert (step.skipped_steps, run.loss_scale.value) == (1, 512.0)
    assert all(torch.equal(q, before[name]) for name, q in run.model.named_parameters())
    assert take_step(run, 2).skipped_steps == 1


def test_the_scale_grows_after_good_steps_up_to_its_largest_and_stops_helping_at_1() -> None:
    settings = ["dtype=float16", "loss_scale.initial=4", "loss_scale.growth_every=2", "loss_scale.largest=16"]
    scale = LossScale.of(config.load("demo", settings))
    found = []
    for _ in range(7):
        assert scale.accepts(1, 2.0, 1.0)
        found.append(scale.value)
    assert found == [4, 8, 8, 16, 16, 16, 16]
    for want in (8, 4, 2, 1):
        assert not scale.accepts(9, 2.0, float("nan"))
        assert (scale.value, scale.good) == (want, 0)
    with pytest.raises(Summa3dError, match="diverged at step 9"):
        scale.accepts(9, float("inf"), 1.0)
    assert scale.skipped == 4


def test_a_resumed_scale_is_the_saved_one_with_its_good_steps() -> None:
    settings = config.load("demo", ["dtype=float16", "loss_scale.initial=64", "loss_scale.growth_every=5"])
    scale = LossScale.of(settings)
    for loss in (2.0, float("inf"), 2.0, 2.0):
        scale.accepts(1, loss, 1.0)
    assert (scale.value, scale.good, scale.skipped) == (32.0, 2, 1)
    assert LossScale.of(settings, scale.state()) == scale


def test_only_float16_scales_its_loss() -> None:
    for dtype in ("float64", "float32", "bfloat16"):
        scale = LossScale.of(config.load("demo", [f"dtype={dtype}"]))
        assert scale.value == 1.0 and scale.accepts(1, 2.0, 1.0) and scale.value == 1.0
        with pytest.raises(Summa3dError, match="diverged"):
            scale.accepts(1, 2.0, float("inf"))


@pytest.mark.mpi(sizes=(2,))
def test_a_resumed_float16_run_ends_with_the_numbers_of_an_uninterrupted_one(comm: Any, shared_tmp_path: Path) -> None:
    kinds = {**grid_of(2), "dtype": "float16", "loss_scale__initial": 2.0**19, "loss_scale__growth_every": 3}
    train_small(comm, shared_tmp_path, **kinds, train__steps=8)
    want = [(line["loss"], line["loss_scale"], line["skipped_steps"]) for line in metrics_of(shared_tmp_path)]
    assert 0 < want[3][2] < 4 and want[-1][1] != want[3][1]
    comm.Barrier()
    if comm.rank == 0:
        checkpoint._delete(shared_tmp_path / "run" / "checkpoints" / "step-8")
    comm.Barrier()
    summary = train_small(comm, shared_tmp_path, resume=True, **kinds, train__steps=8)
    assert [(line["loss"], line["loss_scale"], line["skipped_steps"]) for line in metrics_of(shared_tmp_path)] == want
    assert summary["steps_taken"] == 2 and summary["skipped_steps"] == want[-1][2]


@pytest.mark.mpi(sizes=(1,))
def test_a_16_bit_checkpoint_holds_float32_and_goes_on_in_any_dtype_but_float64(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, dtype="bfloat16", train__steps=4)
    saved = checkpoint.read(checkpoint.newest(shared_tmp_path / "run" / "checkpoints"), comm)  # type: ignore[arg-type]
    assert {entry["dtype"] for entry in saved.index["tensors"].values()} == {"float32"}
    losses = []
    for dtype, steps in (("float16", 5), ("float32", 6), ("bfloat16", 7)):
        losses.append(train_small(comm, shared_tmp_path, resume=True, dtype=dtype, train__steps=steps)["loss"])
    assert losses == sorted(losses, reverse=True) and losses[0] < metrics_of(shared_tmp_path)[3]["loss"]
    with pytest.raises(CheckpointError, match="holds weights in float32, and a run with dtype = 'float64' has them in float64"):
        train_small(comm, shared_tmp_path, resume=True, dtype="float64", train__steps=8)


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("dtype=bfloat61", ["'bfloat61'", "'bfloat16'", "float16"]),
        ("loss_scale.initial=0", ["loss_scale.initial is 0", "at least 1"]),
        ("loss_scale.growth_every=0", ["growth_every is 0"]),
        ("loss_scale.largest=2", ["largest is 2", "at least 65536"]),
    ],
)
def test_a_precision_that_no_run_can_have_is_refused(assignment: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", [assignment])
    assert all(word in str(raised.value) for word in words)
