"""Updated weights of replicas on several nodes: gathered behind the next forward, and whole wherever a layer uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cases import FAMILIES, inputs
from nn_parity import global_weights
from serial_runs import STEPS, trained
from small_runs import shared_corpus, small_config

from summa3d.nn import ModelConfig, build, scheme
from summa3d.parallel.pipeline import Pipeline, replicas_in
from summa3d.parallel.states import states_of
from summa3d.train.loop import compare_copies, evaluate, take_step
from summa3d.train.prepare import prepare

PIPED = {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 2}
PIPED |= {"model__layers": 5, "recompute": "full"}
AHEAD = {"scheme": "cuboid", "grid__x": 2, "grid__dp": 2, "overlap__gather": 3}
EXPERTS = {
    "scheme": "serial",
    "grid__dp": 2,
    "grid__ep": 2,
    "model__family": "mixtral",
    "model__experts": 5,
    "model__ffn": 12,
    "train__batch": 40,
}


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("by", ["pipeline", "model"])
def test_every_module_has_whole_weights_while_those_of_the_next_layer_are_in_flight(make_grid, by, family, zero):
    grid = make_grid(dp=2, node_memory=False)
    model = build(ModelConfig(**{**FAMILIES[family], "layers": 5}), scheme("oned", grid))
    states = states_of(model, grid, zero)
    replicas = replicas_in(model, states, zero, 4 * 96 * 96)
    pipeline = Pipeline(model, "1f1b", 4, torch.float32, replicas)
    want = {name: weight + 1 for name, weight in global_weights(model).items()}
    replicas.update(lambda: [state.weight.data.add_(1) for state in states])
    left: dict[str, tuple[int, int]] = {}
    for name, module in [*model.named_modules()][1:]:

        def check(module: Any, given: Any, name: str = name) -> None:
            for leaf, weight in module.named_parameters(recurse=False):
                assert torch.equal(weight.data, want[f"{name}.{leaf}"]), name
            left[name] = replicas.gathers.left

        module.register_forward_pre_hook(check)
    batch = inputs(model.config)

    def loss() -> Any:
        if by == "pipeline":
            return pipeline.run(1, lambda micro: (batch, model.batch_of(batch, count=7, pairs=5)))[0]
        return model(**batch, count=7, **({"pairs": 5} if family == "bert" else {}))

    with torch.no_grad(), grid.ledger.watch() as moved:
        found, in_first = loss(), dict(left)
        assert loss() == found  # of weights of the model itself, too
    left_at = [in_first[f"blocks.{layer}"] for layer in range(5)]
    assert sum(left_at[0]) > 0.6 * len(replicas.buckets) and sum(left_at[4]) <= 2
    assert all(coming >= min(2, sum(item)) for item in left_at for coming in item[1:])
    assert [sum(item) for item in left_at] == sorted(map(sum, left_at), reverse=True)
    sizes = [bucket.sizes for bucket in replicas.buckets]
    assert moved.rows and grid.ledger.total(phase="optimizer").words == sum(sum(item) - item[grid["dp"].index] for item in sizes)
    assert model.context.state.pending_gathers is None and replicas.gathers.left == (0, 0)


RUNS = {"pipeline": PIPED, "prefetch": AHEAD, "experts": EXPERTS}


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", RUNS)
def test_no_bit_of_a_run_depends_on_it(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    settings = {**STEPS, **RUNS[name], "train__steps": 3, "train__evaluate_every": 1, "dtype": dtype, "replicas__bucket": 2000}
    found = [
        trained(comm, shared_tmp_path, f"{overlap} {zero}", **settings, replicas__overlap=overlap, replicas__zero=zero)
        for overlap, zero in ((True, 1), (False, 1), (True, 2), (False, 2))
    ]
    assert found[0] == found[1] and found[2] == found[3]


@pytest.mark.mpi(sizes=(2,))
def test_who_compares_evaluates_or_resumes_between_steps_has_whole_weights(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    changes = {**STEPS, "scheme": "serial", "grid__dp": 2, "replicas__bucket": 2000}
    losses = []
    for overlap in (True, False):
        config = small_config(shared_corpus(comm, shared_tmp_path), **changes, replicas__overlap=overlap)
        run = prepare(config, comm, shared_tmp_path / f"run{overlap}")
        take_step(run, 1)
        assert (run.replicas.gathers.left > (0, 0)) is overlap
        losses.append(evaluate(run))
        take_step(run, 2)
        compare_copies(run)
        assert run.replicas.gathers.left == (0, 0)
        run.grid.free()
    assert losses[0] == losses[1]


@pytest.mark.mpi(sizes=(4,))
def test_a_later_stage_has_all_gathers_in_flight_before_it_waits_for_its_input(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", "no")
    changes = {**STEPS, "scheme": "serial", "grid__dp": 2, "grid__pp": 2, "model__layers": 4, "replicas__bucket": 2000}
    run = prepare(small_config(shared_corpus(comm, shared_tmp_path), **changes), comm, shared_tmp_path / "run")
    take_step(run, 1)
    left_at, _ = run.replicas.gathers.left
    trace = run.grid.ledger.start_trace()
    take_step(run, 2)
    run.grid.ledger.stop_trace()
    gathers = [one.start for one in trace.communications if (one.name, one.axis) == ("all_gather", "dp")]
    assert len(gathers) == left_at > 2
    waits = [one.end - one.wait for one in trace.communications if one.name == "receive" and "pp" in one.axis]
    assert run.pipeline.rank == 0 or sum(start < waits[0] for start in gathers) >= 2
    run.grid.free()
