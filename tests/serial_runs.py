"""Small runs on a grid beside the same run on one rank: losses, norms and validation losses, and the words of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from small_runs import metrics_of, train_small

STEPS: dict[str, Any] = {"train__steps": 20, "train__clip": 0.5, "train__batch": 36, "train__accumulate": 2, "train__keep": 0}
STEPS |= {"train__evaluate_batches": 1, "train__evaluate_every": 10, "model__attention_dropout": 0.05}
FEW = {"train__steps": 4, "train__evaluate_every": 2}
"""As many steps use the moments of AdamW, which replicas share; in `make test` two ranks take all 20."""
NUMBERS = ("loss", "grad_norm", "validation_loss")


def numbers_of(folder: Path) -> list[float]:
    return [line[name] for line in metrics_of(folder) for name in NUMBERS if name in line]


def trained(comm: Any, folder: Path, name: str, **changes: Any) -> list[float]:
    """Loss and norm of every step, and the validation losses, of a run in the folder `name`."""
    if comm.rank == 0:
        (folder / name).mkdir(parents=True)
    comm.Barrier()
    train_small(comm, folder / name, **changes)
    return comm.bcast(numbers_of(folder / name) if comm.rank == 0 else None)


def check_against_serial(
    comm: Any, folder: Path, changes: dict[str, Any], tolerance: float, losses: bool = False, **more: Any
) -> None:
    """Losses and norms of all steps and two evaluations; with `losses`, the losses of the steps alone."""
    settings = {**STEPS, **changes, **more}
    alone = {key: value for key, value in settings.items() if not key.startswith(("grid", "vectors", "pipeline"))}
    want = trained(MPI.COMM_SELF, folder, "serial", **{**alone, "scheme": "serial"}) if comm.rank == 0 else None
    want = comm.bcast(want)
    got = trained(comm, folder, "replicas", **settings)
    assert len(got) == 2 * settings["train__steps"] + 2
    if losses:
        want, got = ([line["loss"] for line in metrics_of(folder / name)] for name in ("serial", "replicas"))
    assert got == pytest.approx(want, rel=tolerance, abs=0)


def moved_by(run: Any) -> dict[tuple[str, str], int]:
    """Words by phase and axis since the start; recomputation is backward's."""
    found: dict[tuple[str, str], int] = {}
    for row in run.grid.ledger.rows():
        found[row.phase, row.axis] = found.get((row.phase, row.axis), 0) + row.amounts.words
    return found
