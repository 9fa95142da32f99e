"""The gradients of a product as products: their forms, and the plans for algorithms that are closed under gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, TypeVar

from ...errors import ShapeError
from .plan import Plan

T = TypeVar("T")


class Gradient(NamedTuple):
    """The gradient of one operand as a product: its form, which dims of the product are its m, n, k, and whether dC is its A.

    The other operand is B for dA, and A for dB.
    """

    form: str
    dims: str
    c_first: bool

    @property
    def inner(self) -> str:
        """The dim of the product that the gradient sums over."""
        return self.dims[2]

    def ordered(self, c: T, other: T) -> tuple[T, T]:
        """The operands of the gradient's product, first and second."""
        return (c, other) if self.c_first else (other, c)


GRADIENTS = {
    # form: (dA, dB)
    "nn": (Gradient("nt", "mkn", True), Gradient("tn", "knm", False)),
    "nt": (Gradient("nn", "mkn", True), Gradient("tn", "nkm", True)),
    "tn": (Gradient("nt", "kmn", False), Gradient("nn", "knm", False)),
    "tt": (Gradient("tt", "kmn", False), Gradient("tt", "nkm", True)),
}


def gradient_plans(plan: Plan) -> tuple[Plan, Plan]:
    """The plans of dA and dB by the algorithm of `plan`. Raises ShapeError if their layouts are not those of A and B."""
    plans = []
    for name, gradient, layout in zip("AB", GRADIENTS[plan.form], (plan.a_layout, plan.b_layout), strict=True):
        result = _gradient_plan(plan, gradient)
        operands = gradient.ordered(plan.c_layout, plan.b_layout if name == "A" else plan.a_layout)
        if (result.a_layout, result.b_layout, result.c_layout) != (*operands, layout):
            raise ShapeError(f"The gradient of {name} of {plan} is no product of {plan.name} on the layouts that are there.")
        plans.append(result)
    return plans[0], plans[1]


def _gradient_plan(plan: Plan, gradient: Gradient) -> Plan:
    sizes = {"m": plan.m, "n": plan.n, "k": plan.k}
    m, n, k = (sizes[dim] for dim in gradient.dims)
    of_m, of_n, of_k = (plan.grains_of(dim) for dim in gradient.dims)
    roles = plan.gradient_roles(gradient.dims)
    return replace(plan, form=gradient.form, m=m, n=n, k=k, grains=(of_m, of_n, of_k), **roles)
