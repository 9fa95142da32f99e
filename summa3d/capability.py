# What this machine can do that not every machine can, and what the environment forbids. Imports errors; asked without MPI.
# Next: comm/transport/node_memory.py, which relies on it; cli/doctor.py, which tells it.
from __future__ import annotations

import os
import platform
import sys

from .errors import ConfigError

FUTEX = {"x86_64": 202}
"""The number of the futex system call. Other machines order stores differently as well, and would need fences."""


def available() -> str | None:
    """Why ranks of this node cannot communicate through its memory (comm/transport/node.py); None where they can.

    Raises ConfigError as `forbidden` does.
    """
    if forbidden("SUMMA3D_NODE_MEMORY"):
        return "SUMMA3D_NODE_MEMORY=no"
    if not sys.platform.startswith("linux") or platform.machine() not in FUTEX or not hasattr(os, "memfd_create"):
        return f"{sys.platform} on {platform.machine()} (needs Linux on {', '.join(FUTEX)})"
    return None


def forbidden(variable: str) -> bool:
    """Whether the environment says no. Raises ConfigError for anything but yes and no, which would not be what was meant."""
    said = os.environ.get(variable, "yes")
    if said not in ("yes", "no"):
        raise ConfigError(f"{variable} is {said!r}; it takes yes or no.")
    return said == "no"
