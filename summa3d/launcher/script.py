"""Runs a Python script or module on one rank as `python -m mpi4py` does, on one core where ranks outnumber the cores.

`python -m summa3d.launcher.script SCRIPT.py ARGS…` is what `summa3d launch -n N SCRIPT.py ARGS…` starts.
"""

from __future__ import annotations

import sys

from ..comm.health import flight_files
from ..comm.health.processes import launched_as
from .runtime import let_idle_threads_sleep, take_core, usable_cores


def main() -> None:
    """Run the script that sys.argv names; an exception on this rank ends the job on all."""
    launched = launched_as()
    if launched is not None and launched[0] > usable_cores():
        take_core(launched[1])
    let_idle_threads_sleep()
    from mpi4py import run

    sys.path.insert(0, "")  # for the script's folder, or for the current one of a module
    try:
        run.main()
    except Exception:
        has_hook = sys.excepthook.__module__.startswith("summa3d.")  # the first grid brings one, which says as much
        if launched is not None and not has_hook:
            flight_files.claim(None)
            sys.stderr.write(f"uncaught exception on rank {launched[1]} of {launched[0]}:\n")
        raise


if __name__ == "__main__":
    main()
