"""srun on emulated nodes: one slurmd a node, with a port of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import local_slurm
import pytest

from summa3d.errors import LaunchError
from summa3d.launch.emulate import Emulated, network_of

ROOT = Path(__file__).parent.parent
REASON = local_slurm.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
NODES = 4


@pytest.fixture(scope="module")
def slurm() -> Iterator[local_slurm.LocalSlurm]:
    """A Slurm on emulated nodes."""
    try:
        emulated = Emulated(network_of(f"nodes={NODES},port=1gbit")).__enter__()
    except LaunchError as error:
        pytest.skip(str(error))
    with emulated:
        started = local_slurm.LocalSlurm(NODES, emulated)
        try:
            yield started
        finally:
            started.stop()


def test_a_product_on_all_nodes_sees_each_as_a_host_and_is_right(slurm: local_slurm.LocalSlurm, tmp_path: Path) -> None:
    product = ("summa3d", "gemm", "--m", "67", "--n", "61", "--k", "71", "--grid", "x=2,y=2,z=2", "--check", "--json")
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "MPIR_CVAR_POLLS_BEFORE_YIELD": "10"}
    ranks = ("srun", "--mpi=pmi2", f"-N{NODES}", "--ntasks-per-node=2")
    found = json.loads(slurm.run(*ranks, *product, cwd=tmp_path, timeout=200, **variables).stdout)
    assert found["relative_error"] < 1e-13
    assert found["machine"]["hosts"] == [f"node{number}" for number in range(1, NODES + 1)]
    assert found["machine"]["ranks_per_node"] == [2] * NODES
