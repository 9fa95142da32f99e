"""A product of ours in a ScaLAPACK program, whose pdgesv solves with it: mpiexec -n 4 python -m mpi4py examples/scalapack.py"""

import ctypes
import os
import sys
from ctypes import byref, c_int
from pathlib import Path

import numpy as np
from mpi4py import MPI

from summa3d import DistMatrix, Grid

N, RHS, BLOCK = 67, 3, 8

# ScaLAPACK of the extra mkl, which calls MPICH. A program in C or Fortran links its own, and needs none of these lines.
folder, system = Path(sys.prefix, "lib"), ctypes.CDLL(None)
system.dlopen.argtypes = ctypes.c_char_p, c_int
ctypes.CDLL("libmpi.so.12", ctypes.RTLD_GLOBAL)
for pattern in ("libmkl_rt.so.*", "libmkl_blacs_intelmpi_lp64.so.*", "libmkl_scalapack_lp64.so.*"):
    (file,) = folder.glob(pattern)
    system.dlopen(bytes(file), os.RTLD_LAZY | os.RTLD_GLOBAL)
    if "rt" in pattern:
        one = byref(c_int(1))
        system.dnrm2_(one, np.zeros(1).ctypes, one)  # the first call of a BLAS loads what the others need

context = c_int()
system.blacs_get_(byref(c_int(-1)), byref(c_int(0)), byref(context))
system.blacs_gridinit_(byref(context), b"R", byref(c_int(2)), byref(c_int(2)))

# Grid(comm, {"x": 2, "y": 2}) numbers ranks as BLACS does by rows.
grid = Grid(MPI.COMM_WORLD, {"x": 2, "y": 2})
A = DistMatrix.from_function(lambda i, j: np.cos(i * j + i) + 9 * (i == j), (N, N), grid, f"m:x[{BLOCK}] k:y[{BLOCK}]")
B = DistMatrix.from_function(lambda i, j: np.sin(i + j), (N, RHS), grid, f"m:x[{BLOCK}] n:y[{BLOCK}]")
S = (A.T @ A).to_scalapack(("x", BLOCK), ("y", BLOCK))  # the product, dealt out and F-ordered as pdgesv wants it
X = B.to_scalapack(("x", BLOCK), ("y", BLOCK))


def arguments(matrix):
    """The block, its first row and column, and its descriptor."""
    described = matrix.layout.descriptor(matrix.shape, grid.shape, grid.coordinates, context.value)
    return matrix.block.ctypes, byref(c_int(1)), byref(c_int(1)), np.array(described, np.int32).ctypes


pivots, info = np.zeros(S.block.shape[0] + BLOCK, np.int32), c_int()
whole = (A.T @ A).to_global()
system.pdgesv_(byref(c_int(N)), byref(c_int(RHS)), *arguments(S), pivots.ctypes, *arguments(X), byref(info))
right = np.allclose(whole @ X.to_global(), B.to_global(), rtol=0, atol=1e-10)
if grid.rank == 0:
    print(f"pdgesv: info {info.value}, (AᵀA)·X = B: {right}, blocks {S.block.shape} and {X.block.shape} here")
