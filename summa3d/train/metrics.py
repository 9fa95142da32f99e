"""Metrics of a run: one line per step in metrics.jsonl, gathered over the ranks without blocking them, and sums over steps.

Keys of a line: step, loss, grad_norm, learning_rate, tokens_per_second, seconds, words_per_rank (the largest over ranks),
model_flops_per_second and mfu (see `StepWork`), arithmetic_share and idle_share; where words were moved, communication_share,
waited_seconds and exposed_communication (see `CoreTime`), and words_by_axis (of rank 0); where they exist, validation_loss,
samples (texts), loss_scale and skipped_steps; of a mixture, by layer of experts, expert_tokens (of each expert) and
expert_entropy (1 where all have as many).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import counted
from ..errors import ConfigError, DataError
from ..files import from_json, no_follow, replacing, text_of
from .utilization import StepWork

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..comm.profile.ledger import Ledger

NUMBERS = ("learning_rate", "tokens_per_second", "seconds", "words_per_rank", "loss", "grad_norm", "validation_loss")
"""Keys of a line whose values are finite numbers, where there are any."""
KIBI = 1024
NO_WORK = StepWork()


@dataclass
class StepMetrics:
    """The measurements of one step on this rank; loss, grad_norm, learning_rate and loss_scale are equal on every rank.

    `step` counts from 1. `loss_scale` and `skipped_steps` (of the run so far) are set by runs with dynamic loss scaling only.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float = 0.0
    words_by_axis: dict[str, int] = field(default_factory=dict)
    arithmetic_seconds: float = 0.0
    communication_seconds: float = 0.0
    waited_seconds: float = 0.0
    validation_loss: float | None = None
    samples: list[str] | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    expert_tokens: list[list[int]] | None = None


class Stopwatch:
    """Measures this rank's wall seconds, words moved and CPU seconds since the stopwatch was made.

    CPU time is that of the training thread; with several BLAS threads, that of the process. Arithmetic is the CPU time outside
    communication calls, data loading and the optimizer included. Communication is the CPU time inside communication calls.
    Waited is the wall time inside communication calls without CPU time: the rank slept, for another rank or for a core. An MPI
    library that spins while it waits turns waiting into CPU time. On a device, waited is the time of its communications.
    """

    def __init__(self, ledger: Ledger, threads: int) -> None:
        self._ledger = ledger
        self._cpu = time.thread_time if threads == 1 else time.process_time
        self._start, self._words = self._now(), self._by_axis()

    def _by_axis(self) -> Counter[str]:
        result = Counter[str]()
        for row in self._ledger.rows():
            result[row.axis] += row.amounts.words
        return result

    def _now(self) -> np.ndarray:
        total = self._ledger.total()
        inside, wall = total.cpu_seconds, time.perf_counter()
        return np.array([wall, self._cpu() - inside, inside, total.seconds - inside])

    def stop(self, step: StepMetrics) -> None:
        """Write the seconds and words since the start into `step`."""
        passed = [float(amount) for amount in self._now() - self._start]
        step.seconds, step.arithmetic_seconds, step.communication_seconds = passed[0], *passed[1:3]
        step.waited_seconds, step.words_by_axis = max(passed[3], 0.0), dict(self._by_axis() - self._words)


