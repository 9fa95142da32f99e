"""Replicas: runs with `grid.dp` are the serial run, move the words of their formula, and do not depend on zero or on buckets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nn_parity import global_weights, whole
from scheme_table import FAMILIES
from serial_runs import FEW, STEPS, check_against_serial, moved_by, numbers_of, trained
from small_runs import metrics_of, shared_corpus, small_config, train_in_legs, train_small

from summa3d.dry.step import run as run_dry
from summa3d.nn import build, scheme
from summa3d.parallel.replicas import Replicas
from summa3d.parallel.states import states_of
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

BERT = {"model__family": "bert", "model__vocabulary": 259}
LLAMA = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
RUNS: dict[int, list[dict[str, Any]]] = {
    2: [{"scheme": "serial", "grid__dp": 2}],
    3: [{"scheme": "serial", "grid__dp": 3, **BERT}],
    4: [
        {"scheme": "oned", "grid__dp": 2, "grid__y": 2, **LLAMA},
        {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "model__layers": 3},
        {
            **{"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "pipeline__schedule": "zb-v", "pipeline__chunks": 2},
            **{"model__layers": 4, "replicas__bucket": 1000, **LLAMA},
        },
    ],
    8: [
        {"scheme": "summa", "grid__dp": 2, "grid__x": 2, "grid__y": 2, "vectors": "root-only", "train__batch": 24, **BERT},
        {
            **{"scheme": "cuboid", "grid__dp": 2, "grid__pp": 2, "grid__z": 2, "pipeline__schedule": "interleaved"},
            **{"pipeline__chunks": 2, "model__layers": 5, "recompute": "full", "train__batch": 24},
        },
    ],
    9: [{"scheme": "summa", "grid__dp": 3, "grid__x": 3, "grid__order": "dp,x", **LLAMA}],
}


@pytest.mark.mpi(sizes=tuple(size for size in RUNS if size < 9))
def test_clipped_steps_of_replicas_are_the_serial_runs(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    for number, changes in enumerate(RUNS[world_size]):
        check_against_serial(comm, shared_tmp_path / str(number), changes, 1e-9, **(FEW if world_size > 2 else {}))


@pytest.mark.wide
@pytest.mark.mpi(sizes=tuple(RUNS))
def test_so_are_all_20_on_every_grid(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    for number, changes in enumerate(RUNS[world_size]):
        check_against_serial(comm, shared_tmp_path / str(number), changes, 1e-9)


@pytest.mark.mpi(sizes=(4,))
def test_so_they_are_in_fewer_bits(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    run = RUNS[world_size][0]
    check_against_serial(comm, shared_tmp_path / "single", run, 2e-4, dtype="float32", **FEW)
    check_against_serial(comm, shared_tmp_path / "half", run, 1e-2, losses=True, dtype="bfloat16", **FEW)


INTERLEAVED = {"scheme": "serial", "grid__dp": 2, "grid__pp": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 2}
INTERLEAVED["model__layers"] = 5


SAME_BITS: dict[str, dict[str, Any]] = {
    "zero": {"replicas__zero": 0},
    "word": {"replicas__bucket": 1},
    "late": {"replicas__overlap": False, "replicas__bucket": 1000},
}


@pytest.mark.mpi(sizes=(3, 4))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["cover", "all"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_zero_overlap_and_the_size_of_buckets_change_no_bit(
    comm: Any, world_size: int, shared_tmp_path: Path, dtype: str, every: bool
) -> None:
    """Each change with each dtype, and on each grid: in a cover of those pairs."""
    settings = {**STEPS, **(RUNS[3][0] if world_size == 3 else INTERLEAVED), "train__steps": 2, "dtype": dtype}
    want, first = trained(comm, shared_tmp_path, "one", **settings), int((world_size == 3) == (dtype == "float64"))
    for name, changes in [*SAME_BITS.items()][0 if every else first :: 1 if every else 2]:
        assert trained(comm, shared_tmp_path, name, **settings, **changes) == want


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("overlap", [True, False])
def test_the_sums_of_a_chunk_start_in_its_last_backward(comm: Any, shared_tmp_path: Path, overlap: bool) -> None:
    """Those of the chunk with the tied table behind its sum over the stages. Without overlap, behind all backwards."""
    changes = {**INTERLEAVED, "train__accumulate": 4, "train__batch": 24, "replicas__overlap": overlap}
    changes["pipeline__scatter"] = overlap
    config = small_config(shared_corpus(comm, shared_tmp_path), **{**changes, "replicas__bucket": 5000})
    run = prepare(config, comm, shared_tmp_path / f"run{overlap}")
    assert run.grid.job.sealed and run.pipeline.scatter is overlap  # a step makes no communicator
    trace = run.grid.ledger.start_trace()
    take_step(run, 1)
    run.grid.ledger.stop_trace()
    ops = {name: span for name, *span in trace.runs}
    assert [name for name in ops if name[0] in "BRT"][-5:] == {
        (0, True): ["R 1", "B 0.2", "B 0.3", "T 0", "R 0"],
        (0, False): ["B 0.2", "B 0.3", "T 0", "R 1", "R 0"],
        (1, True): ["B 0.2", "B 0.3", "R 0", "T 1", "R 1"],
        (1, False): ["B 0.2", "B 0.3", "T 1", "R 0", "R 1"],
    }[run.pipeline.rank, overlap]
    for chunk in range(2):
        tied = f"T {chunk}" in ops
        first, last = ops[f"B {chunk}.3" if overlap and not tied else f"R {chunk}"]
        sums = [one for one in trace.communications if one.axis == "dp" and first <= one.start <= last]
        assert len(sums) == sum(bucket.chunk == chunk for bucket in run.replicas.buckets) > 0
        assert {one.phase for one in sums} == {"optimizer"}


CASES = {
    "gpt2": ("serial", {"dp": 2}),
    "llama": ("oned", {"y": 2, "dp": 2}),
    "bert": ("cuboid", {"y": 2, "z": 2, "dp": 2}),
}


@pytest.mark.mpi(sizes=(2, 4, 8))
def test_raw_gradients_are_the_whole_batchs_where_one_replica_has_no_label(make_grid: Any, world_size: int) -> None:
    name, (kind, axes) = list(CASES.items())[(2, 4, 8).index(world_size)]
    grid, family = make_grid(**axes), FAMILIES[name]
    on_grid = scheme(kind, grid)
    config = family.config(on_grid)
    model = build(config, on_grid, torch.float64, seed=3)
    plain = family.plain(config, global_weights(model), seed=3)
    batch = family.batch(config, 8, 12)
    counts = {}
    for key, divisor in (("labels", "count"), ("relation", "pairs")):
        if key in batch:
            batch[key][4:] = -100  # those of the second replica
            counts[divisor] = int((batch[key] >= 0).sum())
    replicas = Replicas.of(states_of(model, grid, 1), grid, 1, 500)
    first = 4 * replicas.plane.index
    mine = {key: tensor[first : first + 4] for key, tensor in batch.items()}
    loss = model(**mine, step=4, first_row=5 + first, **counts)
    loss.backward()
    want = plain.loss(**batch, step=4, first_row=5)
    want.backward()
    assert replicas.total(loss.item()) == pytest.approx(want.item(), rel=1e-12)
    replicas.reduce()
    replicas.update(lambda: None)
    for state in replicas.states.values():
        expected = plain.weights[state.name].grad[state.shardings.partition.slices(grid)]
        assert state.own_gradient is not None
        assert (state.own_gradient - expected).norm() <= 1e-9 * plain.weights[state.name].grad.norm(), state.name
    weights = {key: whole(model, key, p.data) for key, p in model.named_parameters()}
    assert all(torch.equal(weights[key], weight.detach()) for key, weight in plain.weights.items())  # gathered from their owners


@pytest.mark.mpi(sizes=(4, 6))
@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_moves_each_gradient_and_each_weight_once(comm: Any, world_size: int, shared_tmp_path: Path, zero: int) -> None:
    """2(D−1)/D words an element, of each part exactly; one word for the loss; as the dry run says, and all else as alone."""
    dp = world_size // 2
    changes = {
        "scheme": "cuboid",
        "grid__z": 2,
        "grid__dp": dp,
        "train__accumulate": 2,
        "train__batch": 24,
        "replicas__zero": zero,
    }
    config = small_config(shared_corpus(comm, shared_tmp_path), **{**changes, "model__layers": 4 - dp, "replicas__bucket": 5000})
    run = prepare(config, comm, shared_tmp_path / f"run{zero}")
    take_step(run, 1)
    before = moved_by(run)
    take_step(run, 2)
    step = {key: words - before.get(key, 0) for key, words in moved_by(run).items() if words > before.get(key, 0)}
    formula = 0
    for state in run.replicas.states.values():
        own, block = state.shardings.partition.local_shape(run.grid), state.parameter.numel()
        mine = torch.Size(own).numel()
        formula += (dp - 1) * mine + block - mine
    loss = 1 if run.grid["dp"].index else dp - 1
    assert step["optimizer", "dp"] == formula + loss
    assert {phase for phase, axis in step if "dp" in axis and axis != run.grid.world.label} == {"optimizer"}
    dry = run_dry(setting_of(config, comm.rank), training_of(config)).words()
    assert step == {(phase, axis): words for phase, axes in dry.items() for axis, words in axes.items() if words}


LEGS = [
    (2, {"scheme": "serial", "grid__dp": 2}),
    (1, {"scheme": "serial"}),
    (4, {"scheme": "oned", "grid__y": 2, "grid__dp": 2, "replicas__zero": 0}),
    (3, {"scheme": "serial", "grid__dp": 3}),
    (3, {"scheme": "serial", "grid__dp": 3}),
]
"""Ranks and their grids, for two steps each."""


@pytest.mark.mpi(sizes=(4,))
def test_a_run_goes_on_with_other_replicas_and_each_writes_its_share(comm: Any, shared_tmp_path: Path) -> None:
    whole, legs = shared_tmp_path / "whole", shared_tmp_path / "legs"
    constant = {"train__decay_to": 1.0, "train__evaluate_every": 2}
    for part, step in train_in_legs(comm, shared_tmp_path, LEGS, **constant):
        if part.rank == 0:
            index = json.loads((legs / "run" / "checkpoints" / f"step-{step}" / "index.json").read_text())
            sizes = [entry["bytes"] for entry in index["files"].values()]
            assert len(sizes) == part.size and max(sizes) <= 1.2 * sum(sizes) / part.size
    assert numbers_of(legs) == pytest.approx(numbers_of(whole), rel=1e-9)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_run_of_replicas_that_is_resumed_repeats_every_bit(comm: Any, shared_tmp_path: Path, dtype: str) -> None:
    """In float16 some of the first steps are skipped."""
    settings = {**RUNS[4][0], "dtype": dtype, "train__decay_to": 1.0, "loss_scale__initial": 2.0**22, "train__steps": 6}
    want = trained(comm, shared_tmp_path, "whole", **settings)
    trained(comm, shared_tmp_path, "parts", **{**settings, "train__steps": 3})
    train_small(comm, shared_tmp_path / "parts", resume=True, **settings)
    if comm.rank == 0:
        losses = [[line["loss"] for line in metrics_of(shared_tmp_path / name)] for name in ("whole", "parts")]
        assert losses[0] == losses[1] and numbers_of(shared_tmp_path / "parts")[-3:] == want[-3:]
