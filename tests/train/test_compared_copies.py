"""A run with grid.check compares the copies of its weights every so many steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_runs import train_small

from summa3d.errors import AgreementError
from summa3d.train import loop

RUNS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"scheme": "serial", "grid__dp": 2, "replicas__zero": 0},
        {"scheme": "serial", "grid__dp": 2, "replicas__zero": 3, "dtype": "bfloat16"},
        {"scheme": "oned", "grid__y": 2},
    ],
    4: [
        {"scheme": "cuboid", "grid__z": 2, "grid__dp": 2, "replicas__zero": 1, "dtype": "bfloat16"},
        {"scheme": "oned", "grid__y": 2, "grid__pp": 2, "model__layers": 2},
        {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "model__layers": 2, "replicas__zero": 2, "train__accumulate": 2},
    ],
}


@pytest.mark.mpi(sizes=tuple(RUNS))
def test_copies_are_compared_and_equal_whatever_holds_them(
    comm: Any, shared_tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COPIES_EVERY", 2)
    compared, compare = [], loop.compare
    monkeypatch.setattr(loop, "compare", lambda named, *rest: compared.append(len(named)) or compare(named, *rest))
    for number, changes in enumerate(RUNS[world_size]):
        folder = shared_tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        compared.clear()
        train_small(comm, folder, train__steps=4, train__evaluate_every=0, grid__check=True, **changes)
        assert len(compared) == 2 and compared[0] > 10, changes


@pytest.mark.mpi(sizes=(2,))
def test_a_weight_that_drifts_apart_ends_the_run_on_all_ranks_and_is_named(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "COPIES_EVERY", 2)
    take = loop.take_step

    def drifting(run: Any, number: int) -> Any:
        step = take(run, number)
        if comm.rank == 1 and number == 3:
            next(state for state in run.optimizer.states.values() if "positions" in state.name).weight.mul_(1.001)
        return step

    monkeypatch.setattr(loop, "take_step", drifting)
    with pytest.raises(AgreementError, match=r"copies of positions.weight differ: hash \w+ on rank 0; hash \w+ on rank 1"):
        train_small(comm, shared_tmp_path, train__evaluate_every=0, scheme="oned", grid__y=2, grid__check=True)
