"""The job behind a grid: what belongs to all its parts alike, and what the ranks tell each other when they make the grid."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from mpi4py import MPI

from ..blas_library import TORCH, BlasRule, common_rule, rule_for_tensors
from ..errors import ConfigError, GridError, Summa3dError
from ..node_support import affinity, why_no_node_memory
from ..waiting import cores_are_yielded
from .device.backend import Backend
from .health.agreement import compare, facts_of
from .topology import Topology
from .transport.select import NodeRule
from .transport.transports import TransportFactory

POLLS = (
    "ranks outnumber the cores, and those that wait in MPI keep theirs: it was started before summa3d was imported. "
    "Import summa3d before mpi4py.MPI, or start the ranks by `summa3d launch`."
)
NOTHING_MULTIPLIED = BlasRule(TORCH, "nothing is multiplied here", {})


@dataclass(eq=False)
class Job:
    """What belongs to a job: its grid and all parts of it share it.

    check : whether ranks compare every collective before it. transport : the device transport that was asked for. device : this
    process's; None, CuPy's. transports : makes the transports of each axis. number : that of the grid, the same on all its ranks.
    nodes : the node of each rank, numbered from 0. node_rule : how axes inside a node use its memory; None, they do not.
    blas : what multiplies torch's host tensors, the same on all ranks. sealed : whether new communicators are refused. freed :
    whether the grid was freed. unfinished : the call that was interrupted while it made an axis. kept : objects that higher
    layers keep until the grid is freed, by grid or part, each under its own key: executors, the calls that were agreed on.
    """

    check: bool
    transport: str
    device: Backend | None
    transports: TransportFactory
    nodes: Sequence[int] = ()
    node_rule: NodeRule | None = None
    number: int = 1
    blas: BlasRule = NOTHING_MULTIPLIED
    sealed: bool = False
    freed: bool = False
    unfinished: str = ""
    kept: defaultdict[object, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))
    made: ClassVar[int] = 0  # grids of several ranks that this process, or another rank of one of them, has made

    def introduce(self, comm: MPI.Intracomm, topology: Topology, node_memory: bool | None, same: MPI.Intracomm | None) -> None:
        """Agree with the other ranks of `comm` on the grid that they make: its number, nodes, BLAS, node memory (collective).

        same : a communicator of the same ranks, which outlives the grid, and keeps which of them share a node; None, there is
        none. Raises AgreementError on all ranks where they make different grids, ConfigError where SUMMA3D_BLAS cannot be had.
        """
        facts = {"axes": topology.shape, "order": topology.order, "tile": topology.tile, "check": self.check}
        wanted = node_memory is not False and why_no_node_memory() is None
        mine = facts_of("Grid", facts), Job.made + 1, _leader_of_node(comm, same), _rule_here(), wanted, affinity()
        told = comm.allgather(mine) if comm.size > 1 else [mine]
        everyones_facts, numbers, leaders, rules, wanting, cores = zip(*told, strict=True)
        compare(everyones_facts, "Grid")
        nodes = sorted(set(leaders))
        self.nodes = [nodes.index(leader) for leader in leaders]
        self.blas = _rule_of_all(rules)
        crowded = _is_crowded(cores, self.nodes)
        if comm.size > 1 and all(wanting):
            self.node_rule = NodeRule(crowded, node_memory is True)
        if crowded and comm.rank == 0 and (self.node_rule is None or len(nodes) > 1) and not cores_are_yielded():
            warnings.warn(POLLS, RuntimeWarning, stacklevel=3)
        self.number = Job.made = max(numbers)

    @contextmanager
    def making(self, asked: str) -> Iterator[None]:
        """Turn MPI's error for want of a communicator, in the block of the call `asked`, into a GridError; note an interrupt."""
        try:
            yield
        except MPI.Exception as error:
            if not any(word in str(error) for word in ("communicators", "context ID")):  # none left, or none that all ranks have
                raise
            raise GridError(
                f"MPI has no communicator left for {asked}: too many grids are in use. Free those that are not needed any more, "
                "by\n  grid.free() or `with Grid(…) as grid:`."
            ) from error
        except Summa3dError:
            raise
        except BaseException:
            self.unfinished = asked
            raise

    def check_in_use(self, grid: object) -> None:
        """Raise GridError if the grid was freed, or interrupted while it made an axis."""
        if self.freed:
            raise GridError(f"{grid} was freed: its axes communicate no more. Make another grid.")
        if self.unfinished:
            raise GridError(
                f"{grid} was interrupted in {self.unfinished}, which other ranks may have finished: it makes no further axes.\n"
                "  Free it and make another grid."
            )


def _rule_here() -> BlasRule | ConfigError:
    """BLAS for host tensors on this rank; the error where it cannot follow SUMMA3D_BLAS."""
    try:
        return rule_for_tensors()
    except ConfigError as error:
        return error


def _rule_of_all(rules: Sequence[BlasRule | ConfigError]) -> BlasRule:
    """BLAS for host tensors on all ranks. Raises the ConfigError of the first one that has one."""
    for rule in rules:
        if isinstance(rule, ConfigError):
            raise rule
    return common_rule([rule for rule in rules if isinstance(rule, BlasRule)])


def _is_crowded(cores_of: Sequence[Sequence[int]], nodes: Sequence[int]) -> bool:
    """Return whether some node has more of these ranks than cores they may run on."""
    cores: dict[int, set[int]] = {}
    for node, usable in zip(nodes, cores_of, strict=True):
        cores.setdefault(node, set()).update(usable)
    return len(nodes) > 1 and any(nodes.count(node) > len(usable) for node, usable in cores.items())


@cache
def _leader_key() -> int:
    """Return the key of MPI's attribute of a communicator that is the first rank on this rank's node."""
    return MPI.Comm.Create_keyval()


def _leader_of_node(comm: MPI.Intracomm, same: MPI.Intracomm | None) -> int:
    """Return the first rank of `comm` on this rank's node, which `same` keeps for all grids of the same ranks."""
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
