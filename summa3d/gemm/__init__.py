"""Distributed matrix multiplication on numpy, CuPy and torch arrays; works with numpy and mpi4py alone."""

from .algorithms.cuboid import Cuboid, CuboidPlan
from .any_layout.plan import AnyPlan
from .any_layout.planned import plan_any, plan_einsum
from .cost import volume
from .cost.choose import choose
from .cost.machine import Machine
from .cost.mean import lower_bound
from .einsum import einsum
from .matmul import matmul
from .matrix import DistMatrix
from .one_matrix import plan_syrk
from .symmetric.plan import SymmetricPlan
from .syrk import PackedSymmetric, syrk
from .tensor import DistTensor

__all__ = [
    "AnyPlan",
    "Cuboid",
    "CuboidPlan",
    "DistMatrix",
    "DistTensor",
    "Machine",
    "PackedSymmetric",
    "SymmetricPlan",
    "choose",
    "einsum",
    "lower_bound",
    "matmul",
    "plan_any",
    "plan_einsum",
    "plan_syrk",
    "syrk",
    "volume",
]
