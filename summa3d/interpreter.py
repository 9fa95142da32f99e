"""Arguments of Pythons that import nothing from the current folder, in which anybody may have put a json.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "PYTHONSAFEPATH"
"""What lets a Python and all that it starts leave the current folder out, from Python 3.11 on."""
WITHOUT_FOLDER = "import sys; sys.path[:] = [place for place in sys.path if place]\n"
"""`python -P` for Python 3.10."""
RUN_MODULE = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def module(name: str, *words: str) -> list[str]:
    """The arguments of a Python that runs a module."""
    if sys.version_info >= (3, 11):
        return ["-P", "-m", name, *words]
    return ["-c", WITHOUT_FOLDER + RUN_MODULE, name, *words]


def program(text: str) -> list[str]:
    """The arguments of a Python that runs a program's text."""
    if sys.version_info >= (3, 11):
        return ["-P", "-c", text]
    return ["-c", WITHOUT_FOLDER + text]


def spawns_safely() -> bool:
    """Return whether Pythons that `multiprocessing` starts can leave the current folder out: it passes no options of ours on."""
    return sys.version_info >= (3, 11)


@contextmanager
def safe_spawning() -> Iterator[None]:
    """A context in which Pythons that `multiprocessing` starts leave the current folder out."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
