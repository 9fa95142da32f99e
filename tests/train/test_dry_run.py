"""`train --dry-run`: the bytes of every rank before any is started, and the same bytes of a step that was taken."""

from __future__ import annotations

import gc
import re
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_real import lines_moved, lines_of
from mpi4py import MPI
from small_runs import shared_corpus

from summa3d.bench.memory import peak_bytes
from summa3d.dry.step import run as run_dry
from summa3d.errors import ConfigError, GridError, LayoutError
from summa3d.nn.context_parallel import parts
from summa3d.train import config
from summa3d.train.dry_run import TERMS, predict, setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import Run, open_grid, prepare

INTERLEAVED = ["pipeline.schedule=interleaved", "pipeline.chunks=2"]
LLAMA = ["model.family=llama", "model.kv_heads=2"]
BERT = ["model.family=bert", "model.vocabulary=259"]
CUBE = ["grid.x=2", "grid.y=2", "grid.z=2", "device=cpu"]


@cache
def predicted(*assignments: str) -> dict[str, Any]:
    return predict(config.load("demo", [*CUBE, *assignments]))


H, F, V, S, LAYERS = 256, 1024, 256, 128, 4  # the demo's
MATRICES = V * H + LAYERS * (4 * H * H + 2 * H * F)
VECTORS = S * H + 2 * H + LAYERS * (4 * H + 5 * H + F)  # positions, norms, biases


def test_weights_gradients_and_moments_are_the_models_divided_over_the_grid() -> None:
    found = predicted("dtype=float64")
    assert set(found["bytes"]) == set(found["mean_bytes"]) == set(TERMS) and found["ranks"] == 8
    held = 8 * (MATRICES + 4 * VECTORS)  # every vector is split by one axis of the three and copied on the others
    for term, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert found["mean_bytes"][term] * 8 == times * held
    serial = predict(config.load("demo", ["scheme=serial", "dtype=float64", "device=cpu"]))["bytes"]
    assert serial["parameters"] == 8 * (MATRICES + VECTORS)
    assert serial["peak"] > serial["parameters"] + serial["optimizer"] + serial["activations"]


def test_16_bits_halve_the_activations_and_keep_float32_weights_beside_their_copies() -> None:
    wide, half = predicted("dtype=float32"), predicted("dtype=bfloat16")
    assert half["bytes"]["parameters"] == 1.5 * wide["bytes"]["parameters"]
    assert half["bytes"]["optimizer"] == wide["bytes"]["optimizer"]
    assert 0.45 < half["bytes"]["activations"] / wide["bytes"]["activations"] < 0.75


def test_the_words_on_the_page_of_axes_are_those_of_their_formulas() -> None:
    """The page prints what dry runs found; tests/test_pages.py holds it to that."""
    page = (Path(__file__).parents[2] / "docs" / "axes.md").read_text(encoding="utf-8")
    found = {
        (axis, int(many)): int(words.replace(",", "")) for axis, many, words in re.findall(r"^(\w+) +(\d) +([\d,]+) ", page, re.M)
    }
    parameters, table, batch = MATRICES + VECTORS, V * H, 64
    for many in (1, 4):
        scalars = 3 * many + 3  # the loss of each micro-batch on x and d, once a step on dp and pp; the norm
        for axis in ("x", "d"):  # each weight is gathered, each gradient summed, and the table is used twice
            assert found[axis, many] == many * (parameters + table) * 2 * 3 // 4 + scalars
        assert found["dp", many] == parameters * 2 * 3 // 4 + 6
        assert found["pp", many] == batch * S * H + table + 6
    assert len(found) == 8


STAGE_KEYS = {"pp", "rank", "layers", "parameters", "activations", "peak", "words", "messages"}


def test_each_stage_is_reported_and_the_fullest_rank_is_of_the_fullest_stage() -> None:
    found = predict(config.load("demo", ["scheme=oned", "grid.y=2", "grid.pp=3", "train.accumulate=4", "device=cpu"]), 1)
    stages = found["stages"]
    assert [one["layers"] for one in stages] == [[2], [1], [1]] and all(set(one) == STAGE_KEYS for one in stages)
    stream, loss = 24 // 4 * S * H // 2, [2, 1, 1]  # each of the two sends its half; the loss goes round the three
    table = V * H // 2
    assert [one["words"] - loss[one["pp"]] for one in stages] == [4 * stream + table, 2 * 4 * stream, 4 * stream + table]
    assert max(stages, key=lambda one: one["peak"])["rank"] == found["fullest_rank"] == 0
    assert stages[0]["activations"] > 2.5 * stages[2]["activations"]  # three micro-batches of two layers, one of one and the head
    assert sum(one["parameters"] for one in stages) * 2 == 6 * found["mean_bytes"]["parameters"]


