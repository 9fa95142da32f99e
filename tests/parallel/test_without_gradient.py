"""A parameter without any gradient is left alone by weight decay, as torch's AdamW leaves it, with replicas or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from summa3d.layout import Layout, collect, distribute
from summa3d.nn import Linear, scheme
from summa3d.nn.parameter import new_parameter
from summa3d.parallel.replicas import Replicas
from summa3d.parallel.states import states_of
from summa3d.train.config import TrainConfig
from summa3d.train.optimizer import AdamW
from summa3d.train.precision import working_weights

ROWS, WIDTH, INNER, STEPS = 12, 6, 7, 3
SETTINGS = TrainConfig(weight_decay=0.5, learning_rate=0.1)


class Whole(torch.nn.Module):
    """Two products; a parameter that nothing uses; one that is frozen; and one that only rows of half of the batch use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))  # noqa: E731
        self.up, self.frozen, self.unused, self.sometimes = draw(WIDTH, INNER), draw(INNER, WIDTH), draw(5, 3), draw(WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        y = x @ self.up @ self.frozen
        return (y * self.sometimes if sometimes else y).square().sum() / (ROWS * WIDTH)


class Split(torch.nn.Module):
    """The same in parameters that lie on a grid."""

    def __init__(self, on_grid: Any, plain: Whole) -> None:
        super().__init__()
        self.context = on_grid
        self.up = Linear(WIDTH, INNER, on_grid, bias=False, dtype=torch.float64)
        self.frozen = Linear(INNER, WIDTH, on_grid, self.up.output_layout, bias=False, dtype=torch.float64)
        self.unused = new_parameter(on_grid, Layout("n m"), (5, 3), ("constant", 0.0), torch.float64, decay=True)
        self.sometimes = new_parameter(on_grid, Layout("n"), (WIDTH,), ("constant", 0.0), torch.float64, decay=True)
        for p, theirs in zip(self.parameters_in_order(), plain.parameters(), strict=True):
            p.data.copy_(distribute(theirs.data, on_grid.grid, p.sharding.layout))
        self.frozen.weight.requires_grad_(False)

    def parameters_in_order(self) -> Sequence[Any]:
        return self.up.weight, self.frozen.weight, self.unused, self.sometimes

    def forward(self, x: Tensor, sometimes: bool) -> Tensor:
        y = self.frozen(self.up(x))
        stored = self.context.gathered(self.sometimes, Layout("n"), (WIDTH,)) if sometimes else None
        return (y if stored is None else y * stored).square().sum() / (ROWS * WIDTH)


def train(
    on_grid: Any, zero: int, bucket: int, uses: Sequence[bool], layers_in: torch.dtype = torch.float64
) -> tuple[list[Tensor], list[Tensor]]:
    """Whole parameters after some steps of our optimizer on replicas, and after torch's on the whole batch.

    uses[replica] : whether that replica's rows use `sometimes`
    """
    job, dp = on_grid.whole, len(uses)
    plain, on_grid = Whole(), replace(on_grid, sharded=("dp",)) if zero == 3 and dp > 1 else on_grid
    model = Split(on_grid, plain)
    states = states_of(model, job, zero, layers_in)
    replicas, optimizer = Replicas.of(states, job, zero, bucket), AdamW(states, SETTINGS)
    oracle = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=SETTINGS.betas, eps=SETTINGS.epsilon, weight_decay=0.5)
    mine, own = job.coordinates.get("dp", 0), ROWS // dp
    for step in range(STEPS):
        x = torch.randn(ROWS, 1, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        oracle.zero_grad()
        sum(plain(x[r * own :][:own], uses[r]) for r in range(dp)).backward()
        oracle.step()
        for state in states:
            state.clear()
        with working_weights(model, states, layers_in):
            model(distribute(x[mine * own :][:own].to(layers_in), on_grid.grid, on_grid.residual), uses[mine]).backward()
        replicas.reduce()
        assert replicas.settle(1.5) == 1.5 * dp
        replicas.update(lambda: optimizer.step(0.1))
    of_name = {state.name: state for state in states}
    found = [of_name[name] for name in ("up.weight", "frozen.weight", "unused", "sometimes")]
    ours = [collect(one.parameter.data, job, one.shardings.stored.layout, one.shardings.stored.shape) for one in found]
    return ours, [p.data for p in plain.parameters()]


def check(ours: list[Tensor], theirs: list[Tensor], moves: tuple[bool, ...]) -> None:
    """All are torch's, and those have the bits they began with that nothing moves."""
    for mine, wanted, was, moved in zip(ours, theirs, Whole().parameters(), moves, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)
        assert torch.equal(mine, was.data) is not moved


@pytest.mark.mpi(sizes=(1, 2, 3))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 1 << 20])
def test_frozen_and_unused_parameters_are_left_alone_as_torchs_are(
    make_grid: Any, world_size: int, zero: int, bucket: int
) -> None:
    on_grid = scheme("serial", make_grid(x=1, dp=world_size))
    check(*train(on_grid, zero, bucket, [False] * world_size), (True, False, False, False))


@pytest.mark.mpi(sizes=(2, 3))
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_gradient_of_one_replica_alone_is_all_replicas(make_grid: Any, world_size: int, zero: int) -> None:
    """Layers that gather weights from the replicas (zero 3) run on all or on none."""
    on_grid = scheme("serial", make_grid(x=1, dp=world_size))
    uses = [replica == 1 for replica in range(world_size)]
    check(*train(on_grid, zero, 1 << 20, uses), (True, False, False, True))


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_so_they_are_where_layers_compute_with_narrower_copies(make_grid: Any, zero: int) -> None:
    ours, _ = train(scheme("serial", make_grid(x=1, dp=2)), zero, 1, [False, False], torch.float32)
    for mine, was, moved in zip(ours, Whole().parameters(), (True, False, False, False), strict=True):
        assert torch.equal(mine, was.data) is not moved
