"""Models in the stages of a pipeline, beside the same models whole: for tests, and as a program for a job of four ranks.

staged.py STEPS
"""

from __future__ import annotations

import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import devices
import torch
from plain_bert import sentence_pairs
from plain_vit import pictures
from scheme_table import GPT2, LLAMA, next_tokens

from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.context import Context
from summa3d.nn.overlap import Overlap
from summa3d.parallel.pipeline import Pipeline, stages_of
from summa3d.parallel.states import states_of
from summa3d.train.config import master_dtype
from summa3d.train.precision import torch_dtype, working_weights

FAMILIES = {
    "gpt2": GPT2,
    "llama": replace(LLAMA, kv_heads=6, tied_head=False),
    "tied": replace(LLAMA, kv_heads=6, tied_head=True),
    "bert": replace(GPT2, family="bert"),
    "even": replace(GPT2, ffn=4 * GPT2.hidden, vocabulary=40),
    "vit": ModelConfig(family="vit", layers=1, hidden=24, heads=6, image=12, patch=4, classes=5),
}
ROWS = 4


class AfterOps(ABC):
    """A ledger that looks at an executor at the end of each of its ops."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.ledger, executor.ledger = executor, executor.ledger, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        with self.ledger.run(name):
            yield
        self.after()

    @abstractmethod
    def after(self) -> None:
        """An op has ended."""


@dataclass(frozen=True)
class Case:
    """A pipeline: its scheme and inner axes, schedule, micro-batches, chunks, layers of each stage, and the model's family.

    recompute : layers of a stretch that backward runs again; 0, none. gather : weights that are prefetched
    """

    pp: int
    m: int
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] | int = 5
    family: str = "llama"
    scheme: str = "serial"
    axes: tuple[tuple[str, int], ...] = ()
    recompute: int = 0
    selective: bool = False
    regather: bool = True
    gather: int = 0
    dtype: str = "float64"
    distributed: bool = False

    def config(self) -> Any:
        layers = self.layers if isinstance(self.layers, int) else sum(self.layers)
        return replace(FAMILIES[self.family], layers=layers, dropout=0.1)

    def __str__(self) -> str:
        inner = "".join(f"·{axis}{size}" for axis, size in self.axes)
        return f"{self.schedule}-pp{self.pp}{inner}-v{self.chunks}-m{self.m}-{self.family}"


X2, Y2, Z2 = (("x", 2),), (("y", 2),), (("z", 2),)
XY2, YZ2 = X2 + Y2, Y2 + Z2
CASES = {
    2: [
        Case(2, 3, "gpipe"),
        Case(2, 3, layers=(0, 3)),
        Case(2, 4, "interleaved", 2, family="gpt2", recompute=2),
        Case(2, 1, family="bert", layers=(2, 1)),
        Case(2, 3, family="vit", layers=(2, 1)),
    ],
    3: [Case(3, m, layers=7, family=family) for m, family in ((1, "tied"), (7, "gpt2"))],
    4: [
        Case(4, 5, family="tied"),
        Case(2, 3, scheme="oned", axes=Y2, family="gpt2", layers=3),
        Case(2, 3, scheme="cuboid", axes=Z2, layers=(1, 2), recompute=1),
    ],
    8: [
        Case(2, 2, scheme="summa", axes=XY2, family="bert", layers=3),
        Case(2, 4, "interleaved", 2, scheme="cuboid", axes=YZ2, layers=4),
    ],
}
WIDE = {
    3: [Case(3, m, layers=7, family=family) for m, family in ((2, "llama"), (3, "gpt2"))],
    4: [Case(2, 2, scheme="oned-sp", axes=Y2, layers=3), Case(4, 4, "interleaved", 2, layers=9, family="tied")],
    8: [
        Case(4, 4, "interleaved", 2, scheme="cuboid-sequence", axes=Z2, layers=9, family="tied"),
        Case(4, 3, scheme="oned", axes=Y2, layers=4, family="bert"),
        Case(2, 2, scheme="cuboid", axes=YZ2, family="vit", layers=3, recompute=1),
        Case(2, 2, "gpipe", scheme="tesseract", axes=XY2, layers=3, family="gpt2"),
    ],
}
"""Sweeps of `make test-all`."""


class Piped:
    """A pipelined model, and the same model whole on each inner grid: both with the same weights."""

    def __init__(self, case: Case, make_grid: Any, check: bool = True, scatter: bool = True) -> None:
        self.case, self.config = case, case.config()
        self.grid = make_grid(check=check, **dict(case.axes), pp=case.pp)
        self.dtype = torch_dtype(case.dtype)
        self.whole = scheme(case.scheme, self.grid, case.regather, overlap=Overlap(case.gather))
        counts = None if isinstance(case.layers, int) else case.layers
        staged = replace(self.whole, stages=stages_of(case.schedule, case.pp, case.chunks, self.config.layers, counts))
        self.model, self.copies = (self.built(plan) for plan in (staged, self.whole))
        self.pipeline = Pipeline(self.model, case.schedule, ROWS, self.dtype, scatter=scatter)
        self.executor, self.rank = self.pipeline.executor, self.pipeline.rank
        self.inputs = [self.batch(micro) for micro in range(case.m)]

    def built(self, plan: Context) -> Any:
        model = build(self.config, plan, torch_dtype(master_dtype(self.case.dtype)), seed=3)
        kind = "selective" if self.case.selective else "full" if self.case.recompute else "none"
        model.recompute(kind, max(1, self.case.recompute), self.case.distributed)
        return model.to(devices.NAME) if devices.NAME == "cuda" else model

    def batch(self, micro: int) -> dict[str, torch.Tensor]:
        make = {"bert": sentence_pairs, "vit": pictures}.get(self.config.family, next_tokens)
        found = make(self.config, ROWS * self.case.m, self.config.sequence)
        part = {name: whole[micro * ROWS : (micro + 1) * ROWS].clone() for name, whole in found.items()}
        if micro == 0 and self.case.m > 1:
            part["labels"][:] = -1  # a mean of means would differ
        return part

    def options(self, micro: int) -> dict[str, int]:
        found = {"step": 2, "first_row": micro * ROWS, "count": 37}
        return {**found, "pairs": 5} if self.config.family == "bert" else found

    def feed(self, micro: int) -> Any:
        return self.inputs[micro], self.model.batch_of(self.inputs[micro], **self.options(micro))

    def step(self) -> list[torch.Tensor]:
        """The losses of a step; its gradients are accumulated."""
        with ExitStack() as copies:
            copies.enter_context(working_weights(self.model, states_of(self.model, self.grid), self.dtype))
            return self.pipeline.run(self.case.m, self.feed, forwarded=copies.close)


def accumulate(piped: Piped, model: Any) -> list[torch.Tensor]:
    """Plain accumulation: a forward and a backward of each micro-batch in turn."""
    losses = []
    for micro, inputs in enumerate(piped.inputs):
        with working_weights(model, states_of(model, piped.grid), piped.dtype):
            loss = model(**inputs, **piped.options(micro))
        loss.backward()
        losses.append(loss.detach())
    return losses


def check_gradients(piped: Piped) -> None:
    """Gradients equal in bits; of a table that two stages share, whose two parts are summed otherwise, to the last digits."""
    has_table = piped.config.tied and piped.config.family != "vit"
    tied = piped.model.embedding.weight if piped.case.pp > 1 and has_table else None
    tolerance = 1e-12 if piped.dtype == torch.float64 else 1e-2
    for (name, p), copy in zip(piped.model.named_parameters(), piped.copies.parameters(), strict=True):
        if not p.sharding.layout.holds_block(piped.grid.coordinates):
            assert p.numel() == 0 and p.grad is None, name
        elif p is tied:
            assert (p.grad - copy.grad).norm() <= tolerance * copy.grad.norm(), name
        else:
            assert torch.equal(p.grad, copy.grad), (piped.case, name)


def main(steps: str) -> None:
    """Steps of two pipelines on four ranks, each against plain accumulation."""
    from mpi4py import MPI

    from summa3d.comm.grid import Grid
    from summa3d.comm.health.failure import install_abort_hook

    install_abort_hook()

    def make_grid(check: bool, **axes: int) -> Grid:
        return Grid(MPI.COMM_WORLD, axes, check=False, node_memory=True)

    torch.set_num_threads(1)
    wide = {"hidden": 96, "sequence": 96, "heads": 12}
    for case in (Case(2, 4, "interleaved", 2, scheme="cuboid", axes=Z2, layers=4), Case(4, 5, layers=4)):
        FAMILIES["llama"] = replace(FAMILIES["llama"], **wide)
        piped, chance = Piped(case, make_grid), random.Random(MPI.COMM_WORLD.rank)
        assert piped.pipeline.stream().nbytes >= 1 << 17

        def feed(micro: int, piped: Piped = piped, chance: random.Random = chance) -> Any:
            time.sleep(chance.random() / 100)
            return piped.feed(micro)

        accumulate(piped, piped.copies)
        for _ in range(int(steps)):
            piped.model.zero_grad()
            piped.pipeline.run(case.m, feed)
            check_gradients(piped)
        piped.executor.channel.free()
    if MPI.COMM_WORLD.rank == 0:
        print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