def test_recomputation_micro_batches_and_more_ranks_take_less() -> None:
    base = predicted()["bytes"]
    assert predicted("recompute=full")["bytes"]["activations"] < 0.4 * base["activations"]
    assert predicted("train.batch=48", "train.accumulate=4")["bytes"]["activations"] < 0.6 * base["activations"]
    assert predict(config.load("demo", [*CUBE, "grid.z=4", "train.batch=24"]))["bytes"]["peak"] < base["peak"]


def test_sums_in_flight_are_as_many_of_any_number_of_micro_batches() -> None:
    summed = ["scheme=serial", "grid.dp=2", "device=cpu", "model.layers=1", "replicas.zero=2"]  # one bucket holds all gradients
    peaks = [predict(config.load("demo", [*summed, f"train.accumulate={m}", f"train.batch={8 * m}"]), 1)["peak"] for m in (4, 9)]
    assert peaks[0] == pytest.approx(peaks[1], abs=64)  # a loss of each


def test_axes_inside_a_node_take_less_than_those_between_nodes() -> None:
    cube = config.load("demo", [*CUBE, "model.layers=1"])
    apart = predict(cube)
    some, together = predict(cube, 4), apart["one_node"]
    assert (apart["node_axes"], some["node_axes"], together["node_axes"]) == ([], ["y", "z"], ["x", "y", "z"])
    assert apart["bytes"]["peak"] > some["bytes"]["peak"] > together["bytes"]["peak"] and apart["bytes"]["node"] == 0
    assert predict(cube, 3)["node_axes"] == []  # ranks 0 to 2: no axis of rank 3, the fullest, is inside
    assert predict(cube, 8) | {"one_node": together} == apart | together | {"one_node": together}
    assert "one_node" not in predict(config.load("demo", ["scheme=serial", "device=cpu", "model.layers=1"]))
    there = predict(config.load("demo", [*CUBE[:3], "device=cuda", "model.layers=1"]))
    assert "one_node" not in there and (there["device"], there["node_axes"], there["bytes"]["node"]) == ("cuda", [], 0)
    assert there["bytes"]["peak"] < apart["bytes"]["peak"]  # sums without parts; no masks
    with pytest.raises(ConfigError, match="ranks per node is 0"):
        predict(cube, 0)


def held_by(run: Run) -> tuple[int, int]:
    """Bytes of a run's weights, with the 16-bit copies that stay from step to step, and of its moments."""
    moments = (moment.nbytes for kind in run.optimizer.moments.values() for moment in kind.values())
    weights = [one for state in run.optimizer.states.values() for one in (state.parameter, state.copy) if one is not None]
    return sum(weight.nbytes for weight in weights), sum(moments)


def peak_of_step(run: Run, number: int) -> int:
    """The most that a step of a run holds. Not of its first: the buffers that products keep are there by then."""
    gc.collect()
    kept = run.grid.ledger.workspace_bytes
    with torch.autograd.set_multithreading_enabled(False):
        return sum(held_by(run)) + kept + peak_bytes(lambda: take_step(run, number))


STEPS = {
    "cuboid": ["scheme=cuboid", "grid.x=2", "grid.z=2", "train.accumulate=2", "train.batch=16"],
    "diagonal": ["scheme=cuboid", "grid.y=2", "grid.z=2", "vectors=diagonal", "recompute=full", "model.dropout=0.1"],
    "summa": ["scheme=summa", "grid.x=2", "grid.y=2", "vectors=root-only", "model.family=bert", "model.vocabulary=259"],
    "oned-sp": ["scheme=oned-sp", "grid.y=4", "model.family=llama", "recompute=selective"],
}


