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
HOSTS = [f"node{number}" for number in range(1, NODES + 1)]


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


def on_all_nodes(slurm: local_slurm.LocalSlurm, cwd: Path, *words: str) -> str:
    """What `summa3d WORDS…` prints on two ranks of each node."""
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "MPIR_CVAR_POLLS_BEFORE_YIELD": "10"}
    ranks = ("srun", "--mpi=pmi2", f"-N{NODES}", "--ntasks-per-node=2")
    return slurm.run(*ranks, "summa3d", *words, cwd=cwd, timeout=200, **variables).stdout


def test_a_product_on_all_nodes_sees_each_as_a_host_and_is_right(slurm: local_slurm.LocalSlurm, tmp_path: Path) -> None:
    sizes = ("--m", "67", "--n", "61", "--k", "71", "--grid", "x=2,y=2,z=2")
    found = json.loads(on_all_nodes(slurm, tmp_path, "gemm", *sizes, "--check", "--json"))
    assert found["relative_error"] < 1e-13
    assert found["machine"]["hosts"] == HOSTS
    assert found["machine"]["ranks_per_node"] == [2] * NODES


SWEEP = """
kind = "strong"
what = "gemm"
ranks = [2, 8]
base = {m = 67, n = 61, k = 71}
vary.algorithm = ["cuboid", "oned-row"]
rounds = 2
cluster = "host"
ranks_per_node = 2
"""


def test_a_sweep_measures_its_points_on_all_nodes_once(slurm: local_slurm.LocalSlurm, tmp_path: Path) -> None:
    (tmp_path / "nodes.toml").write_text(SWEEP)
    for _ in range(2):  # the second start has nothing to do
        on_all_nodes(slurm, tmp_path, "sweep", "run", "nodes.toml", "--dir", "found", "--fewer")
        lines = [json.loads(line) for file in tmp_path.rglob("points.jsonl") for line in file.read_text().splitlines()]
        assert sorted((line["ranks"], line["series"]) for line in lines) == [
            *((2, "cuboid"), (2, "oned-row"), (8, "cuboid"), (8, "oned-row")),
        ]
    for line in lines:
        assert line["machine"]["hosts"] == HOSTS and line["machine"]["ranks_per_node"] == [2] * NODES
        assert line["words"] == line["words_formula"] > 0 and len(line["seconds"]["all"]) == 2 and line["predicted"] > 0
