"""A deep copy of a model is a model of its own: its weights, its prefetch and its caches are not the original's."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheme_table import FAMILIES, rows_for, sequence_for
from torch import Tensor

from summa3d.nn import build, initialise, scheme
from summa3d.nn.overlap import Overlap


def gradients(model: Any, batch: dict[str, Any], passes: int = 2) -> list[Tensor]:
    """Loss and gradients of the last of some passes, by when weights are prefetched, and of an evaluation before it."""
    for _ in range(passes):
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            evaluated = model(**batch)
        loss = model(**batch)
        loss.backward()
    return [evaluated, loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def change(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.01)


def check_equal(found: list[Tensor], want: list[Tensor], what: Any) -> None:
    assert all(torch.equal(mine, others) for mine, others in zip(found, want, strict=True)), what


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize(("family", "gather"), [("gpt2", 0), ("gpt2", 2), ("llama", 1), ("bert", 1)])
@pytest.mark.turns
def test_a_copy_computes_with_its_own_weights_before_and_after_steps(make_grid, family, gather):
    grid = make_grid(check=False, x=2, z=2)
    plan = scheme("cuboid", grid, overlap=Overlap(gather=gather))
    config = replace(FAMILIES[family].config(plan), layers=2)
    model = build(config, plan, torch.float64, seed=3)
    batch = FAMILIES[family].batch(config, rows_for(plan), sequence_for(plan, config.sequence))
    reference = build(config, scheme("cuboid", grid), torch.float64, seed=3)
    want = gradients(reference, batch, 1)  # prefetches nothing: all its passes are the same
    change(reference)
    want_changed = gradients(reference, batch, 1)
    passes = 2 if gather else 1
    for moment in ("before any step", "after steps"):
        other = copy.deepcopy(model)
        change(other)
        check_equal(gradients(other, batch, passes), want_changed, moment)
        check_equal(gradients(model, batch, passes), want, moment)
        check_equal(gradients(other, batch, 1), want_changed, moment)
        assert other.context is not model.context and other.context.grid is grid


@pytest.mark.mpi(sizes=(2,))
def test_a_copy_prefetches_like_the_original_and_the_two_may_take_turns(make_grid):
    grid = make_grid(check=False, x=2)
    plan = scheme("cuboid", grid, overlap=Overlap(gather=1))
    config = replace(FAMILIES["gpt2"].config(plan), layers=2)
    model = build(config, plan, torch.float64, seed=3)
    batch = FAMILIES["gpt2"].batch(config, rows_for(plan), config.sequence)
    gradients(model, batch, 1)
    other = copy.deepcopy(model)
    words = []
    for module in (model, other, model, other):  # a pass in another order than the last one would drop, and count, gathers
        with grid.ledger.watch() as moved:
            gradients(module, batch, 1)
        words.append(moved.words)
    assert len(set(words)) == 1
    assert other.context.prefetcher is not plan.prefetcher and other.context.prefetcher.depth == 1


@pytest.mark.mpi(sizes=(4,))
def test_a_copied_layer_keeps_the_grids_axes_and_none_of_the_originals_tensors_alive(make_grid):
    from summa3d.nn import Linear

    plan = scheme("cuboid", make_grid(check=False, x=2, z=2), overlap=Overlap(gather=1))
    linear = Linear(10, 12, plan, dtype=torch.float64)
    initialise(linear, plan, seed=1)
    x = torch.ones(2, 3, 5, dtype=torch.float64)
    linear(x).sum().backward()
    other = copy.deepcopy(linear)
    assert other._source.parts() == (other.weight,) and other._source.prefetcher is other.context.prefetcher
    assert other._product(12).in_flight.source is other._source
    with torch.no_grad():
        other.weight.zero_()
    assert not other(x).sub(other.bias).any() and linear(x).any()
