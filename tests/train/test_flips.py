"""A bit flipped, or an end cut off, in any file that a run writes or reads again: named before it matters, or without effect."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from mpi4py import MPI
from small_runs import train_small

from summa3d.errors import Summa3dError
from summa3d.train.generate import load

LEFT_ALONE = ("summary.json", "loss.png", "lease", "corpus.txt")
"""What a run writes and never reads; and the user's own text, which is encoded anew when it has another size or time."""
SETTINGS: dict[str, object] = {
    "scheme": "serial",
    "train__evaluate_every": 0,
    "data__tokenizer": "bpe:300",
    "model__vocabulary": 300,
    "train__checkpoint_every": 2,
}
Whole = tuple[Path, dict[str, bytes]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run of two steps, and the files of the one that goes on to four."""
    folder = tmp_path_factory.mktemp("whole")
    train_small(MPI.COMM_SELF, folder, **SETTINGS, train__steps=4)
    ended = weights(folder, 4)
    shutil.rmtree(folder / "run/checkpoints/step-4")
    return folder, ended


def weights(folder: Path, step: int) -> dict[str, bytes]:
    """The files of tensors of a checkpoint."""
    path = folder / f"run/checkpoints/step-{step}"
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def damage(path: Path, chance: random.Random) -> str:
    """Flip a bit of a file, or cut its end off; its times stay."""
    data, times = bytearray(path.read_bytes()), path.stat()
    if chance.random() < 0.25:
        what = f"cut to {(size := chance.randrange(len(data)))} bytes"
        del data[size:]
    else:
        bit = chance.randrange(8 * len(data))
        what = f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return what


@pytest.mark.parametrize("number", [10, pytest.param(400, marks=pytest.mark.wide)])
def test_a_damaged_file_is_named_or_changes_no_bit_of_the_run(whole: Whole, tmp_path: Path, number: int) -> None:
    """The run goes on, and text is generated: from the same weights, or not at all."""
    source, ended = whole
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file() and file.name not in LEFT_ALONE)
    assert {file.name for file in files} >= {
        "train.bin",
        "tokens.json",
        "tokenizer.json",
        "index.json",
        "metrics.jsonl",
    }
    chance, named = random.Random(2031), 0
    for place in range(number):
        shutil.copytree(source, folder := tmp_path / str(place))
        file = files[place % len(files)]
        what = damage(folder / file, chance)
        try:
            train_small(MPI.COMM_SELF, folder, resume=True, **SETTINGS, train__steps=4)
        except Summa3dError as error:
            said = str(error)
            assert file.name in said or str((folder / file).parent) in said, (file, what, said)
            assert len(said) < 2000, (file, what, said)
            named += 1
        else:
            assert weights(folder, 4) == ended, (file, what)
            load(folder / "run", MPI.COMM_SELF)
        shutil.rmtree(folder)
    assert named >= number // 4
