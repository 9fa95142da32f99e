# What a run measures: one line per step in metrics.jsonl, gathered over the ranks without making them wait; the final account.
# Imports config and the standard library, numpy, mpi4py. No torch.
# Next: progress.py (the live line), plot.py (loss.png).
from __future__ import annotations

import json
import os
import resource
import sys
import time
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
    validation_loss: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None


class Stopwatch:
    """Wall seconds, words moved, and CPU seconds outside communication calls, since it was made, on this rank.

    CPU time is that of the thread that trains; with several BLAS threads, that of the process.
    """

    def __init__(self, ledger: Ledger, threads: int) -> None:
        self._ledger = ledger
        self._cpu = time.thread_time if threads == 1 else time.process_time
        self._start = self._now()

    def _now(self) -> tuple[float, int, float]:
        total = self._ledger.total()
        return time.perf_counter(), total.words, self._cpu() - total.cpu_seconds

    def stop(self, step: Step) -> None:
        """Write what has passed into `step`."""
        now = self._now()
        step.seconds, step.words, step.arithmetic_seconds = (
            now[0] - self._start[0],
            now[1] - self._start[1],
            now[2] - self._start[2],
        )


@dataclass
class Account:
    """Sums over the steps of a run, on rank 0."""

    cores: int
    steps: int = 0
    seconds: float = 0.0
    arithmetic_seconds: float = 0.0
    tokens: int = 0
    words: int = 0

    def add(self, step: Step, words: int, arithmetic_seconds: float) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.arithmetic_seconds += arithmetic_seconds
        self.tokens += step.tokens
        self.words = max(self.words, words)

    @property
    def arithmetic_share(self) -> float:
        """CPU seconds outside communication calls, summed over ranks ÷ (cores × wall seconds)."""
        return self.arithmetic_seconds / (self.cores * self.seconds) if self.seconds else 0.0


class Recorder:
    """Writes metrics.jsonl on rank 0. The ranks' counters of a step are gathered while the next step runs.

    Ranks post their counters and go on; the line of a step is written when the next step is posted, or at `flush`.
    `post` and `flush` are called by all ranks alike. A run that resumes drops the lines of the steps it does again.
    """

    def __init__(self, path: Path, comm: MPI.Intracomm, resumed_at: int) -> None:
        self.comm = comm.Dup()
        self.account = Account(usable_cores(comm))
        self.communication_share: float | None = None
        self._mine = np.zeros(2)
        self._all = np.zeros((comm.size, 2)) if comm.rank == 0 else None
        self._pending: tuple[Step, MPI.Request] | None = None
        self._file = open_at(path, resumed_at) if comm.rank == 0 else None

    def post(self, step: Step) -> None:
        """Send this rank's counters of `step` on their way."""
        self.flush()
        self._mine[:] = step.words, step.arithmetic_seconds
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
        words, arithmetic = int(self._all[:, 0].max()), float(self._all[:, 1].sum())
        self.account.add(step, words, arithmetic)
        self.communication_share = 1 - arithmetic / (self.account.cores * step.seconds)
        self._file.write(json.dumps(line(step, words)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write what is left; collective."""
        self.flush()
        if self._file is not None:
            self._file.close()
        self.comm.Free()


def line(step: Step, words: int) -> dict[str, Any]:
    """The keys of a metrics line (DESIGN §8); `words` is the largest over the ranks. What is not finite is null."""
    entry: dict[str, Any] = {
        "step": step.step,
        "loss": finite(step.loss),
        "grad_norm": finite(step.grad_norm),
        "lr": step.lr,
        "tokens_per_second": step.tokens / step.seconds,
        "seconds": step.seconds,
        "words_per_rank": words,
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
