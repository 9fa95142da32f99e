"""The cluster of a row: that of a name, or that of a GPU, the GPUs of a node and its network."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ...cluster import Cluster, load
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
    wanted = _plain(gpu)
    table = devices()
    names = {_plain(name): device for device, about in table.items() for name in (device, *about["names"])}
    if wanted in names:
        return names[wanted]
    inside = [name for name in names if wanted.startswith(name)]
    if not inside:
        raise ClusterError(f"unknown GPU {gpu!r}. Known: {', '.join(table)}; or give `cluster`, a name or a TOML file.")
    return names[max(inside, key=len)]


def _plain(name: str) -> str:
    return re.sub(r"nvidia|amd|tensor core|gpu|[\s_-]", "", name.lower())


def cluster_of(gpu: str, gpus_per_node: int | None = None, network: str | None = None, newer: bool = True) -> Cluster:
    """The cluster of a GPU, so many in a node, with the libraries of 2022 and later, or those before.

    network : a node's ports and their rate, such as "8x400Gb/s", or its whole rate; without one, that of the cluster which
    describes the GPU. A rack of several nodes has the ports of each of them. Raises ClusterError for an unknown GPU.
    """
    device = device_of(gpu)
    about = devices()[device]
    cluster = load(about["cluster"])
    values = {
        key: float(value) for key, value in {**about, **(about.get("newer", {}) if newer else {})}.items() if key not in TEXTS
    }
    node, inner = gpus_per_node or 0, cluster.levels[-2] if len(cluster.levels) > 1 else cluster.levels[0]
    fits = node and all(node % level.size == 0 and node != level.size for level in cluster.levels[:-2])
    if fits and node != inner.size:
        values |= {f"{inner.name}.size": float(node), "network.ports": float(node)}
    ports, rate = ports_of(network or "")
    if rate:
        many = ports or max(1, min(node or inner.size, round(rate / 50e9)))
        nodes = inner.size // node if node in [level.size for level in cluster.levels[:-2]] else 1
        values |= {"network.ports": float(nodes * many), "network.bandwidth": PART * rate / (1 if ports else many)}
    known = {key: value for key, value in values.items() if key in cluster.numbers}
    return cluster.replaced(known, "datasheet")


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
