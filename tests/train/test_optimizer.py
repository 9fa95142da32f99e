"""The learning rate, AdamW's groups, the global gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_parity import gradient_norm

from summa3d.comm.grid import Place
from summa3d.layout.layout import Layout, Sharding
from summa3d.parallel.states import states_of
from summa3d.train import config
from summa3d.train.optimizer import AdamW, clip_factor, learning_rate

LAYOUTS = [Layout(("z", "x"), ("y",)), Layout(("y", "x"), ("z",)), Layout((), ("z",)), Layout((), ())]
SHAPE = (13, 7)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("linear", [0.005, 0.01, 0.0055, 0.001, 0.001]),
        ("constant", [0.005, 0.01, 0.01, 0.01, 0.01]),
        ("wsd", [0.005, 0.01, 0.01, 0.001, 0.001]),
    ],
)
def test_after_the_warm_up_the_learning_rate_goes_on_as_the_schedule_says(schedule: str, rates: list[float]) -> None:
    keys = [f"train.schedule={schedule}", "train.steps=110", "train.warmup=10", "train.learning_rate=0.01", "train.decay_to=0.1"]
    settings = config.load("demo", keys).train
    assert [learning_rate(number, settings) for number in (5, 10, 60, 110, 130)] == pytest.approx(rates)


def test_the_decay_of_wsd_is_a_line_over_its_last_steps() -> None:
    keys = ["train.schedule=wsd", "train.steps=110", "train.warmup=10", "train.learning_rate=1", "train.decay_to=0"]
    of_fifth, of_ten = config.load("demo", keys).train, config.load("demo", [*keys, "train.decay_steps=10"]).train
    assert [learning_rate(number, of_fifth) for number in (88, 99, 109)] == pytest.approx([1, 0.5, 1 / 22])
    assert [learning_rate(number, of_ten) for number in (99, 100, 105, 110)] == pytest.approx([1, 1, 0.5, 0])
    short = config.load("demo", [*keys, "train.warmup=100"]).train  # what is left after the warm-up
    assert [learning_rate(number, short) for number in (100, 105, 110)] == pytest.approx([1, 0.5, 0])


def test_the_learning_rate_warms_up_then_falls_along_a_cosine() -> None:
    settings = config.load("demo", ["train.steps=110", "train.warmup=10", "train.learning_rate=0.01", "train.decay_to=0.1"]).train
    rates = [learning_rate(step, settings) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.001) and rates[9] == 0.01 == max(rates)
    assert rates[59] == pytest.approx(0.0055) and rates[-1] == pytest.approx(0.001)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_without_warm_up_the_first_step_is_near_the_peak() -> None:
    settings = config.load("demo", ["train.steps=100", "train.warmup=0", "train.learning_rate=0.01"]).train
    assert 0.0099 < learning_rate(1, settings) < 0.01


def sharded(layout: Layout, grid: Any, whole: torch.Tensor) -> Any:
    """A parameter whose gradient is this rank's block of `whole`."""
    sharding = Sharding(layout, SHAPE)
    p = torch.nn.Parameter(torch.zeros(sharding.local_shape(grid), dtype=whole.dtype))
    p.sharding, p.decay, p.grad = sharding, True, whole[sharding.slices(grid)].clone()  # type: ignore[attr-defined]
    return p


@pytest.mark.mpi(sizes=(1, 6, 8))
def test_the_norm_counts_every_element_of_every_layout_once(comm: Any, make_grid: Callable[..., Any]) -> None:
    grid = make_grid(**{1: {"x": 1, "y": 1, "z": 1}, 6: {"x": 1, "y": 3, "z": 2}, 8: {"x": 2, "y": 2, "z": 2}}[comm.size])
    whole = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).double() for seed in range(len(LAYOUTS))]
    parameters = [sharded(layout, grid, one) for layout, one in zip(LAYOUTS, whole, strict=True)]
    with grid.ledger.watch() as moved:
        norm = gradient_norm(parameters, grid)
    assert norm == pytest.approx(torch.cat([one.flatten() for one in whole]).norm().item(), rel=1e-13)
    assert comm.allgather(norm) == [norm] * comm.size
    assert moved.calls == (comm.size > 1)

    assert norm * clip_factor(norm, limit=0.5) == pytest.approx(0.5)
    assert clip_factor(0.5, limit=0.6) == 1.0


def test_a_limit_of_zero_never_clips() -> None:
    assert clip_factor(5.0, limit=0.0) == 1.0


@pytest.mark.parametrize(("limit", "want"), [(0.0, [3.0, 4.0]), (1.0, [0.6, 0.8]), (6.0, [3.0, 4.0])])
def test_scaled_gradients_are_divided_by_their_scale_before_they_are_clipped(limit: float, want: list[float]) -> None:
    model, plain = Pair(), Pair()
    model.vector.grad = torch.tensor([3.0, 4.0]) * 1024
    plain.vector.grad = torch.tensor(want)
    settings = config.load("demo", ["train.epsilon=1.0"]).train  # so large that the gradient's size tells
    AdamW(states_of(model, ALONE), settings).step(rate=0.1, factor=clip_factor(5.0, limit, scale=1024.0))
    AdamW(states_of(plain, ALONE), settings).step(rate=0.1)
    assert not torch.equal(model.vector, torch.ones(2))
    torch.testing.assert_close(model.vector, plain.vector, rtol=1e-6, atol=0)


ALONE = Place({"x": 1})


class Pair(torch.nn.Module):
    """A matrix that decays and a vector that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
        for p in (self.matrix, self.vector):
            p.decay, p.sharding = p is self.matrix, Sharding(Layout(*[()] * p.dim()), tuple(p.shape))  # type: ignore[attr-defined]


def test_weight_decay_shrinks_only_the_parameters_that_ask_for_it() -> None:
    model = Pair()
    model.matrix.grad, model.vector.grad = torch.zeros(2, 2), torch.zeros(2)
    AdamW(states_of(model, ALONE), config.load("demo", ["train.weight_decay=0.5"]).train).step(rate=0.1)
    assert model.matrix.tolist() == [[pytest.approx(0.95)] * 2] * 2
    assert model.vector.tolist() == [1.0, 1.0]


def test_steps_are_those_of_torch_also_when_it_goes_on_from_a_checkpoint() -> None:
    ours, theirs = Pair(), Pair()
    settings = config.load("demo", ["train.weight_decay=0.3", "train.betas=[0.8, 0.9]", "train.epsilon=1e-3"]).train
    optimizer = AdamW(states_of(ours, ALONE), settings)
    groups = [{"params": [theirs.matrix], "weight_decay": 0.3}, {"params": [theirs.vector], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-3)
    for step in range(6):
        if step == 3:
            moments = optimizer.moments
            optimizer = AdamW(states_of(ours, ALONE), settings)
            optimizer.moments = moments
            optimizer.start_at(3)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        optimizer.step(rate=0.01)
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)
