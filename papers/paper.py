"""Tables of papers: their rows, and the prediction of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from summa3d.cluster import load as load_cluster
from summa3d.comm.topology import Topology
from summa3d.dry.step import Setting
from summa3d.errors import ConfigError, nearest
from summa3d.files import read_toml
from summa3d.nn.config import ModelConfig
from summa3d.plan.cells import BLOCK, cells
from summa3d.plan.programs.programs import PROGRAMS, edited, on_cluster
from summa3d.plan.replay import UnorderedWork

from . import units
from .fit import NumberRanges, Predict, ReportedNumber

FOLDER = Path(__file__).with_name("tables")
UNITS = ("tflops", "model_tflops", "mfu", "sequences", "seconds")
"""What a row of a step may report."""
MARKS = {"fitted": "●", "held out": "○", "never": "×"}
"""Use of a row → its mark: fitted to, predicted only, never fitted to."""


@dataclass(frozen=True)
class Paper:
    """The rows of a paper, and what is fitted to them."""

    name: str
    table: Mapping[str, Any]
    rows: tuple[ReportedNumber, ...]
    ranges: NumberRanges


def names() -> list[str]:
    """The papers whose tables are here."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def table_of(name: str) -> dict[str, Any]:
    """The table of a paper. Raises ConfigError for an unknown name, naming the nearest."""
    if name not in names():
        raise ConfigError(f"unknown paper {name!r}; the nearest is {nearest(name, names())}. Known: {', '.join(names())}.")
    return read_toml(FOLDER / f"{name}.toml")


def load(name: str) -> Paper:
    """The paper of a name; its programs are traced here. Raises as `table_of` does."""
    table = table_of(name)
    ranges = {key: (float(least), float(most)) for key, (least, most) in table.get("fit", {}).items()}
    of = _step_rows if "step" in table else block_rows
    if "inference" in table:
        table = {**table_of(table["of"]), **table}
        rows = [{key: row[key] for key in row if key not in ("corrected", "erratum")} for row in table["row"]]
        table["row"] = [{**row, "use": "never", **table["inference"][row["name"]]} for row in rows]
    return Paper(name, table, tuple(row for given in table["row"] for row in of(table, given)), ranges)


def block_rows(table: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[ReportedNumber]:
    """The rows of a table of blocks' times: one for each cluster and placement."""
    batch = given["batch"]
    if "sequences" in given:
        reported = given["sequences"]
    elif "average" in given:
        reported = given["average"]
    else:
        reported = given["step"] / batch if "step" in given else given["forward"] + given["backward"]
    for cluster in table["clusters"]:
        for place, how in table.get("placement", {"": {"tile": given.get("tile")}}).items():
            name = ", ".join(part for part in (given["name"], cluster if place else "", place) if part)
            described, corrected = load_cluster(cluster), given.get("corrected")
            work = block_work(table, given, how)
            predict = _sequences(work) if "sequences" in given else work.seconds
            texts, ranks = (given["use"], given["series"]), prod(given["axes"].values())
            yield ReportedNumber(name, *texts, ranks, described, round(reported, 4), corrected, given.get("erratum", ""), predict)


def block_work(table: Mapping[str, Any], given: Mapping[str, Any], how: Mapping[str, Any]) -> UnorderedWork:
    """Return what a row's blocks do for one sequence, on axes of the order and tile of `how`; of inference the forward."""
    setting = _setting(given, given["axes"], given["batch"], table["sequence"], dropout=0.1, tile=given.get("tile"))
    cell = edited(cells(setting)[BLOCK], PROGRAMS[given["profile"]].edits)
    order = how["order"].split(",") if "order" in how else None
    topology = Topology.checked(given["axes"], order, how.get("tile"))
    trace = cell.forward if "sequences" in given else (*cell.forward, *cell.backward)
    return UnorderedWork.of(topology, trace, table["layers"] / given["batch"])


def _sequences(work: UnorderedWork) -> Predict:
    return lambda cluster: 1 / work.seconds(cluster)


def _step_rows(table: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[ReportedNumber]:
    """The row of a table of whole training steps, on each of its clusters; `step` of the table holds what its rows share."""
    whole = {**table["step"], **given}
    whole.setdefault("dp", whole["gpus"] // (whole.get("tp", 1) * whole.get("pp", 1)))
    reported = next(whole[unit] for unit in UNITS if unit in whole)
    for name in table["clusters"]:
        cluster = on_cluster(PROGRAMS[whole["profile"]], load_cluster(name))
        predict = units.predictor(whole, cluster)
        texts, marks = (given["name"], given["use"], given["series"]), (given.get("corrected"), given.get("erratum", ""))
        yield ReportedNumber(*texts, whole["gpus"], cluster, reported, *marks, predict, given.get("group", ""), whole["batch"])


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
