"""Measures the machine that it runs on, all ranks at once: products, element-wise work, layers, collectives and messages."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle
from math import ceil, log2, prod
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.axis import Axis
from ..comm.device.arrays import Array, copy_into, library_of, numpy_dtype
from ..comm.device.select import placed, settle
from ..comm.grid import Grid
from ..comm.nodes import Nodes
from ..errors import ConfigError
from ..gemm.algorithms.cuboid import Cuboid, CuboidPlan
from ..gemm.local.blas import accumulate
from .clock import Clock
from .fitted import Measured, MeasuredTime
from .machine import threads_of_rank

if TYPE_CHECKING:
    from mpi4py import MPI

SIDES = (64, 128, 256, 512, 1024, 2048, 4096)
THIN = ((32, 1024, 1024), (1024, 32, 1024), (1024, 1024, 32), (128, 2048, 512), (2048, 128, 512), (512, 2048, 128))
FULL = ("float32", "float64")
"""The dtypes of which all sizes are measured; of the others one, from which their peak follows."""
OTHERS = {"cpu": ("complex64", "complex128", "int32", "int64"), "cuda": ("float16",)}
OTHER_SIDE = {"cpu": 256, "cuda": 4096}
ARRAYS = (1 << 20, 4 << 20, 64 << 20)
"""Bytes of the arrays that are copied and added."""
MESSAGES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes that a collective leaves on each rank, and of a message from one rank to another."""
SPAN, ROUNDS = 0.03, 5
"""Seconds that repetitions of one measurement take, and how often they are measured: the median counts, as it does of steps."""
LONGEST = 0.6
"""Seconds that a product may take; larger ones are left out."""
MOST = 2000
"""Repetitions at most."""
TOUCHED = 64 << 20
"""Bytes that repetitions of arithmetic read before they read the same again: what a step computes with has left the caches."""
KEYS_AND_SIZES = ((64, 32), (64, 64), (256, 32), (256, 64), (1024, 64))
"""Keys and head sizes of fused attention, which computes with sizes rounded up to multiples of 32 (`plan.price.LANES`)."""
HEADS, TOKENS = 8, 2048
"""Heads of attention, and the tokens of all sequences."""
MEMORY_SHARE = 12
"""The part of a node's memory that the arrays of all its ranks may fill."""


@dataclass
class Trial:
    """A measurement: what is repeated how often, what its seconds are divided by, and those of its rounds, with the wall's.

    once : seconds of a single repetition, by which `times` is chosen. worked : whether the seconds of a rank's processor count in
    place of the wall's
    """

    sample: MeasuredTime
    act: Callable[[], Array]
    once: float
    times: int
    divided: float
    worked: bool
    rounds: list[tuple[float, float]] = field(default_factory=list)

    @property
    def measured(self) -> MeasuredTime:
        """The sample with the medians of its rounds."""
        seconds, wall = (median(item) for item in zip(*self.rounds, strict=True))
        return self.sample._replace(seconds=seconds / self.divided, wall=wall)


