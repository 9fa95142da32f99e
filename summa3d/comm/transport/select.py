"""The rules that select: a transport for the device arrays of a communicator, with the reason; what uses the node's memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...errors import ConfigError
from ..device.arrays import Array, dtype_name, is_on_device

VARIABLE = "SUMMA3D_TRANSPORT"
NAMES = ("auto", "mpi", "cuda-aware", "pinned", "nccl")


@dataclass(frozen=True)
class Facts:
    """The facts that select a transport.

    devices : the unique identity of each member's device. nccl : whether all members can load it.
    cuda_aware : whether MPI reads device pointers.
    """

    devices: Sequence[str]
    nccl: bool
    cuda_aware: bool


@dataclass(frozen=True)
class TransportChoice:
    """A transport's name, and why it was taken."""

    name: str
    reason: str


def requested(name: str | None = None) -> str:
    """The transport asked for: `name`, else (auto too) SUMMA3D_TRANSPORT, else auto. ConfigError for one that does not exist."""
    wanted = name if name not in (None, "", "auto") else os.environ.get(VARIABLE) or "auto"
    if wanted not in NAMES:
        raise ConfigError(f"transport {wanted!r} does not exist. Transports: {', '.join(NAMES)} ({VARIABLE} names one as well).")
    return wanted


def choose(facts: Facts, wanted: str = "auto") -> TransportChoice:
    """The transport for device arrays among members with these `facts`.

    NCCL where each has a device of its own; else device pointers into MPI where it reads them; else pinned copies, which
    always work. Raises ConfigError where `wanted` cannot be had, naming what can.
    """
    obstacles = _obstacles(facts)
    works = [name for name, obstacle in obstacles.items() if obstacle is None]
    if wanted != "auto":
        if obstacles[wanted] is not None:
            raise ConfigError(
                f"transport {wanted} cannot carry the device arrays of {len(facts.devices)} ranks: {obstacles[wanted]}.\n"
                f"  Transports that can: auto, {', '.join(works)}."
            )
        return TransportChoice(wanted, "asked for")
    if "nccl" in works:
        return TransportChoice("nccl", "every rank has a device of its own, and NCCL is there")
    if "cuda-aware" in works:
        return TransportChoice("cuda-aware", f"MPI reads device pointers; not NCCL: {obstacles['nccl']}")
    return TransportChoice("pinned", f"not NCCL: {obstacles['nccl']}; not CUDA-aware MPI: {obstacles['cuda-aware']}")


def _obstacles(facts: Facts) -> dict[str, str | None]:
    """Transport → why it cannot be used; None where it can."""
    ((crowded, sharers),) = Counter(facts.devices).most_common(1)
    nccl = None if facts.nccl else "CuPy's NCCL bindings are not there"
    if nccl is None and sharers > 1:
        nccl = f"{sharers} ranks share device {crowded}, and NCCL wants one each"
    return {
        "mpi": "host MPI does not read device memory",
        "cuda-aware": None if facts.cuda_aware else "this MPI does not read device pointers",
        "pinned": None,
        "nccl": nccl,
    }


@dataclass(frozen=True)
class NodeRule:
    """Which communications of an axis, whose members share a node, go through the node's memory.

    All of them if ranks outnumber the cores (`crowded`): a rank that waits inside MPI polls, and takes the core from one that
    works. Otherwise those of SMALL bytes or more, below which MPI is as fast, unless `always`. Communications above LARGEST
    bytes use MPI, which needs no memory for them.
    """

    crowded: bool
    always: bool
    SMALL: ClassVar[int] = 1 << 15
    LARGEST: ClassVar[int] = 1 << 28

    def takes(self, array: Array, elements: int) -> bool:
        """Return whether a communication of this many elements of `array`'s dtype goes through the node's memory."""
        nbytes = elements * array.itemsize
        return (self.always or self.crowded or nbytes >= self.SMALL) and nbytes <= self.LARGEST and staged_dtype(array)


def staged_dtype(array: Array) -> bool:
    """Return whether arrays like this one can be summed in a slot: on the host, and not bool, which MPI's operations reduce."""
    return dtype_name(array) != "bool" and not is_on_device(array)
