"""Counts the words that ranks receive through MPI, whoever calls it: a library between a program and its MPI (PMPI), preloaded.

A collective counts as one that is optimal in bandwidth, whatever the library does: an all-reduce of n over g members 2(g−1)/g·n.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_double
from itertools import product
from pathlib import Path

from common import HERE, environment, printed

LIBRARY = HERE / "build" / "libpmpi_bytes.so"
SEND, GET = "const void *a, N n, MPI_Datatype t", "void *b, N m, MPI_Datatype u"
SENDS = "const void *a, const N *n, const D *f, MPI_Datatype t"
GETS = "void *b, const N *m, const D *d, MPI_Datatype u"
GETS_W = "void *b, const N *m, const D *d, const MPI_Datatype *u"
OTHERS = "for (int i = 0; i < members(c); i++) if (i != here(c)) bytes += (double)m[i] * size"
CALLS = {
    "Recv": ("void *b, N m, MPI_Datatype u, int s, int g, MPI_Comm c", "bytes += (double)m * size(u)"),
    "Bcast": ("void *b, N m, MPI_Datatype u, int r, MPI_Comm c", "if (here(c) != r) bytes += (double)m * size(u)"),
    "Allgather": (f"{SEND}, {GET}, MPI_Comm c", "bytes += (members(c) - 1.0) * m * size(u)"),
    "Alltoall": (f"{SEND}, {GET}, MPI_Comm c", "bytes += (members(c) - 1.0) * m * size(u)"),
    "Allgatherv": (f"{SEND}, {GETS}, MPI_Comm c", f"{OTHERS}(u)"),
    "Alltoallv": (f"{SENDS}, {GETS}, MPI_Comm c", f"{OTHERS}(u)"),
    "Alltoallw": (f"{SENDS.replace('MPI_Datatype ', 'const MPI_Datatype *')}, {GETS_W}, MPI_Comm c", f"{OTHERS}(u[i])"),
    "Allreduce": (
        "const void *a, void *b, N m, MPI_Datatype u, MPI_Op o, MPI_Comm c",
        "bytes += 2.0 * (members(c) - 1) / members(c) * m * size(u)",
    ),
    "Reduce": (
        "const void *a, void *b, N m, MPI_Datatype u, MPI_Op o, int r, MPI_Comm c",
        "if (here(c) == r) bytes += (members(c) - 1.0) * m * size(u)",
    ),
    "Reduce_scatter": (
        "const void *a, void *b, const N *m, MPI_Datatype u, MPI_Op o, MPI_Comm c",
        "bytes += (members(c) - 1.0) * m[here(c)] * size(u)",
    ),
}
"""MPI function → its parameters, with types N of counts and D of displacements, and what it adds to `bytes`."""
WIDTHS = {"": ("int", "int"), "_c": ("MPI_Count", "MPI_Aint")}
"""The end of a function's name → N and D: MPI 4 has each function with large counts too, which mpi4py calls where it can."""
HEAD = """#include <mpi.h>
static double bytes;
double received_bytes(void) { return bytes; }
static int size(MPI_Datatype t) { int found; PMPI_Type_size(t, &found); return found; }
static int members(MPI_Comm c) { int found; PMPI_Comm_size(c, &found); return found; }
static int here(MPI_Comm c) { int found; PMPI_Comm_rank(c, &found); return found; }
"""


def source() -> str:
    """The library's C: each function blocking and non-blocking, with counts of both widths."""
    text = [HEAD]
    for (name, (parameters, counted)), (end, (n, d)) in product(CALLS.items(), WIDTHS.items()):
        typed = re.sub(r"\bD\b", d, re.sub(r"\bN\b", n, parameters))
        for called, last in ((name, ", MPI_Status *q" if name == "Recv" else ""), (f"I{name.lower()}", ", MPI_Request *q")):
            given = ", ".join(one.split()[-1].lstrip("*") for one in (typed + last).split(","))
            text.append(f"int MPI_{called}{end}({typed}{last}) {{ {counted}; return PMPI_{called}{end}({given}); }}")
    return "\n".join(text) + "\n"


def built() -> Path:
    """The library, built with the C compiler against the MPI of this interpreter's environment."""
    LIBRARY.parent.mkdir(exist_ok=True)
    file = LIBRARY.with_suffix(".c")
    file.write_text(source(), encoding="utf-8")
    mpi = [f"-I{sys.prefix}/include", f"-L{sys.prefix}/lib", f"-Wl,-rpath,{sys.prefix}/lib", "-lmpi"]
    printed([os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", str(file), *mpi, "-o", str(LIBRARY)], environment())
    return LIBRARY


@contextmanager
def preloaded() -> Iterator[None]:
    """Let programs that are started meanwhile count, and all messages of ours go through MPI."""
    changed = {"LD_PRELOAD": str(built()), "SUMMA3D_NODE_MEMORY": "no"}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def received_bytes() -> float:
    """Bytes that this rank has received since it began."""
    counted = CDLL(None).received_bytes
    counted.restype = c_double
    found: float = counted()
    return found
