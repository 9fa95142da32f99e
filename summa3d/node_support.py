"""Capabilities of this machine that not every machine has, and environment variables that turn them off; uses no MPI."""

from __future__ import annotations

import os
import platform
import sys

from .errors import ConfigError

MOST_SECONDS = 1e8
"""The longest time for which a watchdog waits."""
FUTEX = {"x86_64": 202}
"""Architecture → number of the futex system call. Other architectures also reorder stores, and would need fences."""


def why_no_node_memory() -> str | None:
    """The reason why ranks of this node cannot communicate through node memory (`comm.transport.node`); None where they can.

    Raises ConfigError as `forbidden` does.
    """
    if forbidden("SUMMA3D_NODE_MEMORY"):
        return "SUMMA3D_NODE_MEMORY=no"
    if not sys.platform.startswith("linux") or platform.machine() not in FUTEX or not hasattr(os, "memfd_create"):
        return f"{sys.platform} on {platform.machine()} (needs Linux on {', '.join(FUTEX)})"
    return None


def watchdog_seconds(default: float = 600.0) -> float:
    """After how many seconds a job that hangs is ended: SUMMA3D_WATCHDOG, else `default`; 0, never.

    Raises ConfigError for a value that is no such number.
    """
    text = os.environ.get("SUMMA3D_WATCHDOG", "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not text.isascii() or "_" in text:  # which Python takes in numbers
        seconds = -1.0
    if not 0 <= seconds <= MOST_SECONDS:
        raise ConfigError(f"SUMMA3D_WATCHDOG is {text!r}; it takes seconds, 0 (never) to {MOST_SECONDS:.0f}.")
    return seconds


def affinity() -> list[int]:
    """The cores that this process may run on now."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def forbidden(variable: str) -> bool:
    """Return whether an environment variable is "no"; unset means "yes". Raises ConfigError for any other value.

    >>> forbidden("SUMMA3D_SOME_VARIABLE")
    False
    """
    value = os.environ.get(variable, "yes")
    if value not in ("yes", "no"):
        raise ConfigError(f"{variable} is {value!r}; it takes yes or no.")
    return value == "no"


def load_average() -> float | None:
    """The load average of the last minute, where the system has one."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
