"""Python time of the pipeline's executor at p = 1 beyond a plain loop of the same forwards and backwards, in µs an operation."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

from common import about, overhead, save, verdict

LIMIT = 50.0  # µs
MICRO_BATCHES = 64
WARM_UPS = 5


def main() -> None:
    """Measure the overhead, and print whether it stays below the limit."""
    what = f"Time this many steps of {MICRO_BATCHES} micro-batches each way."
    result, file = overhead(__file__, __doc__, 1, "--rounds", 101, what, measure)
    print(about(result["machine"]))
    pairs = zip(result["seconds"]["executor"], result["seconds"]["plain"], strict=True)
    more = [(ours - plain) / result["ops"] * 1e6 for ours, plain in pairs]
    row = {"median": median(more), "min": min(more), "max": max(more)}
    each = f"{row['median']:.1f} µs more each [{row['min']:.1f}–{row['max']:.1f}]"
    print(f"{result['ops']} operations: {each}; load {result['load']:.1f}")
    print("  " + verdict(f"at most {LIMIT:.0f} µs of Python an operation", row["median"] <= LIMIT))
    save(result | {"overhead_us": row}, file)


def measure(rounds: int) -> None:
    """Run on the one rank: time both ways in turn; print JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    from summa3d.bench.machine import machine

    found, ways = machine(MPI.COMM_WORLD), Ways()
    seconds: dict[str, list[float]] = {"plain": [], "executor": []}
    for name in seconds:
        for _ in range(WARM_UPS):
            getattr(ways, name)()
    for _ in range(rounds):
        for name, taken in seconds.items():
            start = time.thread_time()  # of the processor: other work on the machine does not count
            getattr(ways, name)()
            taken.append(time.thread_time() - start)
    ops = len(ways.pipeline.program(MICRO_BATCHES))
    print(json.dumps({"kind": "executor_overhead", "machine": found, "ops": ops, "seconds": seconds}))


class Ways:
    """A step of micro-batches that compute next to nothing, by the executor and by a plain loop; the sums are compared."""

    def __init__(self) -> None:
        import torch

        from summa3d.nn import ModelConfig, build, scheme
        from summa3d.parallel.executor import Stage
        from summa3d.parallel.pipeline import Pipeline

        torch.autograd.set_multithreading_enabled(False)
        config = ModelConfig(layers=1, hidden=8, heads=1, sequence=4, vocabulary=16)
        self.model = build(config, scheme("serial"))
        self.weight = self.model.blocks[0].mlp_norm.weight

        class Tiny(Stage):
            def forward(stage, x: Any, inputs: Any, batch: Any) -> Any:
                return self.weight.sum()

        self.pipeline = Pipeline(self.model, "1f1b", 1, torch.float32)
        self.pipeline.executor.stages = [Tiny(**vars(stage)) for stage in self.pipeline.executor.stages]
        self.micro = ({}, self.model.batch_of({"tokens": torch.zeros(1, 4, dtype=torch.long)}))
        self.executor()
        want, self.weight.grad = self.weight.grad.clone(), None
        self.plain()
        assert torch.equal(self.weight.grad, want)

    def executor(self) -> None:
        """The step as training takes it."""
        self.pipeline.run(MICRO_BATCHES, lambda micro: self.micro)

    def plain(self) -> None:
        """The same forwards and backwards."""
        (stage,) = self.pipeline.executor.stages
        losses = []
        for _ in range(MICRO_BATCHES):
            loss = stage.forward(None, *self.micro)
            (loss * 1.0).backward()
            losses.append(loss.detach())


if __name__ == "__main__":
    main()
