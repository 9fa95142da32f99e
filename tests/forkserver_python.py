"""A Python that has imported what takes long, and is forked instead of started: `forkserver_python.py MODULES…`.

A fork runs as `python -m MODULE …`, `python -c PROGRAM …` or `python SCRIPT …` would. See `jobs.python`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path

import forkserver

MPI = "mpi4py.MPI"


class LoadedMPI:
    """The module of MPI, loaded before a fork; the import of it in the fork initialises MPI, as that of a fresh process does."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # a fork that initialises MPI finalises it at its exit
        self.module = importlib.import_module(MPI)
        mpi4py.rc.initialize, mpi4py.rc.finalize = True, None

    def hide(self) -> None:
        """Have the next import of it ask this finder."""
        import mpi4py

        del sys.modules[MPI], mpi4py.MPI
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name == MPI else None

    def create_module(self, _: ModuleSpec) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        import mpi4py

        if mpi4py.rc.initialize:
            module.Init_thread(module.THREAD_MULTIPLE)

    def active(self) -> bool:
        """Return whether MPI is initialised, and not finalised."""
        return self.module.Is_initialized() and not self.module.Is_finalized()

    def finalise(self) -> None:
        """Finalise MPI, as mpi4py does at the exit of an interpreter."""
        if self.active():
            self.module.Finalize()


def main(modules: list[str]) -> None:
    """Import `modules`, then fork for every stub; returns in the server when its owner has ended it, in a fork at its end."""
    mpi = LoadedMPI()
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    mpi.hide()
    forkserver.collapse()
    request = forkserver.serve()
    if request is not None:
        request.take_over()
        sys.executable = request.python  # what a fork starts by this name is a fork too
        try:
            run(request.arguments)
        except SystemExit as end:
            status = end.code or 0
            if not isinstance(status, int) or (status and mpi.active()):
                raise  # the interpreter prints the message; mpi4py ends the job where its `run` asks for it
        else:
            status = 0
        forkserver.leave(status, mpi.finalise)


def run(arguments: list[str]) -> None:
    """Do what the interpreter does with its command line."""
    known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [str(Path.cwd()), *(path for path in known if path not in sys.path)]
    if arguments[0] == "-P":
        arguments = arguments[1:]
        sys.path.pop(0)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if not hasattr(sys.modules.get(arguments[1]), "__path__"):
            sys.modules.pop(arguments[1], None)  # a fresh process runs it first; of a package it runs another
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
