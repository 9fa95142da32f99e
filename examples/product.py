"""A product on a 2×2×2 grid: mpiexec -n 8 python -m mpi4py examples/product.py"""

import numpy as np
from mpi4py import MPI

from summa3d import DistMatrix, Grid

grid = Grid(MPI.COMM_WORLD, {"x": 2, "y": 2, "z": 2})
A = DistMatrix.from_function(lambda i, j: np.sin(i + 2 * j), (67, 101), grid, "m:(x,y) k:z")
B = DistMatrix.from_function(lambda i, j: np.cos(3 * i - j), (101, 41), grid, "k:(z,x) n:y")
C = A @ B
words = MPI.COMM_WORLD.allreduce(grid.ledger.total().words)  # received by all ranks together: mk + kn + mn on this grid
norm = C.norm()
if grid.rank == 0:
    print(C.shape, C.layout, words, f"{norm:.9f}")
