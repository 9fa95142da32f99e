"""Checkpoints that are no checkpoints: refused in one line, before anything relies on them."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file, save_file
from small_runs import train_small

from summa3d.errors import CheckpointError
from summa3d.train.checkpoint import folder as checkpoint
from summa3d.train.checkpoint import huggingface_files, shards
from summa3d.train.checkpoint import index as contents

NAME, FILE = "model.blocks.0.mlp.up.weight", "rank-0.safetensors"
Change = Callable[[dict[str, Any]], object]


def at(*path: Any, to: Any) -> Change:
    """Sets what the path leads to."""

    def change(index: dict[str, Any]) -> None:
        for part in path[:-1]:
            index = index[part]
        index[path[-1]] = to

    return change


def piece(index: dict[str, Any], name: str = "") -> dict[str, Any]:
    return index["tensors"][name or next(iter(index["tensors"]))]["pieces"][0]


def halves(overlap: int) -> Change:
    """The first tensor as two pieces, which overlap or leave a gap, of the size of the whole."""

    def change(index: dict[str, Any]) -> None:
        entry = next(iter(index["tensors"].values()))
        (rows, *_), other = entry["shape"], [[0, size] for size in entry["shape"][1:]]
        index["files"]["rank-1.safetensors"] = dict(index["files"][FILE])
        first, second = [[0, rows // 2], *other], [[rows // 2 - overlap, rows - overlap], *other]
        entry["pieces"] = [{"file": FILE, "slices": first}, {"file": "rank-1.safetensors", "slices": second}]

    return change


def renamed(name: str) -> Change:
    def change(index: dict[str, Any]) -> None:
        index["files"][name] = index["files"].pop(FILE)
        for entry in index["tensors"].values():
            entry["pieces"][0]["file"] = name

    return change


INDEX: dict[str, tuple[Change, str]] = {
    "no step": (lambda index: index.pop("step"), "it lacks step"),
    "step as text": (at("step", to="2"), "step = 2 is not a whole number"),
    "negative step": (at("step", to=-1), "step = -1 is not a whole number"),
    "another step": (
        lambda index: [index.update(step=1), index["random"].update(step=1)],
        "it is that of step 1, and its folder",
    ),
    "another random step": (at("random", "step", to=1), "random.step = 1 is not step = 2"),
    "another seed": (at("random", "seed", to=7), "random.seed = 7 is not config.train.seed = 1"),
    "step beyond limits": (at("step", to=1 << 70), "is not a whole number"),
    "unknown key": (at("steps", to=1), "it has the unknown key steps"),
    "format": (at("version", to=2), "has format summa3d-checkpoint 2"),
    "dtype": (at("dtype", to="int8"), "dtype = int8 is not float32 or"),
    "model": (at("model", to=[]), "model = [] is not dict"),
    "model key": (at("model", "hiden", to=1), "Unknown configuration key 'model.hiden'"),
    "layers": (at("model", "layers", to=4000), "tensors for model.layers = 4000"),
    "scale": (at("loss_scale", "value", to=float("nan")), "loss_scale = "),
    "infinite scale": (at("loss_scale", "value", to=float("inf")), "loss_scale = "),
    "scale as text": (at("loss_scale", "good", to="many"), "loss_scale.good = many is not a whole number"),
    "grid": (at("written_on", "grid", to=[1]), "written_on.grid = [1] is not a table"),
    "blas": (at("written_on", "blas", to={"name": "mkl"}), "written_on.blas lacks reason"),
    "tokenizer": (at("config", "data", to={"tokenizer": 3}), "config.data.tokenizer = 3 is not a text"),
    "files": (at("files", to=[]), "files = [] is not a table"),
    "no files": (at("files", to={}), "which is none of its files"),
    "path": (renamed("../../rank-0.safetensors"), "is not the name of a .safetensors file, without a path"),
    "absolute path": (renamed("/etc/passwd"), "is not the name of a .safetensors file, without a path"),
    "dots": (renamed(".."), "is not the name of a .safetensors file, without a path"),
    "name with zero": (renamed("rank\0.safetensors"), "is not the name of a .safetensors file, without a path"),
    "not utf-8": (renamed("rank\udcff/.safetensors"), "is not the name of a .safetensors file, without a path"),
    "bytes": (at("files", FILE, "bytes", to=-5), f"files.{FILE}.bytes = -5 is not a whole number"),
    "tensors": (at("tensors", to=None), "tensors = None is not a table"),
    "shape": (lambda index: next(iter(index["tensors"].values())).update(shape=[-1]), "shape[0] = -1 is not a whole number"),
    "huge shape": (lambda index: next(iter(index["tensors"].values())).update(shape=[1 << 60, 24]), "elements"),
    "huge file": (
        lambda index: [
            next(iter(index["tensors"].values())).update(shape=[1 << 40, 1]),
            piece(index).update(slices=[[0, 1 << 40], [0, 1]]),
        ],
        f"the pieces in {FILE} take",
    ),
    "tensor dtype": (lambda index: next(iter(index["tensors"].values())).update(dtype="int32"), "dtype = int32 is not float32"),
    "pieces": (lambda index: next(iter(index["tensors"].values())).update(pieces=[]), "have 0 of its"),
    "no list": (lambda index: next(iter(index["tensors"].values())).update(pieces={}), "pieces = {} is not a list"),
    "piece of no file": (lambda index: piece(index).update(file="other.safetensors"), "which is none of its files"),
    "slices": (lambda index: piece(index).update(slices=[]), "are not those of 2 dims"),
    "slice of one": (lambda index: piece(index).update(slices=[[0], [0, 24]]), "are not those of 2 dims"),
    "slice beyond": (lambda index: piece(index)["slices"][0].__setitem__(1, 10**6), "of a dim of"),
    "slice backwards": (lambda index: piece(index)["slices"][0].reverse(), "of a dim of"),
    "fractions": (lambda index: piece(index).update(slices=[[0, 0.5], [0, 24]]), "= 0.5 is not a whole number"),
    "overlap": (halves(overlap=4), "overlap"),
    "the same twice": (
        lambda index: [entry["pieces"].append(entry["pieces"][0]) for entry in index["tensors"].values()],
        "in one file",
    ),
}


def tampered(tensors: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path, dict[str, Any]], None]:
    """Writes the file of a checkpoint anew, with other tensors, and its size and checksum into the index."""

    def change(path: Path, index: dict[str, Any]) -> None:
        held = load_file(path / FILE)
        tensors(held)
        save_file(held, path / FILE)
        signed(path, index)

    return change


def without(path: Path, index: dict[str, Any], part: str) -> None:
    """Take the tensors with `part` in their names out of a checkpoint of one file."""
    tampered(lambda held: [held.pop(name) for name in [*held] if part in name])(path, index)
    for name in [*index["tensors"]]:
        if part in name:
            del index["tensors"][name]


def signed(path: Path, index: dict[str, Any]) -> None:
    index["files"][FILE] = {"bytes": (path / FILE).stat().st_size, "sha256": shards.checksum(path / FILE)}


def no_tensors(path: Path, index: dict[str, Any]) -> None:
    size = (path / FILE).stat().st_size
    (path / FILE).write_bytes((1 << 60).to_bytes(8, "little") + b"{" * (size - 8))
    signed(path, index)


def first(held: dict[str, torch.Tensor]) -> str:
    return min(held)


FILES: dict[str, tuple[Callable[[Path, dict[str, Any]], object], str]] = {
    "another dtype": (tampered(lambda held: held.update({first(held): held[first(held)].float()})), "has float32 ("),
    "another shape": (
        tampered(lambda held: held.update({first(held): held[first(held)].flatten()[None]})),
        "its index says float64",
    ),
    "more tensors": (tampered(lambda held: held.update(more=torch.zeros(1, dtype=torch.float64))), "its index says nothing"),
    "less tensors": (tampered(lambda held: held.pop(first(held))), "has nothing under"),
    "no safetensors": (no_tensors, "is no safetensors file"),
    "a file too many": (
        lambda path, index: shutil.copy(path / FILE, path / "rank-1.safetensors"),
        "which its index does not name",
    ),
    "a FIFO": (lambda path, index: [(path / FILE).unlink(), os.mkfifo(path / FILE)], "is missing"),
    "another model": (lambda path, index: index["model"].update(layers=2), "a run of its model has"),
    "one moment less": (
        lambda path, index: without(path, index, ".exp_avg."),
        "is none; a run of its model has float64",
    ),
    "no moments": (lambda path, index: without(path, index, "optimizer."), "is none; a run of its model has float64"),
}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run of one rank."""
    folder = tmp_path_factory.mktemp("valid")
    train_small(MPI.COMM_SELF, folder, scheme="serial", train__steps=2, train__evaluate_every=0)
    return folder / "run/checkpoints/step-2"


