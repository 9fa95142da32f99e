"""`summa3d gemm` from outside: its JSON, its table, and what it says where the grid does not fit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tracemalloc
from fractions import Fraction
from functools import cache
from math import prod

import jobs
import pytest

from summa3d.bench import capacity
from summa3d.cli import gemm as command
from summa3d.comm.grid import Place
from summa3d.gemm import CuboidPlan, plan_any, plan_syrk, volume
from summa3d.gemm.algorithms.registry import algorithm

FIELDS = {
    *(
        "algorithm",
        "form",
        "grid",
        "m",
        "n",
        "k",
        "dtype",
        "seconds",
        "gflops",
        "words_per_rank",
        "words_per_rank_formula",
        "words_mean",
    ),
    *("messages_per_rank", "workspace_bytes", "workspace_bytes_formula", "relative_error"),
}
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "int32": 4}
BOUND = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-2, "bfloat16": 1e-2, "complex128": 1e-14, "int32": 0}


def gemm(ranks, *arguments, timeout=300):
    command = [jobs.python(), "-m", "summa3d", "launch", "-n", str(ranks), "gemm", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


M, N, K = 131, 67, 101
PRODUCTS = [
    ("nn", "float64", (2, 2, 2), ("--repeat", "3")),
    ("nt", "float64", (3, 2, 2), ("--alpha", "-1.5", "--beta", "0.5")),
    ("tn", "float32", (1, 2, 4), ("--repeat", "1")),
    ("tt", "float16", (2, 1, 1), ("--repeat", "2", "--algorithm", "cuboid")),
    ("nt", "bfloat16", (1, 2, 2), ("--repeat", "2", "--beta", "2")),
    ("cn", "complex128", (1, 1, 2), ("--repeat", "2")),
    ("tn", "int32", (2, 1, 2), ("--repeat", "2")),
    ("nn", "float16", (1, 2, 2), ("--repeat", "2")),
]
ALGORITHMS = ("summa", "cannon", "oned-column", "oned-row", "ca25d", "tesseract")


def line_of(form, dtype, grid, extra):
    x, y, z = grid
    sizes = ("--m", M, "--n", N, "--k", K, "--grid", f"x={x},y={y},z={z}")
    return ("gemm", *sizes, "--form", form, "--dtype", dtype, "--json", "--check", *extra)


def line_of_algorithm(name):
    return ("gemm", "--m", 41, "--n", 37, "--k", 53, "--algorithm", name, "--check", "--json", "--repeat", 2)


@cache
def found_on(ranks):
    """Command line → what its JSON holds, of all products of these tests on so many ranks."""
    lines = [line_of(*product) for product in PRODUCTS if prod(product[2]) == ranks]
    lines += [line_of_algorithm(name) for name in ALGORITHMS] if ranks == 4 else []
    found = {}
    for line, done in zip(lines, jobs.commands(lines, ranks), strict=True):
        assert done.status == 0 and done.stdout.count("\n") == 1, done
        found[line] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("form", "dtype", "grid", "extra"), PRODUCTS)
def test_the_json_has_every_field_and_what_moved_equals_the_formulas(form, dtype, grid, extra):
    m, n, k = M, N, K
    x, y, z = grid
    found = found_on(x * y * z)[line_of(form, dtype, grid, extra)]
    assert found.keys() >= FIELDS
    assert [found[name] for name in ("algorithm", "form", "m", "n", "k", "dtype")] == ["cuboid", form, m, n, k, dtype]
    assert found["grid"] == {"x": x, "y": y, "z": z}
    cost = volume.of_plan(CuboidPlan(form, m, n, k), found["grid"], dtype, "xyz")
    assert found["words_per_rank"] == found["words_per_rank_formula"] == cost.max_words
    mean = Fraction((y - 1) * m * k + (x - 1) * k * n + (z - 1) * m * n, x * y * z)
    assert found["words_mean"] == pytest.approx(float(mean), rel=1e-14)
    assert found["messages_per_rank"] == x + y + z - 3
    assert found["workspace_bytes"] == found["workspace_bytes_formula"] == max(c.workspace for c in cost.costs()) * BYTES[dtype]
    assert found["relative_error"] <= BOUND[dtype]
    seconds = found["seconds"]
    assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
    assert found["gflops"] == pytest.approx((8 if "complex" in dtype else 2) * m * n * k / seconds["median"] / 1e9)
    assert found["serial_seconds"] > 0


def test_people_get_a_table_and_no_check_costs_nothing():
    done = gemm(1, "--m", "5", "--n", "3", "--k", "2", "--grid", "x=1", "--repeat", "1")
    assert done.returncode == 0 and "words     0 per rank (formula 0)" in done.stdout
    assert "cuboid x=1,y=1,z=1, 5×3×2 nn float64, 1 rank\n" in done.stdout and "serial" not in done.stdout


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_a_word_on_the_command_line(name):
    found = found_on(4)[line_of_algorithm(name)]
    assert found["algorithm"] == name and found["relative_error"] < 1e-14
    assert found["words_per_rank"] == found["words_per_rank_formula"]
    assert found["workspace_bytes"] == found["workspace_bytes_formula"]


def test_without_algorithm_or_grid_the_chooser_decides_and_says_so():
    done = gemm(7, "--m", "128", "--n", "128", "--k", "128", "--check", "--json", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "takes " + found["algorithm"] in done.stderr and "lower bound" in done.stderr
    assert found["relative_error"] < 1e-14


def test_the_prediction_names_its_cluster_and_the_nodes_memory_stands_beside_workspace():
    sizes = ["--m", "64", "--n", "48", "--k", "40", "--repeat", "1"]
    lines, *others = jobs.commands([["gemm", *sizes, *more] for more in ([], ["--json"], ["--cluster", "server", "--json"])], 2)
    assumed, named = (json.loads(done.stdout) for done in others)
    assert [(one["cluster"], one["assumed"]) for one in (assumed, named)] == [("server", True), ("server", False)]
    assert assumed["predicted"] == named["predicted"] > 0
    said = lines.stdout.splitlines()
    assert said[2] == f"predicted {1e3 * assumed['predicted']:.2f} ms for the assumed cluster server"
    assert said[5].endswith(f", of the node's memory {assumed['node_bytes']:,}")
    moved = assumed["words_mean"], assumed["words_per_rank"], assumed["workspace_bytes_formula"]
    assert moved[0] <= moved[1] == assumed["words_per_rank_formula"] and assumed["workspace_bytes"] == moved[2]


LAYOUTS = ["--m", 90, "--n", 70, "--k", 80, "--grid", "x=2,y=3", "--a-layout", "m:(x,y) k", "--b-layout", "k[4] n:x[8]", "--dry"]


def test_a_plan_of_layouts_is_printed_with_its_alternatives_and_nothing_runs():
    grid, commands = Place({"x": 2, "y": 3}), []
    for more in (
        [],
        ["--objective", "words", "--out-layout", "m n:(y,x)", "--json"],
        ["--dtype", "float32", "--cluster", "server"],
        ["--workspace", "2KiB", "--json"],
    ):
        commands.append(["gemm", *map(str, LAYOUTS), *more])
    free, asked, named, bounded = (
        subprocess.run([jobs.python(), "-m", "summa3d", *command], capture_output=True, text=True, check=True)
        for command in commands
    )
    layouts = "m:(x,y) k", "k[4] n:x[8]", 90, 70, 80, grid
    plan = plan_any(*layouts)
    assert free.stdout == f"{plan}\n" and len(plan.others) == 7 and all(one.text in free.stdout for one in plan.others)
    found, plan = json.loads(asked.stdout), plan_any(*layouts, "m n:(y,x)", objective="words")
    assert (found["words"], found["max_words"], found["c_layout"]) == (plan.words, plan.max_words, "m n:(y,x)")
    assert found["messages"] == sum(map(plan.messages_of, range(6))) and found["others"][0]["words"] >= found["words"]
    assert named.stdout == f"{plan_any(*layouts, dtype='float32')}\n"
    found, plan = json.loads(bounded.stdout), plan_any(*layouts, workspace=2048)
    assert found["workspace_bytes"] == 8 * plan.max_workspace <= 2048 and found["panels"] == plan.panels > 1
    assert [done.stdout for done in jobs.commands([commands[0]], 2)] == [free.stdout]


def test_a_product_of_one_matrix_is_planned_dry_and_measured_on_ranks_with_the_words_of_its_plan():
    sizes = ["gemm", "--m", "37", "--n", "37", "--k", "29", "--symmetric", "--grid", "x=2,y=1"]
    dry = subprocess.run([jobs.python(), "-m", "summa3d", *sizes, "--dry"], capture_output=True, text=True, check=True)
    plan = plan_syrk("m:x k:y", 37, 29, Place({"x": 2, "y": 1}))
    assert dry.stdout == f"{plan}\n" and f"{plan.general.words:,}" in dry.stdout
    (done,) = jobs.commands([[*sizes, "--repeat", "2", "--json"]], 2)
    found = json.loads(done.stdout)
    assert found["measured_words"]["whole"] == found["max_words"] == plan.max_words and found["difference"] < 1e-14
    assert (found["general"]["words"], found["c_layout"]) == (plan.general.words, str(plan.c.layout))
    assert all(len(times) == 2 for times in found["seconds"].values())


BAD = [
    (["--grid", "x=2,y=2,z=2"], "GridError: Grid x=2,y=2,z=2 has 8 places, but there are 2 ranks."),
    (["--grid", "two"], "summa3d gemm: argument --grid: 'two' is not a grid; write it as x=2,y=2,z=2; see summa3d help gemm\n"),
    (["--grid", "x=2,w=1"], "ConfigError: --grid names axis 'w'; the axes of cuboid are x, y, z."),
    (["--grid", "x=2", "--m", "0"], "ConfigError: --m is 0; it must be at least 1."),
    (["--grid", "x=1,y=0"], "GridError: Axis y has size 0"),
    (["--symmetric", "--m", "3"], "ConfigError: --symmetric multiplies one matrix with its own transpose: --m 3 and --n"),
    (["--symmetric", "--check"], "ConfigError: --check is not of a product of one matrix"),
    (["--grid", "x=2", "--m", "9" * 99], "is beyond ±(2^63 − 1); see summa3d help gemm\n"),
    (["--algorithm", "all"], "`summa3d bench gemm … --algorithm all` compares all of them; see summa3d help gemm\n"),
    (["--grid", "x=2,x=1"], "'x=2,x=1' is not a grid"),
    (["--grid", "x=2", "--panel", "3"], "ConfigError: --panel applies to summa, tesseract and ca25d only (algorithm is cuboid)."),
    (["--grid", "x=2", "--dtype", "int4"], "invalid choice: 'int4'"),
    (["--grid", "x=2", "--a-layout", "m k"], "ConfigError: --a-layout is of a plan that is printed: it needs --dry."),
    (
        ["--grid", "x=2", "--a-layout", "m k", "--dry"],
        "ConfigError: --dry prints the plan of --a-layout and --b-layout on --grid:",
    ),
    (["--grid", "x=2", "--a-layout", "m:y k", "--b-layout", "k n", "--dry"], "names axis 'y'; the grid has the axes x."),
    (
        ["--grid", "x=2", "--m", str(10**7), "--k", str(10**7)],
        "CapacityError: The product needs up to 1,117,587.1 GiB a rank, 2,235,174.2 GiB on node ",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD[:2])
def test_bad_input_is_one_message_and_a_non_zero_status(arguments, message):
    done = gemm(2, "--m", "4", "--n", "4", "--k", "4", *arguments)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr and "usage:" not in done.stderr


def test_bad_input_is_refused_on_every_rank():
    commands = [["gemm", "--m", 4, "--n", 4, "--k", 4, *arguments] for arguments, _ in BAD]
    for done, (_, message) in zip(jobs.commands(commands, 2), BAD, strict=True):
        assert done.status != 0 and done.stdout == "" and done.stderr.count(message) == 1 and "usage:" not in done.stderr, done


@pytest.mark.mpi(sizes=(1,))
@pytest.mark.parametrize(("dtype", "check"), [("float64", False), ("float32", True), ("float64", True), ("complex128", False)])
def test_the_memory_that_is_asked_for_is_the_memory_that_is_taken(comm, make_grid, dtype, check):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--m", "900", "--n", "700", "--k", "800", "--grid", "x=1", "--dtype", dtype, "--repeat", "1", "--device", "cpu"]
    args = parser.parse_args([*words, "--check"] if check else words)
    entry, _ = command.decided(args, comm, None)
    found = algorithm(entry.algorithm)
    asked = capacity.peak_bytes(found, found.plan("nn", 900, 700, 800), make_grid(**entry.grid), dtype, "cpu", check)
    tracemalloc.start()
    command.measure(args, entry, comm)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken * 0.85 < asked < taken * 1.15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cuda"), "device cuda"),
        (("--transport", "ncl"), "transport 'ncl' does not exist"),
    ],
)
def test_a_device_that_is_not_there_and_a_transport_that_does_not_exist_are_one_error(arguments, message):
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [jobs.python(), "-m", "summa3d", "gemm", "--m", "8", "--n", "8", "--k", "8", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=hidden)
    assert ended.returncode != 0 and message in ended.stderr and "Traceback" not in ended.stderr
    assert "use device cpu" in ended.stderr.lower() or "Transports: auto" in ended.stderr
