"""Model FLOPs against the dry run's products, and the peak that they are compared with."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from small_runs import metrics_of, small_config, train_small

from summa3d.comm.grid import Grid
from summa3d.dry.place import DryPlace
from summa3d.errors import ConfigError
from summa3d.nn.context import scheme
from summa3d.nn.models.registry import build
from summa3d.train import config, utilization
from summa3d.train.dry_run import predict
from summa3d.train.loop import train
from summa3d.train.utilization import StepWork, model_flops, peak_flops


@pytest.mark.parametrize(
    "family",
    [
        ["model.family=gpt2"],
        ["model.family=llama", "model.kv_heads=2"],
        ["model.family=llama", "model.tied_head=true"],
        ["model.family=bert", "model.vocabulary=259"],
    ],
)
def test_model_flops_are_the_products_of_a_step_but_for_attention_by_the_usual_count(family: list[str]) -> None:
    sizes = ["model.layers=2", "model.hidden=48", "model.heads=6", "model.sequence=20", "train.batch=3", "scheme=serial"]
    settings = config.load("demo", [*sizes, *family])
    with torch.device("meta"):
        model = build(settings.model, scheme("serial", DryPlace({"x": 1, "y": 1, "z": 1}, 0)), torch.float32, 1)
    square = (
        2 * 3 * 20**2 * 48
    )  # of both layers: the usual count has 12; fused attention, whose backward computes scores again, 14
    traced = 7 if settings.model.architecture.causal else 14  # and the half of them where it is causal
    assert model_flops(model, settings.model, 3) - 12 * square == predict(settings)["flops"] - traced * square


def test_the_peak_is_what_is_stated_or_a_product_of_this_machine() -> None:
    with Grid(MPI.COMM_SELF, {"x": 1}) as grid:
        stated = small_config("text", train__peak_tflops=0.25).train
        assert peak_flops(stated, grid, torch.device("cpu"), torch.float32) == 0.25e12
        measured = small_config("text", train__peak_tflops=0).train
        assert 1e8 < peak_flops(measured, grid, torch.device("cpu"), torch.float32) < 1e14


def test_a_peak_that_was_measured_under_load_is_replaced_by_a_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cpu = small_config("text", train__peak_tflops=0).train, torch.device("cpu")
    peaks = iter([3e9, 2e9])
    monkeypatch.setattr(utilization, "peak_flops", lambda *arguments: next(peaks))
    monkeypatch.setattr(utilization, "load_average", lambda: 0.25)
    with Grid(MPI.COMM_SELF, {"x": 1}) as grid:
        work = StepWork(1e9, 2.5e9, load=9.0)
        work = work.measured_again(settings, grid, cpu, torch.float32)
        assert (work.peak, work.load) == (3e9, 0.25)
        assert work.measured_again(settings, grid, cpu, torch.float32) is work
        stated = small_config("text", train__peak_tflops=0.25).train
        assert work.measured_again(stated, grid, cpu, torch.float32) is work


@pytest.mark.mpi(sizes=(2,))
def test_tensorboard_shows_the_metrics_and_a_resumed_run_goes_on(comm: Any, shared_tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_small(comm, shared_tmp_path, grid__y=2, train__steps=2, train__tensorboard=True)
    train_small(comm, shared_tmp_path, resume=True, grid__y=2, train__steps=4, train__tensorboard=True)
    events = EventAccumulator(str(shared_tmp_path / "run" / "tensorboard"))
    events.Reload()
    lines = metrics_of(shared_tmp_path)
    for name in ("loss", "mfu", "exposed_communication"):
        found = events.Scalars(name)
        assert [event.step for event in found] == [1, 2, 3, 4]
        assert [event.value for event in found] == pytest.approx([line[name] for line in lines])
    comm.Barrier()


@pytest.mark.mpi(sizes=(2,))
def test_tensorboard_that_is_not_installed_is_said_before_anything_else(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="needs the package tensorboard") as raised:
        train(small_config("nowhere", grid__y=2, train__tensorboard=True), comm, shared_tmp_path / "run")
    assert len({*comm.allgather(str(raised.value))}) == 1 and "\n" not in str(raised.value)
    assert not (shared_tmp_path / "run").exists()
