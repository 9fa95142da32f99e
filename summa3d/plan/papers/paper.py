"""Tables of papers beside predictions: what was printed, corrected, predicted, and the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any

from ...comm.topology import Topology
from ...dry.step import Setting
from ...errors import ConfigError
from ...nn.config import ModelConfig
from ...train.toml import nearest, tomllib
from ..cells import BLOCK, cells
from ..cluster import Cluster
from ..cluster import load as load_cluster
from ..replay import Work
from .fit import Ranges, error, fit, held_out, leave_one_out
from .megatron import predictor
from .profiles import edited

FOLDER = Path(__file__).with_name("tables")
MARKS = {"fitted": "●", "held out": "○", "never": "×"}
"""Use of a row → its mark: fitted to, predicted only, never fitted to."""


@dataclass(frozen=True)
class Row:
    """One reported number. predict : its prediction on a cluster. group : what extrapolations select rows by."""

    name: str
    use: str
    series: str
    ranks: int
    cluster: str
    reported: float
    corrected: float | None
    erratum: str
    predict: Callable[[Cluster], float]

    @property
    def target(self) -> float:
        """What the prediction is compared with."""
        return self.reported if self.corrected is None else self.corrected


@dataclass(frozen=True)
class Paper:
    """The rows of a paper, and what is fitted to them."""

    name: str
    table: Mapping[str, Any]
    rows: tuple[Row, ...]
    ranges: Ranges

    def cluster(self, row: Row) -> Cluster:
        """The cluster that a row was measured on."""
        return load_cluster(row.cluster)


def names() -> list[str]:
    """The papers whose tables are here."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name: str) -> Paper:
    """The paper of a name; its programs are traced here. Raises ConfigError for an unknown name, naming the nearest."""
    file = FOLDER / f"{name}.toml"
    if name not in names():
        raise ConfigError(f"unknown paper {name!r}; the nearest is {nearest(name, names())}. Known: {', '.join(names())}.")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    ranges = {key: (float(least), float(most)) for key, (least, most) in table.get("fit", {}).items()}
    of = _step_rows if "step" in table else _block_rows
    return Paper(name, table, tuple(row for given in table["row"] for row in of(table, given)), ranges)


