"""Matrices read from raw and HDF5 files of 1 GB in the page cache, by rows and by columns, beside bare reads of the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import about, conclude, itself, options, save
from ranks import in_range, on_machine, seconds, tell

FOLDER = Path(os.environ.get("TMPDIR", tempfile.gettempdir()))
COLUMNS = 16_384
LEAST = {"rows": 0.8, "columns": 0.5}
DATASET = "a"


def main() -> None:
    """Measure, and print whether ranks read at these shares of the speed of bare reads."""
    parser = options(__doc__, 7)
    parser.add_argument("--ranks", type=int, default=8, help="Ranks that read at once.")
    parser.add_argument("--rows", type=int, default=8192, help=f"Rows of {COLUMNS} float64 numbers in each file.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.rounds, args.rows)
    load = os.getloadavg()[0]
    result = itself(args.ranks) | {"load": load}
    print(about(result["machine"]))
    print(f"{result['bytes'] / 1e9:.2f} GB in each file in {FOLDER}, {args.ranks} ranks; load {load:.1f}; GB/s of all ranks")
    claims = []
    for case, times in result["seconds"].items():
        rates = {way: in_range((result["bytes"] / one / 1e9 for one in found), 2) for way, found in times.items()}
        ours, bare = min(times["ours"]), min(min(found) for way, found in times.items() if way != "ours")
        print(f"{case}: " + "; ".join(f"{way} {rate}" for way, rate in rates.items()))
        least = LEAST[case.split()[1]]
        claims.append((f"{case}: {bare / ours:.2f} of the faster bare read's speed, at least {least}", ours * least <= bare))
    print(f"the fastest of {result['rounds']} rounds each:")
    conclude([*claims, ("no word is moved", result["words"] == 0)])
    save(result, args.json)


def measure(rounds: int, rows: int) -> None:
    """Run on the ranks: our reads and bare ones of the same blocks, in turn; rank 0 prints JSON."""
    world, found = on_machine()
    import h5py
    from mpi4py import MPI

    from summa3d import DistMatrix, Grid

    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    folder = Path(world.bcast(tempfile.mkdtemp(dir=FOLDER) if world.rank == 0 else None))
    path, other, shape = folder / "a.bin", folder / "a.h5", (rows, COLUMNS)
    with Grid(world, {"x": world.size}) as grid:
        whole = DistMatrix.random(shape, grid, "m:x k")
        whole.to_raw(path)
        whole.to_hdf5(other, DATASET)
        del whole
        for layout, dim in (("m:x k", "rows"), ("m k:x", "columns")):
            part = DistMatrix.from_raw(path, shape, grid, layout)
            slices = part.layout.slices(shape, grid.shape, grid.coordinates)
            ways: dict[str, dict[str, Callable[[], Any]]] = {
                f"raw {dim}": {
                    "ours": partial(DistMatrix.from_raw, path, shape, grid, layout),
                    "memmap": partial(mapped, path, shape, slices),
                    "preadv": partial(read, path, shape, slices),
                },
                f"hdf5 {dim}": {
                    "ours": partial(DistMatrix.from_hdf5, other, DATASET, grid, layout),
                    "h5py": partial(hyperslab, h5py, other, slices),
                },
            }
            for case, acts in ways.items():
                for way, act in [(way, act) for _ in range(rounds) for way, act in acts.items()]:
                    world.Barrier()
                    times[case][way].append(world.allreduce(seconds(act), MPI.MAX))
        words = world.allreduce(grid.ledger.total().words)
    world.Barrier()
    if world.rank == 0:
        shutil.rmtree(folder)
    size = rows * COLUMNS * 8
    tell(world, {"kind": "files", "machine": found, "rounds": rounds, "bytes": size, "words": words, "seconds": times})


def mapped(path: Path, shape: tuple[int, int], slices: tuple[slice, ...]) -> np.ndarray:
    """Copy the block from the mapped file."""
    return np.array(np.memmap(path, np.float64, "r", shape=shape)[slices])


def read(path: Path, shape: tuple[int, int], slices: tuple[slice, ...]) -> np.ndarray:
    """Read the block into new memory, all at once, or row by row where it has not all columns."""
    rows, columns = slices
    block = np.empty((rows.stop - rows.start, columns.stop - columns.start))
    pieces = [block] if block.shape[1] == shape[1] else block
    step = block.nbytes // len(pieces)
    with open(path, "rb", buffering=0) as file:
        for number, piece in enumerate(pieces):
            got = os.preadv(file.fileno(), [piece], ((rows.start + number) * shape[1] + columns.start) * 8)
            if got != step:
                raise OSError(f"{got} bytes in place of {step}")
    return block


def hyperslab(h5py: Any, path: Path, slices: tuple[slice, ...]) -> np.ndarray:
    """Read the block by h5py alone."""
    with h5py.File(path, "r") as file:
        block: np.ndarray = file[DATASET][slices]
    return block


if __name__ == "__main__":
    main()
