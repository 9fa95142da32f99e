"""Tokens, labels and token types that a model does not know are refused on every rank, before anything is cut or moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scheme_table import FAMILIES, rows_for, sequence_for

from summa3d.errors import DataError
from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.models.batch_check import check_ids

VIT = ModelConfig(family="vit", layers=1, hidden=24, heads=12, image=4, patch=2, channels=1, classes=5)
TOKENS = "the vocabulary has 37, 0 to 36"


def refused(model: Any, batch: dict[str, Any], words: str, call: Any = None) -> None:
    with model.context.grid.ledger.watch() as moved, pytest.raises(DataError) as caught:
        (call or model)(**batch)
    assert words in str(caught.value), str(caught.value)
    assert moved.calls == 0


@pytest.mark.mpi(sizes=(1, 2))
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_outside_the_vocabulary_are_refused_with_position_and_value(make_grid, world_size, family):
    plan = scheme("cuboid", make_grid(x=world_size))
    config = replace(FAMILIES[family].config(plan), sequence=12)
    model = build(config, plan, torch.float64, seed=3)
    rows = rows_for(plan)
    good = FAMILIES[family].batch(config, rows, sequence_for(plan, config.sequence))
    last = rows - 1
    for name, value, words in (
        ("tokens", 37, TOKENS),
        ("tokens", -1, TOKENS),
        ("tokens", 2**40, TOKENS),
        ("labels", 37, "the vocabulary has 37, 0 to 36; labels below 0 are not counted"),
    ):
        batch = {key: held.clone() for key, held in good.items()}
        batch[name][last, 2] = value
        refused(model, batch, f"{name}[{last}, 2] is {value}; {words}")
        refused(model, {**good, name: good[name].to(torch.uint8)}, f"{name} are ids, of dtype int64 or int32; they have uint8")
        if name == "tokens":
            refused(model, {"tokens": batch["tokens"]}, f"tokens[{last}, 2] is {value}", model.logits)
    if family != "bert":
        refused(model, {"tokens": torch.full((rows, 3), 99)}, "tokens[0, 0] is 99", model.next_logits)
    else:
        batch = {key: held.clone() for key, held in good.items()}
        batch["types"][0, 1] = 2
        refused(model, batch, "types[0, 1] is 2; there are 2, 0 to 1")
        batch = {key: held.clone() for key, held in good.items()}
        batch["relation"][0] = 2
        refused(model, batch, "relation[0] is 2; there are 2 classes, 0 to 1; labels below 0 are not counted")
    batch = {key: held.clone() for key, held in good.items()}
    batch["labels"][:, 1:] = -100
    assert torch.isfinite(model(**batch))
    batch["tokens"][0, 0], batch["tokens"][0, 1], batch["labels"][0, 0] = 0, 36, 36
    assert torch.isfinite(model(**batch))


@pytest.mark.mpi(sizes=(1,))
def test_an_images_label_is_one_of_the_classes(make_grid):
    model = build(VIT, scheme("serial", make_grid(x=1)), torch.float64, seed=3)
    images = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    refused(model, {"images": images, "labels": torch.tensor([4, 5])}, "labels[1] is 5; there are 5 classes, 0 to 4")
    assert torch.isfinite(model(images, torch.tensor([4, -100])))


def test_ids_without_values_are_not_looked_at():
    from torch._subclasses import FakeTensorMode

    check_ids("tokens", torch.empty(2, 3, dtype=torch.int64, device="meta"), 5, "")
    check_ids("tokens", torch.empty(0, 3, dtype=torch.int64), 5, "")
    with FakeTensorMode():
        check_ids("tokens", torch.full((2, 3), 9), 5, "")
    for dtype in (torch.uint8, torch.int16, torch.bool, torch.float32):
        with pytest.raises(DataError, match=f"labels are ids, of dtype int64 or int32; they have {str(dtype)[6:]}"):
            check_ids("labels", torch.tensor([0, 1]).to(dtype), 5, "")
    for dtype in (torch.int32, torch.int64):
        check_ids("tokens", torch.tensor([0, 4], dtype=dtype), 5, "")
        with pytest.raises(DataError, match=r"tokens\[1\] is 5"):
            check_ids("tokens", torch.tensor([0, 5, 6], dtype=dtype), 5, "")
