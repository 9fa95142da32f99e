"""A model in the stages of a pipeline: the bits of accumulation, the words of its messages, and what is in flight."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import devices
import jobs
import pytest
import torch
from plain_bert import sentence_pairs
from scheme_table import GPT2, LLAMA, next_tokens

from summa3d.layout import collect
from summa3d.nn import build, scheme
from summa3d.nn.schemes.scheme import Scheme
from summa3d.parallel.pipeline import Pipeline, stages_of

FAMILIES = {
    "gpt2": GPT2,
    "llama": replace(LLAMA, kv_heads=6, tied_head=False),
    "tied": replace(LLAMA, kv_heads=6, tied_head=True),
    "bert": replace(GPT2, family="bert"),
}
ROWS = 4


@dataclass(frozen=True)
class Case:
    """A pipeline: its scheme and inner axes, schedule, micro-batches, chunks, layers of each stage, and the model's family."""

    pp: int
    m: int
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] | int = 5
    family: str = "llama"
    scheme: str = "serial"
    axes: tuple[tuple[str, int], ...] = ()
    recompute: int = 0

    def config(self) -> Any:
        layers = self.layers if isinstance(self.layers, int) else sum(self.layers)
        return replace(FAMILIES[self.family], layers=layers, dropout=0.1)

    def __str__(self) -> str:
        inner = "".join(f"·{axis}{size}" for axis, size in self.axes)
        return f"{self.schedule}-pp{self.pp}{inner}-v{self.chunks}-m{self.m}-{self.family}"


Y2, Z2, XY2, YZ2 = (("y", 2),), (("z", 2),), (("x", 2), ("y", 2)), (("y", 2), ("z", 2))
CASES = {
    2: [
        Case(2, 3, "gpipe"),
        Case(2, 3, layers=(0, 3)),
        Case(2, 4, "interleaved", 2, family="gpt2", recompute=2),
        Case(2, 1, family="bert", layers=(2, 1)),
    ],
    3: [Case(3, m, layers=7, family=family) for m, family in ((1, "tied"), (2, "llama"), (3, "gpt2"), (7, "llama"))],
    4: [
        Case(4, 5, family="tied"),
        Case(2, 3, scheme="oned", axes=Y2, family="gpt2", layers=3),
        Case(2, 2, scheme="oned-sp", axes=Y2, layers=3),
        Case(2, 3, scheme="cuboid", axes=Z2, layers=(1, 2), recompute=1),
    ],
    8: [
        Case(2, 2, scheme="summa", axes=XY2, family="bert", layers=3),
        Case(2, 4, "interleaved", 2, scheme="cuboid", axes=YZ2, layers=4),
        Case(4, 4, "interleaved", 2, scheme="cuboid-sequence", axes=Z2, layers=9, family="tied"),
    ],
}


class Piped:
    """A pipelined model, and the same model whole on each inner grid: both with the same weights."""

    def __init__(self, case: Case, make_grid: Any, check: bool = True) -> None:
        self.case, self.config = case, case.config()
        self.grid = make_grid(check=check, **dict(case.axes), pp=case.pp)
        self.whole = scheme(case.scheme, self.grid)
        counts = None if isinstance(case.layers, int) else case.layers
        staged = replace(self.whole, stages=stages_of(case.schedule, case.pp, case.chunks, self.config.layers, counts))
        self.model, self.copies = (self.built(plan) for plan in (staged, self.whole))
        self.pipeline = Pipeline(self.model, case.schedule, ROWS, torch.float64)
        self.executor, self.rank = self.pipeline.executor, self.pipeline.rank
        self.inputs = [self.batch(micro) for micro in range(case.m)]

    def built(self, plan: Scheme) -> Any:
        model = build(self.config, plan, torch.float64, seed=3)
        model.recompute("full" if self.case.recompute else "none", max(1, self.case.recompute))
        return model.to(devices.NAME) if devices.NAME == "cuda" else model

    def batch(self, micro: int) -> dict[str, torch.Tensor]:
        make = sentence_pairs if self.config.family == "bert" else next_tokens
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


def accumulate(piped: Piped, model: Any) -> list[torch.Tensor]:
    """Plain accumulation: a forward and a backward of each micro-batch in turn."""
    losses = []
    for micro, inputs in enumerate(piped.inputs):
        loss = model(**inputs, **piped.options(micro))
        loss.backward()
        losses.append(loss.detach())
    return losses


def sent_and_received(piped: Piped) -> tuple[int, int]:
    """Messages of a micro-batch that a rank receives: forward and backward."""
    homes = piped.pipeline.homes
    own = [stage for stage, home in enumerate(homes) if home == piped.rank]
    forward = sum(stage > 0 and homes[stage - 1] != piped.rank for stage in own)
    return forward, sum(stage < len(homes) - 1 and homes[stage + 1] != piped.rank for stage in own)


def most_in_flight(case: Case, rank: int) -> int:
    p, m, v = case.pp, case.m, case.chunks
    known = {"gpipe": m, "1f1b": min(p - rank, m), "interleaved": min(2 * (p - 1 - rank) + (v - 1) * p + 1, m * v)}
    return known[case.schedule]


def kept_after_each_op(piped: Piped) -> list[int]:
    """Filled by a step: how many stage inputs are in flight whenever the channel is asked for progress."""
    counts: list[int] = []
    channel = piped.executor.channel
    progress = channel.progress

    def counting() -> int:
        counts.append(len(piped.executor.flights))
        return progress()

    channel.progress = counting
    return counts


