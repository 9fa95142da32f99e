"""What a checkpoint costs a run: seconds that it blocks a step beside a bare copy, and its bytes/s beside those of `dd`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from common import about, conclude, itself, options, save
from ranks import in_range, on_machine, seconds, tell, training

RANKS = 2
MODEL = ("model.layers=4", "model.hidden=512", "model.heads=8", "model.sequence=256", "train.batch=8", "train.steps=1000000")
SETTINGS = (*MODEL, "scheme=cuboid", f"grid.z={RANKS}", "train.keep=2", "train.peak_tflops=1")
PIECE = 1 << 22
FOLDER = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))


def main() -> None:
    """Measure, and print whether a checkpoint blocks its step no longer than its copy and a tenth of a step."""
    args = options(__doc__, 5, "Save this many checkpoints each way.").parse_args()
    if args.on_ranks:
        return measure(args.rounds)
    load = os.getloadavg()[0]
    result = itself(RANKS) | {"load": load}
    result["seconds"]["dd"] = [dd(result["bytes"]) for _ in range(result["rounds"])]
    print(about(result["machine"]))
    taken = {name: median(found) for name, found in result["seconds"].items()}
    limit = taken["copy"] + 0.1 * taken["step"]
    print(f"{result['bytes'] / 1e6:,.0f} MB a rank, {RANKS} ranks in {FOLDER}; load {result['load']:.1f}")
    print(f"step {taken['step']:.3f} s; copy {taken['copy']:.3f} s; blocked {taken['blocked']:.3f} + {taken['settle']:.3f} s")
    print(f"the writing thread: {taken['cpu']:.3f} s of a core for each checkpoint; a step meanwhile {taken['meanwhile']:.3f} s")
    for name, what in (("waited", "save and wait"), ("bare", "bare writes and fsync"), ("dd", "dd bs=4M conv=fsync")):
        rates = (RANKS * result["bytes"] / one / 1e6 for one in result["seconds"][name])
        print(f"{what}: {in_range(rates, 0)} MB/s of all ranks")
    short = f"blocks at most copy + 0.1 step = {limit:.3f} s", taken["blocked"] + taken["settle"] <= limit
    conclude([short, ("at the speed of the file system: at most 1.25× bare writes", taken["waited"] <= 1.25 * taken["bare"])])
    save(result, args.json)


def dd(size: int) -> float:
    """Seconds in which `dd` writes a rank's bytes to the disk, as many at once as there are ranks."""
    line = ["dd", "if=/dev/zero", "bs=4M", f"count={size}", "iflag=count_bytes", "conv=fsync"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:

        def write() -> None:
            jobs = [subprocess.Popen([*line, f"of={folder}/{rank}"], stderr=subprocess.DEVNULL) for rank in range(RANKS)]
            if any(job.wait() for job in jobs):
                sys.exit(f"dd failed in {folder}")

        return seconds(write)


def measure(rounds: int) -> None:
    """Run on the ranks: steps with and without a checkpoint under way, copies and bare writes, in turn; rank 0 prints JSON."""
    world, found = on_machine()
    from mpi4py import MPI

    from summa3d.train.checkpoint.writer import Writer

    times: dict[str, list[float]] = defaultdict(list)
    where = Path(world.bcast(tempfile.mkdtemp(dir=FOLDER) if world.rank == 0 else None))
    run, step = training([*SETTINGS, f"data.path={__file__}"], world, where)

    def note(name: str, value: float) -> None:
        times[name].append(world.allreduce(value, MPI.MAX))

    def timed(name: str, act: Callable[[], object]) -> None:
        world.Barrier()
        note(name, seconds(act))

    with Writer(run.checkpoints, run.grid, run.config) as writer:
        run.writer = writer
        writer.save(0, run.blocks())
        writer.wait()
        copies, size = writer.copies, sum(copy.nbytes for copy in writer.copies.values())
        for number in range(1, 2 * rounds, 2):
            timed("step", step)
            timed("step", step)
            blocks = {block.name: block.tensor for block in run.blocks() if block.name in copies}
            timed("copy", lambda: [copies[name].copy_(tensor) for name, tensor in blocks.items()])  # noqa: B023 — called at once
            cpu = writer.cpu
            timed("blocked", lambda: writer.save(number, run.blocks()))  # noqa: B023
            blocked = writer.blocked
            timed("meanwhile", step)
            while run.votes.writing:
                timed("meanwhile", step)
            writer.settle()
            note("settle", writer.blocked - blocked)
            writer.wait()
            note("cpu", writer.cpu - cpu)
            timed("waited", lambda: writer.save(number + 1, run.blocks(), waits=True))  # noqa: B023
            timed("bare", lambda: bare(where / f"bare-{world.rank}", size))
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(where)
    tell(world, {"kind": "checkpoint", "machine": found, "rounds": rounds, "bytes": size, "seconds": times})


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