@dataclass(frozen=True)
class CoreTime:
    """Where the time of the cores goes that ranks compute on: shares, which sum to 1.

    Attributes
    ----------
    cores : those that the ranks' threads use
    arithmetic : processor time outside communication calls
    communication : time inside communication calls; None where no words were moved. Of a rank with a core of its own all wall
        seconds inside them, computing and waiting. Where ranks outnumber cores a rank that waits leaves its core to another one:
        of what they wait, only the time that cores are idle counts. On devices the host's processor time inside the calls
    idle : the rest
    waited : wall seconds inside communication calls without processor time, the mean over ranks, and so for a core as well where
        ranks outnumber the cores; None where no words were moved
    exposed : `communication` on the host; None on devices, whose communications may be hidden behind their work
    flops_per_second, utilization : model FLOPs per second of all ranks, and their share of the peak (MFU); None where unknown.
        The share is None where it exceeds 1, too.

    >>> print(CoreTime.of(cores=2, seconds=10.0, words=8, ranks=4, cpu=(12.0, 4.0, 20.0)))
    arithmetic 60%, communication 40%, idle 0% of 2 cores · waited 5.00 s
    """

    cores: int
    arithmetic: float
    communication: float | None
    idle: float
    waited: float | None
    exposed: float | None = None
    flops_per_second: float | None = None
    utilization: float | None = None

    @classmethod
    def of(
        cls,
        cores: int,
        seconds: float,
        words: int,
        ranks: int,
        cpu: Sequence[float],
        work: StepWork = NO_WORK,
        steps: int = 1,
        threads: int = 1,
    ) -> CoreTime:
        """The shares of `seconds` wall seconds, in which `steps` steps were taken.

        cores : of all nodes. threads : of a rank. cpu : seconds of arithmetic, communication and waiting, summed over the ranks
        """
        used, homes = min(cores, ranks * threads), min(cores, ranks)  # cores, and ranks that can be on one at a time
        computing, moving, waiting = (part / (homes * seconds) if seconds else 0.0 for part in cpu)
        arithmetic = min(computing * homes / used, 1.0)
        if ranks > cores:
            waiting = min(waiting, max(1 - computing - moving, 0.0))
        communication = min(moving + waiting * work.on_host, 1 - arithmetic)
        rate = work.flops * steps / seconds if work.flops and seconds else None
        share = rate / work.peak if rate and work.peak else None
        rates = rate, share if share is None or share <= 1 else None  # more is no share: the peak was measured under load
        if not words:
            return cls(used, arithmetic, None, 1 - arithmetic, None, None, *rates)
        exposed = communication if work.on_host else None
        return cls(used, arithmetic, communication, 1 - arithmetic - communication, cpu[2] / ranks, exposed, *rates)

    def __str__(self) -> str:
        shares = [f"arithmetic {self.arithmetic:.0%}"]
        if self.communication is not None:
            shares.append(f"communication {self.communication:.0%}")
        waited = "" if self.waited is None else f" · waited {self.waited:,.2f} s"
        return f"{', '.join(shares)}, idle {self.idle:.0%} of {counted(self.cores, 'core')}{waited}"

    def brief(self) -> list[str]:
        """The use that is worth a look at every step: MFU, communication and model FLOP/s, as far as they are known."""
        result = [] if self.utilization is None else [f"MFU {self.utilization:.{0 if self.utilization >= 0.1 else 1}%}"]
        if self.exposed is not None:
            result.append(f"communication {self.exposed:.0%}")
        if self.flops_per_second is not None:
            result.append(f"{self.flops_per_second / 1e9:,.1f} Gflop/s")
        return result

    def entries(self) -> dict[str, float]:
        """The shares under the keys of a metrics line; shares that are None are left out."""
        result = {
            "arithmetic_share": self.arithmetic,
            "communication_share": self.communication,
            "idle_share": self.idle,
            "waited_seconds": self.waited,
            "exposed_communication": self.exposed,
            "model_flops_per_second": self.flops_per_second,
            "mfu": self.utilization,
        }
        return {name: value for name, value in result.items() if value is not None}


@dataclass
class Account:
    """Sums over the steps of a run, on rank 0; `cpu` sums seconds of arithmetic, communication and waiting over all ranks.

    cores : of all nodes. threads : of a rank
    """

    cores: int
    ranks: int = 1
    work: StepWork = NO_WORK
    threads: int = 1
    steps: int = 0
    seconds: float = 0.0
    cpu: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tokens: int = 0
    words: int = 0

    def add(self, step: StepMetrics, words: int, cpu: Sequence[float]) -> CoreTime:
        """Add a step and return its use of the cores; `words` is the largest over ranks, `cpu` the sums over ranks."""
        self.steps += 1
        self.seconds += step.seconds
        arithmetic, communication, waited = (held + more for held, more in zip(self.cpu, cpu, strict=True))
        self.cpu = arithmetic, communication, waited
        self.tokens += step.tokens
        self.words = max(self.words, words)
        return CoreTime.of(self.cores, step.seconds, words, self.ranks, cpu, self.work, threads=self.threads)

    @property
    def core_time(self) -> CoreTime:
        """The use of the cores over all steps."""
        return CoreTime.of(self.cores, self.seconds, self.words, self.ranks, self.cpu, self.work, self.steps, self.threads)


class MetricsWriter:
    """Writes metrics.jsonl on rank 0. A non-blocking gather of a step's counters is in flight while the next step runs.

    `post`, `flush` and `close` are collective. The line of a step is written when the next step is posted, or at `flush`. A run
    that resumes drops the lines of the steps that it repeats.
    """

    def __init__(
        self,
        path: Path,
        comm: MPI.Intracomm,
        resumed_at: int,
        work: StepWork = NO_WORK,
        tensorboard: bool = False,
        threads: int = 1,
    ) -> None:
        from ..comm.nodes import Nodes

        self.comm = comm.Dup()
        self.account = Account(Nodes.of(comm).total_cores, comm.size, work, threads)
        self.core_time: CoreTime | None = None
        self._mine = np.zeros(4)
        self._all = np.zeros((comm.size, 4)) if comm.rank == 0 else None
        self._pending: tuple[StepMetrics, MPI.Request] | None = None
        self._path, self._late, self._told = path, b"", False
        self._file = open_at(path, resumed_at) if comm.rank == 0 else None
        self._board = _open_board(path.parent / "tensorboard", resumed_at) if tensorboard and comm.rank == 0 else None

    def post(self, step: StepMetrics) -> None:
        """Complete the step in flight, and start the gather of this rank's counters of `step`."""
        self.flush()
        words = sum(step.words_by_axis.values())
        self._mine[:] = words, step.arithmetic_seconds, step.communication_seconds, step.waited_seconds
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
        entry = line(step, words, self.core_time)
        self._late += json.dumps(entry).encode() + b"\n"
        self._write(self._file)
        if self._board is not None:
            for name, value in entry.items():
                if name != "step" and value is not None and not isinstance(value, list):
                    self._board.add_scalar(name, value, step.step)

    def _write(self, file: Any) -> None:
        """Write the lines that are not written yet. Where the disk is full they are kept, which is said once."""
        try:
            while self._late:
                self._late = self._late[file.write(self._late) :]
        except OSError as error:
            if not self._told:
                text = f"{self._path} cannot be written: {error.strerror}. The run goes on, and writes its lines when it can."
                print(text, file=sys.stderr, flush=True)
            self._told = True

    def close(self) -> None:
        """Write the line of the step in flight and close the file; collective."""
        self.flush()
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()
        self.comm.Free()


