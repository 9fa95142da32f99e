"""srun on emulated nodes: one slurmd a node, with a port of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import local_slurm
import pytest

from summa3d.errors import LaunchError
from summa3d.launcher.emulate import Emulated, network_of

ROOT = Path(__file__).parent.parent
REASON = local_slurm.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
ADDRESSES = {"UCX_ADDRESS_VERSION": "v1"}
"""MPICH 5.0.2 hands pmi2 bytes from beyond an address of UCX's version 2; which ones, and so whether MPI_Init ends, varies."""
GRIDS = {2: "x=2,y=1,z=2", 4: "x=2,y=2,z=2"}
"""Nodes → the grid of two ranks on each."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def slurm(request: pytest.FixtureRequest) -> Iterator[local_slurm.LocalSlurm]:
    """A Slurm on emulated nodes."""
    try:
        emulated = Emulated(network_of(f"nodes={request.param},port=1gbit")).__enter__()
    except LaunchError as error:
        pytest.skip(str(error))
    with emulated:
        started = local_slurm.LocalSlurm(request.param, emulated)
        try:
            yield started
        finally:
            started.stop()


def on_all_nodes(slurm: local_slurm.LocalSlurm, cwd: Path, *words: str) -> str:
    """Return what `summa3d WORDS…` prints on two ranks of each node."""
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", **ADDRESSES}
    ranks = ("srun", "--mpi=pmi2", f"-N{len(slurm.nodes)}", "--ntasks-per-node=2")
    return slurm.run(*ranks, "summa3d", *words, cwd=cwd, timeout=200, **variables).stdout


def hosts(slurm: local_slurm.LocalSlurm) -> list[str]:
    return [f"node{number}" for number in range(1, len(slurm.nodes) + 1)]


def test_a_product_on_all_nodes_sees_each_as_a_host_and_is_right(slurm: local_slurm.LocalSlurm, tmp_path: Path) -> None:
    sizes = ("--m", "67", "--n", "61", "--k", "71", "--grid", GRIDS[len(slurm.nodes)])
    found = json.loads(on_all_nodes(slurm, tmp_path, "gemm", *sizes, "--check", "--json"))
    assert found["relative_error"] < 1e-13
    assert found["machine"]["hosts"] == hosts(slurm)
    assert found["machine"]["ranks_per_node"] == [2] * len(slurm.nodes)


SWEEP = """
kind = "strong"
what = "gemm"
ranks = [2, RANKS]
base = {m = 67, n = 61, k = 71}
vary.algorithm = ["cuboid", "oned-row"]
rounds = 2
cluster = "host"
ranks_per_node = 2
"""


def test_a_sweep_measures_its_points_on_all_nodes_once(slurm: local_slurm.LocalSlurm, tmp_path: Path) -> None:
    nodes, ranks = len(slurm.nodes), 2 * len(slurm.nodes)
    (tmp_path / "nodes.toml").write_text(SWEEP.replace("RANKS", str(ranks)))
    for _ in range(2):  # the second start has nothing to do
        on_all_nodes(slurm, tmp_path, "sweep", "run", "nodes.toml", "--dir", "found", "--fewer")
        lines = [json.loads(line) for file in tmp_path.rglob("points.jsonl") for line in file.read_text().splitlines()]
        assert sorted((line["ranks"], line["series"]) for line in lines) == [
            *((2, "cuboid"), (2, "oned-row"), (ranks, "cuboid"), (ranks, "oned-row")),
        ]
    for line in lines:
        assert line["machine"]["hosts"] == hosts(slurm) and line["machine"]["ranks_per_node"] == [2] * nodes
        assert line["words"] == line["words_formula"] > 0 and len(line["seconds"]["all"]) == 2 and line["predicted"] > 0
