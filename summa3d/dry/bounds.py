"""Beside the words of a block's products and the head's: the fewest that any algorithm could have moved, product by product."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import NamedTuple

from ..gemm.algorithms.plan import ProductPlan
from ..gemm.cost.mean import used_words
from ..nn.adopt.roles import products_of
from .record import operations
from .step import DryStep, Setting

BLOCK = {"qkv": ("attention.qkv", "attention"), "out": ("attention.out",), "up": ("mlp.up", "mlp"), "down": ("mlp.down",)}
"""The products of a block's weights, in order, and the modules whose communications are theirs."""
HEAD = "head"
PASSES = 3
"""C, dA and dB: all have one bound, for they read and write blocks of the same three matrices."""


class BoundedProduct(NamedTuple):
    """A product of a micro-batch that a rank takes part in, and its gradients.

    times : how many a step has, gradients and those computed again too. words : received in its layers in a step, with those
    of biases. bound : the sum of the bounds of so many products, each by itself
    """

    product: str
    m: int
    n: int
    k: int
    times: int
    words: int
    bound: float


def bounded_products(setting: Setting, step: DryStep) -> list[BoundedProduct]:
    """The products of the setting's rank that has this step."""
    model, layouts = setting.model, setting.layouts
    rows, layers, has_head = setting.batch * setting.contexts.local(model.sequence), model.layers, model.family != "vit"
    if setting.stages is not None:
        home = setting.topology.coordinates_of(setting.rank)["pp"]
        layers = sum(many for many, other in zip(setting.stages.layers, setting.stages.homes, strict=True) if other == home)
        has_head = has_head and setting.stages.homes[-1] == home
    moved: Counter[str] = Counter()
    for op, times in operations(step.parts):
        if op.kind == "move":
            moved[re.sub(r"^blocks\.\d+\.(moe\.experts\.\d+)?", lambda results: "mlp" * bool(results[1]), op.layer)] += (
                times * op.words
            )
    again = setting.recompute[0] == "full"
    bounds = []
    named = BLOCK if model.config_json is None else products_of(model.config_json)
    for (name, modules), plan in zip(named.items(), layouts.block(model, rows), strict=True):
        count, words = layers * setting.accumulate * (PASSES + again), sum(moved[module] for module in modules)
        if model.num_experts and "mlp" in modules[0]:
            plan, count = _of_expert(setting, plan), count * -(-model.num_experts // setting.axes.get("ep", 1))
        bounds.append(_bounded(name, plan, count, words, layouts.shape))
    if has_head:
        plan = layouts.plan(layouts.residual, "nt", rows, model.vocabulary, model.hidden)
        bounds.append(_bounded(HEAD, plan, setting.accumulate * PASSES, moved[HEAD], layouts.shape))
    return [item for item in bounds if item.times]


def _of_expert(setting: Setting, plan: ProductPlan) -> ProductPlan:
    """A product of a feed-forward layer as that of one expert, which has an even share of the tokens that choose."""
    model, width = setting.model, setting.model.matrices[-1][0]
    rows = max(1, plan.m * model.num_chosen * setting.axes.get("ep", 1) // model.num_experts)
    n, k = (size * model.expert_width // width if size % width == 0 else size for size in (plan.n, plan.k))
    return replace(plan, m=rows, n=n, k=k)


def _bounded(name: str, plan: ProductPlan, count: int, words: int, shape: dict[str, int]) -> BoundedProduct:
    return BoundedProduct(name, plan.m, plan.n, plan.k, count, words, count * bound_of(plan, shape))


def bound_of(plan: ProductPlan, shape: dict[str, int]) -> float:
    """Words that some rank must receive in a product, whatever the algorithm, where operands lie as the plan has them.

    What the P-th part of the work reads and writes of A, B and C, less the most that a rank holds of A and B and keeps of C: with
    each element on one rank, and as many on each, `lower_bound`; copies make it less. Source: Al Daas et al., SPAA 2022.
    """
    first = dict.fromkeys(shape, 0)  # of a balanced split the largest part, and of what one index holds the holder
    held = sum(prod(layout.local_shape(whole, shape, first)) for layout, whole in plan.stored)
    return max(0.0, used_words(plan.m, plan.n, plan.k, Fraction(1, prod(shape.values()))) - held)
