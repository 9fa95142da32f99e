"""`--trace FILE` of gemm and bench from outside.

Every communication, product and copy once, in order, inside what it belongs to.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jobs
import pytest

from summa3d.cli import main as entry

ROOT = Path(__file__).parents[2]
ROUNDED = 0.002  # µs: times are written with three digits


def summa3d(*arguments, ranks, timeout=300):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [jobs.python(), "-m", "summa3d", "launch", "-n", str(ranks), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, cwd=ROOT)


@dataclass
class Span:
    name: str
    start: float
    end: float
    args: dict

    def holds(self, other):
        return self.start - ROUNDED <= other.start and other.end <= self.end + ROUNDED


class Rank:
    """One rank's part of a trace: its spans by track, and its communications from begin to end."""

    def __init__(self, events):
        names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        self.tracks = {name: [] for name in ("runs", "phases", "products", "copies", *names.values())}
        for event in events:
            if event["ph"] == "X":
                span = Span(event["name"], event["ts"], event["ts"] + event["dur"], event["args"])
                self.tracks[names[event["tid"]]].append(span)
        ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
        begun = [event for event in events if event["ph"] == "b"]
        assert len(begun) == len(ends)
        self.flights = [Span(event["name"], event["ts"], ends[event["id"]], event["args"]) for event in begun]
        self.calls = [span for name, spans in self.tracks.items() if name.startswith("axis ") for span in spans]

    def of(self, parent, spans):
        return [span for span in spans if parent.holds(span)]

    def moved(self, parent=None):
        flights = self.flights if parent is None else self.of(parent, self.flights)
        return sum(flight.args["words"] for flight in flights), sum(flight.args["messages"] for flight in flights)

    def check_order(self):
        """Communications are listed as begun; what one thread does one after the other does not overlap."""
        assert all(first.start <= second.start for first, second in pairwise(self.flights))
        work = sorted([*self.calls, *self.tracks["products"], *self.tracks["copies"]], key=lambda span: (span.start, span.end))
        for first, second in pairwise(work):
            assert first.end <= second.start + ROUNDED, (first, second)
        for flight in self.flights:
            assert flight.start <= flight.end


def trace_of(file):
    whole = json.loads(file.read_text())
    events = whole["traceEvents"]
    assert min(event["ts"] for event in events if "ts" in event) == 0
    ranks = [Rank([event for event in events if event["pid"] == rank]) for rank in range(whole["otherData"]["ranks"])]
    for rank in ranks:
        rank.check_order()
    return ranks


PRODUCTS = [
    ("--grid x=2,y=1,z=2 --form nt", ["all_gather", "product nt", "reduce_scatter"], 0),
    ("--grid x=2,y=2,z=1", ["all_gather", "all_gather", "product nn"], 0),
    ("--grid x=2,y=2 --algorithm summa --panel 40 --form tn --dtype complex64", None, None),
    ("--grid x=1,y=2,z=2 --dtype float16 --beta 0.5", ["all_gather", "product nn", "reduce_scatter"], 4),
]
M, N, K = 61, 47, 83


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """Options → JSON and trace of a product."""
    folder = tmp_path_factory.mktemp("products")
    files = {arguments: folder / f"{number}.json" for number, (arguments, *_) in enumerate(PRODUCTS)}
    sizes = ["gemm", "--m", M, "--n", N, "--k", K, "--repeat", 1, "--json", "--trace"]
    ended = jobs.commands([[*sizes, file, *arguments.split()] for arguments, file in files.items()], 4)
    assert all(done.status == 0 for done in ended), ended
    return {
        arguments: (json.loads(done.stdout), trace_of(files[arguments])) for arguments, done in zip(files, ended, strict=True)
    }


