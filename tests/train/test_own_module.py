"""A module of one's own is trained, saved and resumed on any grid, and its numbers are those of torch on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from summa3d.errors import CheckpointError, ConfigError, ShapeError
from summa3d.layout import distribute
from summa3d.nn import LayerNorm, Linear, Muon, check_copies, full_state_dict, initialise, scheme
from summa3d.train import ZeroAdamW, load_checkpoint, replica_rows, save_checkpoint

GRIDS = {
    1: ("serial", {"x": 1}),
    2: ("serial", {"dp": 2}),
    4: ("oned", {"dp": 2, "y": 2}),
    6: ("cuboid", {"dp": 3, "x": 1, "y": 2, "z": 1}),
    8: ("cuboid", {"dp": 2, "x": 2, "y": 1, "z": 2}),
}
ROWS, SEQUENCE, SETTINGS = 48, 5, {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}


def split(on_grid: Any) -> torch.nn.Module:
    up = Linear(11, 13, on_grid, dtype=torch.float64, std=0.3)
    down = Linear(13, 11, on_grid, up.output_layout, dtype=torch.float64, std=0.3)
    model = torch.nn.Sequential(LayerNorm(11, on_grid, dtype=torch.float64), up, torch.nn.Tanh(), down)
    initialise(model, on_grid, seed=3)
    return model


def plain(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.LayerNorm(11), torch.nn.Linear(11, 13), torch.nn.Tanh(), torch.nn.Linear(13, 11)
    ).double()
    model.load_state_dict(state)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, SEQUENCE, 11, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def backward(model: Any, on_grid: Any, step: int, parts: int = 1) -> None:
    """Gradients of the mean over the rows of all replicas, in `parts` backwards."""
    for part in batch(step).chunk(parts):
        rows = part[replica_rows(on_grid.whole, len(part))]
        x = distribute(rows, on_grid.grid, on_grid.residual)
        ((model(x) - (3 * x).sin()).square().sum() / batch(step).numel()).backward()


def in_torch(model: torch.nn.Module, steps: int) -> list[float]:
    """The same steps of torch on one process; its norms."""
    decays, others = ([p for p in model.parameters() if (p.dim() == 2) is decay] for decay in (True, False))
    optimizer = torch.optim.AdamW([{"params": decays}, {"params": others, "weight_decay": 0.0}], **SETTINGS)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        x = batch(step)
        (model(x) - (3 * x).sin()).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.turns
def test_steps_with_replicas_are_those_of_torch(make_grid, world_size: int, zero: int) -> None:
    name, axes = GRIDS[world_size]
    on_grid = scheme(name, make_grid(**axes))
    model = split(on_grid)
    reference = plain(full_state_dict(model))
    optimizer, norms = ZeroAdamW(model, **SETTINGS, max_norm=0.05, zero=zero), []
    for step in range(4):
        optimizer.zero_grad()
        backward(model, on_grid, step, parts=1 + step % 2)
        optimizer.step()
        norms.append(optimizer.norm)
    assert norms == pytest.approx(in_torch(reference, 4), rel=1e-10)
    for key, value in full_state_dict(model).items():
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=1e-10, atol=1e-12)
    check_copies(model)


@pytest.mark.mpi(sizes=(2,))
def test_the_words_of_a_step_are_those_of_its_docstring(make_grid) -> None:
    for zero in (0, 1, 2):
        on_grid = scheme("serial", make_grid(dp=2))
        model = split(on_grid)
        optimizer = ZeroAdamW(model, zero=zero)
        elements = sum(p.numel() for p in model.parameters())
        with on_grid.whole.ledger.watch() as moved:
            backward(model, on_grid, 0, parts=2)
            optimizer.step()
        mean = on_grid.whole.comm.allreduce(moved.words) / 2
        assert mean == (2 if zero < 2 else 3) * elements / 2 + 2  # and two all-reduces of a word


def steps(model: Any, optimizers: tuple[Any, ...], on_grid: Any, first: int, last: int) -> None:
    for step in range(first, last):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, on_grid, step)
        if not isinstance(optimizers[0], ZeroAdamW):
            for p in model.parameters():
                on_grid.whole["dp"].all_reduce(p.grad, into=p.grad)
        for optimizer in optimizers:
            optimizer.step()


def optimizers_of(kind: str, model: Any) -> tuple[Any, ...]:
    if kind.startswith("zero"):
        return (ZeroAdamW(model, **SETTINGS, zero=int(kind[-1])),)
    matrices, others = ([p for p in model.parameters() if p.decay is decay] for decay in (True, False))
    return Muon(matrices, lr=0.03), torch.optim.AdamW(others, lr=0.02)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("kind", ["zero1", "zero2", "muon"])
def test_what_one_grid_saved_goes_on_on_another(make_grid, shared_tmp_path: Path, kind: str) -> None:
    """Steps on two grids are the steps of one, moments and steps taken included."""
    first = scheme("oned", make_grid(dp=2, y=2))
    model = split(first)
    optimizers = optimizers_of(kind, model)
    steps(model, optimizers, first, 0, 3)
    path = save_checkpoint(shared_tmp_path / "own", 3, model, *optimizers)
    assert path.name == "step-3"
    steps(model, optimizers, first, 3, 6)
    want = full_state_dict(model)

    second = scheme("summa", make_grid(dp=1, x=2, y=2))
    again = split(second)
    resumed = optimizers_of(kind, again)
    assert load_checkpoint(shared_tmp_path / "own", again, *resumed) == 3
    steps(again, resumed, second, 3, 6)
    for key, value in full_state_dict(again).items():
        torch.testing.assert_close(value, want[key], rtol=1e-10, atol=1e-12)


@pytest.mark.mpi(sizes=(2,))
def test_what_cannot_be_saved_loaded_or_updated_is_refused_on_all_ranks(make_grid, shared_tmp_path: Path) -> None:
    on_grid = scheme("oned", make_grid(dp=1, y=2))
    model, folder = split(on_grid), shared_tmp_path / "none"
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_checkpoint(folder, model)
    assert load_checkpoint(folder, model, must_exist=False) == 0
    with pytest.raises(CheckpointError, match="a whole number of steps"):
        save_checkpoint(folder, -1, model)
    save_checkpoint(folder, 1, model)
    with pytest.raises(CheckpointError, match=r"no tensor optimizer\.exp_avg"):
        load_checkpoint(folder, model, ZeroAdamW(model))
    other = torch.nn.Sequential(Linear(11, 17, on_grid, dtype=torch.float64))
    with pytest.raises(CheckpointError, match=r"no tensor model\.0\.bias|\(17,\)|\(11, 17\)"):
        load_checkpoint(folder, other)
    with pytest.raises(ShapeError, match=r"4\.weight is torch's own"):
        ZeroAdamW(torch.nn.Sequential(*model, torch.nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="ZeRO-3"):
        ZeroAdamW(model, zero=3)
    with pytest.raises(ConfigError, match=r"lr = -1"):
        ZeroAdamW(model, lr=-1)
    with pytest.raises(ConfigError, match="save_checkpoint"):
        ZeroAdamW(model).state_dict()


@pytest.mark.parametrize(("batch_size", "want"), [(7, [slice(0, 4), slice(4, 7)]), (8, [slice(0, 4), slice(4, 8)])])
def test_the_rows_of_replicas_are_a_balanced_split(batch_size: int, want: list[slice]) -> None:
    from summa3d.comm.grid import Place

    assert [replica_rows(Place({"dp": 2, "x": 2}, rank=rank), batch_size) for rank in range(4)] == [want[0]] * 2 + [want[1]] * 2
