# What this machine can do that not every machine can. Imports the standard library only, so that it can be asked without MPI.
# Next: comm/node.py, which relies on it; cli/doctor.py, which tells it.
from __future__ import annotations

import os
import platform
import sys

FUTEX = {"x86_64": 202}
"""The number of the futex system call. Other machines order stores differently as well, and would need fences."""


def available() -> str | None:
    """Why ranks of this node cannot communicate through its memory (comm/node.py); None where they can."""
    if os.environ.get("SUMMA3D_NODE_MEMORY") == "no":
        return "SUMMA3D_NODE_MEMORY=no"
    if not sys.platform.startswith("linux") or platform.machine() not in FUTEX or not hasattr(os, "memfd_create"):
        return f"{sys.platform} on {platform.machine()} (needs Linux on {', '.join(FUTEX)})"
    return None
