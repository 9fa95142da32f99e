"""What a run measures: one line per step in metrics.jsonl, gathered over the ranks without making them wait, and its sums.

Keys of a line: step, loss, grad_norm, lr, tokens_per_second, seconds, words_per_rank (the largest of a rank), the shares of
`CoreTime` (arithmetic_share, idle_share, and where words were moved communication_share and waited_seconds), and where there are
any validation_loss, loss_scale and skipped_steps.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.ledger import Ledger

KIBI = 1024


@dataclass
class Step:
    """What one step did, on this rank; loss, grad_norm, lr and scale are the same on every rank. `step` counts from 1.

    A run with dynamic loss scaling says the step's scale, and how many steps it has skipped so far.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float = 0.0
    words: int = 0
    arithmetic_seconds: float = 0.0
    communication_seconds: float = 0.0
    waited_seconds: float = 0.0
    validation_loss: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None


class Stopwatch:
    """Wall seconds, words moved, and where the CPU time went, since it was made, on this rank.

    CPU time is that of the thread that trains; with several BLAS threads, that of the process. Arithmetic is what lies outside
    communication calls, the data's and the optimizer's included; communication what lies inside them; waited are the wall
    seconds inside them without CPU time: this rank slept, for another or for a core. An MPI library that spins while it waits
    makes CPU time of it. Of a device, waited are the seconds of its communications.
    """

    def __init__(self, ledger: Ledger, threads: int) -> None:
        self._ledger = ledger
        self._cpu = time.thread_time if threads == 1 else time.process_time
        self._start = self._now()

    def _now(self) -> np.ndarray:
        total = self._ledger.total()
        inside, wall = total.cpu_seconds, time.perf_counter()
        return np.array([wall, total.words, self._cpu() - inside, inside, total.seconds - inside])

    def stop(self, step: Step) -> None:
        """Write what has passed into `step`."""
        passed = [float(amount) for amount in self._now() - self._start]
        step.seconds, step.words, step.arithmetic_seconds, step.communication_seconds = passed[0], round(passed[1]), *passed[2:4]
        step.waited_seconds = max(passed[4], 0.0)


