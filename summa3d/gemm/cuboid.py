# The load-balanced 3-D product on any X×Y×Z grid: the plan (who holds what) and its executor. Imports layout, comm, local.
# Roles, not letters: y gathers A, x gathers B, z reduces C. Any grid axes may take the roles, so the gradients of a product
# are products of the same kind with permuted roles (dA: y↔z, dB: x↔z), and nothing is ever redistributed.
# Next: volume.py (its closed forms), autograd/matmul.py (its gradients).
from __future__ import annotations

from dataclasses import dataclass

from ..comm.arrays import Array
from ..comm.collectives import Pending
from ..comm.grid import Grid
from ..errors import ShapeError
from ..layout.layout import Layout, split_sizes
from .local import FORMS, combine, multiply


@dataclass(frozen=True)
class CuboidPlan:
    """C (m×n) = op(A)·op(B), op(A) m×k, with grid axes in the roles x, y, z. Plain data.

    | form | A | B | C |
    |---|---|---|---|
    | nn | [m:(x,y), k:z] | [k:(z,x), n:y] | [m:(x,z), n:y] |
    | nt | [m:(x,y), k:z] | [n:(y,x), k:z] | [m:(x,z), n:y] |
    | tn | [k:(z,y), m:x] | [k:(z,x), n:y] | [m:(x,z), n:y] |
    | tt | [k:(z,y), m:x] | [n:(y,x), k:z] | [m:(x,z), n:y] |

    Every fine split lies on dim 0, so that each gather and scatter is contiguous in memory.
    """

    form: str
    m: int
    n: int
    k: int
    x: str = "x"
    y: str = "y"
    z: str = "z"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ShapeError(f"form {self.form!r} is not one of {', '.join(FORMS)}.")

    @property
    def a_layout(self) -> Layout:
        return Layout((self.z, self.y), (self.x,)) if self.form[0] == "t" else Layout((self.x, self.y), (self.z,))

    @property
    def b_layout(self) -> Layout:
        return Layout((self.y, self.x), (self.z,)) if self.form[1] == "t" else Layout((self.z, self.x), (self.y,))

    @property
    def c_layout(self) -> Layout:
        return Layout((self.x, self.z), (self.y,))

    @property
    def a_shape(self) -> tuple[int, int]:
        return (self.k, self.m) if self.form[0] == "t" else (self.m, self.k)

    @property
    def b_shape(self) -> tuple[int, int]:
        return (self.n, self.k) if self.form[1] == "t" else (self.k, self.n)

    @property
    def c_shape(self) -> tuple[int, int]:
        return (self.m, self.n)


