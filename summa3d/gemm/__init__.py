# Distributed matrix multiplication on numpy and torch arrays. May import comm and layout; works with numpy and mpi4py alone.
# Next: matrix.py (what a user holds), cuboid.py (the algorithm), volume.py (what it costs), local.py (one product).
from .cuboid import Cuboid, CuboidPlan
from .matrix import DistMatrix, matmul

__all__ = ["Cuboid", "CuboidPlan", "DistMatrix", "matmul"]
