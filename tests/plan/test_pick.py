"""The pick of a scheme and grid: the fastest of few that are priced, the same everywhere, by the cluster of the job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from summa3d.bench.fitted import Measured, MeasuredTime, described, fit
from summa3d.cluster import load
from summa3d.errors import ClusterError, GridError
from summa3d.nn.choose import choose, ranked
from summa3d.nn.schemes.products import family_of
from summa3d.plan.pick import PRICED, Exact, cluster_for, pick, plan_of, shortened
from summa3d.plan.search.plans import FAMILIES
from summa3d.plan.search.timing import Times
from summa3d.train import config as configuration
from summa3d.train.config import SCHEMES

CONFIG = configuration.load(
    "demo", ["model.layers=2", "model.hidden=64", "model.heads=4", "model.sequence=16", "train.batch=12", "data.tokenizer=bytes"]
)
RANKS = 4
NETWORK = load("host").replaced({"host.shared": 0, "node.bandwidth": 1e9}, "assumed")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of cells of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMMA3D_CACHE", str(tmp_path_factory.mktemp("cells")))
        yield


def test_the_short_list_has_the_fewest_words_and_every_family_and_each_program_once() -> None:
    config = configuration.load("demo", [])
    found = ranked(config.model, config.rows, 8, SCHEMES, config.regather)
    short = shortened(found)
    assert len(short) == PRICED and short[0].words == choose(config.model, config.rows, 8, regather=config.regather).words
    assert {family_of(one.scheme, {"z": 1, **one.grid}) for one in short} == set(FAMILIES)
    assert shortened([one for one in found if one.scheme == "summa"][:1])  # what repeats others stays where it is alone


def test_it_is_the_fastest_of_the_short_list_and_cells_are_kept() -> None:
    first = pick(CONFIG, RANKS, SCHEMES, NETWORK)
    short = shortened(ranked(CONFIG.model, CONFIG.rows, RANKS, SCHEMES, CONFIG.regather))
    times = Times(NETWORK, Exact())
    seconds = {(one.scheme, str(one.grid)): times.seconds(plan_of(CONFIG, one, NETWORK)) for one in short}
    assert times.store.traces == 0 and times.store.read == len(short) == first.priced  # what the pick has left
    assert first.seconds == seconds[first.scheme, str(first.grid)] <= 1.01 * min(seconds.values())
    assert pick(CONFIG, RANKS, SCHEMES, NETWORK) == first
    said = str(first)
    assert f"grid {','.join(f'{axis}={size}' for axis, size in first.grid.items())}: " in said and "cluster host" in said


def test_slow_links_ask_for_few_words_and_slow_calls_for_few_calls() -> None:
    words = pick(CONFIG, RANKS, SCHEMES, NETWORK.replaced({"node.bandwidth": 1e6}, "assumed"))
    fewest = choose(CONFIG.model, CONFIG.rows, RANKS, regather=CONFIG.regather)
    assert (words.scheme, words.grid) == (fewest.scheme, fewest.grid)
    calls = pick(CONFIG, RANKS, SCHEMES, NETWORK.replaced({"collectives.launch": 0.1}, "assumed"))
    assert family_of(calls.scheme, calls.grid) == "1-D"  # four sums a layer, where others gather for every product


def test_a_grid_that_does_not_fit_is_the_error_of_the_choice() -> None:
    with pytest.raises(GridError, match="No grid of 5 ranks fits"):
        pick(CONFIG, 5, ("summa",), NETWORK)


def test_the_cluster_is_this_machines_if_it_was_calibrated_for_such_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "here.toml"
    monkeypatch.setenv("SUMMA3D_CLUSTER", str(file))
    one, two = (8, 8, 2), (7, 4, 2)
    default = cluster_for("cpu", *one)
    assert default is not None and (default.name, default["node.size"], default["host.slots"]) == ("host", 8, 2)
    assert cluster_for("cuda", *one) is None
    samples = [MeasuredTime("product", "", 1e-3, "float32", side, side, side) for side in (64, 128)]
    samples += [MeasuredTime("elements", "", 1e-3, bytes=1 << 20), MeasuredTime("elements", "", 2e-3, bytes=2 << 20)]
    samples += [MeasuredTime("move", "", 1e-3, bytes=1 << 20, level="node", hops=1)]
    measured = Measured(8, 1, 2, 1e9, True, tuple(samples))
    file.write_text(described(measured, fit(samples), {}))
    here = cluster_for("cpu", *one)
    assert here is not None and (here.name, here["host.slots"]) == ("here", 2)
    assert [found and found.name for found in (cluster_for("cpu", *two), cluster_for("cuda", *one))] == ["host", None]
    file.write_text(described(replace(measured, nodes=2, ranks=8), fit([*samples, samples[-1]._replace(level="network")]), {}))
    both = cluster_for("cpu", *two)
    assert both is not None and (both.name, both["node.size"]) == ("here", 4)
    file.write_text("name = ")
    with pytest.raises(ClusterError, match="here is no TOML"):
        cluster_for("cpu", *one)