@pytest.mark.parametrize(("arguments", "order", "copies"), PRODUCTS)
def test_a_products_trace_has_its_words_messages_products_and_copies_in_their_order(products, arguments, order, copies):
    (m, n, k), (result, ranks) = (M, N, K), products[arguments]
    moved = [rank.moved() for rank in ranks]
    assert max(words for words, _ in moved) == result["words_per_rank"] > 0
    assert sum(words for words, _ in moved) == 4 * result["words_mean"]
    assert max(messages for _, messages in moved) == result["messages_per_rank"]
    products = [span for rank in ranks for span in rank.tracks["products"]]
    assert sum(span.args["flops"] for span in products) == (8 if "complex" in arguments else 2) * m * n * k
    for rank in ranks:
        (run,) = rank.tracks["runs"]
        assert run.name == result["label"] and not rank.tracks["phases"]
        inside = [*rank.flights, *rank.calls, *rank.tracks["products"], *rank.tracks["copies"]]
        assert rank.of(run, inside) == inside
        assert len(rank.calls) == 2 * len(rank.flights)  # each is begun and waited for once
        if order is not None:
            done_in_order = sorted([*rank.flights, *rank.tracks["products"]], key=lambda span: span.start)
            assert [span.name for span in done_in_order] == order
        if copies is not None:
            assert len(rank.tracks["copies"]) == copies


def test_blocks_that_race_have_a_run_each_with_its_phases_and_their_words(tmp_path):
    file, result = tmp_path / "trace.json", tmp_path / "blocks.json"
    sizes = "--blocks 2 --batch 4 --sequence 5 --hidden 24 --heads 4 --rounds 1"
    schemes = "--scheme cuboid:2,2,1 --scheme summa:2,2 --scheme oned"
    done = summa3d("bench", "block", *sizes.split(), *schemes.split(), "--json", result, "--trace", file, ranks=4)
    assert done.returncode == 0, done.stderr
    rows, ranks = json.loads(result.read_text())["rows"], trace_of(file)
    for rank in ranks:
        assert [run.name for run in rank.tracks["runs"]] == [row["label"] for row in rows]
        assert sum(len(rank.of(run, rank.flights)) for run in rank.tracks["runs"]) == len(rank.flights)
    for number, row in enumerate(rows):
        for place, phase in enumerate(("forward", "backward")):
            most = []
            for rank in ranks:
                spans = rank.of(rank.tracks["runs"][number], rank.tracks["phases"])
                assert [span.name for span in spans] == ["forward", "backward"]
                inside = rank.of(spans[place], [*rank.flights, *rank.tracks["products"]])
                assert {span.args["phase"] for span in inside} == {phase}
                # qkv, projection, up and down, twice; each has two gradients
                assert len([span for span in inside if "flops" in span.args]) >= 8 * (1 + place)
                most.append(rank.moved(spans[place])[0])
            assert max(most) == row["words_per_rank"][phase]


def test_ranks_without_a_part_in_an_entry_have_no_run_of_it(tmp_path):
    file = tmp_path / "trace.json"
    sizes = ["--m", 17, "--n", 13, "--k", 11, "--algorithm", "cuboid", "--ranks", "1,2", "--rounds", 1, "--json", "-"]
    done = summa3d("bench", "strong", *sizes, "--trace", file, ranks=2)
    assert done.returncode == 0, done.stderr
    labels = [row["label"] for row in json.loads(done.stdout)["rows"]]
    runs = [[run.name for run in rank.tracks["runs"]] for rank in trace_of(file)]
    assert runs == [labels, labels[1:]] and len(labels) == 2


def test_a_trace_that_cannot_be_written_is_one_message_before_anything_runs(tmp_path):
    sizes = ["--m", 5, "--n", 4, "--k", 3]
    file = ["--trace", tmp_path / "none" / "trace.json"]
    commands = [["gemm", *sizes, *file], ["bench", "gemm", *sizes, *file], ["bench", "block", *file]]
    for done in jobs.commands(commands, 2):
        assert done.status != 0 and done.stdout == "", done
        assert done.stderr.count("ConfigError: --trace ") == 1 and "which is no folder" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_a_trace_that_the_disk_has_no_room_for_is_one_message():
    done = summa3d("gemm", "--m", 5, "--n", 4, "--k", 3, "--trace", "/dev/full", ranks=2)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert done.stderr.count("DataError: --trace /dev/full cannot be written: No space left") == 1
    assert " of 2 only" not in done.stderr  # one writes, for all


@pytest.mark.parametrize("command", ["gemm", "bench block", "train"])
def test_help_says_what_opens_a_trace(command, capsys):
    name, *kind = command.split()
    with pytest.raises(SystemExit) as ended:
        entry.parser_of(name).parse_args([*kind, "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and "https://ui.perfetto.dev" in words and "--nvtx" in words
