"""The four cases of a product of sharded matrices: what moves, and how many words each rank receives.

Run it from the repository: mpiexec -n 4 python -m mpi4py examples/four_cases.py
"""

import numpy as np
from mpi4py import MPI

import summa3d

M, N, K = 64, 32, 48
CASES = [
    ("k is whole", "nn", "m k", "k n:y"),
    ("k is split in A", "tn", "k:y m", "k n:y"),
    ("k is split in A and B", "nn", "m k:y", "k:y n"),
    ("m and n are split by one axis", "nn", "m:y k", "k n:y"),
]


def main() -> None:
    """Print a line per case."""
    grid = summa3d.Grid(MPI.COMM_WORLD, {"y": MPI.COMM_WORLD.size})
    for case, form, a_layout, b_layout in CASES:
        a_shape = (M, K) if form == "nn" else (K, M)
        A = summa3d.DistMatrix.from_function(lambda i, j: np.sin(i + 2 * j), a_shape, grid, a_layout)
        B = summa3d.DistMatrix.from_function(lambda i, j: np.cos(3 * i - j), (K, N), grid, b_layout)
        with grid.ledger.watch() as moved:
            C = summa3d.matmul(A, B, form=form)
        if grid.rank == 0:
            print(f"{case}: A {a_layout} · B {b_layout} = C {C.layout}: {moved.words} words")


if __name__ == "__main__":
    main()