TURNS = [("cuboid", "float32", "yes"), ("diagonal", "bfloat16", "no"), ("summa", "bfloat16", "yes"), ("oned-sp", "float32", "no")]
"""Settings, dtypes and transports in turn; every setting of a dry run meets its step in tests/dry/test_real_runs.py too."""
CASES = [
    pytest.param(*case, marks=() if case in TURNS else pytest.mark.wide)
    for case in product(STEPS, ("float32", "bfloat16"), ("yes", "no"))
]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize(("name", "dtype", "node_memory"), CASES)
def test_the_peak_is_that_of_a_step_of_the_run(comm, shared_tmp_path, name, dtype, node_memory, monkeypatch) -> None:
    monkeypatch.setenv("SUMMA3D_NODE_MEMORY", node_memory)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    sizes = ["model.layers=2", "model.hidden=96", "model.heads=4", "model.sequence=64", "train.batch=8", "train.warmup=1"]
    corpus = f"data.path={shared_corpus(comm, shared_tmp_path)}"
    loaded = config.load("demo", [*sizes, corpus, f"dtype={dtype}", "train.checkpoint_every=0", *STEPS[name]])
    run = prepare(loaded, comm, shared_tmp_path / "run")
    held, moments = held_by(run)
    take_step(run, 1)
    peak = peak_of_step(run, 2)
    found = comm.bcast(predict(loaded, comm.size) if comm.rank == 0 else None)
    through_node = node_memory == "yes" and found["device"] == "cpu"
    assert found["node_axes"] == [axis for axis in ("x", "y", "z") if run.grid.shape[axis] > 1] * through_node
    copies = held // 2 if dtype == "bfloat16" else 0
    assert found["bytes"]["parameters"] == comm.allreduce(held + copies, MPI.MAX)
    assert found["mean_bytes"]["optimizer"] * 4 == comm.allreduce(moments)
    assert abs(found["bytes"]["peak"] - comm.allreduce(peak, MPI.MAX)) <= 0.05 * peak
    run.grid.free()


SUMMED = ["scheme=serial", "grid.pp=2", "grid.dp=2", "replicas.zero=2", "replicas.bucket=40000"]
STAGED = {
    2: [
        ["scheme=serial", "grid.pp=2", "model.layers=3", "train.accumulate=4"],
        ["scheme=serial", "grid.pp=2", "model.layers=4", "train.accumulate=4", *INTERLEAVED],
        ["scheme=serial", "grid.pp=2", "model.layers=4", "train.accumulate=4", "pipeline.schedule=zb-v", "pipeline.chunks=2"],
        ["scheme=serial", "grid.dp=2", "model.layers=4", "train.accumulate=2", "replicas.zero=2", "replicas.bucket=200000"],
        ["scheme=serial", "grid.dp=2", "model.layers=4", "train.accumulate=2", "replicas.zero=3"],
    ],
    3: [["scheme=serial", "grid.pp=3", "model.layers=6", "pipeline.layers=1,3,2", "train.accumulate=4", *LLAMA]],
    4: [
        ["scheme=cuboid", "grid.pp=2", "grid.z=2", "model.layers=3", "train.accumulate=4", "recompute=full"],
        ["scheme=cuboid", "grid.dp=2", "grid.z=2", "train.accumulate=2", "overlap.gather=1"],
        [
            "scheme=serial",
            "grid.pp=2",
            "grid.dp=2",
            "model.layers=4",
            "train.accumulate=4",
            *INTERLEAVED,
            "replicas.bucket=40000",
        ],
        ["scheme=oned", "grid.pp=2", "grid.y=2", "model.layers=3", "train.accumulate=2", *BERT],
        ["scheme=cuboid", "grid.y=2", "grid.z=2", "model.kv_heads=1", "model.activation=relu2"],  # two ranks share a head
        [*SUMMED, "pipeline.schedule=gpipe", "train.accumulate=8", "replicas.bucket=26214400"],
        [*SUMMED, "pipeline.schedule=zb-h1", "train.accumulate=7", "train.batch=28"],
        [*SUMMED, "model.layers=4", "pipeline.schedule=zb-v", "pipeline.chunks=2", "train.accumulate=5", "train.batch=20"],
    ],
}
"""Ranks → pipelines and replicas: each is compared on every rank."""
LONG = ["scheme=serial", "model.sequence=960", "data.held_out=0.2", "model.hidden=24", "train.batch=2"]
"""Sequences so long that attention holds the most."""
KINDS = [["context.kind=gather"], ["context.kind=ring"], ["context.kind=ring", *LLAMA], ["context.kind=heads", *LLAMA]]
MESH = [["context.kind=mesh", "context.heads=2"], ["context.kind=mesh", "context.heads=2", "context.fold=false", *LLAMA]]
AGAIN = ["context.kind=ring", "context.fold=false", "recompute=full"]
CONTEXTS = {2: [*KINDS, AGAIN], 3: [*KINDS[:3], AGAIN], 4: [*KINDS, *MESH, AGAIN]}
"""Ranks → kinds of contexts, folded or not."""


