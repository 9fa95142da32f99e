"""What the ranks tell each other when they make a grid, and what all of them take from it: one message round."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from mpi4py import MPI

from ..blas_library import Rule, common_rule, rule_for_tensors
from ..errors import ConfigError
from ..node_support import affinity, why_no_node_memory
from .failure import compare, facts_of
from .topology import Topology
from .transport.select import NodeRule


class Introduction(NamedTuple):
    """What one rank tells the others.

    number : the grid's, as far as this rank has counted. leader : the first rank of its node. rule : what would multiply host
    tensors here, or why nothing can. cores : those that it may run on.
    """

    facts: dict[str, str]
    number: int
    leader: int
    rule: Rule | ConfigError
    wants_node_memory: bool
    cores: Sequence[int]


def _rule_here() -> Rule | ConfigError:
    """What would multiply host tensors on this rank; the error where it cannot follow SUMMA3D_BLAS."""
    try:
        return rule_for_tensors()
    except ConfigError as error:
        return error


def _rule_of_all(rules: Sequence[Rule | ConfigError]) -> Rule:
    """What multiplies host tensors on all ranks. Raises the ConfigError of the first one that has one."""
    known = []
    for rule in rules:
        if isinstance(rule, ConfigError):
            raise rule
        known.append(rule)
    return common_rule(known)


class Agreed(NamedTuple):
    """What is the same on all ranks of a grid: its number, each rank's node, what multiplies, when node memory carries."""

    number: int
    nodes: Sequence[int]
    blas: Rule
    node_rule: NodeRule | None


def introduced(
    comm: MPI.Intracomm, topology: Topology, check: bool, node_memory: bool | None, number: int, same: MPI.Intracomm | None
) -> Agreed:
    """What the ranks of `comm` agree on as they make a grid (collective).

    same : a communicator of the same ranks, which outlives the grid, and keeps which of them share a node; None, there is none.
    Raises AgreementError on all ranks where they make different grids, ConfigError where one cannot follow SUMMA3D_BLAS.
    """
    facts = {"axes": topology.shape, "order": topology.order, "tile": topology.tile, "check": check}
    wanted = node_memory is not False and why_no_node_memory() is None
    mine = Introduction(facts_of("Grid", facts), number, _leader_of_node(comm, same), _rule_here(), wanted, affinity())
    everyone = comm.allgather(mine) if comm.size > 1 else [mine]
    compare([one.facts for one in everyone], "Grid")
    leaders = sorted({one.leader for one in everyone})
    nodes = [leaders.index(one.leader) for one in everyone]
    together = comm.size > 1 and all(one.wants_node_memory for one in everyone)
    crowded = _is_crowded([one.cores for one in everyone], nodes)
    return Agreed(
        max(one.number for one in everyone),
        nodes,
        _rule_of_all([one.rule for one in everyone]),
        NodeRule(crowded, node_memory is True) if together else None,
    )


def _is_crowded(cores_of: Sequence[Sequence[int]], nodes: Sequence[int]) -> bool:
    """Whether some node has more of these ranks than cores they may run on."""
    cores: dict[int, set[int]] = {}
    for node, usable in zip(nodes, cores_of, strict=True):
        cores.setdefault(node, set()).update(usable)
    return len(nodes) > 1 and any(nodes.count(node) > len(usable) for node, usable in cores.items())


@cache
def _leader_key() -> int:
    """The key of MPI's attribute of a communicator that is the first rank on this rank's node."""
    return MPI.Comm.Create_keyval()


def _leader_of_node(comm: MPI.Intracomm, same: MPI.Intracomm | None) -> int:
    """The first rank of `comm` on this rank's node; found once for all grids of the same ranks."""
    if comm.size == 1:
        return 0
    leader: int | None = None if same is None else same.Get_attr(_leader_key())
    if leader is None:
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        leader = node.bcast(comm.rank)
        node.Free()
        if same is not None:
            same.Set_attr(_leader_key(), leader)
    return leader