@dataclass(frozen=True)
class CoreTime:
    """Where the time of the cores went, as shares of cores × wall seconds: CPU seconds summed over ranks, and the rest.

    communication : CPU time inside communication calls; None where nothing was moved.
    idle : what is neither arithmetic nor communication: cores that slept, or worked for somebody else.
    waited : wall seconds that a rank was inside communication calls without CPU time, the mean over ranks; None where nothing
        was moved. It is no share of the cores: where ranks outnumber them, a rank waits while another computes.
    """

    cores: int
    arithmetic: float
    communication: float | None
    idle: float
    waited: float | None

    @classmethod
    def of(cls, cores: int, seconds: float, words: int, ranks: int, cpu: Sequence[float]) -> CoreTime:
        """Of the sums over ranks `cpu`: seconds of arithmetic, of communication, and waited."""
        whole = cores * seconds
        arithmetic, communication = (part / whole if whole else 0.0 for part in cpu[:2])
        idle = max(1 - arithmetic - communication, 0.0)
        if not words:
            return cls(cores, arithmetic, None, idle, None)
        return cls(cores, arithmetic, communication, idle, cpu[2] / ranks)

    def __str__(self) -> str:
        shares = [f"arithmetic {self.arithmetic:.0%}"]
        if self.communication is not None:
            shares.append(f"communication {self.communication:.0%}")
        waited = "" if self.waited is None else f" · waited {self.waited:,.2f} s"
        return f"{', '.join(shares)}, idle {self.idle:.0%} of {self.cores} cores{waited}"

    def entries(self) -> dict[str, float]:
        """The keys of a metrics line and of a summary; those that nothing was measured of are left out."""
        found = {
            "arithmetic_share": self.arithmetic,
            "communication_share": self.communication,
            "idle_share": self.idle,
            "waited_seconds": self.waited,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass
class Account:
    """Sums over the steps of a run, on rank 0; `cpu` are seconds of arithmetic, of communication, and waited, over all ranks."""

    cores: int
    ranks: int = 1
    steps: int = 0
    seconds: float = 0.0
    cpu: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tokens: int = 0
    words: int = 0

    def add(self, step: Step, words: int, cpu: Sequence[float]) -> CoreTime:
        """Add a step, of which `words` are the most of a rank and `cpu` the sums over ranks; returns where its time went."""
        self.steps += 1
        self.seconds += step.seconds
        arithmetic, communication, waited = (held + more for held, more in zip(self.cpu, cpu, strict=True))
        self.cpu = arithmetic, communication, waited
        self.tokens += step.tokens
        self.words = max(self.words, words)
        return CoreTime.of(self.cores, step.seconds, words, self.ranks, cpu)

    @property
    def core_time(self) -> CoreTime:
        """Where the time of all steps went."""
        return CoreTime.of(self.cores, self.seconds, self.words, self.ranks, self.cpu)


class Recorder:
    """Writes metrics.jsonl on rank 0. The ranks' counters of a step are gathered while the next step runs.

    Ranks post their counters and go on; the line of a step is written when the next step is posted, or at `flush`.
    `post` and `flush` are called by all ranks alike. A run that resumes drops the lines of the steps it does again.
    """

    def __init__(self, path: Path, comm: MPI.Intracomm, resumed_at: int) -> None:
        self.comm = comm.Dup()
        self.account = Account(usable_cores(comm), comm.size)
        self.core_time: CoreTime | None = None
        self._mine = np.zeros(4)
        self._all = np.zeros((comm.size, 4)) if comm.rank == 0 else None
        self._pending: tuple[Step, MPI.Request] | None = None
        self._file = open_at(path, resumed_at) if comm.rank == 0 else None

    def post(self, step: Step) -> None:
        """Send this rank's counters of `step` on their way."""
        self.flush()
        self._mine[:] = step.words, step.arithmetic_seconds, step.communication_seconds, step.waited_seconds
        self._pending = step, self.comm.Igather(self._mine, self._all, root=0)

    def flush(self) -> None:
        """Complete the step in flight and write its line."""
        if self._pending is None:
            return
        step, request = self._pending
        self._pending = None
        request.Wait()
        if self._all is None or self._file is None:
            return
        words, cpu = int(self._all[:, 0].max()), [float(amount) for amount in self._all[:, 1:].sum(0)]
        self.core_time = self.account.add(step, words, cpu)
        self._file.write(json.dumps(line(step, words, self.core_time)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write what is left; collective."""
        self.flush()
        if self._file is not None:
            self._file.close()
        self.comm.Free()


def line(step: Step, words: int, core_time: CoreTime) -> dict[str, Any]:
    """The keys of a metrics line, as the module lists them; `words` is the largest over the ranks. What is not finite is null."""
    entry: dict[str, Any] = {
        "step": step.step,
        "loss": finite(step.loss),
        "grad_norm": finite(step.grad_norm),
        "lr": step.lr,
        "tokens_per_second": step.tokens / step.seconds,
        "seconds": step.seconds,
        "words_per_rank": words,
        **core_time.entries(),
    }
    optional = ("validation_loss", "loss_scale", "skipped_steps")
    return entry | {name: value for name in optional if (value := getattr(step, name)) is not None}


def finite(value: float) -> float | None:
    """`value` as JSON can hold it."""
    return value if isfinite(value) else None


def open_at(path: Path, resumed_at: int) -> Any:
    """Open metrics.jsonl for appending, holding only the whole lines of steps 1…resumed_at."""
    kept = [entry for entry in read(path) if entry["step"] <= resumed_at]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    os.replace(temporary, path)
    return open(path, "a")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut off in the middle of writing is left out."""
    entries = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(text))
        except ValueError:
            break
    return entries


def usable_cores(comm: MPI.Intracomm) -> int:
    """Cores that the job may use: those that the ranks of each node may run on, added over the nodes. Collective."""
    from mpi4py import MPI

    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    union = set().union(*node.allgather(set(mine)))
    cores: int = comm.allreduce(len(union) if node.rank == 0 else 0)
    node.Free()
    return cores


def peak_memory() -> int:
    """Bytes of memory that this process held at its peak, pages shared with other ranks counted in parts.

    The kernel keeps the peak of the resident size (all shared pages counted whole); the difference between resident and
    proportional size, as of now, is taken off.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (KIBI if sys.platform != "darwin" else 1)
    try:
        rollup = dict(text.split(":", 1) for text in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    except OSError:
        return peak
    resident, proportional = (int(rollup[name].split()[0]) * KIBI for name in ("Rss", "Pss"))
    return peak - (resident - proportional)