CLOSE = {"float32": 0.05, "bfloat16": 0.08}
"""Tolerance of a peak by dtype."""


@pytest.mark.mpi(sizes=tuple(STAGED))
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
def test_every_rank_of_pipelines_and_replicas_moves_and_holds_what_its_dry_run_says(
    comm, shared_tmp_path, dtype, monkeypatch
) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    check_every_rank(comm, shared_tmp_path, STAGED[comm.size], dtype)


@pytest.mark.mpi(sizes=tuple(CONTEXTS))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["some", "all"])
def test_so_does_every_rank_of_contexts_of_each_kind(comm, shared_tmp_path, every, monkeypatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 14)  # blocks of a ring travel in parts
    kinds = CONTEXTS[comm.size] if every else CONTEXTS[comm.size][1:3]
    check_every_rank(comm, shared_tmp_path, [[*LONG, f"grid.cp={comm.size}", *kind] for kind in kinds], "float32")


def check_every_rank(comm: Any, folder: Path, runs: list[list[str]], dtype: str) -> None:
    """Words and messages of a step of each run, line by line, and its peak, are those of the rank's dry run."""
    sizes = ["model.layers=2", "model.hidden=96", "model.heads=4", "model.sequence=64", "train.batch=16", "train.warmup=1"]
    corpus = f"data.path={shared_corpus(comm, folder)}"
    for number, settings in enumerate(runs):
        loaded = config.load("demo", [*sizes, corpus, f"dtype={dtype}", "train.checkpoint_every=0", *settings])
        run = prepare(loaded, comm, folder / f"run{number}")
        take_step(run, 1)
        with run.grid.ledger.watch() as moved:
            peak = peak_of_step(run, 2)
        dry = run_dry(setting_of(loaded, comm.rank, comm.size), training_of(loaded))
        assert lines_of(dry) == lines_moved(moved), settings
        assert abs(dry.peak - peak) <= CLOSE[dtype] * peak, (settings, dry.peak / peak)
        run.grid.free()


def test_the_copy_of_a_checkpoint_is_held_where_one_is_written_while_steps_go_on() -> None:
    alone, every = (predicted("model.layers=1", f"train.checkpoint_every={period}") for period in (0, 10))
    assert every["bytes"]["peak"] - alone["bytes"]["peak"] == every["checkpoint"] > 0
    for other in ("train.background=false", "train.keep=0", "train.steps=10"):
        assert not config.load("demo", ["train.checkpoint_every=10", other]).train.copies_checkpoints, other


@pytest.mark.parametrize(
    ("assignments", "error", "words"),
    [
        (["train.batch=6", "model.family=mixtral"], LayoutError, "batch 6"),
        (["scheme=summa"], GridError, "summa"),
        (["scheme=oned"], GridError, "y=8"),
    ],
)
def test_what_the_run_would_refuse_is_refused(assignments: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        predicted(*assignments)


def test_weights_are_gathered_ahead_on_devices_where_any_are_gathered() -> None:
    def ahead(on_device: bool, *settings: str) -> int:
        return setting_of(config.load("demo", ["scheme=cuboid", *settings]), on_device=on_device).overlap.ahead

    assert [ahead(on_device, "grid.x=2") for on_device in (False, True)] == [0, 1]
    assert [ahead(True, "grid.z=2"), ahead(True, "grid.dp=2", "replicas.zero=3")] == [0, 1]
    assert [ahead(True, "grid.x=2", f"overlap.gather={count}") for count in (0, 3)] == [0, 3]
    shared = config.load("demo", ["grid.x=1", "replicas.zero=3"])
    for device, prefetches in (("cpu", False), ("cuda", True)):
        grid, context = open_grid(shared, MPI.COMM_SELF, torch.device(device))
        assert (context.prefetcher is not None) == prefetches
        grid.free()
