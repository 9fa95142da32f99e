"""`einsum` of distributed tensors with gradients, which are products of letters too."""

from __future__ import annotations

from typing import Any

from torch import Tensor, is_grad_enabled

from ..comm.device.arrays import dtype_name
from ..comm.grid import BaseGrid, agree_on_call
from ..errors import GridError, ShapeError
from ..gemm.any_layout.executor import AnyProduct
from ..gemm.any_layout.plan import AnyPlan, Owned
from ..gemm.any_layout.planned import plan_einsum
from .function import Function, once_differentiable


class EinsumProduct:
    """A plan of letters bound to a grid, with its gradients: dA = einsum of dC and B, in the layout of A, and dB alike.

    Copies of C have copies of one dC, and each copy of an operand receives the whole gradient. Backward keeps A's and B's blocks.
    `plans` are those of dA and dB. Raises GridError for a plan of two grids, and ShapeError for one that is no einsum's.
    """

    def __init__(self, plan: AnyPlan, grid: BaseGrid) -> None:
        if plan.form:
            raise ShapeError(f"{plan!r} is a plan of matrices: summa3d.autograd.product takes it. plan_einsum plans by letters.")
        if len(plan.spaces) > 1:
            raise GridError(f"{plan!r} is one of two grids; products with gradients live on one.")
        self.plan, self.executor = plan, AnyProduct(plan, [grid])
        self.plans = (_gradient(plan, grid, plan.b, plan.a), _gradient(plan, grid, plan.a, plan.b))
        self._gradients = tuple(AnyProduct(plan, [grid]) for plan in self.plans)
        self._agreed: set[object] = set()

    def agree(self, a: Tensor, b: Tensor) -> None:
        """Raise ShapeError for blocks that are not the plan's, AgreementError on all ranks where they call differently.

        They compare that at the first use on such operands, with `check` at each.
        """
        for name, operand in (("a", a), ("b", b)):
            if not isinstance(operand, Tensor):
                raise ShapeError(f"{name} is a {type(operand).__name__}; products with gradients take torch's tensors.")
        graph, grid = is_grad_enabled(), self.executor.grid
        wanted = (graph and a.requires_grad, graph and b.requires_grad)
        known = (a.dtype, b.dtype, wanted, a.shape, b.shape)
        if known in self._agreed and not grid.job.check:
            return
        facts = {"plan": repr(self.plan), "dtypes": (dtype_name(a), dtype_name(b)), "gradients of a, b": wanted}
        refusal = None
        try:
            self.executor.check(a, b)
        except ShapeError as error:
            refusal = error
        agree_on_call(grid, "autograd.einsum", facts, None, None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        self._agreed.add(known)

    def gradient(self, operand: int, c: Tensor, other: Tensor) -> Tensor:
        """The gradient of A (0) or B (1), complete: of this rank's blocks of dC and of the other operand."""
        result: Tensor = self._gradients[operand].run(c, other.conj().resolve_conj())
        return result


def _gradient(plan: AnyPlan, grid: BaseGrid, other: Owned, own: Owned) -> AnyPlan:
    """The plan of an operand's gradient, in its layout."""
    letters = f"{plan.c.names},{other.names}->{own.names}"
    layouts = (plan.c.layout, other.layout)
    return plan_einsum(letters, *layouts, plan.extents, grid, own.layout, plan.dtype.name, plan.objective, machine=plan.machine)


class _Einsum(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, product: EinsumProduct) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.product = product
        result: Tensor = product.executor.run(a, b)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), (need_a, need_b, _) = ctx.saved_tensors, ctx.needs_input_grad
        product: EinsumProduct = ctx.product
        c = grad.contiguous()
        return product.gradient(0, c, b) if need_a else None, product.gradient(1, c, a) if need_b else None, None


def einsum(a: Tensor, b: Tensor, product: EinsumProduct) -> Tensor:
    """Compute C of two tensors by letters, with gradients, on this rank's blocks.

    Parameters
    ----------
    a, b : this rank's blocks, in the layouts of the plan
    product : a plan bound to a grid, ``EinsumProduct(plan_einsum("bmk,bkn->bmn", …), grid)``

    Returns this rank's block of C in the plan's layout.
    Words: those of the plan, backward those of `product.plans`. Memory kept for backward: both blocks.
    Raises ShapeError for blocks that the plan does not have, AgreementError on all ranks where they call differently.
    """
    product.agree(a, b)
    return _Einsum.apply(a, b, product)
