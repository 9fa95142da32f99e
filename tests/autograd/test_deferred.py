"""Deferred weight gradients of single layers: the bits of one backward, and what one keeps until it is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from summa3d.autograd.deferred import DeferredWeightGradient, MicroBatchKey, PassState, run_deferred
from summa3d.autograd.recompute import recompute
from summa3d.nn import scheme
from summa3d.nn.layers.fused_linear import FusedLinear
from summa3d.nn.layers.linear import Linear
from summa3d.nn.parameter import initialise


def layers(*widths: int, **options: Any) -> list[Linear]:
    """Linear layers of 5 inputs on one rank."""
    plan = scheme("serial")
    found = torch.nn.ModuleList(Linear(5, width, plan, dtype=torch.float64, **options) for width in widths)
    initialise(found, plan, seed=2)
    return list(found)


def rows(number: int) -> torch.Tensor:
    return torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number)).requires_grad_()


@pytest.mark.mpi(sizes=(1,))
@pytest.mark.parametrize("transposed", [False, True])
def test_a_deferred_gradient_has_the_bits_of_backward_and_biases_do_not_wait(comm: Any, transposed: bool) -> None:
    (layer,), x, deferred = layers(4, transposed=transposed), rows(1), list[DeferredWeightGradient]()
    layer(x).square().sum().backward()
    want = [grad.clone() for grad in (x.grad, layer.bias.grad, layer.weight.grad)]
    x.grad = layer.bias.grad = layer.weight.grad = None
    with layer.context.run_pass(MicroBatchKey(), deferred):
        layer(x).square().sum().backward()
    assert layer.weight.grad is None and len(deferred) == 1
    assert torch.equal(x.grad, want[0]) and torch.equal(layer.bias.grad, want[1])
    run_deferred(deferred)
    assert deferred == [] and torch.equal(layer.weight.grad, want[2])
    layer(x).sum().backward()  # nothing is deferred any more
    assert not torch.equal(layer.weight.grad, want[2])


@pytest.mark.mpi(sizes=(1,))
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_a_weight_that_several_products_use_gets_their_sum_at_once(comm: Any, again: bool) -> None:
    """Joined with another, and alone: a large gradient that is there already makes the order of sums visible."""
    first, second = layers(5, 5, bias=False)
    joined = FusedLinear(first, second)
    x = rows(1)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(sum(joined(x))) + x
        return x

    def gradients(deferred: list[DeferredWeightGradient] | None) -> list[Any]:
        x.grad = None
        for weight in (first.weight, second.weight):
            weight.grad = torch.full_like(weight, 1e6 / 3)
        with first.context.run_pass(MicroBatchKey(), deferred):
            (recompute(run, [x], [first, second]) if again else run(x)).square().sum().backward()
        run_deferred(deferred or [])
        return [x.grad, first.weight.grad, second.weight.grad]

    for got, want in zip(gradients([]), gradients(None), strict=True):
        assert torch.equal(got, want)


@pytest.mark.mpi(sizes=(1,))
def test_a_deferred_gradient_keeps_no_weight(comm: Any) -> None:
    """Joined columns are a copy, which lives until backward has used it."""
    linears, x, deferred = layers(5, 5, bias=False), rows(1), list[DeferredWeightGradient]()
    joined, copies = FusedLinear(*linears), []
    side_by_side = joined._side_by_side

    def watched(weights: Any) -> torch.Tensor:
        made = side_by_side(weights)
        copies.append(StorageWeakRef(made.untyped_storage()))
        return made

    joined._side_by_side = watched  # type: ignore[method-assign]
    with linears[0].context.run_pass(MicroBatchKey(), deferred):
        y = sum(joined(x)).square().sum()
        assert not copies[0].expired()
        y.backward()
    del y
    assert copies[0].expired() and len(deferred) == 1 and all(linear.weight.grad is None for linear in linears)
    run_deferred(deferred)
    assert all(linear.weight.grad.any() for linear in linears)


@pytest.mark.mpi(sizes=(1,))
def test_a_product_whose_input_needs_no_gradient_defers_nothing(comm: Any) -> None:
    (layer,), deferred = layers(4), list[DeferredWeightGradient]()
    with layer.context.run_pass(MicroBatchKey(), deferred):
        layer(rows(1).detach()).sum().backward()
    assert deferred == [] and layer.weight.grad.any()


def test_a_pass_inside_another_one_has_its_own_key_and_list_and_gives_back_the_outer_ones() -> None:
    state, outer, inner = PassState(), list[DeferredWeightGradient](), list[DeferredWeightGradient]()
    with state.of(MicroBatchKey(0, 1), outer):
        for deferred in (inner, None):
            with pytest.raises(KeyError), state.of(MicroBatchKey(2, 3), deferred):
                assert state.key == (2, 3) and state.deferred is deferred
                raise KeyError
            assert state.key == (0, 1) and state.deferred is outer
    assert state.key == (0, 0) and state.deferred is None
