"""`summa3d …`, and `python -m summa3d …`: signals have their meaning before the command is imported, which takes long."""

from __future__ import annotations

import io
import sys

from . import preemption


def main() -> int:
    """Run the command line, and return the exit status; an interrupt of a command that has no ranks is one line."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale that lacks a character ends no command
    if sys.argv[1:2] == ["train"]:
        preemption.hold()
    try:
        from .cli.main import main as command

        return command()
    except KeyboardInterrupt:
        from .comm.health.processes import launched_as

        module = sys.modules.get("mpi4py.MPI")
        if module is not None and module.Is_initialized():  # it has ranks, of which one reports for all
            raise
        if (launched_as() or (1, 0))[1] == 0:
            print("interrupted", file=sys.stderr)
        return preemption.INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
