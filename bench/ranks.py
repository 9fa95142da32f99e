"""Shared by what benchmark scripts do on a rank: MPI is started, acts are timed in turn, and rank 0 prints JSON.

It imports nothing of summa3d before MPI is started, so that a rank may measure another checkout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

K, T = TypeVar("K"), TypeVar("T")


def started() -> Any:
    """Return MPI's world, started as the command line starts it."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    return MPI.COMM_WORLD


def training(settings: Iterable[str], world: Any, folder: Path) -> tuple[Any, Callable[[], Any]]:
    """Prepare a run of the demo with other settings, and return it with what takes its next step; collective."""
    from summa3d.launcher.runtime import leave_core
    from summa3d.train.config import load
    from summa3d.train.loop import take_step
    from summa3d.train.prepare import prepare

    run, numbers = prepare(load("demo", [*settings]), world, folder), count(1)
    if run.config.grid.pp > 1:
        leave_core()
    return run, lambda: take_step(run, next(numbers))


class Layer:
    """A layer with an input and a gradient of its output."""

    def __init__(self, layer: Any, x: Any, gradient: Any) -> None:
        self.layer, self.x, self.gradient = layer, x.requires_grad_(), gradient

    def forward(self) -> None:
        """One forward."""
        self.y = self.layer(self.x)

    def backward(self) -> None:
        """One backward, of the last forward."""
        self.y.backward(self.gradient)

    def forget(self) -> None:
        """Set all gradients to None, and drop the output."""
        self.x.grad = self.y = None
        self.layer.zero_grad(set_to_none=True)


def grid_layer(size: int, grid: Any, shape: tuple[int, ...], dtype: Any = None) -> Layer:
    """Make a cuboid's `Linear` of `size` features, with blocks of an input [*shape, size] and of a gradient; collective."""
    import torch

    from summa3d.layout import distribute
    from summa3d.nn import Linear, initialise, scheme

    cuboid = scheme("cuboid", grid)
    layer = Linear(size, size, cuboid, dtype=dtype or torch.float32)
    initialise(layer, cuboid, seed=1)
    x, gradient = torch.randn((2, *shape, size), generator=torch.Generator().manual_seed(1), dtype=dtype)
    return Layer(layer, distribute(x, grid, layer.input_layout), distribute(gradient, grid, layer.output_layout))


def on_machine() -> tuple[Any, dict[str, Any]]:
    """Return MPI's world, and the machine that its ranks run on."""
    world = started()
    from summa3d.bench.machine import machine

    return world, machine(world)


def tell(world: Any, result: Any) -> None:
    """Print the result as JSON on rank 0."""
    if world.rank == 0:
        print(json.dumps(result), flush=True)


def seconds(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Count what a call takes by `clock`."""
    start = clock()
    act()
    return clock() - start


def in_turn(acts: Mapping[K, Callable[[], T]], rounds: int, warm_ups: int = 0) -> dict[K, list[T]]:
    """Return what each act returns in each round, in which all have their turn; without those of the rounds that warm up."""
    found: dict[K, list[T]] = {name: [] for name in acts}
    for _ in range(warm_ups + rounds):
        for name, act in acts.items():
            found[name].append(act())
    return {name: values[warm_ups:] for name, values in found.items()}


def alternating(acts: Mapping[K, Callable[[], Any]], rounds: int, clock: Any, warm_ups: int) -> dict[K, list[float]]:
    """Seconds of each act in each round by a `Clock`; every other round has them the other way round. Collective."""
    found: dict[K, list[float]] = {name: [] for name in acts}
    for number in range(-warm_ups, rounds):
        for name in [*acts] if number % 2 == 0 else [*acts][::-1]:
            found[name] += clock.spans(acts[name])
    return {name: values[warm_ups:] for name, values in found.items()}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    found = list(values)
    return {"median": median(found), "min": min(found), "max": max(found)}


def in_range(values: Iterable[float], digits: int, unit: str = "") -> str:
    """The median and the range as text."""
    of = spread(values)
    return f"{of['median']:.{digits}f}{unit} [{of['min']:.{digits}f}–{of['max']:.{digits}f}]"
