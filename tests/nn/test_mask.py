"""Packed documents and padding: what a token may see, in every scheme."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from nn_parity import global_weights, whole
from scheme_table import FAMILIES, rows_for, sequence_for
from torch import Tensor

from summa3d.errors import ShapeError
from summa3d.nn import build, scheme
from summa3d.nn.context import Context
from summa3d.nn.layers.attention_mask import restarting_positions, visible

GRIDS = [
    ("oned", {"y": 4}),
    ("oned-sp", {"y": 4}),
    ("summa", {"x": 2, "y": 2}),
    ("tesseract", {"x": 2, "y": 2, "d": 1}),
    ("cuboid", {"x": 1, "y": 2, "z": 2}),
    ("cuboid-sequence", {"x": 1, "y": 2, "z": 2}),
]


def packed(on_grid: Context, config: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and document ids; a document's last token has no label, and an id may come again later in a row."""
    rows, s = rows_for(on_grid), sequence_for(on_grid, config.sequence)
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, config.vocabulary, (2, rows, s), generator=generator)
    cuts = torch.rand(rows, s, generator=generator) < 0.3
    documents = cuts.cumsum(1) % 3
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = -100
    return tokens, labels, documents


def runs(documents: Tensor) -> list[slice]:
    """The runs of equal ids of one row."""
    starts = [0, *((documents[1:] != documents[:-1]).nonzero()[:, 0] + 1).tolist(), len(documents)]
    return [slice(*pair) for pair in pairwise(starts)]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_documents_are_as_good_as_alone(make_grid, family):
    for name, axes in GRIDS:
        on_grid = scheme(name, make_grid(**axes))
        config = FAMILIES[family].config(on_grid)
        model = build(config, on_grid, torch.float64, seed=3).eval()
        plain = FAMILIES[family].plain(config, global_weights(model), seed=3)
        tokens, labels, documents = packed(on_grid, config)
        count = int((labels >= 0).sum())
        loss = model(tokens, labels, documents=documents)
        loss.backward()
        want = 0.0
        for row in range(len(tokens)):
            for part in runs(documents[row]):
                counted = int((labels[row, part] >= 0).sum())
                if counted:
                    alone = plain.loss(tokens[None, row, part], labels[None, row, part], training=False) * counted / count
                    alone.backward()
                    want += alone.item()
        assert abs(loss.item() - want) <= 1e-10 * want
        for weight, parameter in model.named_parameters():
            expected = plain.weights[weight].grad
            error = (whole(model, weight, parameter.grad) - expected).norm()
            assert error <= 1e-10 * expected.norm(), (name, weight, error)


@pytest.mark.mpi(sizes=(4,))
def test_rotary_positions_are_relative_so_padding_before_a_text_changes_nothing(make_grid):
    for name, axes in GRIDS:
        on_grid = scheme(name, make_grid(**axes))
        config = FAMILIES["llama"].config(on_grid)
        model = build(config, on_grid, torch.float64).eval()
        tokens = torch.randint(0, 37, (rows_for(on_grid), 12), generator=torch.Generator().manual_seed(1))
        mask = (torch.arange(12) >= 4).expand_as(tokens)
        padded = model.logits(tokens, attention_mask=mask)[:, 4:]
        alone = model.logits(tokens[:, 4:])
        assert (padded - alone).norm() <= 1e-10 * alone.norm(), name


def test_positions_restart_where_a_document_begins():
    documents = torch.tensor([[7, 7, 7, 2, 2, 7, 7], [1, 2, 3, 3, 3, 3, 3]])
    assert restarting_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]


def test_a_token_sees_its_own_document_and_no_padding():
    documents, mask = torch.tensor([[5, 5, 1, 1, 5]]), torch.tensor([[1, 1, 1, 0, 1]])
    sees = visible(scheme("serial"), causal=False, attention_mask=mask, documents=documents)
    want = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert sees.allowed[0, 0].int().tolist() == want
    causal = visible(scheme("serial"), causal=True, documents=documents).allowed[0, 0]
    assert causal.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_a_query_that_would_see_nothing_gives_a_number():
    for causal, want in ((True, [[1, 0, 0], [1, 1, 0], [0, 0, 1]]), (False, [[0, 0, 1]] * 3)):
        sees = visible(scheme("serial"), causal, attention_mask=torch.tensor([[0, 0, 1]]))
        assert sees.allowed[0, 0].int().tolist() == want
    nothing = visible(scheme("serial"), causal=False, attention_mask=torch.zeros(1, 3))
    assert nothing.allowed.all()


@pytest.mark.parametrize("argument", ["documents", "attention_mask"])
def test_a_mask_of_another_shape_is_named(argument):
    model = build(FAMILIES["gpt2"].config(scheme("serial")), scheme("serial"))
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    with pytest.raises(ShapeError, match=f"{argument} \\(2, 5\\)"):
        model(tokens, tokens, **{argument: tokens[:, :5]})
