"""A whole run on a pretended device: the host's losses, norms, words and text, and a checkpoint that the host goes on with."""

from __future__ import annotations

from typing import Any

import pretended
import pytest
from small_runs import metrics_of, train_small

from summa3d.train import loop
from summa3d.train.checkpoint import safetensors as tensor_file

GRIDS: dict[int, dict[str, Any]] = {
    1: {"train__accumulate": 2},
    2: {"scheme": "oned", "grid__y": 2, "model__family": "bert", "model__vocabulary": 259, "dtype": "bfloat16"},
    4: {"scheme": "cuboid", "grid__x": 2, "grid__z": 2, "train__accumulate": 3, "overlap__gather": 1, "recompute": "full"},
}


@pytest.mark.mpi(sizes=(1, 2, 4))
def test_a_run_on_a_device_is_the_hosts_and_the_host_goes_on_with_it(
    comm, shared_tmp_path, world_size, kernel_libraries, monkeypatch
):
    settings = {**GRIDS[world_size], "train__sample_tokens": 5, "train__steps": 3}
    tolerance = 1e-9 if "dtype" not in settings else 5e-3
    for name in ("host", "device"):
        (shared_tmp_path / name).mkdir(exist_ok=True)
    host = train_small(comm, shared_tmp_path / "host", **settings)
    taken, take_step = [], loop.take_step
    with pretended.pretended(monkeypatch, kernel_libraries) as (device, backends), monkeypatch.context() as patch:

        def take(run, number):
            before = len(device.waits), len(device.copies)
            step = take_step(run, number)
            taken.append((device.waits[before[0] :], device.copies[before[1] :]))
            return step

        patch.setattr(loop, "take_step", take)
        patch.setattr(tensor_file, "STAGING_BYTES", 1000)
        found = train_small(comm, shared_tmp_path / "device", device="cuda", transport="nccl", **settings)
    assert (found["device"], found["words_per_rank"], found["sample"]) == ("cuda", host["words_per_rank"], host["sample"])
    assert backends or world_size == 1
    for waits, copies in taken:
        assert waits == ["aten._local_scalar_dense.default", "tolist"]  # the loss and the gradient norm
        assert copies and all(direction == "to device" and pinned for direction, _, pinned in copies), copies
    pinned = [pinned for direction, _, pinned in device.copies if direction == "to host"]
    assert any(pinned) and pinned.count(False) == (5 if found["sample"] and comm.rank == 0 else 0)  # the checkpoints; the logits
    for ours, theirs in zip(metrics_of(shared_tmp_path / "device"), metrics_of(shared_tmp_path / "host"), strict=True):
        assert ours["words_per_rank"] == theirs["words_per_rank"]
        for name in ("loss", "grad_norm", "validation_loss"):
            assert name not in theirs or ours[name] == pytest.approx(theirs[name], rel=tolerance), (name, ours["step"])
    for folder in ("device", "host"):
        train_small(comm, shared_tmp_path / folder, resume=True, **{**settings, "train__steps": 4})
    last = [metrics_of(shared_tmp_path / folder)[-1] for folder in ("device", "host")]
    assert last[0]["step"] == 4 and last[0]["grad_norm"] == pytest.approx(last[1]["grad_norm"], rel=10 * tolerance)
