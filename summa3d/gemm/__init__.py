# Distributed matrix multiplication on numpy and torch arrays. May import comm and layout; works with numpy and mpi4py alone.
# Next: matrix.py (what a user holds), algorithms.py (all products), choose.py (which to take), volume.py (what it costs).
from .choose import choose
from .cuboid import Cuboid, CuboidPlan
from .forms import lower_bound
from .machine import Machine, calibrate
from .matrix import DistMatrix, matmul

__all__ = ["Cuboid", "CuboidPlan", "DistMatrix", "Machine", "calibrate", "choose", "lower_bound", "matmul"]