def line(step: StepMetrics, words: int, core_time: CoreTime) -> dict[str, Any]:
    """A line of metrics.jsonl as a dictionary; `words` is the largest over ranks. Numbers that are not finite become null."""
    entry: dict[str, Any] = {
        "step": step.step,
        "loss": finite(step.loss),
        "grad_norm": finite(step.grad_norm),
        "learning_rate": step.learning_rate,
        "tokens_per_second": step.tokens / step.seconds,
        "seconds": step.seconds,
        "words_per_rank": words,
        **core_time.entries(),
    }
    entry |= {"words_by_axis": step.words_by_axis} if step.words_by_axis else {}
    optional = ("validation_loss", "samples", "loss_scale", "skipped_steps", "expert_tokens")
    entry |= {name: value for name in optional if (value := getattr(step, name)) is not None}
    return entry if step.expert_tokens is None else {**entry, "expert_entropy": entropies(step.expert_tokens)}


def entropies(counts: Sequence[Sequence[int]]) -> list[float]:
    """Evenness of the loads of experts, by layer: the entropy of the experts' shares of the tokens over its maximum, log E.

    >>> entropies([[4, 4], [8, 0]])
    [1.0, 0.0]
    """
    shares = [[count / sum(row) for count in row if count] for row in counts]
    result = [sum(share * log(1 / share) for share in of) for of in shares]
    return [item / log(len(row)) if len(row) > 1 else 1.0 for item, row in zip(result, counts, strict=True)]


def finite(value: float) -> float | None:
    """`value` where it is finite, else None, since JSON has no infinity.

    >>> finite(1.5), finite(float("nan"))
    (1.5, None)
    """
    return value if isfinite(value) else None


def open_at(path: Path, resumed_at: int) -> Any:
    """Open metrics.jsonl for appending; keep the complete lines of the steps 1 … resumed_at only.

    The last of them gets the key `resumed`: the next line is that of another start.
    """
    kept = [entry for entry in read(path) if entry["step"] <= resumed_at]
    if kept:
        kept[-1]["resumed"] = True
    with replacing(path) as new:
        new.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    return open(path, "ab", buffering=0, opener=no_follow)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to the first that is none: the last one may be incomplete. `lr` was learning_rate's name.

    Raises DataError where the file cannot be read.
    """
    try:
        lines = text_of(path).splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise DataError(f"Cannot read the metrics {path}: {error}. Remove it to go on without it.") from None
    entries: list[dict[str, Any]] = []
    for line in lines:
        try:
            entry = from_json(line)
        except ValueError:
            break
        if isinstance(entry, dict) and "lr" in entry:
            entry["learning_rate"] = entry.pop("lr")
        if not _is_line(entry):
            break
        entries.append(entry)
    return entries


def _is_line(entry: Any) -> bool:
    """Return whether a JSON value is a line of metrics.jsonl: a step, and numbers where lines have numbers."""
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return False
    numbers = [entry[name] for name in NUMBERS if entry.get(name) is not None]
    return all(isinstance(number, (int, float)) and isfinite(number) for number in numbers)


def check_tensorboard() -> None:
    """Raise ConfigError where TensorBoard's events cannot be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"train.tensorboard needs the package tensorboard ({error}). Install it: pip install tensorboard."
        ) from error


def _open_board(folder: Path, resumed_at: int) -> Any:
    """TensorBoard's writer of events into `folder`; those of steps after `resumed_at` no longer show."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=resumed_at + 1)


def peak_memory() -> int:
    """Peak memory of this process in bytes; a page that n processes share counts 1/n.

    The kernel reports the peak of the resident set size, in which shared pages count fully. The present difference between
    resident and proportional set size is subtracted.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (KIBI if sys.platform != "darwin" else 1)
    try:
        rollup = dict(text.split(":", 1) for text in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    except OSError:
        return peak
    resident, proportional = (int(rollup[name].split()[0]) * KIBI for name in ("Rss", "Pss"))
    return peak - (resident - proportional)
