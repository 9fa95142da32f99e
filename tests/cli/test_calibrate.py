"""`summa3d bench calibrate`: the fit finds the numbers that made the times, and what is measured becomes a cluster's file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fake_device
import jobs
import numpy as np
import pytest

from summa3d.bench import calibrate
from summa3d.bench.blocks import BlockEntry, Case
from summa3d.bench.calibrate import Calibration
from summa3d.bench.fitted import Measured, MeasuredTime, described, fit
from summa3d.bench.predicted import of_block
from summa3d.cli import bench as cli
from summa3d.cli.gemm import machine_of
from summa3d.cluster import Cluster, load, read_text
from summa3d.comm.device import cupy as cupy_backend
from summa3d.comm.device import select as places
from summa3d.comm.nodes import Nodes
from summa3d.comm.topology import Topology
from summa3d.dry.record import Op
from summa3d.errors import ClusterError, ConfigError
from summa3d.gemm import Machine, choose
from summa3d.nn.config import ModelConfig
from summa3d.plan.order import kendall
from summa3d.plan.price import Prices

TRUE = {
    "peak.float32": 6e10, "product.efficiency": 0.8, "product.half": 40, "product.launch": 5e-6,
    "device.memory_bandwidth": 1e10, "elements.efficiency": 0.7, "elements.launch": 3e-6, "collectives.launch": 2e-5,
    "elements.function": 2e-9, "layers.launch": 2e-5, "attention.forward": 1.3, "attention.backward": 0.4, "attention.half": 150,
    "node.size": 4, "node.bandwidth": 4e9, "node.latency": 4e-6, "network.bandwidth": 1e9, "network.latency": 3e-5,
}  # fmt: skip


def priced(cluster: Cluster) -> Iterator[MeasuredTime]:
    """The times of what is measured, on 4 ranks of each of 4 nodes, as the planner prices them."""
    topology = Topology.checked({"x": 4, "y": 4}, ["x", "y"])
    prices, layers = (Prices(one, topology) for one in (cluster.replaced({"layers.launch": 0}, "assumed"), cluster))
    sides = [(side, side, side) for side in calibrate.SIDES]
    for dtype in calibrate.FULL:
        for m, n, k in (*sides, *calibrate.THIN, (8, 8, 8)):
            yield MeasuredTime("product", "", prices.seconds(Op("product", "", "", "nn", m, n, k, dtype=dtype)), dtype, m, n, k)
    for nbytes in calibrate.ARRAYS:
        gelu = Op("elements", "", "", "gelu", read=nbytes, written=nbytes, dtype="float32")
        yield MeasuredTime("elements", "", prices.seconds(gelu), bytes=2 * nbytes, functions=nbytes // 4)
    for keys, size in calibrate.KEYS_AND_SIZES:
        for way, products in (("forward", 2), ("backward", 5)):
            op = Op("product", way, "", "attention", keys, keys, size, products * 64, dtype="float32")
            yield MeasuredTime("attention", way, prices.seconds(op), "float32", keys, keys, size, products=products * 64)
    small = layers.seconds(Op("product", "", "", "nn", 8, 8, 8)), layers.seconds(Op("elements", "", "", "sum", written=8))
    yield MeasuredTime("layers", "", 3 * small[0] + 5 * small[1], products=3, kernels=5)
    for nbytes in (8, *calibrate.ARRAYS):
        yield MeasuredTime(
            "elements", "", prices.seconds(Op("elements", "", "", "", read=nbytes, written=nbytes)), bytes=2 * nbytes
        )
    for level, axis, sharing in (("node", "x", 1), ("network", "y", 4)):
        for nbytes in calibrate.MESSAGES:
            for name, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
                received = times * max(nbytes // 4, 3)
                move = Op("move", "", "", name, axis=axis, words=received, dtype="float32")
                hops = 4 if level == "network" and times == 2 else times * 3
                yield MeasuredTime("move", "", prices.seconds(move), bytes=4 * received * sharing, level=level, hops=hops)


def test_a_fit_finds_the_numbers_behind_the_times_though_some_of_them_were_disturbed() -> None:
    true = with_float64(load("longhorn").replaced(TRUE, "assumed"))
    draw = random.Random(3)
    samples = [one._replace(seconds=one.seconds * (3 if draw.random() < 0.1 else 1)) for one in priced(true)]
    found = fit(samples)
    assert found.error < 0.02
    for key in (
        "product.half",
        "elements.function",
        "attention.half",
        *(f"{one}.launch" for one in ("product", "elements", "layers", "collectives")),
    ):
        assert found.numbers[key] == pytest.approx(true[key], rel=0.05), key
    for key in (f"{level}.{name}" for level in ("node", "network") for name in ("bandwidth", "latency")):
        assert found.numbers[key] == pytest.approx(true[key], rel=0.05), key
    for dtype in calibrate.FULL:
        rate = found.numbers[f"peak.{dtype}"] * found.numbers["product.efficiency"]
        assert rate == pytest.approx(true.peak(dtype) * true["product.efficiency"], rel=0.03)
    for way in ("forward", "backward"):
        rate = found.numbers[f"attention.{way}"] * found.numbers["peak.float32"]
        assert rate == pytest.approx(true[f"attention.{way}"] * true.peak("float32"), rel=0.03)
    rate = found.numbers["device.memory_bandwidth"] * found.numbers["elements.efficiency"]
    assert 1 / rate == pytest.approx(true.byte_time(), rel=0.03)
    text = described(
        Measured(4, 4, 0, 8e9, False, tuple(samples)), found, {"hosts": ["a", "b", "c", "d"], "load": 0.5, "gpu": None}
    )
    cluster = read_text(text, "here")
    assert [(level.name, level.size) for level in cluster.levels] == [("node", 4), ("network", 0)]
    assert cluster["node.bandwidth"] == pytest.approx(found.numbers["node.bandwidth"], rel=1e-3)
    assert {number.source for number in cluster.numbers.values()} == {"measured", "assumed"} and cluster.fitted == ()
    assert cluster.numbers["peak.bfloat16"].origin == "as float16"


def with_float64(cluster: Cluster) -> Cluster:
    numbers = {**cluster.numbers, "peak.float64": cluster.numbers["peak.float32"]._replace(value=3e10)}
    return Cluster(cluster.name, cluster.level_names, numbers)


def test_times_without_a_model_have_a_large_error() -> None:
    draw = random.Random(4)
    noise = [one._replace(seconds=draw.lognormvariate(0, 2) * 1e-3) for one in priced(with_float64(load("selene")))]
    assert fit(noise).error > 0.2


def test_the_order_of_predictions_is_compared_pair_by_pair() -> None:
    assert kendall([1, 2, 3], [2, 3, 5]) == 1 and kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 2], [1, 1]) is None is kendall([1], [1])
    assert kendall([1, 2, 3], [1, 1, 2]) == pytest.approx((2 / 3) ** 0.5)  # a tie is no disagreement


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"SIDES": (32, 96), "THIN": ((16, 64, 64),), "ARRAYS": (1 << 20,), "MESSAGES": (8, 4096), "SPAN": 1e-3, "ROUNDS": 1}
    small |= {"KEYS_AND_SIZES": ((16, 32), (32, 32)), "TOKENS": 64, "TOUCHED": 1 << 20}
    for name, value in {**small, "OTHER_SIDE": {"cpu": 96, "cuda": 96}}.items():
        monkeypatch.setattr(calibrate, name, value)


def test_the_median_round_counts_and_not_the_quickest() -> None:
    sample = MeasuredTime("product", "a product", m=2, n=2, k=2)
    rounds = [(4.0, 9.0), (3.0, 5.0), (1.0, 2.0), (8.0, 8.0), (5.0, 6.0)]
    found = calibrate.Trial(sample, lambda: np.zeros(1), 1.0, 1, 2.0, False, rounds).measured
    assert (found.seconds, found.wall) == (2.0, 6.0)


@pytest.mark.mpi(sizes=(1,))
def test_repetitions_go_through_more_memory_than_a_cache_holds(comm, monkeypatch):
    monkeypatch.setattr(calibrate, "TOUCHED", 1 << 20)
    found = Calibration(comm)
    sets = found.operands([(64, 32), (32, 128)], (64, 128), "float64")
    taken = [next(sets) for _ in range(40)]
    starts = [[array.__array_interface__["data"][0] for array in arrays] for arrays in taken]
    assert [array.shape for array in taken[0]] == [(64, 32), (32, 128), (64, 128)] and taken[0][0].dtype == "float64"
    assert len({one for arrays in starts[: (1 << 20) // (64 << 10)] for one in arrays}) == 3 * 16
    assert starts[16] == starts[0] and not np.shares_memory(taken[0][2], taken[1][2])
    alone = found.operands([(1 << 20,)], (1 << 20,))
    assert next(alone)[0] is next(alone)[0]
    found.grid.free()


@pytest.mark.mpi(sizes=(4,))
def test_what_is_measured_is_written_as_a_cluster_or_refused(comm, quick, monkeypatch, tmp_path, capsys):
    file = Path(comm.bcast(str(tmp_path), root=0)) / "mine" / "here.toml"
    monkeypatch.setenv("SUMMA3D_CLUSTER", str(file))
    args = argparse.Namespace(device="cpu", json="-", write="")
    monkeypatch.setattr("summa3d.bench.fitted.WORST", 0.0)
    with pytest.raises(ConfigError, match=r"median error is \d+%; at most 0% may be.*Nothing was written") as refused:
        cli.calibrated(args, None)
    assert "\n" not in str(refused.value) and not file.exists()
    monkeypatch.setattr("summa3d.bench.fitted.WORST", 1e9)
    assert cli.calibrated(args, None) == 0
    comm.barrier()
    here = load("here")
    assert here["host.slots"] >= 1 and here.levels[0].size == 0 and here["product.half"] >= 0
    if comm.rank == 0:
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert here.peak("float32") == pytest.approx(result["numbers"]["peak.float32"], rel=1e-3)
        assert {one["level"] for one in result["samples"]} == {"", "node"} and result["kind"] == "calibration"
        assert 'source = "measured"' in file.read_text() and "date = " in file.read_text() and "mpi = " in file.read_text()

    monkeypatch.setattr(Nodes, "of", classmethod(lambda cls, comm: Nodes(("a", "b"), (2, 2), (1, 1))))
    measured = Calibration(comm).run()
    assert comm.allgather(measured) == [measured] * 4
    assert (measured.ranks, measured.nodes, measured.slots) == (2, 2, 1)
    assert {one.level for one in measured.samples} == {"", "node", "network"}
    assert (
        all(one.seconds > 0 for one in measured.samples) and sum(one.message for one in measured.samples) == 2
    )  # in a node ranks share cores
    monkeypatch.setattr(Nodes, "of", classmethod(lambda cls, comm: Nodes(("a", "b"), (3, 1), (1, 1))))
    with pytest.raises(ConfigError, match="as many ranks on every node; these nodes have 3, 1"):
        Calibration(comm)


@pytest.mark.mpi(sizes=(2,))
def test_devices_are_measured_by_their_own_products_collectives_and_memory(comm, quick, monkeypatch):
    device = fake_device.use(fake_device.Device(comm, "lazy"))
    for module, name, value in (
        (calibrate, "placed", lambda array, where: array if where == "cpu" else device.put(array)),
        (calibrate, "device_memory", lambda: 16 << 30),
        (places, "CupyBackend", lambda: device),
        (cupy_backend, "CupyBackend", lambda: device),
    ):
        monkeypatch.setattr(module, name, value)
    measured = Calibration(comm, "cuda").run()
    calls = {call[0] for call in device.calls}
    assert {"gemm"} <= calls and device.host_waits > len(measured.samples)
    assert (measured.slots, measured.shared, measured.memory) == (0, False, 16 << 30)
    assert {one.dtype for one in measured.samples if one.kind == "product"} == {"float32", "float64", "float16"}
    assert {one.level for one in measured.samples} == {"", "node"}
    cluster = read_text(described(measured, fit(measured.samples), {"hosts": ["a"]}), "here")
    assert (
        cluster.crowding(64) == 1
        and cluster.ranks_per_node(64) == 1
        and cluster["device.memory"] == pytest.approx(16 << 30, rel=1e-3)
    )
    device.finish()


def test_a_bench_prints_predicted_beside_measured_times_and_chooses_by_the_cluster(tmp_path: Path) -> None:
    words = ["bench", "strong", "--m", "65", "--n", "64", "--k", "66", "--rounds", "2", "--cluster", "server"]
    ended = jobs.run(["-m", "summa3d", *words, "--json", "strong.json"], 2, tmp_path)
    assert ended.status == 0, ended.stderr
    result = json.loads((tmp_path / "strong.json").read_text())
    found = result["prediction"]
    assert found["cluster"] == "server" and found["band"] == 50 and len(result["rows"]) == 2
    for row, error in zip(result["rows"], found["errors"], strict=True):
        assert row["predicted"] / row["seconds"]["median"] - 1 == pytest.approx(error)
    choice = choose(65, 64, 66, 2, machine=Machine(load("server"), node=True))
    assert result["rows"][1]["grid"] == choice.grid and result["rows"][1]["predicted"] == pytest.approx(choice.seconds)
    assert "predicted on cluster server (± 50 %)" in ended.stdout and "median error" in ended.stdout
    with pytest.raises(ClusterError, match="unknown cluster 'selen'; the nearest is selene"):
        machine_of("selen", "cpu", None)


def test_a_block_is_predicted_by_the_operations_that_it_runs_and_slower_where_more_ranks_share_a_core() -> None:
    case = Case(ModelConfig(layers=2, hidden=32, heads=4, sequence=8), batch=4)
    entry = BlockEntry("cuboid", {"x": 2, "y": 2, "z": 1})
    here = with_float64(load("longhorn")).replaced({"host.shared": 1, "host.slots": 4, "peak.float32": 1e9}, "assumed")
    alone = of_block(entry, case, here)
    assert of_block(entry, replace(case, config=replace(case.config, layers=1)), here) == pytest.approx(alone / 2)
    assert of_block(entry, case, here.replaced({"host.slots": 2}, "assumed")) == pytest.approx(2 * alone)
    slow = here.replaced({"product.efficiency": here["product.efficiency"] / 2}, "assumed")
    assert alone < of_block(entry, case, slow) < 2 * alone