def _block_rows(table: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a table of blocks' times: one for each cluster and placement."""
    batch = given["batch"]
    if "average" in given:
        reported = given["average"]
    else:
        reported = given["step"] / batch if "step" in given else given["forward"] + given["backward"]
    setting = _setting(given, given["axes"], batch, table["sequence"], dropout=0.1, tile=given.get("tile"))
    cell = edited(cells(setting)[BLOCK], given["profile"])
    for cluster in table["clusters"]:
        for place, how in table.get("placement", {"": {"tile": given.get("tile")}}).items():
            order = how["order"].split(",") if "order" in how else None
            topology = Topology.checked(given["axes"], order, how.get("tile"))
            work = Work.of(topology, (*cell.forward, *cell.backward), table["layers"] / batch)
            name = ", ".join(part for part in (given["name"], cluster if place else "", place) if part)
            ranks = prod(given["axes"].values())
            texts = given["use"], given["series"]
            yield Row(
                name, *texts, ranks, cluster, round(reported, 4), given.get("corrected"), given.get("erratum", ""), work.seconds
            )


def _step_rows(table: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Row]:
    """The row of a table of whole training steps, on each of its clusters; `step` of the table holds what its rows share."""
    whole = {**table["step"], **given}
    whole.setdefault("dp", whole["gpus"] // (whole["tp"] * whole["pp"]))
    reported = next(whole[unit] for unit in ("tflops", "sequences", "seconds") if unit in whole)
    for cluster in table["clusters"]:
        predict = predictor(whole, load_cluster(cluster))
        texts = given["name"], given["use"], given["series"]
        yield Row(*texts, whole["gpus"], cluster, reported, given.get("corrected"), given.get("erratum", ""), predict)


def _setting(
    given: Mapping[str, Any], axes: dict[str, int], batch: int, sequence: int, dropout: float, tile: dict[str, int] | None = None
) -> Setting:
    """A model of one block, with attention that keeps its scores, as the papers' programs have it, all recomputed."""
    ranks = prod(axes.values())
    model = ModelConfig(
        layers=1,
        hidden=given["hidden"],
        heads=given["heads"],
        sequence=sequence,
        vocabulary=given.get("vocabulary", 1024 * ranks),
        dropout=dropout,
        attention_dropout=dropout,
    )
    return Setting(model, batch, given["scheme"], axes, tile=tile, recompute=("full", 1), on_device=True)


# -- the report ---------------------------------------------------------------------------------------------------------------


def report(paper: Paper) -> dict[str, Any]:
    """What `summa3d plan --paper NAME --json` prints: rows, and a summary of their errors, as fractions.

    Rows are predicted with the numbers of the clusters' files. leave_one_out is the median error of each fitted row by a fit to
    the others; null where nothing is fitted.
    """
    rows = [_line(paper, row) for row in paper.rows]
    absolute = [abs(row["error"]) for row in rows]
    summary = {
        "n": len(rows),
        "fitted": len(paper.ranges),
        "median": median(absolute),
        "mean": mean(absolute),
        "max": max(absolute),
        "leave_one_out": None,
    }
    found: dict[str, Any] = {"paper": paper.name, "unit": paper.table["unit"], "rows": rows, "summary": summary}
    if paper.ranges:
        found |= _refitted(paper, summary)
    if "ordering" in paper.table:
        found["orderings"] = _orderings(paper, rows)
    return found


def _line(paper: Paper, row: Row) -> dict[str, Any]:
    cluster = paper.cluster(row)
    printed = {"name": row.name, "reported": row.reported, "corrected": row.corrected}
    return {**printed, "predicted": row.predict(cluster), "error": error(row, cluster), "use": row.use}


def _refitted(paper: Paper, summary: dict[str, Any]) -> dict[str, Any]:
    """The fit to all fitted rows, leave-one-out, which goes into the summary, and the extrapolations."""
    rows = [row for row in paper.rows if row.use == "fitted"]
    cluster = paper.cluster(rows[0])
    whole = fit(rows, cluster, paper.ranges)
    alone = [abs(one) for one in leave_one_out(rows, cluster, paper.ranges)]
    summary["leave_one_out"] = median(alone)
    found: dict[str, Any] = {
        "fit": {key: whole.cluster[key] for key in paper.ranges},
        "at_bound": list(whole.at_bound),
        "leave_one_out": {"median": median(alone), "mean": mean(alone), "max": max(alone)},
        "extrapolations": [],
    }
    for given in paper.table.get("extrapolation", ()):
        ranks, series = given.get("ranks"), given.get("series")
        train = [row for row in rows if (not ranks or row.ranks in ranks) and (not series or row.series in series)]
        errors = [abs(one) for one in held_out([row for row in rows if row not in train], train, cluster, paper.ranges)]
        found["extrapolations"].append({"name": given["name"], "n": len(errors), "median": median(errors), "max": max(errors)})
    return found


def _orderings(paper: Paper, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which of two series is faster on the same number of ranks: as reported, and as predicted."""
    of = {(row.series, row.ranks): (row.target, line["predicted"], row.name) for row, line in zip(paper.rows, rows, strict=True)}
    pairs = [
        (of[first, ranks], of[second, ranks])
        for first, second in (given["series"] for given in paper.table["ordering"])
        for series, ranks in of
        if series == first
    ]
    missed = [f"{one[2]} against {other[2]}" for one, other in pairs if (one[0] < other[0]) != (one[1] < other[1])]
    return {"right": len(pairs) - len(missed), "of": len(pairs), "missed": missed}
