"""One comparison for every family: a model on a grid against its plain oracle, loss and every raw gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import devices
import numpy as np
import torch
from torch import Tensor

from summa3d.layout import collect, distribute
from summa3d.nn.gradients import norm_and_votes


def whole(model: Any, name: str, block: Tensor) -> Tensor:
    """The global tensor of a parameter's block, or of its gradient's, on the host."""
    sharding = model.get_parameter(name).sharding
    return devices.to_host(collect(block, model.context.grid, sharding.layout, sharding.shape))


def gradient_norm(parameters: Iterable[Any], grid: Any) -> float:
    """The norm of the gradients that parameters have."""
    return norm_and_votes([(p.grad, p.sharding.is_primary(grid)) for p in parameters if p.grad is not None], grid)[0]


def global_weights(model: Any) -> dict[str, Tensor]:
    """Weights as initialised, but γ, β, biases and other vectors away from 1 and 0, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    weights = {name: whole(model, name, p.data) for name, p in model.named_parameters()}
    for name, value in sorted(weights.items()):
        if value.dim() == 1:
            value += torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype) * 0.3
        parameter = model.get_parameter(name)
        parameter.data.copy_(distribute(value, model.context.grid, parameter.sharding.layout))
    return weights


def check_parity(
    model: Any, plain: Any, ours: Callable[[Any], Tensor], theirs: Callable[[Any], Tensor], tolerance: float
) -> None:
    """Loss and every raw gradient of `model`, in all its copies, equal those of `plain`, with the same weights, on one rank."""
    grid, errors, oracle = model.context.grid, {}, None
    loss = ours(model)
    loss.backward()
    if grid.comm.rank == 0:
        alone = theirs(plain)
        alone.backward()
        oracle = alone.item(), {name: weight.grad for name, weight in plain.weights.items()}
    want, gradients = grid.comm.bcast(oracle)
    assert abs(loss.item() - want) <= tolerance * abs(want)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None and gradients[name] is None, name
            continue
        block = distribute(gradients[name], grid, parameter.sharding.layout)
        errors[name] = (devices.to_host(parameter.grad) - block).norm().item()
    squares = grid.comm.allreduce(np.square(list(errors.values())))
    for name, error in zip(errors, np.sqrt(squares), strict=True):
        norm = gradients[name].norm()
        assert error <= tolerance * norm, (name, error / norm)
