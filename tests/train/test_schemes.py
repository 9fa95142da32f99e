"""Every scheme and family is trained by the same command: the losses of one rank, on any grid that the scheme can use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from pairs import turns
from small_runs import metrics_of, train_small

GRIDS = {
    4: [("oned", {"y": 4}), ("oned-sp", {"y": 4}), ("summa", {"x": 2, "y": 2}), ("cuboid-sequence", {"y": 2, "z": 2})],
    8: [("tesseract", {"x": 2, "y": 2, "d": 2}), ("cuboid", {"x": 2, "y": 2, "z": 2})],
    9: [("summa", {"x": 3, "y": 3})],
}
FAMILIES = {
    "gpt2": {"model__heads": 12},
    "llama": {"model__family": "llama", "model__heads": 12, "model__ffn": 36},
    "bert": {"model__family": "bert", "model__heads": 12, "model__vocabulary": 263, "train__accumulate": 2},
}
KV_HEADS = {4: 2, 8: 2, 9: 3}  # fewer than the heads, and on 4 ranks of oned fewer than the axis

CASES = [(ranks, name, family) for ranks, grids in GRIDS.items() for name, _ in grids for family in FAMILIES]
TURNS = [(*case, family) for case, family in turns([case[:2] for case in CASES[:: len(FAMILIES)]], tuple(FAMILIES))]


def losses(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in metrics_of(folder)]


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("cases", [TURNS, pytest.param(CASES, marks=pytest.mark.wide)], ids=["turns", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_on_any_scheme_has_the_losses_of_one_rank(
    comm: Any, shared_tmp_path: Path, family: str, cases: list[tuple[int, str, str]]
) -> None:
    grids = [grid for grid in GRIDS[comm.size] if (comm.size, grid[0], family) in cases]
    if not grids:
        pytest.skip("the turn of this family is on another number of ranks")
    grouped = {"model__kv_heads": KV_HEADS[comm.size]} if family == "llama" else {}
    rows = {"train__batch": 2 * comm.size, "train__evaluate_batches": 1}
    common = {**rows, **FAMILIES[family], **grouped, "train__steps": 3, "train__keep": 0}
    folders = [shared_tmp_path / str(index) for index in range(len(grids) + 1)]
    if comm.rank == 0:
        for folder in folders:
            folder.mkdir()
        train_small(MPI.COMM_SELF, folders[0], scheme="serial", **common)
    comm.Barrier()
    want = losses(folders[0])
    assert want[-1][0] < want[0][0] - 0.3
    for folder, (scheme, axes) in zip(folders[1:], grids, strict=True):
        train_small(comm, folder, scheme=scheme, **{f"grid__{axis}": size for axis, size in axes.items()}, **common)
        for found, expected in zip(losses(folder), want, strict=True):
            assert found == pytest.approx(expected, rel=1e-9), scheme
