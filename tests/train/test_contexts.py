"""Runs with contexts are the serial run, move the words of their formulas, and leave nothing of themselves in a checkpoint."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from serial_runs import FEW, check_against_serial, numbers_of
from small_runs import shared_corpus, small_config, train_in_legs

from summa3d.dry.step import run as run_dry
from summa3d.errors import ConfigError, LayoutError
from summa3d.train import generate
from summa3d.train.dry_run import setting_of, training_of
from summa3d.train.loop import take_step
from summa3d.train.prepare import prepare

LLAMA = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
RING = {"context__kind": "ring", "model__attention_dropout": 0.0}
HEADS = {"context__kind": "heads"}
MESH = {"context__kind": "mesh", "context__heads": 2, "model__attention_dropout": 0.0}
RUNS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"scheme": "serial", "grid__cp": 2},
        {"scheme": "serial", "grid__cp": 2, "recompute": "full", "replicas__zero": 2, **RING, **LLAMA},
    ],
    3: [
        {"scheme": "serial", "grid__cp": 3, "model__sequence": 18, "recompute": "selective", **RING},
    ],
    4: [
        {"scheme": "oned", "grid__cp": 2, "grid__y": 2, "replicas__zero": 3, "model__heads": 12, **HEADS, **LLAMA},
        {"scheme": "serial", "grid__cp": 2, "grid__pp": 2, "model__layers": 4, "replicas__zero": 3, **RING},
    ],
}
TWO = {"train__steps": 2, "train__evaluate_every": 1}
PIPED: dict[str, Any] = {"scheme": "serial", "grid__cp": 2, "grid__pp": 2, "model__layers": 4}
FURTHER: dict[int, list[dict[str, Any]]] = {
    4: [
        {"scheme": "serial", "grid__cp": 4, **MESH, **LLAMA},
        {**PIPED, "pipeline__schedule": "gpipe", **HEADS},
        {**PIPED, "pipeline__schedule": "interleaved", "pipeline__chunks": 2, "replicas__zero": 2, **RING},
        {**PIPED, "pipeline__schedule": "zb-h1", "replicas__zero": 2, **RING, **LLAMA},
        {**PIPED, "pipeline__schedule": "zb-v", "pipeline__chunks": 2, "replicas__zero": 0, **HEADS, **LLAMA},
        {"scheme": "serial", "grid__cp": 2, "grid__dp": 2, "replicas__zero": 3, "grid__order": "cp,dp", **RING},
        {"scheme": "serial", "grid__cp": 4, "context__fold": False, **RING},
    ],
    8: [
        {
            **{"scheme": "cuboid", "grid__cp": 2, "grid__pp": 2, "grid__z": 2, "pipeline__schedule": "zb-v"},
            **{"pipeline__chunks": 2, "model__layers": 4, "train__batch": 24, **RING, **LLAMA},
        },
        {"scheme": "summa", "grid__cp": 2, "grid__x": 2, "grid__y": 2, "vectors": "root-only", "train__batch": 24, **RING},
        {
            **{"scheme": "cuboid", "grid__cp": 2, "grid__y": 2, "grid__z": 2, "vectors": "diagonal", "model__heads": 12},
            **{"train__batch": 24, **HEADS},
        },
        {"scheme": "cuboid-sequence", "grid__cp": 2, "grid__x": 2, "grid__y": 2, "recompute": "full", "train__batch": 24, **RING},
        {
            "scheme": "serial",
            "grid__cp": 2,
            "grid__dp": 2,
            "grid__pp": 2,
            "model__layers": 3,
            "replicas__zero": 3,
            **RING,
            **LLAMA,
        },
    ],
}
"""Ranks → runs that `make test-all` takes."""


@pytest.mark.mpi(sizes=tuple(RUNS))
def test_clipped_steps_with_contexts_are_the_serial_runs(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    for number, changes in enumerate(RUNS[world_size]):
        check_against_serial(comm, shared_tmp_path / str(number), changes, 1e-9, **(FEW if world_size == 2 else TWO))


@pytest.mark.wide
@pytest.mark.parametrize("part", range(3))
@pytest.mark.mpi(sizes=tuple({**RUNS, **FURTHER}), timeout=900)  # 17 s alone, 100 s at load 15
def test_so_are_all_20(comm: Any, world_size: int, shared_tmp_path: Path, part: int) -> None:
    for number, changes in enumerate([*RUNS.get(world_size, []), *FURTHER.get(world_size, [])][part::3]):
        check_against_serial(comm, shared_tmp_path / str(number), changes, 1e-9)


@pytest.mark.mpi(sizes=(2,))
def test_so_they_are_in_fewer_bits(comm: Any, shared_tmp_path: Path) -> None:
    run = RUNS[2][1]
    check_against_serial(comm, shared_tmp_path / "single", run, 2e-4, dtype="float32", **TWO)
    check_against_serial(comm, shared_tmp_path / "half", run, 1e-2, losses=True, dtype="bfloat16", **TWO)


def kv_words(config: Any, inner: int) -> int:
    """The words of a context's keys and values in a layer and micro-batch, on each of `inner` ranks that split heads or rows."""
    model = config.model
    return 2 * config.rows * model.sequence // config.grid.cp * model.num_kv_heads * (model.hidden // model.heads) // inner