class Calibration:
    """Measurements on all ranks of `world`, on the host or on each rank's current device (collective).

    Raises ConfigError where nodes have different numbers of ranks.
    """

    def __init__(self, world: MPI.Intracomm, device: str = "cpu") -> None:
        nodes = Nodes.of(world)
        if len(set(nodes.ranks)) > 1:
            raise ConfigError(
                f"calibrate takes as many ranks on every node; these nodes have {', '.join(map(str, nodes.ranks))}."
            )
        self.world, self.device, self.ranks, self.nodes = world, device, nodes.ranks[0], len(nodes.ranks)
        threads = world.bcast(threads_of_rank())
        self.slots = 0 if device == "cuda" else max(1, min(nodes.cores) // threads)
        self.has_torch = device == "cpu" and importlib.util.find_spec("torch") is not None
        self.one_thread = device == "cpu" and threads == 1
        self.grid = Grid(world, {"x": self.ranks, "y": self.nodes}, order=("x", "y"))
        self.clock, self.grids = Clock(self.grid), [self.grid]
        self.shared = device == "cpu" and bool(self.grid.staged)
        self.largest = world.bcast(node_memory() // MEMORY_SHARE // self.ranks // 3)

    @property
    def crowding(self) -> float:
        """By how much ranks that share a core slow each other down."""
        return float(ceil(self.ranks / self.slots)) if self.slots else 1.0

    def run(self) -> Measured:
        """All measurements, in rounds, so that a while of other work spoils none of them; collective, equal on all ranks."""
        trials = [*self.products(), *self.elements()]
        if self.has_torch:
            trials += [*self.attention(), *self.layers()]
        trials += [*self.moves(), *self.messages()]
        for _ in range(ROUNDS):
            for trial in trials:
                trial.rounds.append(self.repeated(trial.act, trial.times, trial.worked))
        memory = device_memory() if self.device == "cuda" else node_memory() / self.ranks
        for grid in self.grids:
            grid.free()
        samples = tuple(trial.measured for trial in trials)
        return Measured(self.ranks, self.nodes, self.slots, float(memory), self.shared, samples)

    def repeated(self, act: Callable[[], Any], times: int, worked: bool) -> tuple[float, float]:
        """Seconds of one of `times` repetitions on all ranks, and of the wall; of what act returns, all that is queued is done.

        worked : the former are those of the processor of the rank that works the longest
        """
        from mpi4py import MPI

        busy = 0.0

        def run() -> None:
            nonlocal busy
            start = time.thread_time()
            for _ in range(times):
                last = act()
            settle(last)
            busy = time.thread_time() - start

        wall = self.clock.spans(run)[0] / times
        return (self.world.allreduce(busy, MPI.MAX) / times if worked else wall), wall

    def trial(
        self, sample: MeasuredTime, act: Callable[[], Any], divided: float | None = None, worked: bool | None = None
    ) -> Trial:
        """A measurement.

        divided : what its time is divided by; by default how much ranks slow each other down, if it is the wall's. worked : by
        default whether one thread computes: other work takes cores, but not speed.
        """
        worked = self.one_thread if worked is None else worked
        self.repeated(act, 1, worked)
        once, _ = self.repeated(act, 1, worked)
        times = int(min(MOST, max(1, SPAN / max(once, 1e-7))))
        return Trial(sample, act, once, times, divided or (1.0 if worked else self.crowding), worked)

    def array(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """An array of ones where the ranks compute."""
        return placed(np.ones(shape, numpy_dtype(dtype)), self.device)

    @cached_property
    def pools(self) -> tuple[Array, Array]:
        """Buffers that arithmetic reads, of ones, and writes."""
        size = min(TOUCHED, self.largest) // 4
        return self.array((size,)), self.array((size,))

    def operands(
        self, read: Sequence[tuple[int, ...]], written: tuple[int, ...], dtype: str = "float32", tensors: bool = False
    ) -> Iterator[list[Array]]:
        """Arrays of these shapes to read, and one to write, or torch's tensors; each time others, until `pools` are used up."""
        inputs, outputs = (pool.view(numpy_dtype(dtype)) for pool in self.pools)
        sizes, size = [prod(shape) for shape in read], prod(written)
        many = min(MOST, inputs.shape[0] // sum(sizes), outputs.shape[0] // size)
        if many < 2:
            result = [[self.array(shape, dtype) for shape in (*read, written)]]
        else:
            result = [[*parts(inputs[at * sum(sizes) :], read), *parts(outputs[at * size :], [written])] for at in range(many)]
        if tensors:
            import torch

            result = [[torch.from_numpy(array) for array in arrays] for arrays in result]
        return cycle(result)

    # -- one rank's arithmetic -----------------------------------------------------------------------------------------------

    def products(self) -> Iterator[Trial]:
        """Products of growing cubes and of thin shapes, through what multiplies blocks; and one of a single element."""
        for dtype in FULL:
            for side in SIDES:
                result = self.product(side, side, side, dtype)
                yield result
                if 8 * result.once > LONGEST:
                    break
            for shape in THIN:
                yield self.product(*shape, dtype)
        side = OTHER_SIDE[self.device]
        for dtype in OTHERS[self.device]:
            yield self.product(side, side, side, dtype)
        yield self.launch()

    def product(self, m: int, n: int, k: int, dtype: str) -> Trial:
        """One local product."""
        operands = self.operands([(m, k), (k, n)], (m, n), dtype)

        def act() -> Array:
            a, b, out = next(operands)
            accumulate(a, b, "nn", out)
            return out

        return self.trial(MeasuredTime("product", f"{m}×{n}×{k} {dtype}", dtype=dtype, m=m, n=n, k=k), act)

    def launch(self) -> Trial:
        """A distributed product that has next to nothing to do, on a grid of this rank alone."""
        from mpi4py import MPI

        alone = Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1})
        executor = Cuboid(CuboidPlan("nn", 8, 8, 8), alone)
        a, b, out = (self.array((8, 8)) for _ in range(3))
        self.grids.append(alone)
        sample = MeasuredTime("product", "8×8×8 by an executor", dtype="float32", m=8, n=8, k=8)
        return self.trial(sample, lambda: executor.run(a, b, out))

    def elements(self) -> Iterator[Trial]:
        """Copies and additions, by torch on the host where it is installed: what computes a model's element-wise work."""
        for nbytes in (8, *ARRAYS):
            if nbytes > self.largest:
                return
            shape = (nbytes // 4,)
            sets = self.operands([shape, shape], shape, tensors=self.has_torch)
            yield self.trial(MeasuredTime("elements", f"copy of {nbytes:,} bytes", bytes=2 * nbytes), partial(copy, sets))
            yield self.trial(MeasuredTime("elements", f"addition of {nbytes:,} bytes", bytes=3 * nbytes), partial(add, sets))
            if self.has_torch and nbytes > 8:
                sample = MeasuredTime("elements", f"GELU of {nbytes:,} bytes", bytes=2 * nbytes, functions=nbytes // 4)
                yield self.trial(sample, partial(gelu, sets))

    def attention(self) -> Iterator[Trial]:
        """Fused causal attention and its backward."""
        import torch

        from ..dry.trace import ATTENTION

        forward, backward = (getattr(torch.ops.aten, name) for name in ATTENTION)
        for keys, size in KEYS_AND_SIZES:
            whole = torch.ones(TOKENS // keys, keys, HEADS, 4 * size).transpose(1, 2)
            q, k, v, gradient = whole.split(size, dim=-1)  # beside each other, as a fused product leaves them
            out, sums = forward(q, k, v, 0.0, True)[:2]
            acts = partial(forward, q, k, v, 0.0, True), partial(backward, gradient, q, k, v, out, sums, 0.0, True)
            for way, act, products in zip(("forward", "backward"), acts, ATTENTION.values(), strict=True):
                many = TOKENS // keys * HEADS * products // 2  # as a trace counts causal scores
                sample = MeasuredTime("attention", way, dtype="float32", m=keys, n=keys, k=size, products=many)
                yield self.trial(sample, partial(first_of, act))

    def layers(self) -> Iterator[Trial]:
        """A transformer block that has next to nothing to compute, on a grid of this rank alone: what its Python takes.

        Its products are those of grids of several ranks, and not torch's own layers.
        """
        from mpi4py import MPI

        from ..nn.config import ModelConfig
        from ..plan.cells import BLOCK, cells
        from ..plan.price import OF_COLLECTIVES
        from .blocks import BlockEntry, BlockRunner, Case
        from .predicted import setting_of

        config = ModelConfig(layers=1, hidden=8, heads=2, sequence=4, vocabulary=8)
        entry, case = BlockEntry("cuboid", {"x": 1, "y": 1, "z": 1}, regather=False), Case(config, 1)
        runner = BlockRunner(entry, case, MPI.COMM_SELF)
        self.grids.append(runner.grid)
        job = runner.grid.job
        job.blas = job.blas._replace(worth={case.dtype: 0}, least=sys.maxsize)  # nothing is torch's layer, all torch's product

        def act() -> Any:
            y = runner.forward()
            runner.backward(y)
            runner.forget()
            return y

        ops = [op for trace in cells(setting_of(entry, case, 1))[BLOCK] for op in trace]
        many = Counter(op.kind for op in ops if op.name not in OF_COLLECTIVES)
        yield self.trial(MeasuredTime("layers", "a small block", products=many["product"], kernels=many["elements"]), act)

    # -- between ranks -------------------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[Trial]:
        """Collectives of each level, of all its ranks, and in a node of pairs too; all groups of an axis at once."""
        for level, axis, sharing in (("node", self.grid["x"], 1), ("network", self.grid["y"], self.ranks)):
            yield from self.collectives(axis, level, sharing)
        if self.ranks >= 4 and self.ranks % 2 == 0:
            pairs = Grid(self.world, {"x": 2, "y": self.ranks // 2 * self.nodes}, order=("x", "y"))
            self.grids.append(pairs)
            yield from self.collectives(pairs["x"], "node", 1)

    def collectives(self, axis: Axis, level: str, sharing: int) -> Iterator[Trial]:
        """Rings of all sizes along an axis; none along one of a single member."""
        size = axis.size
        worked = self.shared and self.crowding > 1 and level == "node"  # a rank that waits sleeps, and leaves others the core
        for nbytes in MESSAGES if size > 1 else ():
            total = max(nbytes // 4 // size, 1) * size
            if 4 * total > self.largest:
                return
            part, whole = self.array((total // size,)), self.array((total,))
            acts: dict[str, tuple[int, Callable[[], Array]]] = {
                "all_gather": (1, partial(axis.all_gather, part, into=whole)),
                "reduce_scatter": (1, partial(axis.reduce_scatter, whole, into=part)),
                "all_reduce": (2, partial(axis.all_reduce, whole)),
            }
            for name, (times, act) in acts.items():
                received, what = times * 4 * (total - total // size), f"{name} of {4 * total:,} bytes on {size} ranks"
                hops = 2 * log2(size) if times == 2 and level == "network" else times * (size - 1)  # a tree between nodes
                sample = MeasuredTime("move", what, bytes=received * sharing, level=level, hops=hops)
                yield self.trial(sample, act, 1.0 if level == "network" else None, worked)

    def messages(self) -> Iterator[Trial]:
        """Messages between two ranks of a node, and of two nodes, there and back, while the others wait.

        None in a node whose ranks share cores: these two have cores of their own meanwhile, which no run leaves them.
        """
        partners = (("node", self.grid["x"], 0), ("network", self.grid["y"], 0))
        for level, axis, index in partners[self.crowding > 1 :]:
            for nbytes in MESSAGES if axis.size > 1 else ():
                if nbytes > self.largest:
                    break
                array = self.array((nbytes // 4,))
                axis.open_device(array)
                plays = self.grid.coordinates["y" if level == "node" else "x"] == 0 and axis.index in (index, index + 1)

                def act(array: Array = array, axis: Axis = axis, first: bool = axis.index == index, plays: bool = plays) -> Array:
                    for sends in (first, not first) if plays else ():
                        if sends:
                            axis.send(array, 1 - axis.index)
                        else:
                            axis.receive(array, 1 - axis.index)
                    return array

                what = f"message of {nbytes:,} bytes"
                yield self.trial(MeasuredTime("move", what, bytes=nbytes, level=level, hops=1, message=True), act, 2.0, False)


def parts(pool: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Arrays of these shapes, one behind the other, at the beginning of `pool`."""
    for shape in shapes:
        yield pool[: prod(shape)].reshape(shape)
        pool = pool[prod(shape) :]


def first_of(act: Callable[[], Sequence[Array]]) -> Array:
    """The first result of an act that has several."""
    return act()[0]


def copy(sets: Iterator[list[Array]]) -> Array:
    """A copy of the next of `sets`."""
    a, _, out = next(sets)
    return copy_into(out, a)


def add(sets: Iterator[list[Array]]) -> Array:
    """A sum of the next two of `sets`."""
    a, b, out = next(sets)
    library_of(a).add(a, b, out=out)
    return out


def gelu(sets: Iterator[list[Array]]) -> Array:
    """GELU of the next of `sets`, approximated by tanh, as in GPT-2."""
    import torch

    a, _, out = next(sets)
    return torch.ops.aten.gelu.out(a, approximate="tanh", out=out)


def node_memory() -> int:
    """Bytes of memory of this node."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_memory() -> int:
    """Bytes of memory of this rank's current device."""
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[1])
