"""The cluster of a row: that of a name, or that of a GPU, the GPUs of a node and its network."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ...cluster import LARGEST_HOST, Cluster, load
from ...comm.topology import divisors
from ...errors import ClusterError
from ...files import read_toml

FILE = Path(__file__).with_name("devices.toml")
TEXTS = ("names", "cluster", "newer")
PART = 0.9
"""Of a port's line rate, what a message gets."""


@cache
def devices() -> dict[str, dict[str, Any]]:
    """GPU → its other names, the cluster that describes it, and what differs from that."""
    return read_toml(FILE)


def device_of(gpu: str) -> str:
    """The GPU of a name, in whatever spelling. Raises ClusterError for an unknown one, which lists those that are known."""
    table = devices()
    names = {_plain(name): device for device, about in table.items() for name in (device, *about["names"])}
    for wanted in (_plain(gpu), _plain(re.sub(r"[\s_-]\d+\s*GB.*", "", gpu, flags=re.IGNORECASE))):
        if wanted in names:
            return names[wanted]
        inside = [name for name in names if wanted.startswith(name) and not wanted[len(name)].isdigit()]
        if inside:
            return names[max(inside, key=len)]
    raise ClusterError(f"unknown GPU {gpu!r}. Known: {', '.join(table)}; or give `cluster`, a name or a TOML file.")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|amd|tesla|instinct|geforce|tensor core|gpu|[\s_-]", "", name.lower())


def cluster_of(gpu: str, gpus_per_node: int | None = None, network: str | None = None, newer: bool = True) -> Cluster:
    """The cluster of a GPU, so many in a node, with the libraries of 2022 and later, or those before.

    network : a node's ports and their rate, such as "8x400Gb/s", or its whole rate; without one, that of the cluster which
    describes the GPU, as many ports for each GPU. A rack of several nodes has the ports of each of them. Raises ClusterError for
    an unknown GPU, and for nodes of which a rack has no whole number.
    """
    about = devices()[device_of(gpu)]
    cluster = load(about["cluster"])
    values = {
        key: float(value) for key, value in {**about, **(about.get("newer", {}) if newer else {})}.items() if key not in TEXTS
    }
    cluster = cluster.replaced(values, "datasheet")
    sizes = _sizes(gpu, cluster, gpus_per_node)
    values = {f"{name}.size": float(size) for name, size in sizes.items()}
    inner = cluster.levels[-2] if len(cluster.levels) > 1 else cluster.levels[0]
    whole = sizes.get(inner.name, inner.size)
    nodes = whole // sizes.get(cluster.levels[0].name, cluster.levels[0].size) if whole > LARGEST_HOST else 1
    values["network.ports"] = max(1.0, float(cluster["network.ports"] * whole // inner.size))
    ports, rate = ports_of(network or "")
    if rate:
        many = ports or max(1, min(whole // nodes, round(rate / 50e9)))
        values |= {"network.ports": float(nodes * many), "network.bandwidth": PART * rate / (1 if ports else many)}
    return cluster.replaced(values, "datasheet")


def _sizes(gpu: str, cluster: Cluster, node: int | None) -> dict[str, int]:
    """The sizes of a cluster's levels that differ where a node has so many GPUs: of nodes, and of what is inside them.

    A node of which a rack has several is the rack's innermost level; one of more GPUs is the rack itself.
    """
    levels = cluster.levels[:-1]
    if not node or not levels:
        return {}
    inner, host = levels[0], levels[-1]
    if inner is host:
        return {host.name: node}
    if host.size > LARGEST_HOST and host.size % node == 0 and node <= inner.size:
        return {inner.name: node} if node != inner.size else {}
    if node == 1 or (host.size > LARGEST_HOST and node % inner.size):
        parts = [size for size in divisors(host.size) if size <= inner.size or size % inner.size == 0]
        fitting = ", ".join(map(str, parts)) if host.size > LARGEST_HOST else "2 and more"
        raise ClusterError(f"gpus_per_node = {node} is no node of {gpu}: it takes {fitting}.")
    halves = {} if node % inner.size == 0 and node > inner.size else {inner.name: 1 if node % 2 else node // 2}
    return {**halves, host.name: node}


def ports_of(network: str) -> tuple[int, float]:
    """(Ports of a node, 0 where only their sum is said; bytes per second of one, or of all); (0, 0) where it says no rate.

    >>> ports_of("8x400Gb/s (not printed)"), ports_of("InfiniBand, 1.6 Tb/s"), ports_of("InfiniBand")
    ((8, 50000000000.0), (0, 200000000000.0), (0, 0.0))
    """
    match = re.search(r"(?:(\d+)\s*[x×*]\s*)?(\d+(?:\.\d+)?)\s*([GTM])(b|B|bit)", network)
    if match is None:
        return 0, 0.0
    ports, rate, scale, unit = match.groups()
    size = float(rate) * {"M": 1e6, "G": 1e9, "T": 1e12}[scale] / (1 if unit == "B" else 8)
    return int(ports or 0), size
