"""A run small enough for a test: its configuration, its corpus, and how to start it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SMALL = {
    "dtype": "float64",
    "grid.order": "zyx",
    "model.layers": 1,
    "model.hidden": 24,
    "model.heads": 6,
    "model.sequence": 16,
    "model.dropout": 0.1,
    "train.steps": 6,
    "train.batch": 12,
    "train.warmup": 2,
    "train.learning_rate": 0.01,
    "train.evaluate_every": 3,
    "train.evaluate_batches": 2,
    "train.checkpoint_every": 2,
    "train.sample_tokens": 0,
    "train.peak_tflops": 0.05,
}


def write_corpus(path: Path, words: int = 4000) -> Path:
    """A text file of random words, the same every time; whoever reads it meanwhile sees it whole or not at all."""
    from summa3d.files import replacing

    chooser = random.Random(7)
    lexicon = ["".join(chooser.choices("abcdefgh", k=chooser.randint(1, 6))) for _ in range(50)]
    with replacing(path) as new:
        new.write_text(" ".join(chooser.choices(lexicon, k=words)))
    return path


def assignments(corpus: Path | str, **changes: object) -> list[str]:
    """``key=value`` texts for the small run, with `changes` (a dot in a key is written as two underscores)."""
    settings = {**SMALL, "data.path": corpus, **{key.replace("__", "."): value for key, value in changes.items()}}
    return [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in settings.items()]


def small_config(corpus: Path | str, **changes: object) -> Any:
    """The configuration of the small run."""
    from summa3d.train import config

    return config.load("demo", assignments(corpus, **changes))


def shared_corpus(comm: Any, folder: Path) -> Path:
    """The corpus in `folder`, written once for all ranks of `comm`; each rank of a test may call it with one of its own."""
    path = folder / "corpus.txt"
    if comm.rank == 0 and not path.exists():
        write_corpus(path)
    comm.Barrier()
    return path


def train_small(comm: Any, folder: Path, resume: bool = False, **changes: object) -> dict[str, Any]:
    """Train the small run in `folder`/run on `comm`; returns its summary."""
    from summa3d.train.loop import train

    return train(small_config(shared_corpus(comm, folder), **changes), comm, folder / "run", resume=resume)


def train_in_legs(
    comm: Any, folder: Path, legs: Sequence[tuple[int, dict[str, Any]]], **keys: object
) -> Iterator[tuple[Any, int]]:
    """A serial run in `folder`/whole, and the same run in `folder`/legs: two steps each on so many ranks with these settings.

    Yields the ranks and the step after each leg, on its ranks.
    """
    from mpi4py import MPI

    whole, parts = folder / "whole", folder / "legs"
    if comm.rank == 0:
        whole.mkdir()
        parts.mkdir()
        train_small(MPI.COMM_SELF, whole, scheme="serial", train__steps=2 * len(legs), **keys)
    comm.Barrier()
    for done, (ranks, settings) in enumerate(legs):
        part = comm.Split(color=0 if comm.rank < ranks else MPI.UNDEFINED)
        if part != MPI.COMM_NULL:
            train_small(part, parts, resume=done > 0, train__steps=2 * (done + 1), **{**keys, **settings})
            yield part, 2 * (done + 1)
            part.Free()
        comm.Barrier()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics lines of the run in `folder`/run."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def micro_batch(run: Any, number: int, first_row: int) -> Any:
    """Forward and backward of one micro-batch of step `number`, by the model's own forward; returns its part of the loss."""
    from summa3d.train.device import on_device

    settings = run.config.train
    inputs = on_device(run.objective.training(settings.seed, number - 1, first_row, settings.micro_batch), run.device)
    with run.grid.ledger.phase("forward"), run.working_weights():
        loss = run.model(**inputs, step=number - 1, first_row=first_row, **run.objective.counts(settings.batch))
    with run.grid.ledger.phase("backward"):
        (loss * run.loss_scale.value).backward()
    return loss.detach()


def tensors_of(path: Path) -> dict[str, Any]:
    """The whole tensors of the checkpoint at `path`, weights and moments, in its dtypes."""
    import torch
    from mpi4py import MPI

    from summa3d.comm.grid import Place
    from summa3d.layout.layout import Layout, Sharding
    from summa3d.train.checkpoint import folder, shards

    saved, found = folder.read(path, MPI.COMM_SELF), {}
    with shards.ShardReader(path, saved.index["tensors"]) as reader:
        for name, entry in saved.index["tensors"].items():
            found[name] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            whole = Sharding(Layout(*[()] * len(entry["shape"])), tuple(entry["shape"]))
            reader.read(shards.TensorBlock(name, found[name], whole), Place({"x": 1}))
    return found