def written(path: Path, index: dict[str, Any]) -> None:
    (path / "index.json").write_text(json.dumps({**index, "sha256": contents.digest(index)}))


def refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(path)
    said = str(raised.value)
    assert words in said and "\n" not in said and str(path) in said and len(said) < 1000


def read(path: Path) -> None:
    saved = checkpoint.read(path, MPI.COMM_SELF)
    saved.verify(MPI.COMM_SELF)
    saved.check_tensors()


def test_a_checkpoint_of_a_run_is_one(valid: Path) -> None:
    read(valid)


@pytest.mark.parametrize("name", INDEX)
def test_an_index_that_cannot_be_is_refused_in_a_line(valid: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(valid, tmp_path / "step-2"))
    index = contents.read(path / "index.json")
    index.setdefault("loss_scale", None)
    if index["loss_scale"] is None:
        index["loss_scale"] = {"dynamic": False, "value": 1.0, "good": 0, "skipped": 0}
    change, words = INDEX[name]
    change(index)
    written(path, index)
    refused(path, words)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_the_index_says_is_refused_in_a_line(valid: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(valid, tmp_path / "step-2"))
    index = contents.read(path / "index.json")
    change, words = FILES[name]
    change(path, index)
    written(path, index)
    refused(path, words)


@pytest.mark.parametrize("part", [".exp_avg_sq.", "optimizer."])
def test_a_run_does_not_go_on_without_its_moments(valid: Path, tmp_path: Path, part: str) -> None:
    """It would go on with zeros in their place."""
    shutil.copytree(valid.parent.parent, tmp_path / "run")
    shutil.copy(valid.parent.parent.parent / "corpus.txt", tmp_path)
    path = tmp_path / "run/checkpoints/step-2"
    index = contents.read(path / "index.json")
    without(path, index, part)
    written(path, index)
    with pytest.raises(CheckpointError, match="is none; a run of its model has float64"):
        train_small(MPI.COMM_SELF, tmp_path, resume=True, scheme="serial", train__steps=3, train__evaluate_every=0)


