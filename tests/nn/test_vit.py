"""A ViT on a grid is the same function as a plain torch model whose patches are a convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_parity import global_weights
from plain_vit import PlainViT, pictures
from scheme_table import GRIDS, Family, check_against_plain_torch, rows_for

from summa3d.errors import ShapeError
from summa3d.nn import ModelConfig, build, scheme

# Pixels of a patch, classes and f are primes or odd; 12 heads and h = 24 are divided by every axis used here.
VIT = ModelConfig(
    family="vit",
    layers=1,
    hidden=24,
    heads=12,
    ffn=29,
    image=9,
    patch=3,
    channels=3,
    classes=7,
    dropout=0.1,
    attention_dropout=0.2,
)


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 8, 12))
def test_loss_and_every_raw_gradient_equal_plain_torch_in_every_scheme(make_grid, world_size):
    """Of twelve ranks on two grids that split its 10 positions; the wide test has the others."""
    check(
        make_grid,
        GRIDS[world_size] if world_size < 12 else [one for one in GRIDS[12] if one[0] in ("cuboid-sequence", "oned-sp")],
    )


@pytest.mark.wide
@pytest.mark.mpi(sizes=(12,))
def test_so_they_do_on_every_grid_of_twelve_ranks(make_grid):
    check(make_grid, GRIDS[12])


def check(make_grid: Any, grids: list[tuple[str, dict[str, int]]]) -> None:
    for name, axes in grids:
        check_against_plain_torch(Family(lambda _: VIT, PlainViT, pictures), scheme(name, make_grid(**axes)))


@pytest.mark.mpi(sizes=(1, 8))
def test_logits_with_fused_attention_are_those_of_plain_torch(make_grid, world_size):
    axes = {1: {"x": 1}, 8: {"x": 2, "y": 2, "z": 2}}[world_size]
    on_grid = scheme("cuboid", make_grid(**axes))
    model = build(VIT, on_grid, torch.float64).eval()
    plain = PlainViT(VIT, global_weights(model))
    plain.at(0, 0, training=False)
    images = pictures(VIT, rows_for(on_grid), VIT.sequence)["images"]
    want = plain.logits(images)
    assert (model.logits(images) - want).norm() <= 1e-10 * want.norm()


@pytest.mark.mpi(sizes=(2,))
def test_images_and_labels_that_do_not_fit_are_named(make_grid):
    model = build(VIT, scheme("cuboid", make_grid(x=2)))
    images = torch.zeros(2, 3, 9, 9)
    with pytest.raises(ShapeError, match=r"batch, 3, 9, 9"):
        model(images[:, :, 1:], torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match="labels have shape"):
        model(images, torch.zeros(3, dtype=torch.int64))
