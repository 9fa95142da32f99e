"""Zero-bubble pipelines: the bits of accumulation and of 1F1B, what is in flight, the words of paying later, and the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from mpi4py import MPI
from staged import ROWS, X2, XY2, Y2, YZ2, Z2, AfterOps, Case, Piped, accumulate, check_gradients

from summa3d.autograd import matmul
from summa3d.autograd.differentiable import InFlight, Product
from summa3d.comm.pending import Completed
from summa3d.parallel.executor import Stage
from summa3d.parallel.schedule import GRADIENT_SENDERS
from summa3d.parallel.simulate import in_flight

FOUR = {"chunks": 2, "layers": 4}
CASES = {
    2: [
        Case(2, 3, "zb-h1", layers=(0, 3), family="gpt2", selective=True),
        Case(2, 2, "zb-h1", layers=(2, 1), dtype="bfloat16", recompute=2),
        Case(2, 3, "zb-v", family="bert", recompute=1, **FOUR),
    ],
    3: [Case(3, 1, "zb-h1", layers=7, family="tied"), Case(3, 5, "zb-v", 2, layers=7)],
    4: [
        Case(2, 3, "zb-h1", scheme="oned-sp", axes=Y2, layers=3, selective=True),
        Case(2, 2, "zb-v", scheme="oned", axes=Y2, family="gpt2", recompute=1, **FOUR),
        Case(2, 3, "zb-v", scheme="cuboid", axes=Z2, regather=False, **FOUR),
        Case(2, 3, "zb-h1", scheme="cuboid", axes=X2, layers=3, gather=2, recompute=1, dtype="bfloat16"),
    ],
    8: [
        Case(2, 2, "zb-h1", scheme="summa", axes=XY2, family="bert", layers=3),
        Case(2, 2, "zb-v", scheme="cuboid-sequence", axes=YZ2, family="gpt2", recompute=1, **FOUR),
        Case(2, 2, "zb-v", scheme="tesseract", axes=XY2, **FOUR),
    ],
}
WIDE = {
    2: [
        Case(2, 3, schedule, chunks, layers=5, family=family, **options)
        for schedule, chunks in (("zb-h1", 1), ("zb-v", 2))
        for family in ("gpt2", "llama", "bert")
        for options in ({}, {"selective": True}, {"recompute": 1}, {"recompute": 2, "dtype": "bfloat16"})
    ],
    4: [Case(4, 9, "zb-v", 2, layers=9, family="tied"), Case(4, 3, "zb-h1", layers=4)]
    + [
        Case(2, 3, schedule, chunks, layers=4, scheme="cuboid", axes=axes, regather=regather, gather=gather, dtype=dtype)
        for schedule, chunks in (("zb-h1", 1), ("zb-v", 2))
        for axes in (X2, Z2)
        for regather, gather, dtype in ((True, 0, "bfloat16"), (True, 1, "float64"), (False, 3, "float64"))
    ],
    8: [
        Case(4, 4, "zb-v", 2, layers=8, scheme=name, axes=axes, recompute=recompute)
        for name, axes, recompute in (
            ("oned", Y2, 0),
            ("oned-sp", Y2, 1),
            ("cuboid-sequence", Z2, 0),
            ("cuboid", X2, 1),
            ("tesseract", (("d", 2),), 1),
        )
    ],
}
"""Sweeps of `make test-all`."""


class Counting(AfterOps):
    """A ledger that counts, at the end of each op of a pipeline, the inputs kept from F to X, and from F to W."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.to_x, self.to_w = list[int](), list[int]()

    def after(self) -> None:
        self.to_x.append(len(self.executor.pending))
        self.to_w.append(len(self.executor.pending) + len(self.executor.deferred))


@pytest.mark.mpi(sizes=tuple(CASES), timeout=600)
@pytest.mark.parametrize("cases", [CASES, pytest.param(WIDE, marks=pytest.mark.wide)], ids=["few", "more"])
def test_a_step_has_the_bits_of_accumulation_and_keeps_what_the_simulation_says(
    make_grid: Any, world_size: int, cases: dict[int, list[Case]]
) -> None:
    for case in cases.get(world_size, ()):
        piped = Piped(case, make_grid, check=False)
        kept = Counting(piped.executor)
        losses, want = piped.step(), accumulate(piped, piped.copies)
        last = piped.rank == piped.pipeline.homes[-1]
        assert len(losses) == (case.m if last else 0), case
        assert all(torch.equal(loss, one) for loss, one in zip(losses, want, strict=last)), case
        check_gradients(piped)
        ops, p, m = piped.pipeline.schedule(case.m).ops_of(piped.rank), case.pp, case.m
        assert (kept.to_x, kept.to_w) == (in_flight(ops, GRADIENT_SENDERS), in_flight(ops)), case
        most = min(2 * p, m + 1 + piped.rank) if case.schedule == "zb-v" else min(p, m)
        assert max(kept.to_w) <= most and (case.schedule == "zb-h1" or max(kept.to_w) == most), case
        assert not piped.executor.deferred and not piped.executor.handed, case
        piped.executor.channel.free()


