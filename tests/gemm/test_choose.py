"""The chooser: its words against the lower bound and against every grid, its closed forms against those of each rank."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.cluster import load
from summa3d.comm.topology import grids_of
from summa3d.dtypes import dtype_of
from summa3d.errors import ClusterError, ConfigError, GridError, ShapeError
from summa3d.gemm import DistMatrix, matmul
from summa3d.gemm.algorithms.registry import ALGORITHMS, algorithm_of
from summa3d.gemm.cost.choose import AWKWARD, Search, choose
from summa3d.gemm.cost.machine import Machine
from summa3d.gemm.cost.mean import lower_bound
from summa3d.gemm.pieces.timing import best_pieces

RANKS = (8, 64, 512, 4096)
SQUARE, MIXED, FLAT = (8192, 8192, 8192), (16384, 8192, 4096), (24576, 24576, 1536)
SHAPES = [SQUARE, MIXED, FLAT, (65536, 4096, 4096), (4096, 65536, 4096), (2048, 2048, 131072)]


def words_of(m, n, k, grid):
    """The words of an average rank, by the formula that README shows."""
    x, y, z = grid["x"], grid["y"], grid["z"]
    return Fraction((y - 1) * m * k + (x - 1) * k * n + (z - 1) * m * n, x * y * z)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_words_are_the_best_of_all_factorisations_and_near_the_bound(shape, ranks):
    choice = choose(*shape, ranks)
    best = min(words_of(*shape, grid) for grid in grids_of(ranks, ("x", "y", "z")))
    assert choice.used == ranks and choice.words == float(best)
    assert lower_bound(*shape, ranks) <= choice.words * (1 + 1e-12) and choice.words <= 1.15 * choice.bound


@pytest.mark.parametrize(
    ("shape", "ranks", "grid"),
    [
        ((8192, 8192, 8192), 8, (2, 2, 2)),
        ((8192, 8192, 8192), 64, (4, 4, 4)),
        ((8192, 8192, 8192), 512, (8, 8, 8)),
        ((8192, 8192, 8192), 4096, (16, 16, 16)),
        ((16384, 4096, 8192), 64, (8, 2, 4)),
        ((65536, 1024, 1024), 8, (8, 1, 1)),
        ((1024, 65536, 1024), 64, (1, 64, 1)),
        ((1024, 1024, 65536), 64, (1, 1, 64)),
        ((8192, 8192, 64), 64, (8, 8, 1)),
        ((64, 16384, 16384), 4096, (1, 64, 64)),
    ],
)
def test_words_equal_the_bound_where_its_grid_is_whole(shape, ranks, grid):
    choice = choose(*shape, ranks)
    assert choice.words == pytest.approx(lower_bound(*shape, ranks), rel=1e-12)
    assert tuple(choice.grid.values()) == grid and choice.algorithm == "cuboid"


def test_31_ranks_use_27():
    choice = choose(8192, 8192, 8192, 31)
    assert choice.used == 27 and choice.idle == 4 and choice.words <= 15e6
    assert "4 of 31 ranks idle" in str(choice)
    fastest = min(one.in_one_piece for one in choice.others)
    said = f"0.961 s in one piece (within 10% of the fastest, {fastest:.3g} s, the fewest words);"
    assert choice.best.in_one_piece > fastest and said in str(choice)


def test_between_nodes_what_is_chosen_is_in_the_pieces_of_fewest_seconds_and_says_so():
    between, limit = Machine(load("frontera-rtx")), choose(8192, 8192, 8192, 8, "float32").workspace_bytes
    choice = choose(8192, 8192, 8192, 8, "float32", machine=between)
    assert choice.pieces == choice.plan.pieces == best_pieces(choice.plan, choice.grid, choice.best.dtype, between) > 1
    assert choice.seconds < 0.9 * choice.best.in_one_piece and choice.messages == choice.pieces * choice.best.mean.messages
    share = f"In {choice.pieces} pieces it takes {choice.best.share_of_one:.0%} of the seconds of one."
    assert share in str(choice) and f"cuboid x=2,y=2,z=2 in {choice.pieces} pieces" in str(choice)
    volume = ALGORITHMS["cuboid"].volume(choice.plan, choice.grid, "float32")
    assert choice.workspace_bytes == 4 * max(cost.workspace for cost in volume.costs()) and volume.max_words == choice.max_words
    assert choose(8192, 8192, 8192, 8, "float32", machine=Machine(load("frontera-rtx"), node=True)).pieces == 1
    assert choose(8192, 8192, 8192, 8, "float32", memory_limit=limit, machine=between).workspace_bytes <= limit


def test_the_workspace_of_a_table_in_a_node_is_that_of_a_product_through_its_memory():
    choice = choose(512, 512, 512, 8, machine=Machine(node=True))
    for one in choice.others:
        volume = ALGORITHMS[one.algorithm].volume(one.plan, one.grid, "float64", staged=tuple(one.grid))
        assert one.workspace_bytes == 8 * max(cost.workspace for cost in volume.costs())
    assert choice.algorithm == "cuboid" and choice.workspace_bytes == 0
    head = str(choice).splitlines()[2]
    assert "mean words" in head and "workspace bytes" in head


def test_in_a_node_a_collective_waits_once_however_many_members_it_has():
    shape, wake = (802, 526, 270), 3e-4

    def candidates(launch, algorithm=None):
        node = Machine(load("server").replaced({"collectives.launch": launch, "network.latency": 0.0}, "assumed"), node=True)
        choice = choose(*shape, 8, algorithm=algorithm, machine=node)
        return choice, {str(one): one for one in (choice.best, *choice.others)}

    (_, without), (choice, found) = candidates(0.0), candidates(wake)
    for grid, waits in (("x=8,y=1,z=1", 1), ("x=4,y=2,z=1", 2), ("x=2,y=4,z=1", 2)):
        name = f"cuboid {grid}"
        assert found[name].seconds == pytest.approx(without[name].seconds + waits * wake)
    assert sum(size > 1 for size in choice.grid.values()) == 1
    (_, without), (panels, _) = candidates(0.0, "summa"), candidates(wake, "summa")  # each message is a broadcast
    assert panels.seconds == pytest.approx(without[str(panels.best)].seconds + panels.messages * wake)
    outside = choose(*shape, 8, machine=Machine(load("server").replaced({"collectives.launch": wake}, "assumed")))
    assert outside.seconds == choose(*shape, 8).seconds  # MPI's messages have a latency of their own


@given(m=st.integers(1, 3000), n=st.integers(1, 3000), k=st.integers(1, 3000), ranks=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_choice_is_the_fewest_words_of_its_rank_count(m, n, k, ranks):
    choice = choose(m, n, k, ranks)
    best = min(words_of(m, n, k, grid) for grid in grids_of(choice.used, ("x", "y", "z")))
    assert choice.words == float(best) and ranks // 2 < choice.used <= ranks
    here = min(words_of(m, n, k, grid) for grid in grids_of(ranks, ("x", "y", "z")))
    assert choice.used == ranks or here > AWKWARD * choice.bound
    assert choice.words >= 0 and "lower bound" in str(choice)


def test_each_rank_count_of_the_table_is_beside_its_own_bound():
    choice = choose(2048, 2048, 2048, 31)
    rows = [line.split() for line in str(choice).splitlines()]
    bounds = {int(row[2]): row[3] for row in rows if row[:2] == ["lower", "bound"]}
    assert bounds == {ranks: f"{lower_bound(2048, 2048, 2048, ranks):,.0f}" for ranks in (31, 30, 27)}
    taken = next(row for row in rows if row[0] == "→")
    assert f"{choice.words / lower_bound(2048, 2048, 2048, 27):.2f}" in taken


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_at_equal_words_m_or_n_is_split_before_k(ranks):
    assert choose(2048, 2048, 2048, ranks).grid["z"] == 1


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
def test_closed_forms_are_the_mean_over_ranks(name, form):
    found, checked = ALGORITHMS[name], 0
    for ranks in (1, 4, 6, 8, 9, 16):
        for grid in found.grids(ranks):
            volume = found.volume(found.plan(form, 144 * 2, 144 * 3, 144), grid)
            mean = found.mean(form, 144 * 2, 144 * 3, 144, grid)
            messages = sum(cost.messages for cost in volume.costs()) / ranks
            turned = form == "tt" and name in ("summa", "cannon", "tesseract")  # their transposes are estimated
            assert float(mean.words) == pytest.approx(float(volume.mean_words), rel=0.35 if turned else 1e-12), (grid, ranks)
            assert mean.messages == pytest.approx(messages, abs=1 if turned else 1e-9), (grid, ranks)
            checked += 1
    assert checked > 1


def test_every_plan_belongs_to_one_algorithm():
    for found in ALGORITHMS.values():
        assert algorithm_of(found.plan("nn", 2, 2, 2)) is found


@pytest.mark.parametrize("ranks", [4093, 4096, pytest.param(75277, marks=pytest.mark.wide)])
def test_of_thousands_of_ranks_few_candidates_are_priced(ranks, monkeypatch):
    """50 µs each: a second. Of a prime number of ranks fewer ranks are looked at too, but not all."""
    priced, candidates = [], Search.candidates

    def noted(search, many):
        found = list(candidates(search, many))
        priced.extend(found)
        return found

    monkeypatch.setattr(Search, "candidates", noted)
    choose(8192, 8192, 8192, ranks)
    assert 0 < len(priced) < 30_000


def test_a_memory_limit_is_respected_and_changes_the_choice():
    free = choose(2048, 2048, 2048, 8)
    tight = choose(2048, 2048, 2048, 8, memory_limit=free.workspace_bytes // 2)
    tighter = choose(2048, 2048, 2048, 8, memory_limit=1 << 20)
    assert tight.workspace_bytes <= free.workspace_bytes // 2 and tight.words >= free.words
    assert tighter.workspace_bytes <= 1 << 20
    with pytest.raises(ConfigError, match=r"workspace of 1,000 bytes.*\n.*smallest workspace is [\d,]+ bytes: summa"):
        choose(2048, 2048, 2048, 8, memory_limit=1000)


def test_workspace_is_that_of_the_rank_that_needs_most():
    for m, n, k, ranks in ((67, 41, 101, 12), (5, 300, 7, 8), (100, 100, 1000, 16), (3, 2, 1, 6)):
        choice = choose(m, n, k, ranks)
        for candidate in (choice.best, *choice.others):
            volume = ALGORITHMS[candidate.algorithm].volume(candidate.plan, candidate.grid, "float64")
            assert candidate.workspace_bytes == 8 * max(cost.workspace for cost in volume.costs()), str(candidate)


def test_an_algorithm_by_name():
    choice = choose(1000, 1000, 1000, 16, algorithm="cannon")
    assert choice.algorithm == "cannon" and choice.grid == {"x": 4, "y": 4}
    with pytest.raises(GridError, match=r"cannon cannot use 8 ranks.*\n.*cuboid"):
        choose(1000, 1000, 1000, 8, algorithm="cannon")
    with pytest.raises(ConfigError, match="'strassen' is not known"):
        choose(10, 10, 10, 4, algorithm="strassen")


def test_bad_sizes_and_dtypes():
    with pytest.raises(ShapeError, match="m is -1"):
        choose(-1, 10, 10, 4)
    with pytest.raises(ShapeError, match="ranks is 0"):
        choose(10, 10, 10, 0)
    for sizes in ((10.5, 10, 10, 4), (10, "10", 10, 4), (10, 10, 10, 4.0)):
        with pytest.raises(ShapeError, match="must be a whole number"):
            choose(*sizes)
    for dtype in ("bool", "foo"):
        with pytest.raises(ConfigError, match=f"dtype {dtype} is not supported by products"):
            choose(10, 10, 10, 4, dtype)
    with pytest.raises(ConfigError, match="memory_limit is '1GiB'; it takes a number of bytes"):
        choose(10, 10, 10, 4, memory_limit="1GiB")
    assert choose(0, 10, 10, 4).words >= 0 and choose(10, 10, 0, 3).bound == 0


def test_dtypes_by_name_or_type():
    assert dtype_of(np.float32) == dtype_of("float32") == dtype_of(np.dtype("float32"))
    assert dtype_of("torch.bfloat16").nbytes == 2 and dtype_of("complex64").flops == 8


def machine(**numbers: float) -> Machine:
    return Machine(load("server").replaced({key.replace("_", ".", 1): value for key, value in numbers.items()}, "assumed"))


def test_ranks_that_share_cores_gain_nothing_from_more():
    alone, crowded = (choose(512, 512, 512, 7, machine=machine(host_slots=slots)) for slots in (0, 2))
    assert crowded.seconds > 1.5 * alone.seconds


def test_a_described_cluster_decides():
    """Numbers of a description that are other than the default change times and, where links are slow, the ranks in use."""
    selene = Machine(load("selene"))
    found = choose(8192, 8192, 8192, 64, "float32", machine=selene)
    assert found.seconds < choose(8192, 8192, 8192, 64, "float32").seconds / 50
    assert found.seconds == pytest.approx(found.best.seconds) and selene.cluster.link(8) == (1 / 230e9, 2e-6)
    assert selene.cluster.link(64) == (1 / 22.5e9, 6e-6) and load("frontera-rtx").link(64)[0] == pytest.approx(4 / 6.8e9)
    with pytest.raises(ClusterError, match="selene has no peak of float64"):
        choose(8192, 8192, 8192, 64, machine=selene)


def test_seconds_are_those_of_operations_or_bytes_of_words_of_sums_and_of_messages():
    slow = {"product_half": 10, "product_launch": 3e-3, "network_bandwidth": 1e6, "network_latency": 2e-3}
    found, double = machine(**slow, peak_float64=1e9, device_memory_bandwidth=1e8), dtype_of("float64")
    assert found.product(300, 200, 100, double) == pytest.approx(2 * 300 * 200 * 100 * 1.1 / 1e9 + 3e-3)
    assert found.product(300, 200, 1, double) == pytest.approx(8 * (300 + 200 + 300 * 200) / 1e8 + 3e-3)
    gathered, reduced, messages = 5000, 700, 3
    moved = 8 * (gathered + reduced) / 1e6 + 8 * (gathered + 3 * reduced) / 1e8 + messages * 2e-3
    assert found.transfer(gathered, reduced, messages, double, 4) == pytest.approx(moved)
    in_node = 8 * (2 * gathered + 3 * reduced) / 1e8 + messages * 2e-3
    assert found.node_transfer(gathered, reduced, messages, double, 4) == pytest.approx(in_node)


@pytest.mark.mpi(sizes=(3,))
def test_the_choice_is_placed_on_the_first_ranks_and_runs(comm):
    choice = choose(24, 24, 24, 3, machine=machine(network_bandwidth=1e6))
    assert (choice.used, choice.idle) == (2, 1)
    with choice.place(comm) as grid:
        assert grid.inside == (comm.rank < 2)
        layouts = (choice.plan.a_layout, choice.plan.b_layout)
        ones = [DistMatrix.from_global(np.ones((24, 24)), grid, layout) for layout in layouts]
        with grid.ledger.watch() as moved:
            c = matmul(*ones, choice.plan.form, algorithm=choice.algorithm)
        assert moved.words == (choice.words if grid.inside else 0) and choice.words == choice.max_words
        if grid.inside:
            assert np.array_equal(c.to_global(), np.full((24, 24), 24))


def test_in_one_nodes_memory_nothing_is_reduced_that_can_be_read_in_place():
    """Gathered words cost nothing there: k is split only where laying A and B out would cost more than summing C."""
    for m, n, k, ranks in ((2048, 2048, 2048, 8), (8192, 1024, 1024, 4), (700, 500, 300, 7)):
        found = choose(m, n, k, ranks, machine=Machine(node=True))
        assert found.algorithm == "cuboid" and found.grid["z"] == 1 and found.idle == 0
        assert "read in place" in str(found)
    assert choose(1024, 1024, 16384, 8, machine=Machine(node=True)).grid["z"] == 8
    assert choose(2048, 2048, 2048, 8).grid == {"x": 2, "y": 2, "z": 2}
