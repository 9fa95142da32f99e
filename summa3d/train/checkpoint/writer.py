"""Writes a run's checkpoints: a thread of each rank writes its file while steps go on, then one of rank 0 publishes them."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...comm.health.agreement import check_agreement
from ...errors import CheckpointError
from ..on_root import on_root
from . import shards
from .folder import clean, index_of, publish, temporary
from .worker import Worker

if TYPE_CHECKING:
    from ...comm.grid import BaseGrid
    from ..config import Config

ATTEMPTS = 3
"""How often a run tries a checkpoint before it ends."""
PAUSE = 0.5
"""Seconds before the second attempt; twice as long before the third."""
NICENESS = 10
"""The step goes first where thread and step share a core."""


@dataclass
class PendingCheckpoint:
    """A checkpoint under way, on this rank: what its thread does (`work` is None where nothing is left to do), and the attempt.

    publishes : whether all files are written, and rank 0 writes the index
    """

    step: int
    blocks: Sequence[shards.TensorBlock]
    loss_scale: dict[str, Any] | None
    task: Callable[[], Any] = dict
    work: Future[Any] | None = None
    attempt: int = 1
    publishes: bool = False


class Writer:
    """The checkpoints of a run, one at a time; a context manager. Threads only write files: MPI is for the main thread.

    `save` copies this rank's blocks and returns; a thread writes the copy. Once a step's ranks know that none is `busy`,
    `settle` gathers what the index needs, and a thread of rank 0 publishes the folder; a later `settle` sees that it is done.
    What fails is said and tried again by the ranks where it failed; after `attempts` every rank raises CheckpointError.

    Attributes
    ----------
    copies : the copies of blocks that threads write, kept from checkpoint to checkpoint
    blocked, cpu : seconds that checkpoints took of this rank's main thread, and processor seconds of its writing thread
    """

    def __init__(
        self,
        folder: Path,
        grid: BaseGrid,
        config: Config,
        say: Callable[[str], None] = lambda text: None,
        attempts: int = ATTEMPTS,
    ) -> None:
        self._folder, self._grid, self._config, self._say, self._attempts = folder, grid, config, say, attempts
        self._worker = Worker()
        self._saving: PendingCheckpoint | None = None
        self.copies: dict[str, torch.Tensor] = {}
        self.blocked = self.cpu = 0.0
        on_root(grid.comm, lambda: clean(folder), CheckpointError)

    @property
    def busy(self) -> bool:
        """Return whether this rank's thread is at work."""
        return self._saving is not None and self._saving.work is not None and not self._saving.work.done()

    def save(
        self, step: int, blocks: Sequence[shards.TensorBlock], loss_scale: dict[str, Any] | None = None, waits: bool = False
    ) -> None:
        """Write the checkpoint step-N of all ranks' blocks; collective. Waits for the one before.

        waits : whether to return when it is published; else a copy of the blocks is written while the caller goes on

        Raises CheckpointError for what is no number of a step, and AgreementError where ranks save different ones.
        """
        check_agreement(self._grid.comm, "the checkpoint", {"step": step})
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"A checkpoint is that of a whole number of steps, 0 or more; it was given {step!r}.")
        self.wait()
        began = time.perf_counter()
        own = [block for block in blocks if block.sharding.is_primary(self._grid) and block.tensor.numel()]
        written = own if waits else [self._copy(block) for block in own]
        file = temporary(self._folder, step) / f"rank-{self._grid.rank}.safetensors"
        self._saving = PendingCheckpoint(step, blocks, loss_scale, lambda: shards.write(file, written, self._grid))
        self._start(self._saving)
        self.blocked += time.perf_counter() - began
        if waits:
            self.wait()

    def wait(self) -> None:
        """Return once the checkpoint under way is published; collective."""
        while self._saving is not None:
            began = time.perf_counter()
            if self._saving.work is not None:
                self._saving.work.exception()  # which waits for the thread
            self.blocked += time.perf_counter() - began
            self.settle()

    def settle(self) -> None:
        """Take the checkpoint under way a stage further, where there is one; no rank is `busy`. Collective."""
        if self._saving is None:
            return
        began, saving, comm = time.perf_counter(), self._saving, self._grid.comm
        entry, error = _outcome(saving)
        answers = comm.gather((entry, error))
        failed: list[str] = comm.bcast([item for _, item in answers if item is not None] if answers else [])
        if failed and saving.attempt == self._attempts:
            on_root(comm, lambda: clean(self._folder), CheckpointError)
            raise CheckpointError(f"{failed[0]}" + (f" It was tried {self._attempts} times." if self._attempts > 1 else ""))
        if failed:
            self._say(f"{failed[0]} Trying again.")
            if error is not None:
                self._start(saving, PAUSE * saving.attempt)
            saving.attempt += 1
        elif not saving.publishes:
            saving.publishes, saving.work = True, None
            if answers:
                saving.task = partial(self._publish, saving, [item for item, _ in answers])
                self._start(saving)
        else:
            self._saving = None
        self.blocked += time.perf_counter() - began

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        """Start no more work; a run that fails does not wait for its end."""
        self._worker.close(wait=False)

    def _copy(self, block: shards.TensorBlock) -> shards.TensorBlock:
        """A block whose tensor is a copy on the host."""
        if block.name not in self.copies:
            self.copies[block.name] = torch.empty_like(block.tensor, device="cpu", pin_memory=block.tensor.is_cuda)
        return replace(block, tensor=self.copies[block.name].copy_(block.tensor.detach()))

    def _start(self, saving: PendingCheckpoint, pause: float = 0.0) -> None:
        def timed() -> Any:
            _yield_to_others()
            time.sleep(pause)
            began = time.thread_time()
            try:
                return saving.task()
            finally:
                self.cpu += time.thread_time() - began

        saving.work = self._worker.submit(timed)

    def _publish(self, saving: PendingCheckpoint, entries: Sequence[dict[str, Any]]) -> None:
        index = index_of(saving.step, saving.blocks, entries, self._config, self._grid.job.blas, saving.loss_scale)
        publish(self._folder, saving.step, index, self._config.train.keep)


def save(folder: Path, step: int, blocks: Sequence[shards.TensorBlock], grid: BaseGrid, config: Config) -> Path:
    """Write the checkpoint step-N under `folder` at once and return its path; collective.

    Each rank writes one file into a temporary folder. Rank 0 then writes the index, renames the folder to its final name and
    deletes all but the newest `train.keep` checkpoints. An interrupted call leaves no folder with a final name.

    Raises CheckpointError, on every rank alike, where a file cannot be written.
    """
    with Writer(folder, grid, config, attempts=1) as writer:
        writer.save(step, blocks, waits=True)
    return folder / f"step-{step}"


def _outcome(saving: PendingCheckpoint) -> tuple[Any, str | None]:
    """The result of a thread's work, or what is to be said of its failure."""
    work = saving.work
    error = None if work is None else work.exception()
    if isinstance(error, OSError):
        return None, f"The checkpoint of step {saving.step} cannot be written: {error}."
    if error is not None and not isinstance(error, CheckpointError):
        raise error
    return (None if work is None or error is not None else work.result()), None if error is None else str(error)


def _yield_to_others() -> None:
    """Let a step go first that shares its core with this thread; Linux has priorities of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
