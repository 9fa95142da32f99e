"""A model is its cells: enter, layers, leave. Cut between layers, as a pipeline cuts it, it has the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from plain_bert import sentence_pairs
from scheme_table import GPT2, LLAMA, next_tokens

from summa3d.errors import ConfigError, DataError, ShapeError
from summa3d.nn import ModelConfig, build, scheme

VIT = ModelConfig(family="vit", layers=3, hidden=24, heads=12, image=12, patch=3, channels=2, classes=5, dropout=0.1)
CASES = {
    "gpt2": replace(GPT2, layers=3),
    "llama": replace(LLAMA, layers=3, kv_heads=6, tied_head=True),
    "bert": replace(GPT2, layers=3, family="bert"),
    "vit": VIT,
}


def inputs_of(config: ModelConfig, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    if config.family == "vit":
        images = torch.randn(rows, config.channels, config.image, config.image, generator=generator)
        return {"images": images, "labels": torch.arange(rows) % config.classes}
    if config.family == "bert":
        return sentence_pairs(config, rows, config.sequence)
    documents = torch.arange(config.sequence).expand(rows, -1) // 5
    return {**next_tokens(config, rows, config.sequence), "documents": documents}


def in_stages(model, inputs, cuts, **options):
    """Forward and backward of a micro-batch, stage by stage: each stage has a graph of its own, and receives tensors alone."""
    batch = model.batch_of(inputs, **options)
    ends = [0, *cuts, len(model.blocks)]
    received, sent = [], []
    for first, last in pairwise(ends):
        x = sent[-1].detach().requires_grad_() if sent else model.enter(inputs, batch)
        received.append(x)
        sent.append(model.through(x, first, last, batch, model.visible(inputs)))
    loss = model.leave(sent.pop(), inputs, batch)
    loss.backward()
    while sent:
        sent.pop().backward(received.pop().grad)
    return loss


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("family", list(CASES))
@pytest.mark.turns
def test_cut_between_layers_a_model_has_the_same_loss_and_gradients_in_bits(make_grid, world_size, family):
    on_grid = scheme("serial") if world_size == 1 else scheme("cuboid", make_grid(y=2, z=2))
    inputs = inputs_of(CASES[family], 4)
    options = {"step": 3, "first_row": 8, "count": 31} | ({"pairs": 3} if family == "bert" else {})
    for recomputed in (0, 2):
        whole, cut = (build(CASES[family], on_grid, torch.float64, seed=3) for _ in range(2))
        for model in (whole, cut):
            model.recompute("full" if recomputed else "none", max(1, recomputed))
        want = whole(**inputs, **options)
        want.backward()
        loss = in_stages(cut, inputs, (0, 1), **options)
        assert torch.equal(loss, want)
        for (name, p), q in zip(whole.named_parameters(), cut.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("family", list(CASES))
def test_a_batch_is_checked_before_any_cell_runs(family):
    model = build(CASES[family], scheme("serial"), seed=3)
    inputs = inputs_of(CASES[family], 4)
    batch = model.batch_of(inputs, 2, 8)
    sequence = 17 if family == "vit" else 12
    assert (batch.rows, batch.sequence, batch.step, batch.first_row, batch.count) == (4, sequence, 2, 8, None)
    with pytest.raises(DataError, match="labels"):
        model.batch_of({**inputs, "labels": inputs["labels"].clamp(min=40) + 40})
    with pytest.raises(ShapeError, match="labels"):
        model.batch_of({**inputs, "labels": inputs["labels"][:3]})


@pytest.mark.mpi(sizes=(2,))
def test_replicas_divide_by_the_count_of_the_whole_step_alone(make_grid):
    """A mean of the replicas' own means is wrong where they count different numbers of labels."""
    inputs = inputs_of(CASES["gpt2"], 4)
    model = build(CASES["gpt2"], scheme("cuboid", make_grid(dp=2)), torch.float64, seed=3)
    alone = build(CASES["gpt2"], scheme("serial"), torch.float64, seed=3)
    assert torch.equal(model(**inputs, count=31), alone(**inputs, count=31))
    with pytest.raises(ConfigError, match=r"A loss on 2 replicas \(dp=2\) needs `count`"):
        model(**inputs)
