"""`summa3d ARGS…` on a rank that kills itself, or asks itself to end: at an op of a step, or while it writes a checkpoint.

Started by test_killed.py. KILLED="RANK STEP KIND COUNT": at the COUNT-th op of this kind in a step: F, B, X, W, T, a bucket of
R, the `norm` of the gradient, the `update`, or the `evaluation`; with a negative count, at its end; or in `prepare`. In a
checkpoint, KIND is `copy`, in the middle of copying the blocks; `file`, when half of the file is on the disk; and on rank 0
`index`, when half of it is; `rename`, when all is but the final name; and `delete`, when the checkpoint of STEP has lost its
name. `start` is before the program has imported anything, `init` inside MPI_Init, `end` after the last step. KILLED_AT: a file
that receives the time. KILLED_BY: the signal, SIGKILL unless it is set. KILLED_WHO: `rank`, or what started it: `mpiexec` or
`launch`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from summa3d import preemption
from summa3d.comm.health.processes import launched_as

ABOVE = {"rank": 0, "mpiexec": 2, "launch": 3}
"""Processes between a rank and what is struck: MPICH's proxy is the parent of a rank."""
BY = signal.Signals[os.environ.get("KILLED_BY", "SIGKILL")]


def die() -> None:
    Path(os.environ["KILLED_AT"]).write_text(str(time.time()))
    os.kill(above(os.getpid(), ABOVE[os.environ.get("KILLED_WHO", "rank")]), BY)


def above(process: int, levels: int) -> int:
    """The process that started a process, or one further up."""
    for _ in range(levels):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def die_early(kind: str, here: bool) -> None:
    """Begin as `python -m summa3d train` does, and die before anything is imported, or in MPI_Init, if this is the rank."""
    preemption.hold()
    if kind == "start" and here:
        die()
    preemption.listen("SIGTERM", "SIGINT")
    if kind == "init":
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI

        if here:
            threading.Timer(0.005, die).start()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


if __name__ == "__main__":
    RANK, STEP, KIND, COUNT = os.environ["KILLED"].split()
    TEMPORARY = f".tmp-step-{STEP}"
    launched = launched_as()
    assert launched is not None
    if KIND in ("start", "init"):
        die_early(KIND, launched[1] == int(RANK))

from summa3d.cli.main import main  # noqa: E402
from summa3d.comm.profile.ledger import Ledger  # noqa: E402
from summa3d.train.checkpoint import folder, shards  # noqa: E402
from summa3d.train.checkpoint.writer import Writer  # noqa: E402


def half_a_file(tensors: Any, path: Path) -> str:
    digest = save_file(tensors, path)
    if TEMPORARY in str(path):
        if BY == signal.SIGKILL:
            os.truncate(path, path.stat().st_size // 2)
        die()
    return digest


def half_an_index(path: Path, text: str, **options: Any) -> int:
    if TEMPORARY in str(path) and BY == signal.SIGKILL:
        text = text[: len(text) // 2]
    written = write_text(path, text, **options)
    if TEMPORARY in str(path):
        die()
    return written


def half_a_copy(writer: Writer, step: int, *arguments: Any, **options: Any) -> None:
    blocks = itertools.count()
    if step == int(STEP):
        Writer._copy = lambda self, block: die() if next(blocks) == 2 else copy(self, block)
    save(writer, step, *arguments, **options)


def no_rename(source: Any, target: Any, **options: Any) -> None:
    if TEMPORARY in str(source):
        assert (Path(source) / "index.json").is_file()
        die()
    rename(source, target, **options)


class Counted:
    """Dies at the `count`-th op of a kind in the step: at its beginning, or at its end where `count` is negative."""

    def __init__(self, kind: str, count: int) -> None:
        self.kind, self.left, self.ends, self.armed = kind, abs(count), count < 0, kind == "prepare"

    @contextmanager
    def around(self, kind: str) -> Iterator[None]:
        self.left -= self.armed and kind == self.kind
        dies = self.armed and kind == self.kind and self.left == 0
        if dies and not self.ends:
            die()
        yield
        if dies and self.ends:
            die()

    @contextmanager
    def run(self, ledger: Ledger, name: str) -> Iterator[None]:
        self.armed = self.armed or name == f"step {STEP}"
        with self.around(name[0] if name[:2] in ("F ", "B ", "X ", "W ", "T ") else "other"), span(ledger, name):
            yield

    def calling(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as an op of this kind."""

        def called(*arguments: Any) -> Any:
            with self.around(kind):
                return function(*arguments)

        return called


save_file, rename, span = shards.save_file, os.rename, Ledger.run
write_text, save, copy, remove = Path.write_text, Writer.save, Writer._copy, folder.remove_files

if __name__ == "__main__":
    if launched[1] == int(RANK):
        if KIND == "file":
            shards.save_file = half_a_file
        elif KIND == "rename":
            os.rename = no_rename
        elif KIND == "index":
            Path.write_text = half_an_index
        elif KIND == "copy":
            Writer.save = half_a_copy
        elif KIND == "delete":
            folder.remove_files = lambda path, names: die() if f".old-step-{STEP}" in str(path) else remove(path, names)
        else:
            from summa3d.parallel.replicas import Replicas
            from summa3d.train import loop
            from summa3d.train.optimizer import AdamW

            counted = Counted(KIND, int(COUNT))
            Ledger.run = lambda ledger, name: counted.run(ledger, name)
            Replicas.start = counted.calling("R", Replicas.start)
            loop.norm_and_votes = counted.calling("norm", loop.norm_and_votes)
            loop.evaluate = counted.calling("evaluation", loop.evaluate)
            loop.finish = counted.calling("end", loop.finish)
            loop.prepare = counted.calling("prepare", loop.prepare)
            AdamW.step = counted.calling("update", AdamW.step)
    sys.exit(main(sys.argv[1:]))
