"""A BERT on a grid is the same function as a plain torch model: both losses, every raw gradient, padding and packed documents."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

import pytest
import torch
from nn_parity import check_parity, global_weights, whole
from plain_bert import PlainBERT, sentence_pairs
from torch import Tensor

from summa3d.autograd.relayout import relayout
from summa3d.errors import ShapeError
from summa3d.layout import Layout, Redistribution, collect, distribute
from summa3d.layout.redistribute import Placement
from summa3d.nn import ModelConfig, build, scheme

# 12 heads and h = 24 are divided by every axis used here; v, f and s are primes that none divides.
CONFIG = ModelConfig(
    family="bert", layers=2, hidden=24, heads=12, ffn=29, sequence=11, vocabulary=37, dropout=0.1, attention_dropout=0.2
)
GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
    3: [(1, 1, 3)],
    4: [(2, 2, 1), (1, 2, 2)],
    8: [(2, 2, 2)],
    12: [(2, 3, 2), (1, 3, 4)],
}
S = 9


def batch_for(x: int, y: int, z: int) -> dict[str, Tensor]:
    return sentence_pairs(CONFIG, lcm(x * y, x * z) * (2 if x * y * z < 4 else 1), S)


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_both_losses_and_every_raw_gradient_equal_plain_torch(make_grid, world_size):
    check(make_grid, GRIDS[world_size][: 1 if world_size == 12 else None])


@pytest.mark.wide
@pytest.mark.mpi(sizes=(12,))
def test_so_they_do_on_every_grid_of_twelve_ranks(make_grid):
    check(make_grid, GRIDS[12])


def check(make_grid: Any, grids: list[tuple[int, int, int]]) -> None:
    for x, y, z in grids:
        model = build(CONFIG, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64, seed=3)
        plain = PlainBERT(CONFIG, global_weights(model), seed=3)
        batch = {**batch_for(x, y, z), "step": 4, "first_row": 5}
        check_parity(model, plain, lambda m, b=batch: m(**b), lambda m, b=batch: m.loss(**b), 1e-10)


@pytest.mark.mpi(sizes=(1, 8))
def test_logits_with_fused_attention_are_those_of_plain_torch(make_grid, world_size):
    x, y, z = {1: (1, 1, 1), 8: (2, 2, 2)}[world_size]
    model = build(CONFIG, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64).eval()
    plain = PlainBERT(CONFIG, global_weights(model))
    plain.at(0, 0, training=False)
    batch = batch_for(x, y, z)
    got = model.logits(batch["tokens"], batch["types"], batch["attention_mask"])
    want = plain.logits(batch["tokens"], batch["types"], batch["attention_mask"] > 0)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).norm() <= 1e-10 * theirs.norm()


@pytest.mark.mpi(sizes=(1, 4))
def test_padding_changes_nothing_for_the_tokens_before_it(make_grid, world_size):
    x, y, z = {1: (1, 1, 1), 4: (1, 2, 2)}[world_size]
    model = build(replace(CONFIG, sequence=S), scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64).eval()
    global_weights(model)
    tokens = batch_for(x, y, z)["tokens"]
    short, relation = model.logits(tokens[:, :5])
    mask = (torch.arange(S) < 5).long().expand_as(tokens)
    padded, padded_relation = model.logits(tokens, attention_mask=mask)
    assert (padded[:, :5] - short).norm() <= 1e-12 * short.norm()
    assert (padded_relation - relation).norm() <= 1e-12 * relation.norm()


@pytest.mark.mpi(sizes=(1, 4))
def test_accumulated_micro_batches_give_the_gradient_of_the_whole_batch(make_grid, world_size):
    x, y, z = {1: (1, 1, 1), 4: (2, 2, 1)}[world_size]
    rows = x * y
    model = build(CONFIG, scheme("cuboid", make_grid(x=x, y=y, z=z)), torch.float64)
    global_weights(model)
    halves = [batch_for(x, y, z), batch_for(x, y, z)]
    halves[1] = {name: part.roll(1, -1) for name, part in halves[1].items()}
    both = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    model(**both).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    rows = len(halves[0]["tokens"])
    counts = {"count": int((both["labels"] >= 0).sum()), "pairs": int((both["relation"] >= 0).sum())}
    for part, half in enumerate(halves):
        model(**half, first_row=part * rows, **counts).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - want[name]).norm() <= 1e-10 * want[name].norm(), name


@pytest.mark.mpi(sizes=(2,))
def test_a_tensor_that_does_not_fit_the_tokens_is_named(make_grid):
    model = build(CONFIG, scheme("cuboid", make_grid(x=2, y=1, z=1)))
    batch = batch_for(2, 1, 1)
    with pytest.raises(ShapeError, match="attention_mask"):
        model(**{**batch, "attention_mask": batch["attention_mask"][:, :-1]})
    with pytest.raises(ShapeError, match="relation has shape"):
        model(**{**batch, "relation": batch["relation"][:-1]})


@pytest.mark.mpi(sizes=(8,))
def test_a_relayout_moves_the_words_of_its_plan_and_its_gradient_goes_back(make_grid):
    grid = make_grid(x=2, y=2, z=2)
    source, target, shape = Layout(("x", "z"), (), ("y",)), Layout(("x", "y"), (), ("z",)), (5, 3, 7)
    whole_tensor = torch.arange(105, dtype=torch.float64).view(shape)
    block = distribute(whole_tensor, grid, source).requires_grad_()
    with grid.ledger.watch() as forward:
        out = relayout(block, shape, grid, source, target)
    assert torch.equal(collect(out.detach(), grid, target, shape), whole_tensor)
    with grid.ledger.watch() as backward:
        (out * distribute(whole_tensor, grid, target)).sum().backward()
    assert torch.equal(block.grad, block.detach())
    plans = [Redistribution(shape, Placement.on(grid, a), Placement.on(grid, b)) for a, b in ((source, target), (target, source))]
    assert [forward.words, backward.words] == [plan.words_of(grid.rank) for plan in plans]


@pytest.mark.mpi(sizes=(4,))
def test_a_relation_is_learned_without_labels_and_labels_without_a_relation(make_grid):
    model = build(CONFIG, scheme("cuboid", make_grid(x=1, y=2, z=2)), torch.float64)
    batch = batch_for(1, 2, 2)
    relation = batch.pop("relation")
    model(**batch).backward()
    assert model.pooler.weight.grad is None
    assert whole(model, "head_bias", model.head_bias.grad).norm() > 0
    model.zero_grad()
    model(**{**batch, "labels": torch.full_like(batch["labels"], -100)}, relation=relation).backward()
    assert whole(model, "head_bias", model.head_bias.grad).norm() == 0
    assert whole(model, "pooler.weight", model.pooler.weight.grad).norm() > 0
