"""Distributed matrix multiplication on numpy, CuPy and torch arrays; works with numpy and mpi4py alone."""

from .algorithms.cuboid import Cuboid, CuboidPlan
from .cost import volume
from .cost.choose import choose
from .cost.machine import Machine
from .cost.mean import lower_bound
from .matmul import matmul
from .matrix import DistMatrix

__all__ = ["Cuboid", "CuboidPlan", "DistMatrix", "Machine", "choose", "lower_bound", "matmul", "volume"]
