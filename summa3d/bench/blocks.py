"""Benchmark of transformer blocks in several schemes and grids on the same ranks, with equal weights and inputs.

Forward and backward are timed separately in interleaved rounds. Words are counted by the ledger, bytes by torch's saved-tensor
hooks and allocations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.device.select import settle
from ..comm.grid import Grid
from ..comm.profile.nvtx import Ranges
from ..comm.profile.trace import Trace, write
from ..comm.topology import describe, several
from ..errors import LayoutError
from ..gemm.algorithms.cuboid import CuboidPlan
from ..layout.distribute import collect, distribute
from ..nn.config import ModelConfig
from ..nn.context import Context, scheme
from ..nn.layers.attention_mask import Visible
from ..nn.layers.dropout import Batch
from ..nn.models.block import Block
from ..nn.overlap import DEFAULT, Overlap
from ..nn.parameter import initialise
from ..nn.schemes.registry import SCHEME_SPECS
from ..nn.schemes.scheme import Scheme
from .clock import Clock
from .memory import peak_bytes, saved_bytes
from .race import raced, show, split
from .statistics import times_of

if TYPE_CHECKING:
    from mpi4py import MPI

SEED = 1


@dataclass(frozen=True)
class Case:
    """A stack of `config.layers` blocks on b sequences of s tokens, on the host or on each rank's current CUDA device.

    >>> case = Case(ModelConfig(layers=1, hidden=8, heads=2, sequence=4), batch=2)
    >>> case.shape
    (2, 4, 8)
    """

    config: ModelConfig
    batch: int
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def shape(self) -> tuple[int, int, int]:
        """The global shape [b, s, h] of the residual stream."""
        return self.batch, self.config.sequence, self.config.hidden

    @property
    def flops(self) -> int:
        """Floating-point operations of all matrix products, forward and backward: 6 per weight and token, and attention's.

        The two products of attention count all s² scores, as without a mask.
        """
        config = self.config
        h, kv = config.hidden, config.hidden // config.heads * config.num_kv_heads
        linears = 3 if config.architecture.activation == "swiglu" else 2
        token = config.layers * (2 * h * h + 2 * h * kv + linears * h * config.ffn_dim + 2 * config.sequence * h)
        return 6 * self.batch * self.config.sequence * token


@dataclass(frozen=True)
class BlockEntry:
    """An entry of the benchmark: a scheme on a grid of all ranks.

    `regather` gathers operands again in backward instead of keeping them; `overlap` says what is in flight meanwhile.
    """

    scheme: str
    grid: Mapping[str, int]
    regather: bool = True
    overlap: Overlap = DEFAULT

    @property
    def label(self) -> str:
        """The entry's name in tables: scheme, grid without axes of size 1, and switches that differ from the default."""
        axes = several(self.grid) or self.grid
        switches = {name: value for name, value in asdict(self.overlap).items() if value != getattr(DEFAULT, name)}
        in_flight = "".join(f" {name}={int(value) if isinstance(value, bool) else value}" for name, value in switches.items())
        return f"{self.scheme} {describe(axes)}" + ("" if self.regather else " keep") + in_flight


def grids_for(name: str, ranks: int, case: Case) -> list[dict[str, int]]:
    """All grids of `ranks` ranks on which the scheme can run the case."""
    return [shape for shape in SCHEME_SPECS[name].grids(ranks) if fits(name, shape, case)]


def gathers(name: str) -> bool:
    """Return whether the scheme's products all-gather operands, so that backward may gather them again or keep them."""
    kind = SCHEME_SPECS[name]
    return isinstance(kind.plan(kind.residual, "nn", 1, 1, 1), CuboidPlan)


def fits(name: str, shape: Mapping[str, int], case: Case) -> bool:
    """Return whether the scheme can run the case on a grid of this shape, with like parts on all ranks."""
    try:
        layouts = Scheme.of(name, shape)
        layouts.check(case.config, case.batch)
        layouts.check_even(case.config, case.batch)
    except LayoutError:
        return False
    return True