def expected(config: Any, inner: int) -> dict[tuple[str, str], int]:
    """Words by phase and axis, in a layer and micro-batch, by the formulas of the kinds."""
    c, kv, how = config.grid.cp, kv_words(config, inner), config.context
    own = config.rows * config.model.sequence // c * config.model.hidden // inner  # of q, and of the output
    exchanged = (own + own + kv) * (how.heads - 1) // how.heads if how.kind == "mesh" else (own + own + kv) * (c - 1) // c
    ring = {"gather": (c - 1) * kv, "ring": (c - 1) * kv, "heads": 0, "mesh": (c // how.heads - 1) * kv}[how.kind]
    back = ring if how.kind == "gather" else 2 * ring
    exchanged = exchanged if how.kind in ("heads", "mesh") else 0
    return {
        ("forward", "ring"): ring,
        ("backward", "ring"): back,
        ("forward", "heads"): exchanged,
        ("backward", "heads"): exchanged,
    }


WORDS: dict[int, list[tuple[dict[str, Any], int]]] = {
    2: [
        ({"scheme": "serial", "grid__cp": 2}, 1),
        ({"scheme": "serial", "grid__cp": 2, **HEADS}, 1),
    ],
    3: [({"scheme": "serial", "grid__cp": 3, "model__sequence": 18, **RING, **LLAMA}, 1)],
    4: [
        ({"scheme": "serial", "grid__cp": 4, **MESH, **LLAMA}, 1),
        ({"scheme": "cuboid", "grid__cp": 2, "grid__z": 2, "context__fold": False, "replicas__zero": 2, **RING}, 2),
    ],
}
"""Ranks → runs, and the ranks that split the heads or rows of a context."""


@pytest.mark.mpi(sizes=tuple(WORDS))
def test_words_are_those_of_the_formula_and_of_the_dry_run(comm: Any, world_size: int, shared_tmp_path: Path) -> None:
    for number, (changes, inner) in enumerate(WORDS[world_size]):
        keys = {"train__accumulate": 2, "train__batch": 12, "model__layers": 2, **changes}
        config = small_config(shared_corpus(comm, shared_tmp_path), **keys)
        run = prepare(config, comm, shared_tmp_path / f"run{number}")
        take_step(run, 1)
        with run.grid.ledger.watch() as moved:
            take_step(run, 2)
        step: dict[tuple[str, str], int] = {}
        for row in moved.rows:
            step[row.phase, row.axis] = step.get((row.phase, row.axis), 0) + row.amounts.words
        dry = run_dry(setting_of(config, comm.rank), training_of(config)).words()
        assert {key: words for key, words in step.items() if words} == {
            (phase, axis): words for phase, axes in dry.items() for axis, words in axes.items() if words
        }, changes
        labels = {"ring": run.model.context.ring_axis.label, "heads": run.model.context.head_axis.label}
        summed = {"cp": 0}
        for state in run.replicas.states.values() if config.replicas.zero == 2 else ():
            own = prod(state.shardings.partition.local_shape(run.grid))
            summed["cp"] += 2 * (config.grid.cp - 1) * own  # of two micro-batches
        for (phase, kind), words in expected(config, inner).items():
            if words:
                also = summed["cp"] if phase == "backward" else 0
                assert step[phase, labels[kind]] == 2 * 2 * words + also, (changes, phase, kind)
        run.grid.free()


LEGS = [
    (2, {"grid__cp": 2, "scheme": "serial", **RING}),
    (1, {"scheme": "serial"}),
    (4, {"grid__cp": 2, "grid__y": 2, "scheme": "oned", "replicas__zero": 3, **HEADS}),
    (4, {"grid__cp": 2, "grid__pp": 2, "scheme": "serial"}),
]


@pytest.mark.mpi(sizes=(4,))
def test_a_run_goes_on_with_other_contexts_and_generates_the_same_text(comm: Any, shared_tmp_path: Path) -> None:
    """Ranks and their grids, for two steps each; the text by the grid of the last one is that by one rank."""
    keys = {
        "train__decay_to": 1.0,
        "train__evaluate_every": 2,
        "model__layers": 2,
        "train__accumulate": 2,
        "model__heads": 12,
        **LLAMA,
    }
    assert len([*train_in_legs(comm, shared_tmp_path, LEGS, **keys)]) == sum(comm.rank < ranks for ranks, _ in LEGS)
    legs, whole = shared_tmp_path / "legs", shared_tmp_path / "whole"
    assert numbers_of(legs) == pytest.approx(numbers_of(whole), rel=1e-9)
    texts = {}
    for name, part in (("grid", comm), ("rank", MPI.COMM_SELF)):
        model, plan, settings, tokenizer = generate.load(legs / "run", part)
        texts[name] = generate.sample(model, plan, settings.model, tokenizer, "defab", 5, temperature=0)
        plan.whole.free()
    assert texts["grid"] == texts["rank"] and texts["grid"].startswith("defab")


def test_a_configuration_that_contexts_cannot_split_is_named() -> None:
    for changes, error, words in (
        ({"model__sequence": 18}, LayoutError, r"sequence 18 .* cp = 2(.|\n)*fit: 12, 16, 20, 24"),
        ({"model__attention_dropout": 0.1, "context__kind": "ring"}, ConfigError, "Kinds that can: gather, heads"),
        ({"model__heads": 3, "context__kind": "heads"}, LayoutError, r"heads 3 (.|\n)*fit: 2, 4"),
        ({"model__family": "bert", "model__vocabulary": 259}, ConfigError, "Families that can: gpt2, llama"),
        ({"context__heads": 2}, ConfigError, 'Set context.kind to "mesh"'),
        ({"context__kind": "rings"}, ConfigError, "gather, ring, heads, mesh"),
    ):
        with pytest.raises(error, match=words):
            small_config("stdlib", **{"grid__cp": 2, **changes})
