"""Emulated nodes: parts of this machine with a network of their own, joined by a switch whose ports have a limited bandwidth.

A node is a set of namespaces without names, which a process holds open until the launcher closes its input. However the launcher
ends, the kernel then ends every process of the node, and takes its links, mounts and shared memory away.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import TracebackType

from ..errors import LaunchError
from ..files import pairs_of
from .follow import follow

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "taskset", "mount")
HYDRA = ("mpich", "intel")
"""Vendors of launchers that start ranks through a remote shell of ours."""
MOST_NODES = 200
SUBNET = "10.77.0"
SWITCH = f"{SUBNET}.254"
NIC, BRIDGE = "eth0", "br0"
MTU = 9000
BURST, QUEUE = "64k", "4m"
"""What a port may send at once, and what may wait before it; 64 KiB is the largest packet that TCP hands to a link."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": NIC, "FI_PROVIDER": "tcp"}
"""No other transport: UCX would find memory that nodes of one machine share, and show tens of GB/s on a port of 1 Gbit/s."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SHELL_FILE = "/dev/shm/remote_shell"
SWITCH_SCRIPT = "read -r pid _ < /proc/self/stat && mount -t tmpfs tmpfs /dev/shm && echo $pid && read -r _"
NODE_SCRIPT = f"""
read -r pid _ < /proc/self/stat && hostname $1 && mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm || exit
mkdir /dev/shm/cgroup && mount --rbind /sys/fs/cgroup /dev/shm/cgroup && mount -t sysfs sysfs /sys || exit
mount --rbind /dev/shm/cgroup /sys/fs/cgroup && umount --lazy /dev/shm/cgroup && rmdir /dev/shm/cgroup || exit
cat /proc/sys/kernel/random/uuid > /dev/shm/id && mount --bind /dev/shm/id {BOOT_ID} && rm /dev/shm/id && echo $pid && read -r _
"""
"""The first process of a node named $1. UCX finds a node's links in /sys; it and summa3d tell nodes apart by their boot_id."""