def test_an_index_of_an_earlier_version_is_read(valid: Path, tmp_path: Path) -> None:
    """Without the run's configuration, what multiplied, and a loss scale."""
    path = Path(shutil.copytree(valid, tmp_path / "step-2"))
    index = contents.read(path / "index.json")
    del index["config"], index["loss_scale"], index["written_on"]["blas"]
    written(path, index)
    read(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '{"sha256": 1}', "[" * 100_000, '{"a":' * 100_000, "\udcff", '{"step": 1e999}']
)
def test_a_text_that_is_no_index_is_refused_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text, errors="surrogateescape")
    refused(tmp_path, "index")


VALUES = (None, True, -1, 0, 1 << 63, 1e308, "", "x" * 10_000, [], {}, [[]], {"": {}}, [[0, 1]], "\0", "../x")


@pytest.mark.parametrize("many", [60, pytest.param(2000, marks=pytest.mark.wide)])
def test_an_index_with_any_value_changed_is_read_as_it_was_or_refused_in_a_line(valid: Path, tmp_path: Path, many: int) -> None:
    """Any value of the table, by any of a list, or left out: what is accepted still names the same files, inside the folder."""
    chance, good = random.Random(2029), contents.read(valid / "index.json")
    for _ in range(many):
        index = json.loads(json.dumps(good))
        above, key = chance.choice(places(index))
        if isinstance(above, dict) and chance.random() < 0.2:
            del above[key]
        else:
            above[key] = chance.choice(VALUES)
        written(tmp_path, index)
        try:
            found = contents.read(tmp_path / "index.json")
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
        else:
            assert found["files"].keys() == good["files"].keys()
            assert {name: entry["pieces"] for name, entry in found["tensors"].items()} == {
                name: good["tensors"][name]["pieces"] for name in found["tensors"]
            }


def places(table: Any) -> list[tuple[Any, Any]]:
    """Every container and key in it."""
    keys = table.keys() if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else ()
    return [(table, key) for key in keys] + [place for key in keys for place in places(table[key])]


def test_a_fifo_in_a_transformers_folder_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        huggingface_files.listing(tmp_path)
