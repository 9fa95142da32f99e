"""Layouts as text, and a matrix that goes from one to another: mpiexec -n 4 python -m mpi4py examples/layouts.py"""

import numpy as np
from mpi4py import MPI

from summa3d import DistMatrix, Grid, Layout

grid = Grid(MPI.COMM_WORLD, {"x": 2, "y": 2})
whole = np.arange(24.0).reshape(6, 4)
A = DistMatrix.from_global(whole, grid, "m:x k:y")
lines = []
for text in ("m:(x,y) k", "m k:(y,x)", "m:x k @y=0", "m:x[1] k:y[2]", "m k"):
    with grid.ledger.watch() as moved:
        B = A.redistribute(text)
    assert np.array_equal(B.to_global(), whole)
    words = MPI.COMM_WORLD.allreduce(moved.words)
    lines.append(f"m:x k:y → {text}: {words} words, blocks here {B.block.shape}")
assert Layout("m:x k:y") == Layout(("x",), ("y",))
if grid.rank == 0:
    print("\n".join(lines))
