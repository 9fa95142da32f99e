"""The nodes that a job runs on: hosts, ranks and usable cores of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mpi4py import MPI

from ..node_support import affinity

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Nodes:
    """Hosts, numbers of ranks and numbers of usable cores, one of each per node, in the order of each node's first rank.

    A node is a running operating system: several launcher daemons on one host are one node. A node's cores are the union of its
    ranks' affinities, so that they are the same whether each rank is bound to a core or all ranks share all cores.

    >>> Nodes(("a", "b"), ranks=(4, 4), cores=(2, 2)).total_cores
    4
    """

    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    cores: tuple[int, ...]

    @classmethod
    def of(cls, comm: MPI.Intracomm) -> Nodes:
        """The nodes of the ranks of `comm`; collective."""
        host = MPI.Get_processor_name()
        system = BOOT_ID.read_text().strip() if BOOT_ID.exists() else host
        ranks: dict[str, list[tuple[str, list[int]]]] = {}
        for node, name, cores in comm.allgather((system, host, affinity())):
            ranks.setdefault(node, []).append((name, cores))
        on = list(ranks.values())
        unions = ({core for _, cores in node for core in cores} for node in on)
        return cls(tuple(node[0][0] for node in on), tuple(map(len, on)), tuple(map(len, unions)))

    @property
    def total_cores(self) -> int:
        """The number of cores that the job may use."""
        return sum(self.cores)
