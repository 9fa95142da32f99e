"""Products of matrices that lie anywhere, on one grid and on two: mpiexec -n 4 python -m mpi4py examples/any_layouts.py"""

import numpy as np
from mpi4py import MPI

from summa3d import DistMatrix, Grid, matmul
from summa3d.gemm import plan_any

grid, line = Grid(MPI.COMM_WORLD, {"x": 2, "y": 2}), Grid(MPI.COMM_WORLD, {"p": 4})
a, b = np.random.default_rng(1).random((64, 96)), np.random.default_rng(2).random((96, 48))
A = DistMatrix.from_global(a, grid, "m k:(y,x)")
B = DistMatrix.from_global(b, grid, "k[8] n:x[8]")  # block-cyclic, with copies along y
C = A @ B
D = matmul(A, B, out_layout="m:x n @y=0")
E = A @ DistMatrix.from_global(b, line, "k:p n")
assert all(np.allclose(one.to_global(), a @ b) for one in (C, D, E))
plan = plan_any(A.layout, B.layout, 64, 48, 96, grid)
if grid.rank == 0:
    print(C.layout, "·", D.layout, "·", E.layout)
    print(plan)
