"""Training steps of several configurations on the same ranks, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..bench.clock import Clock
from ..bench.race import raced, split
from ..bench.statistics import times_of
from ..train.config import Config
from ..train.loop import take_step
from ..train.prepare import Run, prepare
from ..train.utilization import model_flops

if TYPE_CHECKING:
    from mpi4py import MPI


class StepRunner:
    """A configuration whose steps are timed; its constructor is collective over `comm`. It writes no checkpoint."""

    def __init__(self, config: Config, comm: MPI.Intracomm, folder: Path, rounds: int) -> None:
        steps = rounds + 3  # one that is not counted, one whose words are, one that is traced
        self.run: Run = prepare(replace(config, train=replace(config.train, steps=steps)), comm, folder, overwrite=True)
        self.comm, self.ranks, self.clock, self.done, self.loss = comm, comm.size, Clock(self.run.grid), 0, 0.0

    def step(self) -> None:
        """Take the next step; collective."""
        self.done += 1
        self.loss = take_step(self.run, self.done).loss

    def seconds(self) -> float:
        """Seconds of the next step, over all ranks; collective."""
        with self.run.grid.ledger.run(self.run.config.scheme):
            return self.clock.spans(self.step)[0]

    def amounts(self) -> dict[str, Any]:
        """Words that the fullest rank receives in a step, operations, loss of the last step, and `split`; collective."""
        with self.run.grid.ledger.watch() as moved:
            self.step()
        where = split(self.run.grid.ledger, self.seconds, self.comm)
        batch = self.run.config.train.batch
        return {
            "flops": model_flops(self.run.model, self.run.config.model, batch),
            "sequences": batch,
            "words": max(self.comm.allgather(moved.words)),
            "loss": self.loss,
            "split": where,
        }


def run_steps(configs: Sequence[Config], comm: MPI.Intracomm, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Seconds and amounts of a step of each configuration: in each round, each takes a step; collective over `comm`."""
    runners = [StepRunner(config, comm, folder / "work", rounds) for config in configs]
    with torch.autograd.set_multithreading_enabled(False):
        times = raced(runners, rounds, comm)
        result = [{"seconds": times_of(taken), **runner.amounts()} for runner, taken in zip(runners, times, strict=True)]
    for runner in runners:
        runner.run.grid.free()
    return result
