"""A plan as a training configuration, and as a folder with a Slurm job that runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...cluster import Cluster
from ...errors import DataError
from ...files import replace_text
from ...jobs import script
from ...train import toml
from ...train.config import Config, from_table, to_table, write
from .plans import Plan


def configured(plan: Plan, base: Config) -> Config:
    """The configuration `base` on the plan's grid: what `summa3d train` would run."""
    table = to_table(base)
    table |= {"grid": {}, "chosen": "", "model": toml.dump(plan.inner.model), "device": plan.inner.device}
    table["pipeline"].pop("layers", None)
    for key, value in plan.keys().items():
        toml.assign(table, key, value)
    return from_table(table)


JOB = """# {plan}
# Written by `summa3d plan --write`; predicted: {seconds:.4g} s a step on {cluster}. Submit it from any folder:
#   sbatch -A ACCOUNT -p PARTITION job.sh
# Before its time limit the job saves and goes back into the queue.
{settings}record "$RUN"
check
train
"""
SPARE = 1.25
"""Times the predicted seconds of all steps that a job may take, beside STARTUP."""
STARTUP = 600


def export(folder: Path, plan: Plan, seconds: float, base: Config, cluster: Cluster, result: Mapping[str, Any]) -> dict[str, Any]:
    """Write plan.toml, job.sh and plan.json into a folder; returns what a dry run of plan.toml says of its bytes.

    result : the plan as in the search's JSON. Raises DataError where the folder cannot be written, and ConfigError for
    a cluster whose devices are not NVIDIA's.
    """
    from ...train.dry_run import predict

    config = configured(plan, base)
    dry = predict(config)
    held = {key: dry[key] for key in ("fullest_rank", "bytes", "mean_bytes", "peak")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(to_table(config), folder / "plan.toml")
        replace_text(folder / "job.sh", _job(folder, plan, seconds, config, cluster))
        replace_text(folder / "plan.json", json.dumps({**result, "dry_run": held}, indent=1) + "\n")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from None
    return held


def _job(folder: Path, plan: Plan, seconds: float, config: Config, cluster: Cluster) -> str:
    ranks = plan.stage_ranks * plan.pp
    node = min(cluster.node or ranks, ranks)
    minutes = -(-int(STARTUP + SPARE * seconds * config.train.steps) // 60)
    limit = f"{minutes // 60:02}:{minutes % 60:02}:00"
    of = script.site_of(cluster.name, plan.inner.device)
    head = script.header(of, f"plan-{ranks}", -(-ranks // node), node, {**script.KINDS["train"], "time": limit})
    settings = script.assigned(
        CONFIG=(folder / "plan.toml").resolve(),
        SCHEME=plan.inner.scheme,
        GRID=",".join(f"{axis}={size}" for axis, size in config.grid.axes.items()),
    )
    told = {"plan": plan, "seconds": seconds, "cluster": cluster.name, "settings": settings}
    return script.compose(of, head, JOB.format(**told))
