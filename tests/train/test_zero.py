"""ZeRO: what of the states of parameters each replica stores, in which words they travel, and which bits do not depend on it."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import metrics_of, shared_corpus, small_config, tensors_of, train_small

from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

CUBOIDS: dict[str, Any] = {"scheme": "cuboid", "grid__z": 2, "grid__dp": 2, "train__accumulate": 2, "train__batch": 16}


def prepared(comm: Any, folder: Path, name: str = "run", **changes: Any) -> Any:
    return prepare(small_config(shared_corpus(comm, folder), **changes), comm, folder / name)


@pytest.mark.mpi(sizes=(4,), timeout=100)
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


@pytest.mark.mpi(sizes=(2,), timeout=100)
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