@pytest.mark.mpi(sizes=(2, 4))
def test_zb_h1_has_the_bits_of_1f1b_on_the_same_ranks_with_a_tied_table_too(make_grid: Any, world_size: int) -> None:
    """And a weight that two layers of a stage use: as one backward sums it."""
    inner = {2: {}, 4: {"scheme": "cuboid", "axes": Z2}}[world_size]
    for options in ({"recompute": 0}, {"recompute": 2, "dtype": "bfloat16"}):
        found = []
        for schedule in ("1f1b", "zb-h1"):
            piped = Piped(Case(2, 3, schedule, layers=(2, 2), family="gpt2", **inner, **options), make_grid)
            for blocks in (piped.model.blocks, piped.copies.blocks):
                blocks[1].mlp, blocks[2].mlp = blocks[0].mlp, blocks[3].mlp
            found.append((piped.step(), [p.grad for p in piped.model.parameters() if p.numel()]))
            if schedule == "zb-h1":  # the other has its bits
                accumulate(piped, piped.copies)
                check_gradients(piped)
            piped.executor.channel.free()
        for one, other in zip(*(losses + gradients for losses, gradients in found), strict=True):
            assert torch.equal(one, other), options


GATHERED = [
    ("cuboid", YZ2, True, lambda y, z: (7 * (z - 1) + 2 * (y - 1), z - 1)),
    ("cuboid-sequence", YZ2, True, lambda y, z: (7 * (z - 1) + 2 * (y - 1), z - 1)),
    ("cuboid", YZ2, False, lambda y, z: (0, 0)),
    ("oned-sp", (("y", 4),), True, lambda y, z: (2 * (y - 1), 0)),
    ("oned", (("y", 4),), True, lambda y, z: (0, 0)),
    ("summa", XY2, True, lambda y, z: (0, 0)),
]
"""Scheme, axes, regather; and E/P of a block, bsV/P of the head, that W gathers again of the gradients of products."""


@pytest.mark.mpi(sizes=(8,))
def test_paying_later_gathers_each_products_gradient_once_more_and_moves_nothing_else(make_grid: Any) -> None:
    layers, m = (1, 2), 2
    for name, axes, regather, of in GATHERED:
        rows, found = [], []
        for schedule in ("1f1b", "zb-h1"):
            case = Case(2, m, schedule, layers=layers, family="even", scheme=name, axes=axes, regather=regather)
            piped = Piped(case, make_grid, check=False)
            with piped.grid.ledger.watch() as moved:
                piped.step()
            rows.append({(row.axis, row.collective, row.phase, row.dtype): row.amounts.words for row in moved.rows})
            found.append(moved.words)
            piped.executor.channel.free()
        block, head = of(dict(axes).get("y", 1), dict(axes).get("z", 1))
        config, last = piped.config, piped.rank == piped.pipeline.homes[-1]
        stream = ROWS * config.sequence * config.hidden // 4
        logits = ROWS * config.sequence * config.vocabulary // 4
        more = m * (block * stream * layers[piped.rank] + head * logits * last)
        assert found[1] - found[0] == more, (name, regather)
        changed = {key for key in {**rows[0], **rows[1]} if rows[0].get(key) != rows[1].get(key)}
        assert all(kind == "all_gather" and phase == "backward" for _, kind, phase, _ in changed), (name, changed)


class Timed(Product):
    """A product that takes as long forward as for each of its gradients. It begins when its rank and what it is given are ready.

    What is given is full of the time since when it is.
    """

    is_linear = False

    def __init__(self, piped: Piped, seconds: float, clock: FakeClock) -> None:
        self.in_flight, self.rows = InFlight(state=piped.model.context.state), None
        self.seconds, self.clock = seconds, clock

    def agree(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        pass

    def _done(self, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self.clock.wall = max(self.clock.wall, given.max().item())
        self.clock.passes(self.seconds)
        return torch.full_like(result, self.clock.wall)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return self._done(a, a), (a, b)

    def start_grad_a(self, shared: torch.Tensor, b: torch.Tensor) -> Any:
        return Completed(self._done(shared, shared))

    def start_grad_b(self, shared: torch.Tensor, a: torch.Tensor) -> Any:
        self.clock.passes(self.seconds)
        return Completed(torch.ones(1, dtype=a.dtype))


class TimedStage(Stage):
    """A stage of one such product."""

    def forward(self, x: Any, inputs: Any, batch: Any) -> Any:
        x = inputs["stream"].clone().requires_grad_() if x is None else x
        y = matmul(x, self.model.weight, self.model.product)
        return (y.sum() if self.leaves else y), None  # no term of a router


UNITS = {("1f1b", 1): 33.0, ("interleaved", 2): 28.5, ("zb-h1", 1): 27.0, ("zb-v", 2): 25.5}


@pytest.mark.mpi(sizes=(4,))
def test_steps_of_timed_stages_take_the_times_of_their_schedules(
    comm: Any, make_grid: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 micro-batches on 4 ranks, in units of a rank's forward: from the first op of the trace to the last."""
    unit, m = 0.25, 8
    for (schedule, chunks), units in UNITS.items():
        piped = Piped(Case(4, m, schedule, chunks, layers=8), make_grid, check=False)
        stages, weight = piped.executor.stages, torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        model = SimpleNamespace(context=piped.model.context, weight=weight, product=Timed(piped, unit / chunks, clock))
        send = piped.executor.channel.send
        now = lambda array, *where, send=send: send(torch.full_like(array, clock.wall), *where)  # noqa: E731
        monkeypatch.setattr(piped.executor.channel, "send", now)
        piped.executor.stages = [TimedStage(**{**vars(stage), "model": model}) for stage in stages]
        stream, clock.wall = piped.pipeline.stream().zero_(), 1024.0
        trace = piped.grid.ledger.start_trace()
        piped.pipeline.run(m, lambda micro, stream=stream: ({"stream": stream}, None))
        piped.grid.ledger.stop_trace()
        starts, ends = zip(*(span[1:] for span in trace.runs), strict=True)
        assert weight.grad.item() == m * chunks, schedule
        assert (comm.allreduce(max(ends), MPI.MAX) - comm.allreduce(min(starts), MPI.MIN)) / unit == units, schedule
        piped.executor.channel.free()
