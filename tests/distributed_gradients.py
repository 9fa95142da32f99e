"""Gradients of a product of distributed tensors beside torch's of the whole ones, and its words beside those of its plans."""

from __future__ import annotations

import torch

from summa3d.gemm import DistTensor


def block_of(whole, grid, layout):
    """This rank's block, a leaf of the graph."""
    return DistTensor.from_global(whole.detach(), grid, layout).block.requires_grad_()


def is_block_of(block, grid, layout, whole):
    """Return whether each rank has its block of `whole` in `layout`."""
    return torch.allclose(block, block_of(whole, grid, layout).detach(), rtol=0, atol=1e-12)


def check_gradients(grid, case, plan, bound, call, wholes, rank):
    """Take ``call(a, b, bound)`` and its backward on blocks. wholes : torch's A and B with gradients, C, and dC."""
    a, b, want, dc = wholes
    own_a, own_b = block_of(a, grid, case.a), block_of(b, grid, case.b)
    with grid.ledger.watch() as forward:
        c = call(own_a, own_b, bound)
    with grid.ledger.watch() as backward:
        c.backward(block_of(dc, grid, plan.c.layout).detach())
    assert is_block_of(c.detach(), grid, plan.c.layout, want), repr(plan)
    assert is_block_of(own_a.grad, grid, case.a, a.grad) and is_block_of(own_b.grad, grid, case.b, b.grad), repr(plan)
    assert forward.words == plan.words_of(rank)
    assert backward.words == sum(one.words_of(rank) for one in bound.plans)
