"""The points of sweeps: what a file means, which grids and sizes it gives, what is refused, and what a point is named by."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from typing import Any

import jobs
import pytest

from summa3d import cluster
from summa3d.errors import ClusterError, ConfigError
from summa3d.plan.pick import pick
from summa3d.sweep import file as sweeps
from summa3d.sweep.file import Sweep, flat, load, nested, read
from summa3d.sweep.points import Point, expand, races
from summa3d.sweep.rules import RULES, grown

PRODUCT = {"m": 30, "n": 20, "k": 40}
MODEL = {"model": {"hidden": 24, "heads": 6, "sequence": 16, "layers": 1}, "train": {"batch": 12}}


def products(**table: Any) -> Sweep:
    return read({"name": "p", "what": "gemm", "ranks": [1, 2, 4], "base": PRODUCT, **table})


def blocks(**table: Any) -> Sweep:
    return read({"name": "b", "ranks": [1, 2, 4], "base": {**MODEL, "grid": "fewest"}, **table})


def test_every_count_meets_every_value_once() -> None:
    points, refused = expand(products(vary={"dtype": ["float32", "float64"], "k": [40, 41]}))
    assert not refused and len(points) == len({point.id for point in points}) == 12
    contents = {(point.ranks, point.config["dtype"], point.config["k"]) for point in points}
    assert contents == {(ranks, dtype, k) for ranks in (1, 2, 4) for dtype in ("float32", "float64") for k in (40, 41)}
    twice, _ = expand(products(vary={"k": [40, 40]}))
    assert len(twice) == 3  # one content is one point


def test_an_id_is_of_the_content_alone_and_the_same_in_every_process() -> None:
    point = Point("gemm", 2, {"m": 3, "n": 4, "k": 5}, series="a", race="b")
    assert point.id == Point("gemm", 2, {"k": 5, "n": 4, "m": 3}, series="other", x=7).id
    others = [Point("gemm", 2, {"m": 3, "n": 4, "k": 6}), Point("gemm", 4, point.config), Point("gemm", 2, point.config, 1)]
    assert len({point.id, *(one.id for one in others)}) == 4
    program = "from summa3d.sweep.points import Point; print(Point('gemm', 2, {'m': 3, 'n': 4, 'k': 5}).id)"
    environ = jobs.environment({"PYTHONHASHSEED": "7"})
    assert subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True).stdout.strip() == point.id


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("cube", [(30, 20, 40), (60, 40, 80)]),
        ("rows", [(30, 20, 40), (240, 20, 40)]),
        ({"m": "base * ranks ** 0.5", "k": [7, 9]}, [(30, 20, 7), (85, 20, 9)]),
    ],
)
def test_products_grow_as_the_rule_says(rule: Any, sizes: list[tuple[int, int, int]]) -> None:
    points, _ = expand(products(kind="weak", ranks=[1, 8], weak=rule))
    assert [tuple(point.config[name] for name in "mnk") for point in points] == sizes


def test_the_rules_of_the_papers_are_their_tables() -> None:
    base = {"model.hidden": 2048, "model.heads": 32, "train.batch": 96}
    table = [(4, 2048, 32, 96), (16, 4096, 64, 192), (64, 8192, 128, 384)]  # Optimus, table 2, 2-D
    for ranks, hidden, heads, batch in table:
        assert grown("block", "optimus", base, ranks, 4, 0) == {
            "model.hidden": hidden,
            "model.heads": heads,
            "train.batch": batch,
        }
    stages = grown("train", "ptdp", {"model.layers": 3}, 8, 1, 3)  # PTD-P, figure 11: 3 layers on 1 stage, 24 on 8
    assert stages == {"model.layers": 24, "grid.pp": 8}
    assert set(RULES["train"]) == {"cube", "rows", "optimus", "ptdp"}
    odd = grown("block", "cube", {"model.hidden": 96, "model.heads": 4}, 3, 1, 0)
    assert odd["model.hidden"] % odd["model.heads"] == 0


def test_grids_are_the_planners_those_of_fewest_words_every_one_or_those_of_a_list() -> None:
    fewest, _ = expand(blocks(vary={"scheme": ["oned", "cuboid"]}))
    assert [prod(point.axes.values()) for point in fewest] == [point.ranks for point in fewest]
    (planned,), _ = expand(blocks(ranks=[4], ranks_per_node=4, vary={"scheme": ["cuboid"], "grid": "planned"}))
    host = cluster.load("host").replaced({"node.size": 4, "host.slots": 4}, "assumed")
    found = pick(planned.settings, 4, ["cuboid"], host)
    assert planned.axes == found.grid and found.priced > 1
    with pytest.raises(ClusterError, match="unknown cluster 'selen'"):
        expand(blocks(cluster="selen", vary={"grid": "planned"}))
    every, _ = expand(blocks(ranks=[4], vary={"scheme": ["cuboid"], "grid": "every"}))
    assert {tuple(point.axes.values()) for point in every} >= {(4, 1, 1), (2, 2, 1), (1, 2, 2)}
    listed, refused = expand(blocks(vary={"scheme": ["cuboid"], "grid": ["x=2,y=2", {"z": 2}]}))
    assert [point.axes for point in listed] == [{"z": 2}, {"x": 2, "y": 2}]
    assert [(one.ranks, str(one.error)) for one in refused] == [(1, "none of the grids that are listed has 1 rank.")]
    staged, _ = expand(blocks(what="train", config="demo", ranks=[4], base={**MODEL, "grid": {"pp": 2}, "model": {"layers": 2}}))
    assert staged[0].axes["pp"] == 2 and prod(staged[0].axes.values()) == 4


def test_what_a_run_would_refuse_is_refused_with_its_reason() -> None:
    _, refused = expand(blocks(ranks=[5], vary={"scheme": ["oned", "summa"], "grid": ["z=5"]}))
    assert len(refused) == 2 and all("5" in str(one.error) for one in refused)
    points, refused = expand(products(ranks=[2, 4], vary={"algorithm": ["cannon"]}))
    assert [point.ranks for point in points] == [4] and "cannon cannot use 2 ranks" in str(refused[0].error)


def test_a_listed_grid_that_its_algorithm_does_not_have_is_refused() -> None:
    points, refused = expand(
        products(ranks=[4], base={**PRODUCT, "algorithm": "summa"}, vary={"grid": ["x=2,y=2", "x=2,y=2,z=1"]})
    )
    assert [point.axes["x"] for point in points] == [2, 2] and not refused
    points, refused = expand(products(ranks=[4], base={**PRODUCT, "algorithm": "summa"}, vary={"grid": ["z=4"]}))
    assert not points and "summa has no grid z=4. Its grids of 4 ranks: " in str(refused[0].error)


def test_memory_refuses_points_too() -> None:
    from summa3d.sweep.run import planned

    points, refused = planned(blocks(ranks=[1], memory=1000.0))
    assert not points and "the limit is" in str(refused[0].error)
    assert len(planned(blocks(ranks=[1], memory=1e9))[0]) == 1


def test_points_of_one_count_and_work_are_one_race() -> None:
    sweep = blocks(ranks=[1, 2, 3], vary={"scheme": ["oned", "cuboid"], "train": {"batch": [12, 24]}}, repeats=2)
    ready = races(expand(sweep)[0], sweep)
    assert len(ready) == 3 * 2 * 2 and {len(race) for race in ready} == {2}
    for race in ready:
        assert len({(point.ranks, point.config["train.batch"], point.repeat) for point in race}) == 1
    alone = read({**{"name": "p", "what": "gemm", "ranks": [1, 2], "base": PRODUCT}, "order": "sequential"})
    assert [len(race) for race in races(expand(alone)[0], alone)] == [1, 1]
    shared = products(kind="weak", weak="cube")
    assert [len(race) for race in races(expand(shared)[0], shared, shared=True)] == [3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"ranks": []}, "ranks = [] are no rank counts"),
        ({"ranks": [1], "rouns": 3}, "The nearest known key is 'rounds'"),
        ({"ranks": [1], "rounds": 0}, "rounds is 0; it must be at least 1."),
        ({"ranks": [1], "kind": "weak"}, "weak scaling alone has a rule"),
        ({"ranks": [1], "base": {**PRODUCT, "panell": 3}}, "unknown key 'panell' of a product; the nearest is 'panel'"),
        ({"ranks": [1], "base": {"m": 3}}, "a product needs n, k in base."),
        ({"ranks": [2], "kind": "weak", "weak": "root"}, "weak = 'root' is no rule of gemm; it has cube, rows"),
        (
            {"ranks": [2], "kind": "weak", "weak": {"m": "base + x"}},
            "the formula 'base + x' may hold numbers, base, ranks, first",
        ),
        ({"ranks": [2], "kind": "weak", "weak": {"m": "__import__('os')"}}, "may hold numbers"),
        (
            {"ranks": [1], "vary": {"grid": ["x:2"]}, "base": {**PRODUCT, "algorithm": "cuboid"}},
            "'x:2' is no grid; write it as x=2",
        ),
        ({"ranks": [2], "kind": "weak", "weak": {"m": "(1 - base) ** 0.5"}}, "it is the root of a negative number"),
        ({"ranks": [2], "kind": "weak", "weak": {"m": "base * 1e308 * 1e308"}}, "cannot be worked out: it is inf"),
        ({"ranks": [2], "kind": "weak", "weak": {"m": "(" * 9000 + "1" + ")" * 9000}}, "cannot be worked out"),
        ({"ranks": [2], "kind": "weak", "weak": {"dtype": "base * 2"}}, "its base, 'float64', is no number"),
        ({"ranks": [1], "base": {**PRODUCT, "dtype": "float12"}}, "dtype float12 is not supported by products"),
        ({"ranks": [1], "base": {**PRODUCT, "algorithm": "cubiod"}}, "Algorithm 'cubiod' is not known"),
        ({"ranks": [1], "vary": {"algorithm": [["cuboid"]]}}, "is not known"),
        ({"ranks": [2], "base": {"m": 3}, "vary": {"grid": ["x=2"]}}, "a product needs n, k in base."),
        ({"ranks": [2], "vary": {"grid": ["x=2"]}}, "name an algorithm beside a list of grids"),
        ({"ranks": [1], "vary": {"dtype": []}}, "vary.dtype = [] has no values"),
        ({"ranks": [1], "vary": {key: [*range(1, 99)] for key in "mnk"}}, "make 941,192 points; a sweep has at most 100,000"),
        ({"ranks": [1], "series": [{"name": 3}]}, "name = 3 of series 1 is an integer; it takes text."),
        ({"ranks": [1], "series": [{"name": "a"}, {"base": 3}]}, "base = 3 of series 2 is an integer; it takes a table."),
        ({"ranks": [1], "series": [3]}, "series has 3; it takes tables"),
        ({"ranks": [1], "series": [{"nam": "a"}]}, "The nearest known key is 'series.name'"),
        ({"ranks": [1], "base_ranks": -1}, "base_ranks is -1; it must be at least 0."),
        ({"ranks": [1], "memory": float("nan")}, "memory is nan; it must be at least 0."),
    ],
)
def test_a_file_that_cannot_be_is_one_message(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        expand(read({"name": "p", "what": "gemm", "base": PRODUCT, **table}))
    assert message in str(raised.value)


def test_threads_are_those_that_the_most_ranks_have_each_counts_own_or_a_number() -> None:
    given = {"kind": "grid", "what": "gemm", "ranks": [1, 8]}
    shares = {words: read({"name": "s", **given, "threads": words}).threads_of_rank(32, 8) for words in ("equal", "each", 3, "5")}
    assert shares == {"equal": 4, "each": None, 3: 3, "5": 5} and read({"name": "s", **given}).threads_of_rank(2, 8) == 1
    for wrong in ("some", 0, "-1"):
        with pytest.raises(ConfigError, match=r"threads = .* or a number from 1 on"):
            read({"name": "s", **given, "threads": wrong})


def test_keys_are_set_from_the_command_line() -> None:
    sweep = load("product-strong", ["ranks=1,3", "rounds=2", "m=64", "dtype=float64"])
    assert (list(sweep.ranks), sweep.rounds, sweep.base["m"], sweep.base["dtype"]) == ([1, 3], 2, 64, "float64")
    sizes = load("optimus-strong", ["model.hidden=96"])
    assert flat(sizes.base)["model.hidden"] == 96 and nested(flat(sizes.base)) == sizes.base
    with pytest.raises(ConfigError, match=r"neither a TOML file nor one of .*; the nearest is optimus-weak"):
        load("optimus-week")


@pytest.mark.parametrize("name", sweeps.shipped())
def test_every_sweep_that_is_shipped_has_points_of_all_its_series(name: str) -> None:
    sweep = load(name)
    points, refused = expand(sweep)
    assert points and not refused, [str(one.error) for one in refused]
    assert sweeps.shipped()[name].endswith(".")
    assert max(sweep.ranks) <= 27
    assert set(sweep.published.get("series", ())) <= {point.series for point in points}
