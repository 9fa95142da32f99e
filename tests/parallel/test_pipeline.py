"""A model in the stages of a pipeline: the bits of accumulation, the words of its messages, and what is in flight."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from staged import CASES, WIDE, X2, Y2, AfterOps, Case, Piped, accumulate, check_gradients
from torch.multiprocessing.reductions import StorageWeakRef

from summa3d.errors import AgreementError
from summa3d.layout import collect
from summa3d.nn import build, scheme
from summa3d.parallel.executor import Stage
from summa3d.parallel.simulate import in_flight


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


class Noting(AfterOps):
    """A ledger that counts, at the end of each op of a pipeline: stage inputs in flight, sends out, and stage outputs alive."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []
        self.counts: list[tuple[int, int, int]] = []
        noted = self

        class Noted(Stage):
            def forward(self, x: Any, inputs: Any, batch: Any) -> Any:
                if x is not None:
                    noted.inputs.append(StorageWeakRef(x.untyped_storage()))
                y, term = super().forward(x, inputs, batch)
                if not self.leaves:
                    noted.outputs.append(StorageWeakRef(y.untyped_storage()))
                return y, term

        executor.stages = [Noted(**vars(stage)) for stage in executor.stages]

    def after(self) -> None:
        alive = sum(not output.expired() for output in self.outputs)
        self.counts.append((len(self.executor.pending), len(self.executor.channel._sends), alive))


@pytest.mark.mpi(sizes=tuple(CASES))
@pytest.mark.parametrize("cases", [CASES, pytest.param(WIDE, marks=pytest.mark.wide)], ids=["few", "more"])
def test_a_step_has_the_bits_of_accumulation_and_moves_the_words_of_its_messages(
    make_grid: Any, world_size: int, cases: dict[int, list[Case]]
) -> None:
    """Losses and raw gradients equal in bits; of a tied table, whose two parts are summed last, to the last digits.

    In flight is the schedule's number after each op, and of a stage's outputs no more is alive than sends are out.
    """
    for case in cases.get(world_size, ()):
        piped = Piped(case, make_grid)
        noted = Noting(piped.executor)
        with piped.grid.ledger.watch() as moved:
            losses = piped.pipeline.run(case.m, piped.feed)
        want = accumulate(piped, piped.copies)
        last = piped.rank == case.pp - 1
        assert len(losses) == (case.m if last else 0), case
        assert all(torch.equal(loss, one) for loss, one in zip(losses, want, strict=last)), case
        check_gradients(piped)
        check_words(piped, moved)
        kept, sends, alive = zip(*noted.counts, strict=True)
        assert list(kept) == in_flight(piped.pipeline.schedule(case.m).ops_of(piped.rank)), case
        assert max(kept) == most_in_flight(case, piped.rank), case
        assert all(few <= many for few, many in zip(alive, sends, strict=True)), (case, noted.counts)
        piped.executor.channel.free()


def check_words(piped: Piped, moved: Any) -> None:
    block, (forward, backward) = piped.executor.wire.buffer().numel(), sent_and_received(piped)
    found = {"forward": 0, "backward": 0}
    for row in moved.rows:
        if "pp" in row.axis and row.collective == "receive":
            found[row.phase] += row.amounts.words
    m = piped.case.m
    assert found == {"forward": m * block * forward, "backward": m * block * backward}, piped.case
    table = sum(row.amounts.words for row in moved.rows if "pp" in row.axis and row.collective == "all_reduce")
    assert table == (0 if piped.pipeline.tied is None else piped.pipeline.tied.numel()), piped.case
    assert all(row.axis.startswith("pp") or set(row.axis) <= set("xyzd·") for row in moved.rows), moved.rows


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("distributed", [True, False])
def test_of_an_input_whose_parts_are_kept_nothing_else_is_alive(make_grid: Any, world_size: int, distributed: bool) -> None:
    """Behind its forward, on ranks of oned that recompute from their parts; else the input lives until its backward."""
    piped = Piped(Case(2, 3, scheme="oned", axes=Y2, layers=4, recompute=1, distributed=distributed), make_grid)
    noted, alive = Noting(piped.executor), []
    progress = piped.executor.channel.progress

    def counting() -> int:
        alive.append(sum(not one.expired() for one in noted.inputs))
        return progress()

    piped.executor.channel.progress = counting
    piped.pipeline.run(3, piped.feed)
    accumulate(piped, piped.copies)
    check_gradients(piped)
    assert len(noted.inputs) == (3 if piped.rank else 0) and max(alive) == (0 if distributed or not piped.rank else 1)
    piped.executor.channel.free()


