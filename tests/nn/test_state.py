"""Whole tensors of a module in torch's layout, from any grid to any other; blocks of another rank or grid are refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from summa3d.errors import AgreementError, GridError, ShapeError
from summa3d.nn import Embedding, LayerNorm, Linear, full_state_dict, initialise, load_full_state_dict, scheme

GRIDS = {
    1: ("serial", {"x": 1}),
    3: ("oned", {"y": 3}),
    4: ("cuboid", {"x": 2, "y": 1, "z": 2}),
    6: ("summa", {"x": 3, "y": 2}),
    8: ("cuboid", {"dp": 2, "x": 1, "y": 2, "z": 2}),
}


def plain() -> torch.nn.Module:
    """A table and two layers of torch, of prime sizes, with a buffer and a tied name."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Embedding(17, 11),
        torch.nn.LayerNorm(11),
        torch.nn.Linear(11, 13),
        torch.nn.BatchNorm1d(5),
        torch.nn.Linear(13, 7),
    ).double()
    with torch.no_grad():
        for one in model.state_dict().values():
            one.copy_(torch.randint(-99, 99, one.shape))
    return model


def split(on_grid: Any) -> torch.nn.Module:
    up = Linear(11, 13, on_grid, dtype=torch.float64)
    down = Linear(13, 7, on_grid, up.output_layout, dtype=torch.float64)
    table, norm = Embedding(17, 11, on_grid, dtype=torch.float64), LayerNorm(11, on_grid, dtype=torch.float64)
    return torch.nn.Sequential(table, norm, up, torch.nn.BatchNorm1d(5).double(), down)


@pytest.mark.mpi(sizes=tuple(GRIDS))
def test_whole_tensors_go_to_torchs_layers_and_come_back_bit_for_bit(make_grid, world_size: int) -> None:
    name, axes = GRIDS[world_size]
    grid = make_grid(**axes)
    model, theirs = split(scheme(name, grid)), plain()
    with grid.ledger.watch() as moved:
        load_full_state_dict(model, theirs.state_dict())
    assert moved.words == 0
    found = full_state_dict(model)
    assert list(found) == list(theirs.state_dict())
    fresh = plain().requires_grad_(False)
    for one in fresh.state_dict().values():
        one.zero_()
    fresh.load_state_dict(found)
    for key, want in theirs.state_dict().items():
        assert torch.equal(fresh.state_dict()[key], want), key
    with grid.ledger.watch() as moved:
        rooted = full_state_dict(model, root_only=True)
    wholes = sum(p.sharding.shape.numel() if hasattr(p.sharding.shape, "numel") else int(torch.tensor(p.sharding.shape).prod())
                 for p in model.parameters() if hasattr(p, "sharding"))  # fmt: skip
    owned = sum(p.numel() for p in model.parameters() if hasattr(p, "sharding") and p.sharding.is_primary(grid))
    assert moved.words == wholes - owned
    assert list(rooted) == (list(found) if grid.rank == 0 else [])


@pytest.mark.mpi(sizes=(4,))
def test_blocks_of_another_rank_or_grid_are_refused_though_they_have_the_same_sizes(make_grid, comm, shared_tmp_path) -> None:
    def model(axes: dict[str, int]) -> torch.nn.Module:
        on_grid = scheme("cuboid", make_grid(**axes))
        layer = Linear(8, 8, on_grid)
        initialise(layer, on_grid, seed=1)
        return layer

    one, other = model({"x": 2, "z": 2}), model({"y": 2, "z": 2})
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    own = torch.load(file)  # weights alone, as torch reads by default
    one.load_state_dict(own)
    neighbours = comm.sendrecv(own, (comm.rank + 1) % 4, source=(comm.rank - 1) % 4)
    assert own["weight"].shape == neighbours["weight"].shape
    with pytest.raises(
        RuntimeError, match=r"weight is \[\d:\d, \d:\d\] of \(8, 8\), the block of another rank or grid.*full_state_dict"
    ):
        one.load_state_dict(neighbours)
    if own["weight"].shape == other.weight.shape and comm.allreduce(1) == 4:
        with pytest.raises(RuntimeError, match="another rank or grid"):
            for _ in range(1):
                other.load_state_dict(own if comm.rank in (1, 2) else neighbours)
    load_full_state_dict(other, full_state_dict(one))
    for key, value in full_state_dict(other).items():
        assert torch.equal(value, full_state_dict(one)[key])


@pytest.mark.mpi(sizes=(2,))
def test_a_state_that_does_not_fit_is_refused_on_all_ranks_before_anything_is_written(make_grid) -> None:
    on_grid = scheme("oned", make_grid(y=2))
    model = split(on_grid)
    good = plain().state_dict()
    load_full_state_dict(model, good)
    before = full_state_dict(model)
    rank = on_grid.grid.rank
    with pytest.raises(
        ShapeError, match=r"2\.weight has shape \(11, 13\); the whole is \(13, 11\).*\[outputs, inputs\](.|\n)*On rank 1 of 2"
    ):
        load_full_state_dict(model, {**good, "2.weight": good["2.weight"].T} if rank else good)
    with pytest.raises(ShapeError, match=r"lacks 0\.weight and has the unknown table"):
        load_full_state_dict(model, {"table" if key == "0.weight" else key: value for key, value in good.items()})
    with pytest.raises(ShapeError, match=r"full_state_dict"):
        load_full_state_dict(model, model.state_dict())
    with pytest.raises(GridError, match="belongs to a layer"):
        full_state_dict(plain())
    with pytest.raises(AgreementError, match="root_only"):
        full_state_dict(model, root_only=rank == 1)
    assert all(torch.equal(value, before[key]) for key, value in full_state_dict(model).items())
