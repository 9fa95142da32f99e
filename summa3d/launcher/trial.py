"""A few steps of several configurations on ranks of this machine, each a run of `summa3d train`: what their steps take."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ..cluster import Cluster
from ..columns import counted
from ..errors import CapacityError, ConfigError, LaunchError
from ..node_support import load_average
from ..train.config import Config, DataConfig, numbers_of, to_table, write
from .runtime import usable_cores

RunOnRanks = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]
"""Arguments of `summa3d` → how their run on all ranks has ended, with what it printed."""
STEPS = 5
"""Steps that are measured, behind one that is not: it makes what the others keep."""
PYTHON = 300 << 20
"""Bytes of a rank beside what a plan counts: Python, numpy and torch."""
WINDOWS = 64
"""The corpus of random tokens, in sequences: its held-out part has some."""
GIB = 2**30


def measure(configs: Sequence[Config], start: RunOnRanks, say: Callable[[str], None]) -> list[list[float]]:
    """The seconds of each measured step of each configuration: run after run, on random tokens.

    Raises LaunchError where a run fails, with the last that it printed.
    """
    say(f"load {load_average():.1f} on {usable_cores()} cores before the first run")
    with TemporaryDirectory(prefix="summa3d-try-") as scratch:
        folder = Path(scratch)
        return [_steps_of(config, number, len(configs), folder, start, say) for number, config in enumerate(configs, 1)]


def cluster_here(cluster: Cluster, ranks: int, say: Callable[[str], None]) -> Cluster:
    """The cluster by which plans are searched that this machine is to run: with its cores, where their number was assumed.

    Raises ConfigError for a cluster of devices, and for ranks of several nodes.
    """
    if not cluster["host.slots"]:
        raise ConfigError(
            f"--try runs plans on CPU ranks of this machine, and {cluster.name} describes devices. Clusters of CPU ranks: host; "
            "server; here, once `summa3d bench calibrate --write` has measured this machine; or a file with host.slots."
        )
    if cluster.node and ranks > cluster.node:
        raise ConfigError(
            f"--try runs plans on this machine alone, and {ranks} ranks are {-(-ranks // cluster.node)} nodes of {cluster.name}, "
            f"which has {cluster.node} ranks a node. Ranks that fit: up to {cluster.node}; more with "
            f"--set {cluster.level_names[0]}.size={ranks}."
        )
    cores = usable_cores()
    if cluster.numbers["host.slots"].source == "measured" or cluster["host.slots"] == cores:
        return cluster
    say(f"host.slots of {cluster.name} is {cluster['host.slots']:g}; this machine has {cores}, by which its plans are searched")
    return cluster.replaced({"host.slots": cores}, "measured")


def check_memory(ranks: int, peak: int, free: int) -> None:
    """Raise CapacityError where `ranks` ranks that hold `peak` bytes each do not fit into `free` bytes of this machine."""
    needed = ranks * (peak + PYTHON)
    if needed > free:
        each = f"{peak / GIB:.3g} GiB of the plan and {PYTHON / GIB:.2g} of Python each"
        fitting = f"{max(0, free // ranks - PYTHON) / GIB:.3g} GiB"
        raise CapacityError(
            f"--try runs plans on this machine, which has {free / GIB:.3g} GiB of memory free; {ranks} ranks take "
            f"{needed / GIB:.3g} GiB: {each}. Plans that fit hold at most {fitting} a rank: a smaller model, batch or --memory."
        )


def free_memory() -> int:
    """Bytes of memory of this machine that processes can have, as Linux says; elsewhere all that it has."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def short(config: Config, tokens: Path) -> Config:
    """The run of a configuration that is measured: a few steps on the token numbers of a file, and nothing behind them."""
    train = replace(
        config.train, steps=1 + STEPS, evaluate_every=0, evaluate_batches=1, checkpoint_every=0, keep=0, sample_tokens=0
    )
    data = DataConfig(path=str(tokens), tokenizer=numbers_of(config.model), token_dtype="int32", held_out=0.5)
    return replace(config, train=train, data=data)


def _steps_of(config: Config, number: int, many: int, folder: Path, start: RunOnRanks, say: Callable[[str], None]) -> list[float]:
    """The seconds of the measured steps of one configuration."""
    tokens, file, run = folder / "tokens.bin", folder / f"{number}.toml", folder / str(number)
    ranks = prod(config.grid.axes.values())
    say(f"{number}/{many}: {1 + STEPS} steps of {config.scheme}, grid {config.grid} on {counted(ranks, 'rank')}")
    shortened = short(config, tokens)
    many_tokens = WINDOWS * (config.model.sequence + 1)
    np.random.default_rng(1).integers(shortened.data.vocabulary, size=many_tokens, dtype=np.int32).tofile(tokens)
    write(to_table(shortened), file)
    ended = start(["train", str(file), "--run", str(run), "--json"])
    if ended.returncode != 0:
        last = "\n  ".join((ended.stderr or ended.stdout).strip().splitlines()[-8:])
        raise LaunchError(f"the run of plan {number} ended with status {ended.returncode}:\n  {last}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [float(line["seconds"]) for line in lines if line["step"] > 1]