@pytest.mark.mpi(sizes=(4, 6))
def test_copies_of_the_stream_travel_once(make_grid: Any, world_size: int) -> None:
    """Each rank of oned sends its part, and the next stage gathers the whole: the same bits as where each sends all."""
    case = Case(2, 3, scheme="oned", axes=(("y", world_size // 2),), layers=3)
    moved, results = [], []
    for scatter in (True, False):
        piped = Piped(case, make_grid, scatter=scatter)
        with piped.grid.ledger.watch() as watched:
            losses = piped.pipeline.run(case.m, piped.feed)
        words: dict[tuple[str, str], int] = defaultdict(int)
        for row in watched.rows:
            words[row.axis, row.phase] += row.amounts.words
        moved.append(words)
        results.append([*losses, *(p.grad for p in piped.model.parameters() if p.grad is not None)])
        piped.executor.channel.free()
    assert len(results[0]) == len(results[1]) > 12 and all(map(torch.equal, *results))
    block, share = piped.pipeline.stream().numel(), piped.pipeline.stream().numel() // (world_size // 2)
    for phase, messages in zip(("forward", "backward"), sent_and_received(piped), strict=True):
        assert moved[0]["pp", phase] == case.m * messages * share
        assert moved[1]["pp", phase] == case.m * messages * block
        assert moved[0]["y", phase] - moved[1]["y", phase] == case.m * messages * (block - share)


@pytest.mark.mpi(sizes=(2, 4))
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


@pytest.mark.mpi(sizes=(4,))
def test_without_gradients_only_forwards_run(make_grid: Any) -> None:
    for case in (Case(4, 6), Case(2, 4, "interleaved", 2, scheme="oned", axes=Y2, layers=4)):
        piped = Piped(case, make_grid)
        with torch.no_grad(), piped.grid.ledger.watch() as moved:
            losses = piped.pipeline.run(case.m, piped.feed)
            want = [piped.copies(**inputs, **piped.options(micro)) for micro, inputs in enumerate(piped.inputs)]
        assert not piped.executor.pending and all(p.grad is None for p in piped.model.parameters())
        assert torch.equal(torch.stack(losses or want), torch.stack(want))
        forward = sum(row.amounts.words for row in moved.rows if row.axis == "pp")
        assert forward == case.m * piped.executor.wire.buffer().numel() * sent_and_received(piped)[0]
        piped.executor.channel.free()


def note_flights(piped: Piped, counts: list[int]) -> None:
    counts.append(len(piped.executor.pending))


@pytest.mark.mpi(sizes=(4,))
def test_each_chunk_prefetches_in_its_own_order_and_copies_end_with_the_last_forward(make_grid: Any) -> None:
    """A prefetch that is dropped would be counted; the backwards that are left free each copy that they have used."""
    words = {}
    for gather in (0, 2):
        case = Case(2, 4, "interleaved", 2, scheme="cuboid", axes=X2, layers=5, gather=gather)
        piped = Piped(case, make_grid)
        for _ in range(2):
            ended = list[int]()
            with piped.grid.ledger.watch() as moved:
                piped.pipeline.run(case.m, piped.feed, forwarded=partial(note_flights, piped, ended))
        ops = piped.pipeline.schedule(case.m).ops_of(piped.rank)
        last = max(place for place, op in enumerate(ops) if op.kind == "F")
        assert ended == [in_flight(ops)[last]] and ended[0] > 0
        words[gather] = sum(row.amounts.words for row in moved.rows if row.axis == "x")
        piped.executor.channel.free()
    assert words[2] == words[0] > 0


SPOKEN = {
    2: [Case(2, 2, "zb-v", 2, layers=4, family="tied"), Case(2, 3, layers=(0, 3))],
    4: [Case(2, 3, scheme="oned", axes=Y2, family="gpt2", layers=3), Case(2, 2, scheme="oned-sp", axes=Y2, layers=3)],
}


@pytest.mark.mpi(sizes=tuple(SPOKEN))
def test_the_next_tokens_logits_are_the_whole_models_on_every_rank(make_grid: Any, world_size: int) -> None:
    """Of 5 tokens, which axes that split the sequence cannot share; the last stage broadcasts them."""
    for case in SPOKEN[world_size]:
        piped = Piped(case, make_grid)
        tokens = torch.arange(20).reshape(4, 5) % piped.config.vocabulary
        with piped.grid.ledger.watch() as moved:
            found = piped.pipeline.next_logits(tokens)
        assert torch.equal(found, piped.copies.next_logits(tokens)), case
        spoken = sum(row.amounts.words for row in moved.rows if row.axis == "pp" and row.collective == "broadcast")
        assert spoken == (0 if piped.rank == piped.pipeline.homes[-1] else found.numel())
        piped.executor.channel.free()


@pytest.mark.wide
def test_messages_that_move_only_inside_mpi_arrive(tmp_path: Path) -> None:
    """No copies between address spaces, blocks that MPI does not send ahead, and ops that end at random times."""
    ended = jobs.run([str(Path(__file__).parents[1] / "staged.py"), "2"], 4, extra={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert ended.status == 0 and "done" in ended.stdout, ended.stdout + ended.stderr


STUCK = """
import sys, time
sys.path.append({tests!r})
from mpi4py import MPI
from staged import Case, Piped
from summa3d.comm.health.failure import install_abort_hook, telling_where
from summa3d.comm.health.watchdog import Watchdog
from summa3d.comm.grid import Grid
install_abort_hook()
rank = MPI.COMM_WORLD.rank
piped = Piped(Case(2, 2), lambda check, **axes: Grid(MPI.COMM_WORLD, axes), check=False)
def feed(micro):
    if (rank, micro) == (0, 1):
        time.sleep({seconds})
        raise ValueError("broken")
    return piped.feed(micro)
piped.pipeline.run(2, piped.feed)
with telling_where(lambda: piped.executor.state), Watchdog({watchdog}):
    piped.pipeline.run(2, feed)
"""


def test_a_hang_or_a_failure_is_told_with_the_op_that_each_rank_is_in(tmp_path: Path) -> None:
    tests = str(jobs.ROOT / "tests")
    (tmp_path / "hang.py").write_text(STUCK.format(tests=tests, seconds=60, watchdog=4))
    hung = jobs.run(["hang.py"], 2, cwd=tmp_path)
    assert hung.status != 0
    assert re.search(r"rank 0 of 2 \[F 0\.1\]: no progress for 4 s", hung.stderr), hung.stderr
    waits = r"waits \d\.\d s in receive of float64 \[.*\], F for stage 1 from rank 0 over pp \(ranks 0, 1\)"
    assert re.search(rf"rank 1 of 2 \[F 0\.1; {waits}\]: no progress for 4 s", hung.stderr), hung.stderr
    (tmp_path / "fail.py").write_text(STUCK.format(tests=tests, seconds=0, watchdog=60))
    failed = jobs.run(["fail.py"], 2, cwd=tmp_path)
    assert failed.status != 0
    assert re.search(r"uncaught exception on rank 0 of 2 \[F 0\.1\]:", failed.stderr), failed.stderr


@pytest.mark.mpi(sizes=(4,))
def test_ranks_that_do_not_agree_on_the_pipeline_are_told_in_what(make_grid: Any, world_size: int) -> None:
    case = Case(2, 3, scheme="oned", axes=Y2, family="gpt2", layers=3)
    piped = Piped(case, make_grid)
    piped.pipeline.check(3)
    with pytest.raises(AgreementError) as raised:
        piped.pipeline.check(3 + (piped.grid.rank == 2))
    assert re.fullmatch(
        r"the 4 ranks do not agree on the pipeline:\n  schedule: "
        r"'schedule 1f1b \(p=2, m=3, v=1\), ops \w+' on ranks 0, 1, 3; 'schedule 1f1b \(p=2, m=4, v=1\), ops \w+' on rank 2",
        str(raised.value),
    )
    piped.pipeline.rows += piped.grid.rank == 1
    with pytest.raises(
        AgreementError, match=r"on the pipeline:\n  stream between stages: \(4, .* on ranks 0, 2, 3; \(5, .*rank 1$"
    ):
        piped.pipeline.check(3)
    piped.executor.channel.free()
