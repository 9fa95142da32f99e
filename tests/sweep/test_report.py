"""Every number of a sweep's report is recomputed from its lines by numpy: repeats are pooled, the first is the baseline."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summa3d.cli.main import main as cli
from summa3d.sweep import report
from summa3d.sweep.points import Point

MACHINE = {
    **{
        "nodes": 1,
        "hosts": ["n"],
        "ranks_per_node": [1],
        "threads_per_rank": [1],
        "cores_per_node": [2],
        "cores": 2,
        "gpu": None,
    },
    **{
        "processor": "p",
        "load": 0.1,
        "blas": "b",
        "core_type": "c",
        "products": "MKL (why)",
        "mpi": "MPI",
        "gflops_per_core": {},
    },
    **{"python": "3", "numpy": "2", "summa3d": "0", "commit": None},
}
ABOUT = {"name": "s", "kind": "strong", "x": "ranks", "published": {}, "rounds": 4, "cluster": "c", "band": 20.0}
GRIDS: dict[int, list[dict[str, int]]] = {2: [{"grid.y": 2}], 4: [{"grid.y": 4}, {"grid.x": 2, "grid.y": 2}]}
ROUNDS, REPEATS, FLOPS, PREDICTED = 4, 2, 3e9, 0.125


def written(folder: Path, what: str) -> list[dict[str, Any]]:
    """Lines of two series on 2 and 4 ranks, each point twice; the second repeat is 1.2 times slower."""
    random, lines = np.random.default_rng(3), []
    for number, series in enumerate(("a", "b")):
        for ranks, grids in GRIDS.items():
            for grid in grids:
                for repeat in range(REPEATS):
                    config = {"series": series, **grid}
                    point = Point(what, ranks, config, repeat, series, ranks)
                    scale = (1 + number) / ranks ** (0.5 + 0.2 * len(grid)) * (1 + 0.2 * repeat)
                    seconds = sorted(float(one) for one in scale * random.lognormal(0, 0.1, ROUNDS))
                    times = {"min": seconds[0], "median": float(np.median(seconds)), "max": seconds[-1], "all": seconds}
                    moved = {"words": 100 * ranks + number, "words_formula": 100 * ranks + number, "predicted": PREDICTED / ranks}
                    lines.append(
                        {"id": point.id, "what": what, "ranks": ranks, "series": series, "x": ranks, "label": point.label}
                        | {"repeat": repeat, "config": config, "race": 1, "seconds": times, "flops": FLOPS, "split": None}
                        | {"time": 1.0, "sweep": ABOUT, "machine": MACHINE, **moved}
                    )
    folder.mkdir()
    (folder / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def rounds_of(lines: list[dict[str, Any]], series: str, config: dict[str, Any]) -> np.ndarray:
    """All rounds of a point, of both repeats."""
    own = [line["seconds"]["all"] for line in lines if line["config"] == {"series": series, **config}]
    assert len(own) == REPEATS
    return np.concatenate(own)


def error(rounds: np.ndarray) -> float:
    """The standard error of the logarithm of the median of 8 values, which is below their 2nd in 9 of 256."""
    second, seventh = np.sort(rounds)[[1, 6]]
    return float(np.log(seventh / second) / (2 * 1.80989))


@pytest.mark.parametrize("what", ["block", "train"])
def test_every_number_of_a_report_follows_from_the_lines(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = written(tmp_path / "s", what)
    assert cli(["sweep", "report", str(tmp_path / "s"), "--format", "csv", "--format", "latex"]) == 0
    said, latex = capsys.readouterr().out, (tmp_path / "s.tex").read_text()
    assert "95 % interval" in said and f"medians of {ROUNDS * REPEATS} rounds" in said
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(rows) == 6  # two series, three grids
    expected = [(series, ranks, grid) for ranks, grids in GRIDS.items() for series in ("a", "b") for grid in grids]
    for row, (series, ranks, grid) in zip(sorted(rows, key=by_words), sorted(expected, key=lambda one: one[1::-1]), strict=True):
        first, own = rounds_of(lines, series, GRIDS[2][0]), rounds_of(lines, series, grid)
        speed = np.median(first) / np.median(own)
        reach = np.exp(1.95996 * np.hypot(error(first), error(own))) if ranks > 2 else 1.0
        assert {name: float(row[name]) for name in row if name not in ("id", "point")} == pytest.approx(
            {
                **{"ranks": ranks, "median ms": 1e3 * np.median(own), "min": 1e3 * own.min(), "max": 1e3 * own.max()},
                **{"predicted ms": 1e3 * PREDICTED / ranks, "Gflop/s": FLOPS / np.median(own) / 1e9},
                **{"GFLOP/rank": FLOPS / ranks / 1e9, "speed-up": speed, "efficiency": speed * 2 / ranks},
                **{"speed-up, low": speed / reach, "speed-up, high": speed * reach, "raced with": 0},
                **{"words/rank": 100 * ranks + (series == "b"), "formula": 100 * ranks + (series == "b")},
            },
            rel=2e-4,
        )
        assert f"{speed:.2f} & {speed / reach:.2f}--{speed * reach:.2f} & " in latex.replace(r"\$", "")


def by_words(row: dict[str, str]) -> tuple[int, int]:
    return int(row["ranks"]), int(row["words/rank"])


def test_a_plot_has_the_fastest_grid_of_each_count_in_seconds_beside_the_prediction(tmp_path: Path) -> None:
    lines = written(tmp_path / "s", "block")
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    (result,) = report.results(lines)
    report.draw(figure, result)
    seconds, speed, efficiency, words, _ = figure.axes
    for number, series in enumerate(("a", "b")):
        own = [rounds_of(lines, series, GRIDS[2][0]), min((rounds_of(lines, series, one) for one in GRIDS[4]), key=np.median)]
        medians = np.array([np.median(one) for one in own])
        drawn = seconds.containers[number].lines
        assert np.allclose(drawn[0].get_ydata(), medians)
        ends = np.array([segment[:, 1] for segment in drawn[2][0].get_segments()])
        assert np.allclose(ends, [[one.min(), one.max()] for one in own])
        reach = np.exp(1.95996 * np.hypot(error(own[0]), error(own[1])))
        for panel, values in ((speed, medians[0] / medians), (efficiency, medians[0] / medians * [1, 0.5])):
            line, _, (bars,) = panel.containers[number].lines
            assert np.allclose(line.get_ydata(), values)
            ends = np.array([segment[:, 1] for segment in bars.get_segments()])
            assert np.allclose(ends, [[values[0]] * 2, [values[1] / reach, values[1] * reach]], rtol=2e-4)
        dotted = [line.get_ydata() for line in seconds.lines if line.get_linestyle() == ":"][number]
        assert np.allclose(dotted, [PREDICTED / 2, PREDICTED / 4])  # seconds, not a speed-up of their own
        assert list(words.lines[number].get_ydata()) == [200 + number, 400 + number]
    said = " ".join(figure.get_supxlabel().split())
    assert "dotted: predicted for c ±20 %" in said and "of ratios their 95 % interval" in said
