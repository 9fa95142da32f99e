"""A checkpoint knows no scheme: a run of any family goes on under another one, on other ranks, optimizer state included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from small_runs import metrics_of, train_small

LEGS = [
    (8, {"scheme": "cuboid", "grid__x": 2, "grid__y": 2, "grid__z": 2, "vectors": "diagonal"}),
    (4, {"scheme": "summa", "grid__x": 2, "grid__y": 2, "vectors": "root-only"}),
    (2, {"scheme": "oned", "grid__y": 2}),
    (1, {"scheme": "serial"}),
]
"""How many ranks, and what they run, for two steps each; vectors stored in every way there is."""
CONSTANT = {"train__decay_to": 1.0}
"""After the warm-up, so that the learning rate of a step does not depend on how many are to come."""


LLAMA = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
NEMOTRON = {"model__kv_heads": 2, "model__activation": "relu2"}


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("model", [{}, pytest.param(LLAMA, marks=pytest.mark.wide), NEMOTRON], ids=["gpt2", "llama", "grouped"])
def test_a_run_that_changes_its_scheme_every_two_steps_is_one_run(comm: Any, shared_tmp_path: Path, model: Any) -> None:
    whole, legs = shared_tmp_path / "whole", shared_tmp_path / "legs"
    if comm.rank == 0:
        whole.mkdir()
        legs.mkdir()
        train_small(MPI.COMM_SELF, whole, scheme="serial", train__steps=2 * len(LEGS), **CONSTANT, **model)
    comm.Barrier()
    for done, (ranks, settings) in enumerate(LEGS):
        part = comm.Split(color=0 if comm.rank < ranks else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            train_small(part, legs, resume=done > 0, train__steps=2 * (done + 1), **CONSTANT, **model, **settings)
            part.Free()
        comm.Barrier()
    assert len(metrics_of(legs)) == 2 * len(LEGS)
    for name in ("loss", "grad_norm"):
        got, want = ([line[name] for line in metrics_of(folder)] for folder in (legs, whole))
        assert got == pytest.approx(want, rel=1e-9), name
