"""Benchmarked products on a fake device: operands there, each time one of a product that is done, the words of the host's."""

from __future__ import annotations

import fake_device
import pytest

from summa3d.bench import products as contest
from summa3d.bench.products import Problem, ProductEntry
from summa3d.comm.device import cupy as cupy_backend
from summa3d.comm.device import select as places


@pytest.mark.mpi(sizes=(3,))
def test_a_race_on_a_device_waits_for_each_product_and_counts_what_the_host_would(comm, monkeypatch):
    device = fake_device.use(fake_device.Device(comm, "lazy"))
    for module, name, value in (
        (contest, "placed", lambda array, where: array if where == "cpu" else device.put(array)),
        (places, "CupyBackend", lambda: device),
        (cupy_backend, "CupyBackend", lambda: device),
    ):
        monkeypatch.setattr(module, name, value)
    grids = [("cuboid", {"x": 3, "y": 1, "z": 1}), ("cuboid", {"x": 1, "y": 1, "z": 3}), ("summa", {"x": 1, "y": 2})]
    for dtype in ("float32", "float16"):
        found = []
        for place in ("cpu", "cuda"):
            entries = [ProductEntry(name, grid, Problem(17, 13, 11, "nn", dtype, place)) for name, grid in grids]
            device.calls.clear()
            device.host_waits = 0
            found.append(contest.run_benchmark(entries, comm, 2)["rows"])
        products = [call for call in device.calls if call[0] == "gemm"]
        runs = 2 * (2 + 1) + 2  # of the two cuboids, on which all ranks are: rounds, one before, one whose words are counted
        assert len(products) >= runs and device.host_waits >= runs
        for host, there in zip(*found, strict=True):
            assert (host["device"], there["device"]) == ("cpu", "cuda")
            for count in ("words_per_rank", "messages_per_rank"):  # none on a rank that has no part in it
                assert host.get(count) == there.get(count)
    device.finish()