class Cuboid:
    """A plan bound to the axes of a grid: C = op(A)·op(B) by gathering A along y and B along x, and scatter-adding C along z.

    The steps are separate, so that a gradient can share one gather between two products and overlap a scatter with the
    next product. Source: Bian et al. 2021, Algorithm 1, on a cuboid instead of a cube and with B's fine split on rows.
    """

    def __init__(self, plan: CuboidPlan, grid: Grid) -> None:
        self.plan, self.ledger = plan, grid.ledger
        self.x, self.y, self.z = grid[plan.x], grid[plan.y], grid[plan.z]
        self.a_block = plan.a_layout.local_shape(plan.a_shape, grid.shape, grid.coordinates)
        self.b_block = plan.b_layout.local_shape(plan.b_shape, grid.shape, grid.coordinates)
        self.c_block = plan.c_layout.local_shape(plan.c_shape, grid.shape, grid.coordinates)
        coarse = Layout((plan.x,), (plan.y,), (plan.z,)).local_shape((plan.m, plan.n, plan.k), grid.shape, grid.coordinates)
        m, n, k = coarse
        self.a_sizes = split_sizes(k if plan.form[0] == "t" else m, self.y.size)
        self.b_sizes = split_sizes(n if plan.form[1] == "t" else k, self.x.size)
        self.c_sizes = split_sizes(m, self.z.size)

    def check(self, a: Array, b: Array, out: Array | None = None) -> None:
        """Raise ShapeError unless a, b and out are the blocks and the one dtype that the plan expects."""
        for name, array, expected in (("A", a, self.a_block), ("B", b, self.b_block), ("C", out, self.c_block)):
            if array is not None and tuple(array.shape) != expected:
                raise ShapeError(f"The block of {name} has shape {tuple(array.shape)}; {self.plan} expects {expected} on this rank.")
            if array is not None and array.dtype != a.dtype:
                raise ShapeError(f"{name} has dtype {array.dtype}, A has {a.dtype}; a product takes one dtype.")

    def gather_a(self, a: Array) -> Array:
        """A gathered along y. Words: gathered − own."""
        return self._workspace(self.y.size, self.y.all_gather(a, sizes=self.a_sizes))

    def gather_b(self, b: Array) -> Array:
        """B gathered along x. Words: gathered − own."""
        return self._workspace(self.x.size, self.x.all_gather(b, sizes=self.b_sizes))

    def multiply(self, a_gathered: Array, b_gathered: Array) -> Array:
        """This rank's summand of C[m:x, n:y]."""
        return self._workspace(self.z.size, multiply(a_gathered, b_gathered, self.plan.form))

    def scatter_c(self, partial: Array) -> Array:
        """C summed along z and scattered to [m:(x,z), n:y]. Words: (Z−1)·own."""
        return self.z.reduce_scatter(partial, sizes=self.c_sizes)

    def gather_c(self, c: Array) -> Array:
        """A gradient of C gathered along z: what both dA and dB are products of."""
        return self._workspace(self.z.size, self.z.all_gather(c, sizes=self.c_sizes))

    def start_scatter_a(self, partial: Array) -> Pending:
        """Start summing dA along y and scattering it to A's layout. Words: (Y−1)·own."""
        return self.y.start_reduce_scatter(partial, sizes=self.a_sizes)

    def start_scatter_b(self, partial: Array) -> Pending:
        """Start summing dB along x and scattering it to B's layout. Words: (X−1)·own."""
        return self.x.start_reduce_scatter(partial, sizes=self.b_sizes)

    def run(self, a: Array, b: Array, out: Array | None = None, alpha: float = 1, beta: float = 0) -> Array:
        """C = α·op(A)·op(B) + β·C.

        Parameters
        ----------
        a, b : this rank's blocks, layouts and shapes as the plan says
        out : the block of C, optional, overwritten in place; needed for β ≠ 0

        Returns the block of C [m/(XZ), n/Y].

        Moves [(Y−1)mk + (X−1)kn + (Z−1)mn]/(XYZ) words per rank (mean) in (Y−1)+(X−1)+(Z−1) messages.
        Workspace: the gathered A, B and the partial C, then the partial C and the Z parts to be summed (`volume.cuboid`).
        Raises ShapeError where a, b or out is not what the plan expects, before any communication.
        """
        self.check(a, b, out)
        if out is None and beta != 0:
            raise ShapeError(f"beta = {beta} needs the block of C that it scales: pass out.")
        a_gathered, b_gathered = self.gather_a(a), self.gather_b(b)
        if self.z.size == 1:
            return multiply(a_gathered, b_gathered, self.plan.form, out, alpha, beta)
        partial = self._workspace(self.z.size, multiply(a_gathered, b_gathered, self.plan.form, None, alpha))
        del a_gathered, b_gathered
        if out is None or beta == 0:
            return self.z.reduce_scatter(partial, sizes=self.c_sizes, into=out)
        return combine(self.z.reduce_scatter(partial, sizes=self.c_sizes), out, beta)

    def _workspace(self, members: int, array: Array) -> Array:
        """Count `array` as workspace, unless the axis has one member and it is the caller's own block."""
        return array if members == 1 else self.ledger.track(array)
