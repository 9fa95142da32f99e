"""`find_plans`: the search for the fastest plans of a model on a cluster, as a call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster import Cluster, load
from ...columns import counted
from ...comm.topology import several
from ...errors import ConfigError
from ...nn.config import ModelConfig
from ...table import Column, Table
from ...train.config import Config
from ..programs.bands import own_band
from .explain import explain
from .export import configured
from .memory import usable
from .plans import Plan
from .request import Request, bytes_of, request, space_of
from .search import Found, PlanSearch, Priced, ProgressCallback
from .store import Store
from .text import GIB, as_json, as_text
from .timing import Times


@dataclass(frozen=True)
class Plans:
    """The fastest plans of a model on a cluster, ascending by predicted seconds. Printed, it is the table of ``summa3d plan``.

    Attributes
    ----------
    result : all that the search found (the best of each family, what was rejected and why)
    asked : the model's name and configuration
    searched : the search itself, which can price further plans
    """

    result: Found
    asked: Request
    searched: PlanSearch

    def __len__(self) -> int:
        return len(self.result.best)

    def __getitem__(self, place: int) -> Priced:
        return self.result.best[place]

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.result.best[0].plan

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step of the fastest plan, within `band`."""
        return self.result.best[0].seconds

    @property
    def band(self) -> float:
        """Half the width of the band of predicted times, as a share of them."""
        return own_band(self.result.cluster)[0]

    @property
    def grid(self) -> dict[str, int]:
        """The axes of the fastest plan's grid with more than one rank."""
        return several(self.best.shape)

    def config(self, place: int = 0) -> Config:
        """The configuration of a plan, the fastest by default: what `summa3d train` would run, and `dry_run` takes."""
        return configured(self.result.best[place].plan, self.asked.config)

    def explain(self, place: int) -> list[str]:
        """Say in lines why the plan of this number, from 1, is where it is. Raises ConfigError for a number that there is not."""
        if place < 1:
            raise ConfigError(f"plan {place} is none; the plans are numbered from 1.")
        return list(explain(self.result, place, self.searched.times))

    def as_json(self) -> dict[str, Any]:
        """Report that ``summa3d plan --json`` prints."""
        return as_json(self.result, self.asked)

    def table(self) -> Table:
        """A row for each plan: seconds, utilization, GiB of the fullest rank, and shares of the step's time."""
        rows = self.as_json()["plans"]
        limits = f"{self.asked.name} on {self.result.cluster.name}, {counted(self.result.space.ranks, 'rank')}, ±{self.band:.0%}"
        return Table(
            limits,
            [
                Column("plan", [row["plan"] for row in rows], left=True),
                Column("family", [row["family"] for row in rows], left=True),
                Column("seconds", [row["seconds"] for row in rows], "{:.4g}".format),
                Column("MFU", [row["mfu"] for row in rows], "{:.1%}".format),
                Column("HFU", [row["hfu"] for row in rows], "{:.1%}".format),
                Column("GiB", [row["memory"]["total"] / GIB for row in rows], "{:.1f}".format),
                *(
                    Column(name, [row["time"][name] / row["seconds"] for row in rows], "{:.1%}".format)
                    for name in ("compute", "p2p", "bubble", "dp")
                ),
            ],
        )

    def to_frame(self) -> Any:
        """The table as a DataFrame. Raises ConfigError where pandas is not installed."""
        return self.table().to_frame()

    def _repr_html_(self) -> str:
        return self.table().html()

    def __str__(self) -> str:
        return "\n".join(as_text(self.result, self.asked))


def find_plans(
    model: str | Sequence[str] | Path | ModelConfig | Config,
    cluster: str | Path | Cluster,
    ranks: int,
    batch: int,
    *,
    fix: Mapping[str, Any] | Sequence[str] = (),
    limit: Sequence[str] = (),
    memory: str | float | None = None,
    era: str = "now",
    top: int = 8,
    processes: int = 0,
    say: Callable[[str], None] = lambda line: None,
    tell: ProgressCallback = lambda done, total, traced: None,
) -> Plans:
    """Search for the grids, pipelines and replicas on which a training step of a model is predicted to be the fastest.

    Every plan that divides evenly and fits is considered; times are of its own program, traced dry and priced. No rank is
    started, and MPI is not initialized.

    Parameters
    ----------
    model : a name ("gpt3-175b"), a configuration that is shipped or the path of one; further words are KEY=VALUE of its sizes, as
        ["llama3-8b", "sequence=4096"]; or a `ModelConfig` or `Config`
    cluster : the name of one that is shipped, "here" for what `summa3d bench calibrate` has measured, or the path of a file
    ranks, batch : how many ranks, and sequences of a step
    fix : only plans with these values, as {"pp": 8} or ["pp=8"]
    limit : only plans within these, as ["y<=8"]
    memory : of a device, bytes or as "40GB", in place of the cluster's; of either a reserve is kept free (`memory.reserve`)
    era : "now", or "2021": all-reduces, every layer recomputed, no ZeRO
    top : how many plans to keep
    processes : other Pythons that trace; a script that asks for some has an ``if __name__ == "__main__":``
    say, tell : are given a line for each file of the cache that cannot be used, and (done, of how many, cells traced)

    Raises ConfigError and ClusterError for what is unknown, naming the nearest, and where no plan is left, with the reasons.

    >>> plans = find_plans("gpt3-175b", "selene", 1024, 1536, fix={"pp": 8})  # doctest: +SKIP
    >>> print(plans.best, plans.seconds, plans.grid)  # doctest: +SKIP
    """
    if top < 1:
        raise ConfigError(f"--top is {top}; it must be at least 1.")
    described = (cluster if isinstance(cluster, Cluster) else load(str(cluster))).filled(ranks)
    if memory is not None:
        described = described.replaced({"device.memory": bytes_of(memory) if isinstance(memory, str) else memory}, "assumed")
    words = [str(model)] if isinstance(model, str | Path) else model
    asked = request(words, batch, described)
    fixes = (
        [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in fix.items()]
        if isinstance(fix, Mapping)
        else fix
    )
    space = space_of(asked, described, ranks, batch, era, fixes, limit)
    store = Store(say, processes)
    searched = PlanSearch(space, Times(described, store, asked.config.train), usable(described["device.memory"]), top)
    with closing(store):
        return Plans(searched.run(tell), asked, searched)
