"""`summa3d report` and `summa3d plot` on files: what is read, joined, written and refused."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess

import jobs
import numpy as np
import pytest

from summa3d.bench import plots, series, statistics, tables
from summa3d.cli import report
from summa3d.cli.main import main as cli
from summa3d.table import Column, Table

MACHINE = {
    **{
        "nodes": 1,
        "hosts": ["n1"],
        "ranks_per_node": [1],
        "threads_per_rank": [1],
        "cores_per_node": [2],
        "cores": 2,
        "gpu": None,
    },
    **{
        "processor": "a processor",
        "load": 0.5,
        "blas": "openblas 1",
        "core_type": "c",
        "products": "MKL 2 (why)",
        "mpi": "MPI 1",
    },
    **{"gflops_per_core": {}, "python": "3", "numpy": "2", "summa3d": "0", "commit": "0123456789abcdef"},
}


def line(ranks, size, seconds, **changes):
    """A line of `gemm --json` of a product size³ that the library chose an algorithm for."""
    middle = sorted(seconds)[len(seconds) // 2]
    times = {"min": min(seconds), "median": middle, "max": max(seconds), "all": seconds}
    product = {"m": size, "n": size, "k": size, "form": "nn", "dtype": "float64", "device": "cpu"}
    ran = {"algorithm": "cuboid" if ranks > 1 else "oned-column", "options": {}, "chosen": True, "label": f"cuboid z={ranks}"}
    moved = {"words_per_rank": size * size * (ranks - 1), "messages_per_rank": ranks - 1, "workspace_bytes": 0}
    on = {"ranks": ranks, "threads": 1, "cores": min(ranks, 2), "machine": {**MACHINE, "ranks_per_node": [ranks]}}
    return {**product, **ran, **moved, **on, "seconds": times, "gflops": 2 * size**3 / middle / 1e9, **changes}


STRONG = [line(1, 64, [0.8, 0.9, 1.0]), line(2, 64, [0.5, 0.6, 0.6]), line(4, 64, [0.4, 0.4, 0.9])]
WEAK = [STRONG[0], line(2, 81, [1.0]), line(4, 102, [1.2]), line(8, 128, [1.5])]


def write(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(path)


def numbers(path):
    return [{name: row[name] for name in ("ranks", "speed-up", "efficiency")} for row in csv.DictReader(path.open())]


def test_lines_of_gemm_are_a_scaling_series_with_the_fewest_ranks_as_baseline(tmp_path, capsys):
    files = [write(tmp_path / "strong.jsonl", STRONG[::-1]), write(tmp_path / "weak.jsonl", WEAK)]
    assert cli(["report", *files, "--no-plots", "--format", "csv"]) == 0
    said = capsys.readouterr().out
    assert "Strong scaling of 64×64×64 nn float64; speed-up and efficiency over serial" in said
    assert (
        "Weak scaling from 64×64×64 nn float64 on 1 rank" in said and "ranks share cores in the rows of 4 ranks (2 cores)" in said
    )
    assert "1 node × 1–4 ranks × 1 thread on 2 cores (n1)" in said and said.count("a processor") == 2
    strong = [(row["ranks"], float(row["speed-up"]), float(row["efficiency"])) for row in numbers(tmp_path / "strong.csv")]
    assert strong == [
        ("1", 1, 1),
        ("2", pytest.approx(1.5), pytest.approx(0.75)),
        ("4", pytest.approx(2.25), pytest.approx(0.5625)),
    ]
    weak = [float(row["efficiency"]) for row in numbers(tmp_path / "weak.csv")]
    assert weak == [pytest.approx(own["gflops"] / own["ranks"] / WEAK[0]["gflops"]) for own in WEAK]


def test_files_of_several_jobs_are_joined_and_repeated_rows_keep_all_rounds(tmp_path, capsys):
    first, second = write(tmp_path / "one.jsonl", [*STRONG[:2], *WEAK[1:]]), tmp_path / "two.json"
    machine = {**MACHINE, "mpi": "MPI 2"}
    rows = [line(2, 64, [0.5, 0.7]), line(1, 64, [0.5, 0.9], chosen=False, algorithm="summa", label="summa x=1,y=1")]
    second.write_text(json.dumps({"kind": "strong", "rows": rows, "numpy": [], "machine": machine}))
    assert cli(["report", "--merge", first, str(second), "--no-plots", "--format", "csv"]) == 0
    said = capsys.readouterr().out
    assert "over serial; medians of 2–5 rounds" in said and "MPI 1" in said and "MPI 2" in said
    assert f"merged: {first}, {second}\n" in said
    strong, weak = tmp_path / "merged-one-1-strong.csv", tmp_path / "merged-one-2-weak.csv"
    assert [[row["ranks"] for row in numbers(file)] for file in (strong, weak)] == [list("112"), list("1248")]
    assert float(numbers(strong)[2]["speed-up"]) == pytest.approx(0.9 / 0.6)  # the median of 0.5 0.5 0.6 0.6 0.7


def bench_result(path, kind, rows, **machine):
    path.write_text(json.dumps({"kind": kind, "rows": rows, "numpy": [], "machine": {**MACHINE, **machine}}))
    return str(path)


def test_results_of_other_problems_stay_apart_when_merged(tmp_path, capsys):
    strong = bench_result(tmp_path / "strong.json", "strong", STRONG)
    weak = bench_result(tmp_path / "weak.json", "weak", WEAK)  # its row on 8 ranks, and a strong series to 128³, are two problems
    other = bench_result(tmp_path / "other.json", "strong", [line(ranks, 128, [9 / ranks]) for ranks in (1, 2)])
    more = bench_result(tmp_path / "more.json", "weak", [line(2, 81, [1.2])])
    flat = [line(ranks, size, [1.0], n=n) for ranks, size, n in ((1, 128, 16), (2, 161, 20))]  # as much work, another problem
    assert cli(["report", "--merge", strong, weak, other, more, write(tmp_path / "flat.jsonl", flat), "--no-plots"]) == 0
    titles = [text for text in capsys.readouterr().out.splitlines() if " scaling " in text]
    assert [title.partition(" nn")[0] for title in titles] == [
        *("Strong scaling of 64×64×64", "Weak scaling from 64×64×64", "Strong scaling of 128×128×128"),
        "Weak scaling from 128×16×128",
    ]
    assert [title.rpartition("; ")[2] for title in titles] == [
        "medians of 3 rounds",
        "medians of 1–3 rounds",
        *["medians of 1 round"] * 2,
    ]


def test_merged_measurements_count_once_and_loads_are_a_range(tmp_path, capsys):
    lines = write(tmp_path / "lines.jsonl", [line(1, 64, [0.7, 0.9], machine={**MACHINE, "load": None}), STRONG[1]])
    first = bench_result(tmp_path / "first.json", "strong", STRONG)
    second = bench_result(tmp_path / "second.json", "strong", [line(2, 64, [0.5, 0.7])], load=3.2)
    pytest.importorskip("matplotlib")
    assert cli(["report", first]) == 0 and (tmp_path / "first.png").exists()
    alone = (tmp_path / "first.png").read_bytes()
    capsys.readouterr()
    assert cli(["report", "--merge", first, second, first, lines, "--format", "png", "--format", "csv"]) == 0
    said = capsys.readouterr().out
    assert "medians of 3–5 rounds" in said and "load 0.5–3.2 at the start" in said and said.count("a processor") == 1
    rows = {row["ranks"]: float(row["median ms"]) for row in csv.DictReader((tmp_path / "merged-first.csv").open())}
    assert rows == {"1": pytest.approx(900), "2": pytest.approx(600), "4": pytest.approx(400)}
    assert (tmp_path / "merged-first.png").exists() and (tmp_path / "first.png").read_bytes() == alone


def test_ranks_with_other_thread_counts_than_the_baseline_have_no_speed_up(capsys, tmp_path):
    file = write(tmp_path / "strong.jsonl", [line(1, 64, [0.5], threads=2), *STRONG[1:], line(1, 64, [0.9])])
    assert cli(["report", file, "--no-plots", "--format", "csv", "--format", "latex"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[2:]
    assert header.split()[:2] == ["ranks", "threads/rank"]
    shown = [(*row.split()[:2], *row.split()[-7:-4]) for row in rows[:3]]  # beside Gflop/s, words, messages, workspace
    ranged = [("1", "1", "1.00", "1.00–1.00", "1.00"), ("1", "2", "–", "–", "–"), ("2", "1", "1.50", "1.50–1.80", "0.75")]
    assert shown == ranged and header.split()[-8:-5] == ["speed-up", "range", "efficiency"]
    assert "ranks have 1–2 threads: rows with other thread counts than the baseline have no speed-up" in rows
    assert [row["speed-up"] for row in numbers(tmp_path / "strong.csv")][1] == ""
    assert " & -- & -- & -- & " in (tmp_path / "strong.tex").read_text()
    (on_cuda,) = series.series_of([{**STRONG[0], "device": "cuda"}, {**STRONG[1], "device": "cuda", "threads": 2}])
    assert on_cuda.speed_up(on_cuda.rows[1]).middle == pytest.approx(1.5)  # a GPU multiplies: the host's threads do not count


def test_a_ratio_that_is_not_known_has_no_point_in_the_plot():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    plots.scaling(figure, {"kind": "strong", "rows": [*STRONG[:2], line(4, 64, [0.1], threads=2)], "numpy": []})
    drawn = [panel.containers[0].lines[0].get_xdata() for panel in figure.axes[1:3]]
    assert [list(ranks) for ranks in drawn] == [[1, 2], [1, 2]]


def test_equal_times_are_equal_speed_ups_whatever_the_series(tmp_path, capsys):
    named = {"chosen": False, "algorithm": "cannon", "label": "cannon x=2,y=2"}
    panels = {**named, "options": {"panel": 8}, "label": "summa x=1,y=1 panel=8"}
    lines = [*STRONG, *(line(ranks, 64, seconds, **named) for ranks, seconds in ((1, [1.9, 2.0, 2.1]), (4, [0.4])))]
    file = write(tmp_path / "two.jsonl", [*lines, line(1, 64, [3.0], **panels)])
    assert cli(["report", file, "--no-plots", "--format", "csv"]) == 0
    assert "speed-up and efficiency over serial; medians" in capsys.readouterr().out
    pooled = (1.0 + 1.9) / 2  # the median of 0.8 0.9 1.0 1.9 2.0 2.1; a product in panels is not serial
    got = [(row["ranks"], float(row["speed-up"])) for row in numbers(tmp_path / "two.csv")]
    times = [("1", 0.9), ("2", 0.6), ("4", 0.4), ("1", 2.0), ("4", 0.4), ("1", 3.0)]
    assert got == [(ranks, pytest.approx(pooled / seconds)) for ranks, seconds in times]


def test_series_without_a_serial_row_have_baselines_of_their_own(tmp_path, capsys):
    named = {"chosen": False, "algorithm": "cannon", "label": "cannon x=2,y=2"}
    assert cli(["report", write(tmp_path / "two.jsonl", [*STRONG[1:], line(4, 64, [0.2], **named)]), "--no-plots"]) == 0
    assert "speed-up and efficiency over the fewest ranks of each series; medians" in capsys.readouterr().out
    assert [one.baseline_name for one in series.series_of(STRONG[1:])] == ["chosen on 2 ranks"]


def test_few_rounds_give_a_speed_up_the_range_of_both_times_and_six_an_interval():
    (chosen,) = series.series_of(STRONG)
    assert chosen.speed_up(STRONG[2]) == pytest.approx((0.9 / 0.4, 0.8 / 0.9, 1.0 / 0.4, True))
    assert chosen.efficiency(STRONG[1]) == pytest.approx((0.75, 0.8 / 0.6 / 2, 1.0 / 0.5 / 2, True))
    assert chosen.speed_up(STRONG[0]) == (1, 1, 1, True)
    rounds = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    (sure,) = series.series_of([line(1, 64, rounds), line(2, 64, [one / 2 for one in rounds])])
    found = sure.speed_up(sure.rows[1])
    assert found.middle == pytest.approx(2) and not found.is_range and found.middle / found.low == pytest.approx(found.high / 2)
    assert 2 / (1.5 / 1.0) < found.low < 2 < found.high < 2 * (1.5 / 1.0)  # narrower than the range


@pytest.mark.parametrize("count", [6, 10, 20])
@pytest.mark.parametrize("sigma", [0.03, 0.5])
def test_intervals_hold_the_ratio_of_medians_in_95_of_100_series(count, sigma):
    random, true, held = np.random.default_rng(count), 1.7, 0
    for _ in range(1000):
        above, below = random.lognormal(np.log(true), sigma, count), random.lognormal(0, sigma, count)
        found = statistics.ratio(above.tolist(), below.tolist())
        held += found.low <= true <= found.high
    assert 920 <= held <= 980


def test_many_series_fit_the_figure_and_those_of_no_words_are_named():
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    rows = [
        line(ranks, 64, [1 / ranks], chosen=False, algorithm=f"algorithm-{name}", words_per_rank=0 if name == 3 else 3000 + name)
        for name in range(8)
        for ranks in (1, 2)
    ]
    plots.scaling(figure, {"kind": "strong", "rows": rows, "numpy": [], "machine": MACHINE})
    figure.draw_without_rendering()
    (legend,), words = figure.legends, figure.axes[3]
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and len(legend.get_texts()) == 9  # the series and the ideal
    low, high = words.get_ylim()
    assert sum(low <= place <= high for place in words.get_yticks()) >= 2  # though all words are alike
    said = " ".join(figure.get_supxlabel().split())
    assert "over serial; points of 0 words are not drawn (algorithm-3); medians of 1 round" in said
    assert [text.get_text() for text in words.get_legend().get_texts()] == ["least if every operand is held once"]


def test_a_table_is_written_for_people_spreadsheets_and_papers(tmp_path):
    pytest.importorskip("matplotlib")
    file = write(tmp_path / "strong.v1.jsonl", STRONG)
    assert (
        cli(["report", file, *(word for name in ("png", "pdf", "svg", "markdown", "latex") for word in ("--format", name))]) == 0
    )
    header, rule, first = (tmp_path / "strong.v1.md").read_text().splitlines()[2:5]
    assert header.startswith("| ranks | algorithm and grid | median ms |") and rule.startswith("| --: | :-- | --: |")
    assert first.startswith("| 1 | serial | 900.00 |") and "numpy's" not in header  # no value, no column
    latex = (tmp_path / "strong.v1.tex").read_text()
    assert r"\caption{Strong scaling of 64$\times$64$\times$64 nn float64" in latex and r"\begin{tabular}{rlrrr" in latex
    assert r"\label{tab:strong.v1}" in latex and ". Ranks share cores in" in latex
    width, height = struct.unpack(">II", (tmp_path / "strong.v1.png").read_bytes()[16:24])
    assert (width, height > width) == (3.4 * 300, True)
    assert (tmp_path / "strong.v1.pdf").read_bytes().startswith(b"%PDF")
    drawn = (tmp_path / "strong.v1.svg").read_text()
    for text in (
        "speed-up",
        "efficiency",
        "words received per rank",
        "ideal",
        "ranks share cores",
        "chosen",
        "1 thread on 2 cores",
    ):
        assert text in drawn


def test_latex_and_markdown_escape_what_they_would_read():
    table = Table("50% of a_b", [Column("x|y", ["a&b"], left=True), Column("none", [None]), Column("p", [0.5], csv_only=True)])
    assert table.markdown().splitlines()[-1] == "| a&b |" and table.text().splitlines() == ["50% of a_b", "x|y", "a&b"]
    assert r"\caption{50\% of a\_b.}" in table.latex() and r"a\&b \\" in table.latex()
    said = Table("a title", [Column("x", ["a"])], ["one more", "said."], label="v1").latex().splitlines()
    assert said[1:3] == [r"\caption{A title. One more. Said.}", r"\label{tab:v1}"]
    assert table.csv() == "x|y,p\na&b,0.5"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file"),
        (b"{", "is neither JSON"),
        (b"\xff", "cannot be read"),
        (b"[1]", "is not a result of `summa3d bench` or `summa3d gemm --json`"),
        (b'{"kind": "gemm", "rows": []}', "is not a result of `summa3d bench` (a JSON object with kind"),
        (b'{"kind": "gemm", "rows": [{}], "numpy": []}', "is a gemm result of another version: it lacks m, n, k"),
        (b'{"m": 3}\n{"m": 4}', "is not one of `summa3d gemm --json`: it lacks n, k"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys, content, message):
    file = tmp_path / "result.json"
    if content is not None:
        file.write_bytes(content)
    good = write(tmp_path / "good.jsonl", STRONG)
    assert cli(["report", good, str(file), "--no-plots"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("DataError: ") and message in said.err and len(said.err.splitlines()) == 1


def test_a_folder_instead_of_a_file_is_one_line(tmp_path, capsys):
    assert cli(["report", str(tmp_path), "--no-plots"]) == 1
    drawn = "Runs of `summa3d train` are drawn by `summa3d plot`"
    assert capsys.readouterr().err == f"DataError: {tmp_path} is a folder without points of a sweep. {drawn}.\n"


def test_lines_that_gemm_prints_are_reported(tmp_path, capsys):
    file = tmp_path / "strong.jsonl"
    for ranks in (1, 2):
        done = jobs.run(
            ["-m", "summa3d", "gemm", "--m", "32", "--n", "32", "--k", "32", "--repeat", "2", "--json"],
            ranks,
            extra={"OMP_NUM_THREADS": "1"},
        )
        assert done.status == 0, done.stderr
        file.open("a").write(done.stdout)
    assert cli(["report", str(file), "--no-plots"]) == 0
    first, header, one, two, *_ = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("Strong scaling of 32×32×32 nn float64; speed-up and efficiency over serial; medians of 2 rounds")
    assert one.split()[:2] == ["1", "serial"] and two.split()[0] == "2" and header.split()[0] == "ranks"


DRY = ["train", "demo", "--dry-run", "--ranks", "1", "--set", "model.layers=1"]  # which starts MPI


@pytest.mark.parametrize("command", [["report", "--no-plots"], ["config", "demo"], DRY])
def test_a_reader_that_takes_no_more_ends_a_command_quietly(tmp_path, command):
    ours, theirs = os.pipe()
    os.close(ours)  # as `| head` does once it has its lines
    files = [write(tmp_path / "strong.jsonl", STRONG)] if command[0] == "report" else []
    done = subprocess.run([jobs.python(), "-m", "summa3d", *command, *files], stdout=theirs, stderr=subprocess.PIPE, timeout=100)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_plot_of_runs_names_what_it_cannot_draw(tmp_path, capsys):
    assert cli(["plot", str(tmp_path), "--out", str(tmp_path / "loss.gif")]) == 1
    assert "names no format; end it in one of .png, .svg, .pdf" in capsys.readouterr().err
    assert cli(["plot", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"DataError: {tmp_path} holds no run: ")


def test_peers_stand_side_by_side_and_a_missing_one_is_a_dash(tmp_path):
    spread = {"median": 1.5, "min": 1.4, "max": 1.6}
    common = {"m": 2, "n": 2, "k": 2, "dtype": "float64", "numpy_seconds": 0.01}
    both = {"case": "sq2", "ranks": 2, "seconds": {"ours": 0.02, "peer": 0.03}, "fractions": {"ours": 0.5, "peer": 0.33}}
    one = {"case": "tall", "ranks": 4, "seconds": {"ours": 0.02}, "fractions": {"ours": 0.5}, "quotients": {}, "noted": {}}
    rows = [{**common, **both, "quotients": {"peer ÷ ours": spread}, "noted": {"other": 0.8}}, {**common, **one}]
    names = {"peers": ["ours", "peer"], "quotients": ["peer ÷ ours"], "noted": ["other"]}
    result = {"kind": "versus", **names, "rows": rows, "remarks": ["said."]}
    header, first, second, remark = tables.table(result).text().splitlines()
    assert (
        header.split()[:4] == ["case", "P", "numpy", "ms"] and "1.50" in first and "1.40–1.60" in first and first.endswith("0.80")
    )
    assert second.split() == ["tall", "float64", "4", "10.00", "20.00", *"–", "0.50", *"––––"] and remark == "said."
    pytest.importorskip("matplotlib")
    (picture,) = report.write(result, tmp_path / "peers", ["svg"])
    assert "tall" in picture.read_text()
