"""`summa3d.launch(function, ranks=4)`: results by rank, what ranks print, and errors that name the rank."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import summa3d
from summa3d.errors import LaunchError

pytest.importorskip("cloudpickle")


def test_a_function_of_a_session_is_called_on_every_rank_and_its_results_are_those_of_numpy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    factor = 3.0

    def product(m: int, k: int) -> tuple[int, np.ndarray, int]:
        from mpi4py import MPI

        grid = summa3d.Grid(MPI.COMM_WORLD, {"x": 3})
        a = summa3d.DistMatrix.from_function(lambda i, j: factor * i - j, (m, k), grid, "m:x k")
        whole = (a @ a.T).to_global()
        sys.stdout.write(f"{grid.rank} is here\n")
        return grid.rank, whole, sum(a.block.shape)

    results = summa3d.launch(product, 7, 5, ranks=3)
    a = factor * np.arange(7)[:, None] - np.arange(5)[None]
    assert [rank for rank, _, _ in results] == [0, 1, 2] and [size for _, _, size in results] == [8, 7, 7]
    for _, whole, _ in results:
        np.testing.assert_allclose(whole, a @ a.T, rtol=1e-13)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"{rank} is here" for rank in range(3)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    def fails(text: str) -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank == 1:
            raise ValueError(text)
        MPI.COMM_WORLD.barrier()

    with pytest.raises(LaunchError, match=r"rank 1 of 2 raised(.|\n)*in fails\n(.|\n)*ValueError: no such row"):
        summa3d.launch(fails, "no such row", ranks=2)


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0, "4"])
def test_a_number_of_ranks_that_is_none_is_refused(ranks: object) -> None:
    with pytest.raises(LaunchError, match=f"1 or more; got ranks={ranks!r}"):
        summa3d.launch(print, ranks=ranks)


def test_ranks_start_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(LaunchError, match="this is rank 2 of 4"):
        summa3d.launch(print, ranks=2)


def test_what_cannot_be_sent_and_a_missing_cloudpickle_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="cannot send print to its ranks: TypeError"):
        summa3d.launch(print, (line for line in "ab"), ranks=2)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(LaunchError, match=r"pip install 'summa3d\[notebook\]'"):
        summa3d.launch(print, ranks=2)
