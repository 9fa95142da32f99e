"""A ViT on a grid is the same function as a plain torch model whose patches are a convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from nn_parity import global_weights
from plain_vit import PlainViT, pictures
from scheme_table import GRIDS, Family, check_against_plain_torch, rows_for

from summa3d.errors import LayoutError, ShapeError
from summa3d.nn import Context, ModelConfig, build, scheme

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


def image_for(on_grid: Context) -> int | None:
    """The side of the smallest image whose 1 + n² positions the scheme can split; None where no n² will do."""
    num_shards = on_grid.residual.num_shards(1, on_grid.grid.shape)
    return next((3 * n for n in (2, 3, 4) if (1 + n * n) % num_shards == 0), None)


@pytest.mark.mpi(sizes=(1, 2, 3, 4, 8, 12))
def test_loss_and_every_raw_gradient_equal_plain_torch_in_every_scheme(make_grid, world_size):
    """Of twelve ranks on the grid of three axes, and on one that no image fits; the wide test has the others."""
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
        on_grid = scheme(name, make_grid(**axes))
        side = image_for(on_grid)
        if side is None:
            with pytest.raises(LayoutError, match="sequence 10 cannot be split"):
                build(VIT, on_grid)
        else:
            config = replace(VIT, image=side, sequence=128)
            check_against_plain_torch(Family(lambda _, config=config: config, PlainViT, pictures), on_grid)


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