class Stack(nn.Module):
    """The blocks of a model, one after the other, on the residual stream."""

    def __init__(self, config: ModelConfig, context: Context, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, context, f"blocks.{index}", dtype) for index in range(config.layers))
        initialise(self, context, SEED)
        if context.prefetcher is not None:
            context.prefetcher.follow(self)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Apply all blocks to the local block `x` of the residual stream."""
        for block in self.blocks:
            x = block(x, batch, Visible())
        return x


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """The global input [b, s, h] and the global gradient of the output [b, s, h], equal for all entries."""
    drawn = torch.randn((2, *case.shape), generator=torch.Generator().manual_seed(SEED))
    x, gradient = drawn.to(getattr(torch, case.dtype)).to(case.device)
    return x, gradient


class BlockRunner:
    """An entry of the benchmark with its sharded weights and input. Its constructor is collective over `world`.

    A peer library's model races beside it with the same `ranks`, `seconds`, `output`, `facts` and `amounts`.
    """

    def __init__(self, entry: BlockEntry, case: Case, world: MPI.Intracomm) -> None:
        self.entry, self.case, self.comm, self.ranks = entry, case, world, world.size
        self.grid = Grid(world, dict(entry.grid), node_memory=None if case.device == "cpu" else False)
        self.clock = Clock(self.grid)
        self.context = scheme(entry.scheme, self.grid, entry.regather, overlap=entry.overlap)
        self.context.scheme.check(case.config, case.batch)
        with torch.device(case.device):
            self.stack = Stack(case.config, self.context, getattr(torch, case.dtype))
        x, gradient = inputs(case)
        self.x = self._stored(x).requires_grad_()
        self.gradient = self._stored(gradient)
        self.batch = Batch(case.batch, case.config.sequence)

    def facts(self) -> dict[str, Any]:
        """The columns of a row that name the entry: scheme, grid, regather and label."""
        entry = self.entry
        return {"scheme": entry.scheme, "grid": dict(entry.grid), "regather": entry.regather, "label": entry.label}

    def _stored(self, whole: Tensor) -> Tensor:
        return self.context.as_stored(distribute(whole, self.grid, self.context.residual))

    def forward(self) -> Tensor:
        """Run the stack on the local block of the input and return the local block of its output; collective."""
        with self.grid.ledger.phase("forward"):
            y: Tensor = self.stack(self.x, self.batch)
        return y

    def backward(self, y: Tensor) -> None:
        """Run backward from the output `y` of `forward`; collective."""
        with self.grid.ledger.phase("backward"):
            y.backward(self.gradient)

    def forget(self) -> None:
        """Set all gradients to None, as an optimizer does between steps."""
        self.x.grad = None
        self.stack.zero_grad(set_to_none=True)

    def seconds(self) -> tuple[float, float]:
        """Seconds of one forward and of one backward, over all ranks; collective."""
        with self.grid.ledger.run(self.entry.label):
            forward, backward = self.clock.spans(self._forward, self._backward)
        del self._y
        self.forget()
        return forward, backward

    def _forward(self) -> None:
        self._y = self.forward()
        settle(self._y)

    def _backward(self) -> None:
        self.backward(self._y)
        settle(self._y)

    def output(self) -> Tensor:
        """The global output [b, s, h] of one forward without autograd; collective."""
        with torch.no_grad():
            y = self.context.batch_first(self.forward())
        return collect(y, self.grid, self.context.residual, self.case.shape)

    def amounts(self) -> dict[str, Any]:
        """Words, messages and bytes of one step, as the largest over ranks, and the mean words; collective."""
        ledger = self.grid.ledger
        with ledger.watch() as forward:
            y = self.forward()
        with ledger.watch() as backward:
            self.backward(y)
        self.forget()
        del y
        with saved_bytes([self.x, *self.stack.parameters()]) as saved:
            self.forward()

        def step() -> None:
            self.backward(self.forward())

        peak = peak_bytes(step, self.x.device)
        self.forget()
        held = sum(parameter.nbytes for parameter in self.stack.parameters())
        mine = (forward.words, backward.words, forward.messages, backward.messages, saved.bytes, peak + held, held)
        all_ranks = self.comm.allgather(mine)
        most = [max(values) for values in zip(*all_ranks, strict=True)]
        mean = [sum(values) / len(values) for values in zip(*all_ranks, strict=True)]
        return {
            "words_per_rank": {"forward": most[0], "backward": most[1]},
            "words_mean": {"forward": mean[0], "backward": mean[1]},
            "messages_per_rank": {"forward": most[2], "backward": most[3]},
            "saved_bytes": most[4],
            "peak_bytes": most[5],
            "parameter_bytes": most[6],
            "split": split(self.grid.ledger, self.seconds, self.comm),
        }

    def free(self) -> None:
        """Free the grid's communicators; collective."""
        self.grid.free()


def run_benchmark(
    entries: Sequence[BlockEntry],
    case: Case,
    world: MPI.Intracomm,
    rounds: int,
    file: Path | None = None,
    ranges: Ranges | None = None,
) -> dict[str, Any]:
    """Run the benchmark: in each round, every entry runs once; collective over `world`.

    Parameters
    ----------
    rounds : rounds that are timed, after a warm-up round that is not counted
    file : trace of one more round
    ranges : NVTX ranges, which show that round to a profiler

    Returns the case and rows with min, median, max and all seconds of forward, backward and both, the columns of
    `BlockRunner.amounts`, and `relative_difference`: ‖y − y₀‖ / ‖y₀‖ of an entry's output y and the first entry's output y₀. The
    difference is a rounding error, since all entries compute the same function.
    """
    runners = [BlockRunner(entry, case, world) for entry in entries]
    seconds = timed(runners, rounds, world)
    if file is not None or ranges is not None:
        whole = Trace()
        for runner in runners:
            show(runner.grid.ledger, runner.seconds, whole, ranges)
        if file is not None:
            write(file, whole, world)
    rows = list(rows_of(runners, seconds))
    for runner in runners:
        runner.free()
    return {**facts(case, world.size), "rows": rows}


def facts(case: Case, ranks: int) -> dict[str, Any]:
    """The case, the number of ranks and torch's version, for a result."""
    return {
        "case": {**asdict(case.config), "batch": case.batch, "dtype": case.dtype, "device": case.device, "flops": case.flops},
        "ranks": ranks,
        "torch": torch.__version__,
    }


def timed(contenders: Sequence[BlockRunner], rounds: int, world: MPI.Intracomm) -> list[dict[str, Any]]:
    """Seconds of every contender, in interleaved rounds after a warm-up round that is not counted; collective."""
    return [
        {
            "forward": times_of([forward for forward, _ in taken]),
            "backward": times_of([backward for _, backward in taken]),
            "both": times_of([forward + backward for forward, backward in taken]),
        }
        for taken in raced(contenders, rounds, world)
    ]


def rows_of(contenders: Sequence[BlockRunner], seconds: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each contender: its name, seconds and amounts, and the relative difference of its output from the first one's."""
    reference = contenders[0].output()
    for contender, taken in zip(contenders, seconds, strict=True):
        difference = (contender.output() - reference).norm() / reference.norm()
        yield {**contender.facts(), "seconds": taken, **contender.amounts(), "relative_difference": difference.item()}
