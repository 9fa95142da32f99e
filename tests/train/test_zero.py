"""ZeRO: what of the states of parameters each replica stores, in which words they travel, and which bits do not depend on it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import metrics_of, shared_corpus, small_config, tensors_of, train_in_legs, train_small

from summa3d.dry.step import run as run_dry
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

CUBOIDS: dict[str, Any] = {"scheme": "cuboid", "grid__z": 2, "grid__dp": 2, "train__accumulate": 2, "train__batch": 16}


def prepared(comm: Any, folder: Path, name: str = "run", **changes: Any) -> Any:
    return prepare(small_config(shared_corpus(comm, folder), **changes), comm, folder / name)


@pytest.mark.mpi(sizes=(4,))
def test_replicas_in_16_bits_store_their_shares_and_gather_copies_of_16_bits(comm: Any, shared_tmp_path: Path) -> None:
    """Of the float32 weight and moments a share; the sums move float32 words, and the gathered copies 16-bit ones."""
    run = prepared(comm, shared_tmp_path, dtype="bfloat16", **CUBOIDS)
    take_step(run, 1)
    with run.grid.ledger.watch() as moved:
        take_step(run, 2)
    index = run.grid["dp"].index
    shares = wholes = 0
    for state in run.optimizer.states.values():
        whole = state.shardings.used.local_shape(run.grid)
        share = state.shardings.used.sharded_over(("dp",)).local_shape(run.grid)
        stored = (state.parameter.data, *(run.optimizer.moments[name][state.name] for name in run.optimizer.moments))
        assert {(tuple(one.shape), one.dtype) for one in stored} == {(share, torch.float32)}, state.name
        assert (tuple(state.copy.shape), state.copy.dtype, state.parameter.grad) == (whole, torch.bfloat16, None), state.name
        shares, wholes = shares + prod(share), wholes + prod(whole)
    rows = [row for row in moved.rows if row.axis == "dp" and row.collective != "all_reduce"]
    assert {(row.collective, row.dtype, row.phase, row.amounts.words, row.amounts.bytes) for row in rows} == {
        ("reduce_scatter", "float32", "optimizer", shares, 4 * shares),
        ("all_gather", "bfloat16", "optimizer", wholes - shares, 2 * (wholes - shares)),
    }, (index, rows)


@pytest.mark.mpi(sizes=(2,))
def test_a_run_in_16_bits_goes_on_with_another_zero_and_the_same_bits(comm: Any, shared_tmp_path: Path) -> None:
    """The copies are rounded after they are gathered, or before: the same. Also in checkpoints and evaluations."""
    keys = {"dtype": "bfloat16", "scheme": "serial", "grid__dp": 2, "train__decay_to": 1.0, "train__evaluate_every": 2}
    for name, zeros in (("whole", (0, 0)), ("sharded", (1, 1)), ("changed", (1, 0)), ("again", (0, 1))):
        if comm.rank == 0:
            (shared_tmp_path / name).mkdir()
        comm.Barrier()
        for part, zero in enumerate(zeros):
            keys |= {"train__steps": 3 * part + 3, "replicas__zero": zero, "train__keep": 1}
            train_small(comm, shared_tmp_path / name, resume=part > 0, **keys)
    numbers, weights = (
        [found(shared_tmp_path / name) for name in ("whole", "sharded", "changed", "again")]
        for found in (numbers_of, lambda folder: tensors_of(folder / "run" / "checkpoints" / "step-6"))
    )
    assert all(one == numbers[0] and len(one) == 16 for one in numbers)
    for one in weights:
        assert all(torch.equal(one[name], tensor) for name, tensor in weights[0].items())


def numbers_of(folder: Path) -> list[float]:
    names = ("loss", "grad_norm", "validation_loss")
    return [line[name] for line in metrics_of(folder) for name in names if name in line]


LLAMA = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
BERT = {"model__family": "bert", "model__vocabulary": 259}
PIPED = {"scheme": "serial", "grid__pp": 2, "grid__dp": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 2}
GRIDS: dict[int, list[dict[str, Any]]] = {
    2: [{"scheme": "serial", "grid__dp": 2, "overlap__gather": 2}],
    4: [
        {"scheme": "oned", "grid__dp": 2, "grid__y": 2, **LLAMA},
        {**PIPED, "model__layers": 4},
        {**PIPED, "model__layers": 4, "pipeline__schedule": "zb-v"},
        {"scheme": "cuboid", "grid__dp": 2, "grid__x": 2, "regather": False, "recompute": "full"},
    ],
    6: [{"scheme": "serial", "grid__dp": 3, "grid__pp": 2, "model__layers": 3, "pipeline__schedule": "zb-h1", **BERT}],
    8: [
        {"scheme": "cuboid", "grid__dp": 2, "grid__y": 2, "grid__z": 2, "vectors": "diagonal", "overlap__gather": 1},
        {"scheme": "summa-transposed", "grid__dp": 2, "grid__x": 2, "grid__y": 2, "vectors": "root-only", **BERT},
    ],
}
"""Ranks → grids with replicas, each with a scheme and a family."""
SHORT = {
    "train__steps": 2,
    "train__evaluate_every": 1,
    "train__batch": 24,
    "train__accumulate": 2,
    "train__clip": 0.5,
    "train__evaluate_batches": 1,
}


def trained(comm: Any, folder: Path, name: str, **changes: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses, norms and validation losses of a run in the folder `name`, and its summary."""
    if comm.rank == 0:
        (folder / name).mkdir(parents=True)
    comm.Barrier()
    summary = train_small(comm, folder / name, **changes)
    return comm.bcast(numbers_of(folder / name) if comm.rank == 0 else None), summary


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_gradients_and_weights_that_replicas_share_train_as_copied_ones(
    comm: Any, world_size: int, shared_tmp_path: Path
) -> None:
    """Losses and norms of zero 0 to 1e-9, whose sums have another order."""
    for number, grid in enumerate(GRIDS[world_size]):
        runs = {}
        for zero in (1, 2, 3):
            settings = {**SHORT, **grid, "replicas__zero": zero, "replicas__bucket": 5000, "train__keep": 0}
            runs[zero], _ = trained(comm, shared_tmp_path, f"{number}-{zero}", **settings)
        assert len(runs[1]) == 6 and runs[2] == pytest.approx(runs[1], rel=1e-9), grid
        assert runs[3] == pytest.approx(runs[1], rel=1e-9), grid


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_of_one_micro_batch_every_zero_has_the_same_bits(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    """Every gradient is then one sum over the replicas: but for a tied table with zero 3, where the two uses are summed each.

    In 16 bits zero 3 sums gradients before they are widened.
    """
    settings = {**SHORT, "scheme": "serial", "grid__dp": 3, "train__accumulate": 1, **LLAMA, "model__tied_head": False}
    settings["dtype"] = dtype
    want, summary = trained(comm, shared_tmp_path, "0", **settings, replicas__zero=0, train__sample_tokens=4)
    for zero, bucket in ((1, 1000), (2, 1), (2, 1 << 20)):
        keys = {**settings, "replicas__zero": zero, "replicas__bucket": bucket}
        assert trained(comm, shared_tmp_path, f"{zero}-{bucket}", **keys)[0] == want
    whole, sampled = trained(comm, shared_tmp_path, "3", **settings, replicas__zero=3, train__keep=0, train__sample_tokens=4)
    assert whole == (want if dtype == "float64" else pytest.approx(want, rel=1e-2))
    assert len(sampled["sample"]) == len(summary["sample"])
    assert dtype != "float64" or sampled["sample"] == summary["sample"]  # on the grid, by gathered weights, and on one rank


LEGS = [
    (2, {"scheme": "serial", "grid__dp": 2, "replicas__zero": 2}),
    (4, {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "replicas__zero": 3}),
    (1, {"scheme": "serial"}),
    (4, {"scheme": "oned", "grid__dp": 2, "grid__y": 2, "replicas__zero": 2}),
]


@pytest.mark.mpi(sizes=(4,))
def test_a_run_goes_on_with_another_zero_on_other_grids(comm: Any, shared_tmp_path: Path) -> None:
    keys = {"train__decay_to": 1.0, "train__evaluate_every": 2, "model__layers": 2, "train__accumulate": 2}
    assert len([*train_in_legs(comm, shared_tmp_path, LEGS, **keys)]) == sum(comm.rank < ranks for ranks, _ in LEGS)
    assert numbers_of(shared_tmp_path / "legs") == pytest.approx(numbers_of(shared_tmp_path / "whole"), rel=1e-9)


def uses_of(name: str, recomputed: bool) -> tuple[int, int, int]:
    """Return how often zero 3 gathers a parameter of a GPT-2 in forward and in backward, and how often it sums its gradient."""
    if name == "embedding.weight":
        return 2, 1, 2  # looked up, and the head's; only products gather again
    product = name.startswith("blocks") and name.endswith("weight") and "norm" not in name
    return 1, int(product) + int(recomputed and name.startswith("blocks")), 1


@pytest.mark.pairs
@pytest.mark.mpi(sizes=(4, 6))
@pytest.mark.parametrize(("zero", "recompute"), [(2, "none"), (3, "none"), (3, "full")])
@pytest.mark.turns
def test_words_and_bytes_are_those_of_the_shards(
    comm: Any, world_size: int, shared_tmp_path: Path, zero: int, recompute: str
) -> None:
    """Zero 2: (m+1)/2 times the words of zero 1, of m micro-batches. 3: of a product's weight 3m/2, or 2m with recomputation."""
    dp, m = world_size // 2, 3 if world_size == 4 else 2
    changes = {**CUBOIDS, "grid__dp": dp, "train__accumulate": m, "train__batch": 12 * m, "recompute": recompute}
    changes |= {"replicas__zero": zero, "replicas__bucket": 5000, "model__layers": 4 - dp}
    run = prepared(comm, shared_tmp_path, f"{zero}-{recompute}", **changes)
    take_step(run, 1)
    with run.grid.ledger.watch() as moved:
        take_step(run, 2)
    found, want = dict.fromkeys(("forward", "backward", "optimizer"), 0), dict.fromkeys(("forward", "backward", "optimizer"), 0)
    for row in moved.rows:
        if row.axis == "dp":
            found[row.phase] += row.amounts.words
    want["optimizer"] = 1 if run.grid["dp"].index else dp - 1  # of the loss
    sizes: dict[str, list[int]] = {"weights": [], "gradients": [], "moments": []}
    for state in run.optimizer.states.values():
        whole = state.shardings.used.local_shape(run.grid)
        share = state.shardings.used.sharded_over(("dp",)).local_shape(run.grid)
        gather, scatter = prod(whole) - prod(share), (dp - 1) * prod(share)
        assert tuple(state.accumulated.shape) == share and state.accumulated.is_contiguous()
        assert {tuple(one[state.name].shape) for one in run.optimizer.moments.values()} == {share}
        assert tuple(state.parameter.shape) == (share if zero == 3 else whole)
        sizes["weights"].append(state.parameter.numel())
        sizes["gradients"].append(state.accumulated.numel())
        sizes["moments"] += [one[state.name].numel() for one in run.optimizer.moments.values()]
        if zero == 2:
            assert state.parameter.grad is None
            want["backward"] += m * scatter
            want["optimizer"] += gather
        else:
            forward, backward, sums = uses_of(state.name, recompute == "full")
            want["forward"] += m * forward * gather
            want["backward"] += m * (backward * gather + sums * scatter)
    assert found == want
    step: dict[tuple[str, str], int] = {}
    for row in moved.rows:
        step[row.phase, row.axis] = step.get((row.phase, row.axis), 0) + row.amounts.words
    dry = run_dry(setting_of(run.config, comm.rank), training_of(run.config))
    assert {(phase, axis): many for phase, axes in dry.words().items() for axis, many in axes.items() if many} == step
    held = {kind: sum(many) for kind, many in sizes.items()}
    assert (dry.parameters, dry.gradients, dry.moments) == (8 * held["weights"], 8 * held["gradients"], 8 * held["moments"])
