"""A model in the stages of a pipeline: the bits of accumulation, the words of its messages, and what is in flight."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from mpi4py import MPI
from staged import CASES, WIDE, Y2, Case, Piped, accumulate, check_gradients

from summa3d.layout import collect
from summa3d.nn import build, scheme
from summa3d.parallel.executor import Stage


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
@pytest.mark.parametrize("cases", [CASES, pytest.param(WIDE, marks=pytest.mark.wide)], ids=["few", "more"])
def test_a_step_has_the_bits_of_accumulation_and_moves_the_words_of_its_messages(
    make_grid: Any, world_size: int, cases: dict[int, list[Case]]
) -> None:
    """Losses and raw gradients equal in bits; of a tied table, whose two parts are summed last, to the last digits."""
    for case in cases.get(world_size, ()):
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
    for case in CASES[world_size][1:4:2] if world_size == 2 else CASES[world_size][1:3]:
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
    """No copies between address spaces, blocks that MPI does not send ahead, and ops that end at random times."""
    ended = jobs.run([str(Path(__file__).parents[1] / "staged.py"), "2"], 4, extra={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert ended.status == 0 and "done" in ended.stdout, ended.stdout + ended.stderr


class Sleeping(torch.autograd.Function):
    """Blocks that take time, and no processor: forward 1 part, backward 2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


@pytest.mark.wide  # it asserts times
@pytest.mark.mpi(sizes=(4,), timeout=100)
@pytest.mark.parametrize(("schedule", "chunks", "units"), [("1f1b", 1, 33.0), ("interleaved", 2, 28.5)])
def test_a_step_of_sleeping_stages_takes_the_time_of_its_schedule(
    comm: Any, make_grid: Any, schedule: str, chunks: int, units: float
) -> None:
    """8 micro-batches on 4 ranks, in units of a rank's forward: from the first op of the trace to the last."""
    unit = 0.04
    piped = Piped(Case(4, 8, schedule, chunks, layers=8), make_grid, check=False)

    class Asleep(Stage):
        def forward(self, x: Any, inputs: Any, batch: Any) -> Any:
            x = torch.zeros_like(piped.pipeline.stream()).requires_grad_() if x is None else x
            y = Sleeping.apply(x, unit / chunks)
            return y.sum() if self.leaves else y

    piped.executor.stages = [Asleep(**vars(stage)) for stage in piped.executor.stages]
    found = []
    for _ in range(3):
        comm.Barrier()
        trace = piped.grid.ledger.start_trace()
        piped.pipeline.run(8, piped.feed)
        piped.grid.ledger.stop_trace()
        starts, ends = zip(*(span[1:] for span in trace.runs), strict=True)
        found.append((comm.allreduce(max(ends), MPI.MAX) - comm.allreduce(min(starts), MPI.MIN)) / unit)
    assert 0.98 * units <= min(found) <= 1.10 * units, found
    piped.executor.channel.free()
