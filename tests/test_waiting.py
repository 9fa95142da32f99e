"""Ranks that outnumber the cores yield theirs while they wait in MPI, whatever started them."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from summa3d.comm import job
from summa3d.waiting import VARIABLES

NAMES = [name for names in VARIABLES.values() for name in names]
PRINTED = f"import os, sys; {{before}}; import summa3d; print([os.environ.get(name) for name in {NAMES}])"
STARTED = "import types; sys.modules['mpi4py.MPI'] = types.SimpleNamespace(Is_initialized=lambda: True)"


def printed(before: str = "pass", **environ: str) -> list[str | None]:
    kept = {name: value for name, value in os.environ.items() if name not in NAMES and "LOCAL" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PRINTED.format(before=before)], env=kept | environ, capture_output=True, text=True, check=True
    )
    return eval(done.stdout)


def test_an_import_before_mpi_starts_has_waiting_ranks_yield():
    assert printed(MPI_LOCALNRANKS="9999") == ["10", None, "1"]
    assert printed(SLURM_STEP_TASKS_PER_NODE="1,9999(x2)") == ["10", None, "1"]


def test_ranks_with_a_core_each_and_the_users_own_settings_are_left_alone():
    assert printed(MPI_LOCALNRANKS="1") == printed() == [None, None, None]
    assert printed(MPI_LOCALNRANKS="9999", MPIR_CVAR_ENABLE_HEAVY_YIELD="1") == [None, "1", "1"]


def test_where_mpi_has_started_nothing_is_set():
    assert printed(STARTED, MPI_LOCALNRANKS="9999") == [None, None, None]


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize(("crowded", "in_node"), [(True, False), (True, True), (False, False)])
def test_ranks_that_poll_are_told_once_where_they_have_no_node_memory(comm, make_grid, monkeypatch, crowded, in_node):
    monkeypatch.setattr(job, "_is_crowded", lambda cores, nodes: crowded)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_grid(x=2, node_memory=in_node)
    said = [str(one.message) for one in told if "outnumber the cores" in str(one.message)]
    assert len(said) == (comm.rank == 0 and crowded and not in_node)