@pytest.mark.mpi(sizes=tuple(CASES), timeout=300)
def test_a_step_has_the_bits_of_accumulation_and_moves_the_words_of_its_messages(make_grid: Any, world_size: int) -> None:
    """Losses and raw gradients equal in bits; of a tied table, whose two parts are summed last, to the last digits."""
    for case in CASES[world_size]:
        piped = Piped(case, make_grid)
        counts = kept_after_each_op(piped)
        with piped.grid.ledger.watch() as moved:
            losses = piped.pipeline.run(case.m, piped.feed)
        want = accumulate(piped, piped.copies)
        last = piped.rank == case.pp - 1
        assert len(losses) == (case.m if last else 0), case
        assert all(torch.equal(loss, one) for loss, one in zip(losses, want, strict=last)), case
        check_gradients(piped)
        check_words(piped, moved)
        assert max(counts) == most_in_flight(case, piped.rank) and counts[-1] == 0, case
        piped.executor.channel.free()


def check_gradients(piped: Piped) -> None:
    tied = piped.pipeline.tied
    for (name, p), copy in zip(piped.model.named_parameters(), piped.copies.parameters(), strict=True):
        if not p.sharding.layout.holds_block(piped.grid.coordinates):
            assert p.numel() == 0 and p.grad is None, name
        elif p is tied:
            assert (p.grad - copy.grad).norm() <= 1e-12 * copy.grad.norm(), name
        else:
            assert torch.equal(p.grad, copy.grad), (piped.case, name)


def check_words(piped: Piped, moved: Any) -> None:
    block, (forward, backward) = piped.pipeline.stream().numel(), sent_and_received(piped)
    found = {"forward": 0, "backward": 0}
    for row in moved.rows:
        if "pp" in row.axis and row.collective == "receive":
            found[row.phase] += row.amounts.words
    m = piped.case.m
    assert found == {"forward": m * block * forward, "backward": m * block * backward}, piped.case
    table = sum(row.amounts.words for row in moved.rows if "pp" in row.axis and row.collective == "all_reduce")
    assert table == (0 if piped.pipeline.holders is None else piped.pipeline.tied.numel()), piped.case
    assert all(row.axis.startswith("pp") or set(row.axis) <= set("xyzd·") for row in moved.rows), moved.rows


@pytest.mark.mpi(sizes=(2, 4), timeout=200)
def test_a_whole_step_equals_one_rank(make_grid: Any, world_size: int) -> None:
    """Against a model on one rank, whose gradients are whole."""
    for case in (CASES[world_size][3], CASES[world_size][1]):
        piped = Piped(case, make_grid)
        losses = piped.pipeline.run(case.m, piped.feed)
        alone = build(piped.config, scheme("serial"), torch.float64, seed=3)
        want = accumulate(piped, alone)
        assert not losses or abs(sum(losses) - sum(want)) <= 1e-9 * sum(want)
        for (name, p), one in zip(piped.model.named_parameters(), alone.parameters(), strict=True):
            grad = torch.empty_like(p) if p.grad is None else p.grad
            whole = collect(grad, piped.grid, p.sharding.layout, p.sharding.shape)
            assert (whole - one.grad).norm() <= 1e-9 * one.grad.norm(), (case, name)
        piped.executor.channel.free()


@pytest.mark.mpi(sizes=(4,), timeout=100)
def test_without_gradients_only_forwards_run(make_grid: Any) -> None:
    for case in (Case(4, 6), Case(2, 4, "interleaved", 2, scheme="oned", axes=Y2, layers=4)):
        piped = Piped(case, make_grid)
        with torch.no_grad(), piped.grid.ledger.watch() as moved:
            losses = piped.pipeline.run(case.m, piped.feed)
            want = [piped.copies(**inputs, **piped.options(micro)) for micro, inputs in enumerate(piped.inputs)]
        assert not piped.executor.flights and all(p.grad is None for p in piped.model.parameters())
        assert torch.equal(torch.stack(losses or want), torch.stack(want))
        forward = sum(row.amounts.words for row in moved.rows if row.axis == "pp")
        assert forward == case.m * piped.pipeline.stream().numel() * sent_and_received(piped)[0]
        piped.executor.channel.free()


def test_messages_that_move_only_inside_mpi_arrive(tmp_path: Path) -> None:
    """No copies between address spaces, blocks of 1 MiB, and ops that end at random times."""
    ended = jobs.run([str(Path(__file__)), "8"], 4, extra={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert ended.returncode == 0 and "done" in ended.stdout, ended.stdout + ended.stderr


def main(steps: str) -> None:
    """Steps of two pipelines on four ranks, each against plain accumulation."""
    from mpi4py import MPI

    from summa3d.comm.failure import install_abort_hook
    from summa3d.comm.grid import Grid

    install_abort_hook()

    def make_grid(check: bool, **axes: int) -> Grid:
        return Grid(MPI.COMM_WORLD, axes, check=False, node_memory=True)

    wide = {"hidden": 384, "sequence": 96, "heads": 12}
    for case in (Case(2, 4, "interleaved", 2, scheme="cuboid", axes=Z2, layers=4), Case(4, 5)):
        FAMILIES["llama"] = replace(FAMILIES["llama"], **wide)
        piped, chance = Piped(case, make_grid), random.Random(MPI.COMM_WORLD.rank)
        assert piped.pipeline.stream().nbytes >= 1 << 19

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
    import sys

    main(*sys.argv[1:])
