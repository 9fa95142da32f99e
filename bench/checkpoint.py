"""What a checkpoint costs a run: seconds that it blocks a step beside a bare copy, and its bytes/s beside those of `dd`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import about, overhead, save, verdict

RANKS = 2
MODEL = ("model.layers=4", "model.hidden=512", "model.heads=8", "model.sequence=256", "train.batch=8", "train.steps=1000000")
SETTINGS = (*MODEL, "scheme=cuboid", f"grid.z={RANKS}", "train.keep=2", "train.peak_tflops=1")
PIECE = 1 << 22
FOLDER = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))


def main() -> None:
    """Measure, and print whether a checkpoint blocks its step no longer than its copy and a tenth of a step."""
    result, file = overhead(__file__, __doc__, RANKS, "--rounds", 5, "Save this many checkpoints each way.", measure)
    result["seconds"]["dd"] = [dd(result["bytes"]) for _ in range(result["rounds"])]
    print(about(result["machine"]))
    taken = {name: median(found) for name, found in result["seconds"].items()}
    limit = taken["copy"] + 0.1 * taken["step"]
    print(f"{result['bytes'] / 1e6:,.0f} MB a rank, {RANKS} ranks in {FOLDER}; load {result['load']:.1f}")
    print(f"step {taken['step']:.3f} s; copy {taken['copy']:.3f} s; blocked {taken['blocked']:.3f} + {taken['settle']:.3f} s")
    print(f"the writing thread: {taken['cpu']:.3f} s of a core for each checkpoint; a step meanwhile {taken['meanwhile']:.3f} s")
    for name, what in (("waited", "save and wait"), ("bare", "bare writes and fsync"), ("dd", "dd bs=4M conv=fsync")):
        rates = sorted(RANKS * result["bytes"] / seconds / 1e6 for seconds in result["seconds"][name])
        print(f"{what}: {median(rates):,.0f} MB/s of all ranks [{rates[0]:,.0f}–{rates[-1]:,.0f}]")
    print("  " + verdict(f"blocks at most copy + 0.1 step = {limit:.3f} s", taken["blocked"] + taken["settle"] <= limit))
    print("  " + verdict("at the speed of the file system: at most 1.25× bare writes", taken["waited"] <= 1.25 * taken["bare"]))
    save(result, file)


def dd(size: int) -> float:
    """Seconds in which `dd` writes a rank's bytes to the disk, as many at once as there are ranks."""
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        began = time.perf_counter()
        line = ["dd", "if=/dev/zero", "bs=4M", f"count={size}", "iflag=count_bytes", "conv=fsync"]
        jobs = [subprocess.Popen([*line, f"of={folder}/{rank}"], stderr=subprocess.DEVNULL) for rank in range(RANKS)]
        if any(job.wait() for job in jobs):
            sys.exit(f"dd failed in {folder}")
        return time.perf_counter() - began


def measure(rounds: int) -> None:
    """Run on the ranks: steps with and without a checkpoint under way, copies and bare writes, in turn; rank 0 prints JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    from mpi4py import MPI

    from summa3d.bench.machine import machine
    from summa3d.train import config
    from summa3d.train.checkpoint.writer import Writer
    from summa3d.train.loop import take_step
    from summa3d.train.prepare import prepare

    comm = MPI.COMM_WORLD
    names = ("step", "copy", "blocked", "settle", "cpu", "meanwhile", "waited", "bare")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    where = comm.bcast(tempfile.mkdtemp(dir=FOLDER))
    run = prepare(config.load("demo", [*SETTINGS, f"data.path={__file__}"]), comm, Path(where))

    def timed(name: str, action: Any) -> None:
        comm.Barrier()
        began = time.perf_counter()
        action()
        seconds[name].append(comm.allreduce(time.perf_counter() - began, MPI.MAX))

    with Writer(run.checkpoints, run.grid, run.config) as writer:
        run.writer, number = writer, 0
        writer.save(0, run.blocks())
        writer.wait()
        for _ in range(rounds):
            for name in ("step", "step"):
                number += 1
                timed(name, lambda: take_step(run, number))  # noqa: B023 — called at once
            blocks = {block.name: block.tensor for block in run.blocks() if block.name in writer.copies}
            timed("copy", lambda: [writer.copies[name].copy_(tensor) for name, tensor in blocks.items()])  # noqa: B023
            blocked, cpu = writer.blocked, writer.cpu
            timed("blocked", lambda: writer.save(number, run.blocks()))  # noqa: B023
            blocked = writer.blocked
            while True:
                number += 1
                timed("meanwhile", lambda: take_step(run, number))  # noqa: B023
                if run.writing == 0:
                    break
            writer.settle()
            seconds["settle"].append(comm.allreduce(writer.blocked - blocked, MPI.MAX))
            writer.wait()
            seconds["cpu"].append(comm.allreduce(writer.cpu - cpu, MPI.MAX))
            timed("waited", lambda: writer.save(number, run.blocks(), waits=True))  # noqa: B023
            timed("bare", lambda: bare(Path(where) / f"bare-{comm.rank}", size_of(writer)))
    found = {"kind": "checkpoint", "machine": machine(comm), "rounds": rounds, "bytes": size_of(writer), "seconds": seconds}
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(where)
        print(json.dumps(found))


def size_of(writer: Any) -> int:
    """Bytes of this rank's tensors."""
    return sum(copy.nbytes for copy in writer.copies.values())


def bare(file: Path, size: int) -> None:
    """Write so many bytes, which are no zeros, to the disk, and remove them."""
    data = memoryview(os.urandom(PIECE))
    with open(file, "wb", buffering=0) as opened:
        for start in range(0, size, PIECE):
            opened.write(data[: size - start])
        os.fsync(opened.fileno())
    file.unlink()


if __name__ == "__main__":
    main()