@dataclass(frozen=True)
class EmulatedNodes:
    """Emulated nodes: how many, the bits per second of a node's port in each direction, and seconds that packets wait there."""

    nodes: int
    port: float
    delay: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a port, in each direction."""
        return self.port / 8


def network_of(text: str) -> EmulatedNodes:
    """The network that an option describes. Raises LaunchError for another text.

    >>> network_of("nodes=4,port=250mbit")
    EmulatedNodes(nodes=4, port=250000000.0, delay=0.0)
    """
    values = pairs_of(text) or {}
    rate = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", values.get("port", ""))
    delay = re.fullmatch(r"(\d+(?:\.\d+)?)ms", values.get("delay", "0ms"))
    count = re.fullmatch(r"\d{1,3}", values.get("nodes", ""))
    known = set(values) <= {"nodes", "port", "delay"}
    if not known or count is None or not 1 <= int(count[0]) <= MOST_NODES or rate is None or delay is None or not float(rate[1]):
        raise LaunchError(
            f"--emulate {text!r} cannot be read; it takes nodes=N (1 to {MOST_NODES}), port=RATE in kbit, mbit or gbit, and "
            "delay=…ms where wanted: --emulate nodes=4,port=1gbit"
        )
    return EmulatedNodes(int(count[0]), float(rate[1]) * UNITS[rate[2]], float(delay[1]) / 1000)


def why_not(vendor: str = "mpich") -> str | None:
    """Reason why no ranks can be started on emulated nodes here by a launcher of this vendor; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"they are namespaces of Linux, and this is {sys.platform}"
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} is missing (Debian: apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "only root makes their namespaces and links"
    return None if vendor in HYDRA else "only hydra, the launcher of MPICH and Intel MPI, starts ranks on them"


class Emulated:
    """Emulated nodes, which last as long as this context, or as this process if that ends first.

    Raises LaunchError where they cannot be made, with what the failed program has said.
    """

    def __init__(self, network: EmulatedNodes) -> None:
        reason = why_not()
        if reason is not None:
            raise LaunchError(f"nodes cannot be emulated: {reason}.")
        numbers = range(1, network.nodes + 1)
        self.network, self.names = network, [f"node{number}" for number in numbers]
        self.addresses = [f"{SUBNET}.{number}" for number in numbers]
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Emulated:
        try:
            self._switch = self._held("--net", "--mount", script=SWITCH_SCRIPT)
            spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
            self._nodes = [self._held(*spaces, script=NODE_SCRIPT, name=name) for name in self.names]
            self._wire()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the nodes; the kernel removes what belonged to them."""
        while self._holders:
            self._holders.pop().communicate()

    def _held(self, *spaces: str, script: str, name: str = "switch") -> int:
        """The process id of a shell in new namespaces that ends once this process closes its input, or ends."""
        command = ["unshare", *spaces, "sh", "-c", script, "sh", name]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment(), start_new_session=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        said = holder.stdout.readline().strip()
        if not said:
            raise LaunchError(f"nodes cannot be emulated: {' '.join(command[:-5])}: {holder.stderr.read().strip()}")
        return int(said)

    def _wire(self) -> None:
        """Join the nodes by a switch; either end of a link sends no faster than the port's rate."""
        rate = f"tbf rate {self.network.port:.0f}bit burst {BURST} limit {QUEUE}"
        links = ["link set lo up", f"link add {BRIDGE} mtu {MTU} type bridge", f"link set {BRIDGE} up"]
        for pid, name in zip(self._nodes, self.names, strict=True):
            links.append(f"link add {name} mtu {MTU} type veth peer name {NIC} mtu {MTU} netns {pid}")
            links.append(f"link set {name} master {BRIDGE} up")
        self._batch(self.in_switch(), "ip", [*links, f"addr add {SWITCH}/24 dev {BRIDGE}"])
        self._batch(self.in_switch(), "tc", [f"qdisc add dev {name} root {rate}" for name in self.names])
        delay = f"qdisc add dev {NIC} parent 1:1 netem delay {self.network.delay * 1000:g}ms limit 100000"
        for place, address in enumerate(self.addresses):
            up = ["link set lo up", f"addr add {address}/24 dev {NIC}", f"link set {NIC} up"]
            self._batch(self.in_node(place), "ip", up)
            waits = [delay] if self.network.delay else []
            self._batch(self.in_node(place), "tc", [f"qdisc add dev {NIC} root handle 1: {rate}", *waits])

    def _batch(self, where: Sequence[str], program: str, lines: Sequence[str]) -> None:
        """Run lines of `ip` or `tc` somewhere."""
        done = subprocess.run(
            [*where, program, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, env=_environment()
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            kernel = " (this kernel has no netem: leave delay out)" if self.network.delay and program == "tc" else ""
            raise LaunchError(f"nodes cannot be emulated: {program}: {said[0] if said else done.returncode}{kernel}")

    def in_node(self, place: int) -> list[str]:
        """Beginning of the command line of a program that runs on a node, counted from 0, on the node's cores."""
        cores = ",".join(map(str, cores_of(place, self.network.nodes)))
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid")
        return ["taskset", "--cpu-list", cores, "nsenter", f"--target={self._nodes[place]}", *spaces, "--"]

    def in_switch(self) -> list[str]:
        """Beginning of the command line of a program that is to reach all nodes."""
        return ["nsenter", f"--target={self._switch}", "--net", "--"]

    def command(self, launcher: Sequence[str], ranks: int, program: Sequence[str]) -> list[str]:
        """The command line that starts a program on consecutive ranks of each node, as many on each.

        Raises LaunchError where the nodes do not divide the ranks.
        """
        nodes = self.network.nodes
        if ranks < 1 or ranks % nodes:
            raise LaunchError(f"{nodes} nodes do not divide {ranks} ranks; {nodes}, {2 * nodes} or {4 * nodes} would fit.")
        shell = f"/proc/{self._switch}/root{SHELL_FILE}"
        cases = [
            f'{address}) shift; exec {shlex.join(self.in_node(place))} sh -c "$*";;'
            for place, address in enumerate(self.addresses)
        ]
        lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "case $1 in", *cases, "esac"]
        with open(os.open(shell, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o755), "w", encoding="ascii") as file:
            file.write("\n".join([*lines, 'echo "there is no node $1" >&2; exit 1', ""]))
        where = ("-launcher", "ssh", "-launcher-exec", shell, "-localhost", SWITCH, "-hosts", ",".join(self.addresses))
        return [*self.in_switch(), *launcher, *where, "-ppn", str(ranks // nodes), "-n", str(ranks), *program]


def run(network: EmulatedNodes, launcher: Sequence[str], ranks: int, program: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a program on ranks of emulated nodes to its end, and return its exit status as `follow` does.

    Raises LaunchError where nodes cannot be emulated, or do not divide the ranks; OSError where the launcher cannot be started.
    """
    with Emulated(network) as nodes:
        return follow(nodes.command(launcher, ranks, program), {**environ, **ENVIRONMENT, "PATH": _path(environ)})


def cores_of(place: int, nodes: int) -> list[int]:
    """The cores of a node: its part of this process's, at least one, so that a node's ranks know how many share a core."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // nodes)
    return list(islice(cycle(cores), place * share, (place + 1) * share))


def _path(environ: Mapping[str, str] = os.environ) -> str:
    """Search path of programs, with those of root."""
    return f"{environ.get('PATH', '')}:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path(), "LC_ALL": "C"}
