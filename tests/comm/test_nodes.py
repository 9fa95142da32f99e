"""The nodes of a job: cores are the union of its ranks' affinities on each operating system, summed over these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from summa3d.comm import nodes
from summa3d.comm.nodes import Nodes


@pytest.mark.mpi(sizes=(3,))
@pytest.mark.parametrize(
    ("systems", "affinities", "ranks", "cores"),
    [
        ("aaa", [{0}, {1}, {2}], (3,), (3,)),  # each rank bound to a core
        ("aaa", [{0, 1}, {0, 1}, {0, 1}], (3,), (2,)),  # all ranks on all cores
        ("aba", [{0, 1}, {0, 1}, {1, 2}], (2, 1), (3, 2)),  # the same numbers on another system are other cores
    ],
)
def test_cores_do_not_depend_on_how_ranks_are_bound(
    comm: Any, monkeypatch: Any, tmp_path: Path, systems: str, affinities: list[set[int]], ranks: Any, cores: Any
) -> None:
    (tmp_path / "boot_id").write_text(systems[comm.rank] + "\n")
    monkeypatch.setattr(nodes, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinities[comm.rank])
    found = Nodes.of(comm)
    assert (found.ranks, found.cores, found.total_cores) == (ranks, cores, sum(cores))
    assert len(found.hosts) == len(set(systems)) and all(found.hosts)
