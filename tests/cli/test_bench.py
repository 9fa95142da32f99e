"""`summa3d bench` and `summa3d report` from outside, on tiny products: what the JSON holds, what is drawn, what is refused."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import tracemalloc
from pathlib import Path

import jobs
import pytest

from summa3d.bench import products
from summa3d.cli.main import main as cli
from summa3d.gemm.algorithms.registry import algorithm
from summa3d.launcher.runtime import find_launcher, loaded_runtime

ROOT = Path(__file__).parents[2]
ROW = {
    *("algorithm", "grid", "options", "chosen", "label", "ranks", "m", "n", "k", "form", "dtype", "seconds", "gflops"),
    *("words_per_rank", "messages_per_rank", "workspace_bytes", "threads", "cores", "speed_over_numpy"),
}
WIDE = [("strong", False), ("weak", True)]


def summa3d(*arguments, ranks=None, timeout=300, variables=None):
    launch = [] if ranks is None else ["launch", "-n", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    command = [jobs.python(), "-m", "summa3d", *launch, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


def bench(ranks, kind, *arguments, sizes=(17, 13, 11), variables=None):
    m, n, k = sizes
    return summa3d("bench", kind, "--m", m, "--n", n, "--k", k, *arguments, ranks=ranks, variables=variables)


def sound(row, rounds):
    seconds = row["seconds"]
    assert row.keys() >= ROW
    assert len(seconds["all"]) == rounds and 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert row["gflops"] == pytest.approx(2 * row["m"] * row["n"] * row["k"] / seconds["median"] / 1e9)
    found = algorithm(row["algorithm"])
    plan = found.plan(row["form"], row["m"], row["n"], row["k"], **row["options"])
    volume = found.volume(plan, row["grid"], row["dtype"])
    assert row["words_per_rank"] == volume.max_words
    assert row["messages_per_rank"] == max(cost.messages for cost in volume.costs())


def test_entries_race_on_the_same_ranks_and_numpy_with_them():
    options = ["--entry", "cuboid:z=2", "--entry", "summa:x=2,panel=4", "--form", "nt", "--dtype", "float32", "--rounds", "3"]
    done = bench(2, "gemm", *options, "--numpy", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result = json.loads(done.stdout)
    assert [row["label"] for row in result["rows"]] == ["cuboid x=1,y=1,z=2", "summa x=2,y=1 panel=4"]
    for row in result["rows"]:
        sound(row, rounds=3)
        assert (row["ranks"], row["form"], row["dtype"]) == (2, "nt", "float32") and row["speed_over_numpy"] > 0
    (numpy,) = result["numpy"]
    assert numpy["threads"] == 1 and len(numpy["seconds"]["all"]) == 3
    machine = result["machine"]
    assert machine["cores"] >= 1 and machine["core_type"] and machine["gflops_per_core"]["float64"] > 0


def test_every_grid_has_the_librarys_choice_once_and_all_others():
    done = bench(3, "gemm", "--every-grid", "--rounds", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["chosen"] for row in rows] == [True] + [False] * (len(rows) - 1)
    labels = [row["label"] for row in rows]
    assert len(set(labels)) == len(labels) and {"cuboid x=3,y=1,z=1", "summa x=1,y=3"} <= set(labels)
    assert not any(label.startswith("oned-row") for label in labels)  # its C is copied over all ranks


def test_strong_scaling_uses_part_of_the_ranks_and_is_drawn(tmp_path):
    file = tmp_path / "strong.v1.json"
    named = ["--algorithm", "cuboid", "--algorithm", "cannon"]
    done = bench(3, "strong", "--ranks", "1,3", *named, "--rounds", "2", "--numpy", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "Strong scaling of 17×13×11 nn float64; speed-up and efficiency over serial" in done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [(row["algorithm"], row["ranks"]) for row in rows] == [("cuboid", 1), ("cannon", 1), ("cuboid", 3)]
    for row in rows:
        sound(row, rounds=2)
    shown = summa3d("report", file, "--format", "png", "--format", "svg")
    assert shown.returncode == 0, shown.stderr
    assert done.stdout.strip() in shown.stdout
    assert (tmp_path / "strong.v1.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "strong.v1.svg").read_text()


def recomputed(rows):
    """Speed-up and efficiency of rows that are in the order of their ranks, over the first one, by hand."""
    first, *_ = rates = [row["m"] * row["n"] * row["k"] / row["seconds"]["median"] for row in rows]
    return [(rate / first, rate / first / row["ranks"] * rows[0]["ranks"]) for rate, row in zip(rates, rows, strict=True)]


@pytest.mark.parametrize(
    ("kind", "bound"), [("strong", True), ("weak", False), *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE)]
)
def test_what_the_chooser_takes_is_one_series_with_one_baseline(tmp_path, kind, bound):
    file, launcher = tmp_path / "scaling.json", find_launcher(loaded_runtime())
    binding = [*launcher.command, *(("--bind-to", "core") if bound else ())]
    oversubscribed = ["--oversubscribe"] if launcher.vendor == "openmpi" and bound else []
    variables = {"SUMMA3D_MPIEXEC": shlex.join(binding + oversubscribed), "SUMMA3D_BIND": "yes" if bound else "no"}
    done = bench(8, kind, "--rounds", "2", "--json", file, sizes=(48, 40, 44), variables=variables)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8] and all(row["chosen"] for row in rows)
    assert "speed-up and efficiency over serial; medians of 2 rounds" in done.stdout and "1 ranks" not in done.stdout
    assert cli(["report", str(file), "--no-plots", "--format", "csv"]) == 0
    table = list(csv.DictReader(file.with_suffix(".csv").open()))
    assert [row["series"] for row in table] == ["chosen"] * 4 and table[0]["algorithm and grid"] == "serial"
    shown = [(float(row["speed-up"]), float(row["efficiency"])) for row in table]
    assert shown == [pytest.approx(pair) for pair in recomputed(rows)] and shown[0] == (1, 1)
    machine, cores = result["machine"], min(8, len(os.sched_getaffinity(0))) if bound else len(os.sched_getaffinity(0))
    assert (machine["nodes"], machine["ranks_per_node"], machine["cores"]) == (1, [8], cores) and machine["threads_per_rank"] == [
        1
    ]
    assert [row["cores"] for row in rows][-1] == cores  # of all ranks together, not of rank 0


def test_weak_scaling_keeps_the_work_per_rank():
    done = bench(2, "weak", "--rounds", "1", "--json", "-", sizes=(100, 50, 40))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["numpy"] == [] and [row["speed_over_numpy"] for row in result["rows"]] == [None, None]
    assert [(row["ranks"], row["m"], row["n"], row["k"]) for row in result["rows"]] == [(1, 100, 50, 40), (2, 126, 63, 50)]


BAD = [
    (
        "gemm",
        ["--entry", "summa:z=2"],
        "'z=2' is not AXIS=SIZE,OPTION=NUMBER,…, each once; summa has x, y, panel, lookahead, pieces.",
    ),
    ("gemm", ["--entry", "cuboid:x=3"], "ConfigError: cuboid x=3,y=1,z=1 needs 3 ranks; 2 were started."),
    ("gemm", ["--algorithm", "strassen"], "ConfigError: Algorithm 'strassen' is not known."),
    ("gemm", ["--algorithm", "cannon"], "GridError: cannon cannot use 2 ranks."),
    ("gemm", ["--rounds", "0"], "ConfigError: --rounds is 0; it must be at least 1."),
    ("gemm", ["--m", 2**62], "CapacityError: The product needs up to"),
    ("strong", ["--m", 2**31, "--ranks", "1"], "CapacityError: The product needs up to 592.0 GiB a rank, 592.0 GiB on node "),
    ("gemm", ["--json", "none/x.json"], "ConfigError: --json none/x.json lies in none, which is no folder."),
    ("gemm", ["--dtype", "bfloat16", "--numpy"], "which is not comparable with bfloat16 on cpu."),
    ("strong", ["--device", "cuda"], "ConfigError: device cuda"),
    ("strong", ["--ranks", "1,4"], "ConfigError: --ranks asks for 4; 2 were started."),
    ("strong", ["--ranks", "1,two"], "'1,two' is not a list of rank counts; write it as 1,2,4"),
]


def test_bad_input_is_one_message_and_a_non_zero_status():
    kind, arguments, message = BAD[1]
    done = bench(2, kind, *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_refused_on_every_rank():
    commands = [["bench", kind, "--m", 17, "--n", 13, "--k", 11, *arguments] for kind, arguments, _ in BAD]
    for done, (_, _, message) in zip(jobs.commands(commands, 2), BAD, strict=True):
        assert done.status != 0 and done.stdout == "" and done.stderr.count(message) == 1, done


@pytest.mark.mpi(sizes=(1,))
@pytest.mark.parametrize(("form", "dtype"), [("nn", "float64"), ("tn", "float32"), ("nt", "complex128")])
def test_a_race_asks_for_the_memory_that_it_takes(comm, form, dtype, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(products, "require", lambda nbytes, world: asked.append(nbytes))
    problem = products.Problem(900, 700, 800, form, dtype)
    entry = products.ProductEntry("cuboid", {"x": 1, "y": 1, "z": 1}, problem)
    for make in (lambda: products.ProductRunner(entry, comm), lambda: products.NumpyRunner(problem, comm, 1)):
        tracemalloc.start()
        runner = make()
        runner.seconds()
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken * 0.85 < asked[-1] < taken * 1.15
    assert len(asked) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that is always full")
def test_a_result_that_cannot_be_written_has_been_printed():
    done = bench(1, "gemm", "--rounds", "1", "--json", "/dev/full")
    assert done.returncode != 0 and "\nserial " in done.stdout
    assert "DataError: --json /dev/full cannot be written: [Errno 28]" in done.stderr and "Traceback" not in done.stderr
