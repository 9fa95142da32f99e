"""Training in a pipeline: the losses of one rank, one run over several grids, and the bits of a run that was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from small_runs import metrics_of, shared_corpus, small_config, train_in_legs, train_small

from summa3d.train import generate
from summa3d.train.loop import evaluate, take_step
from summa3d.train.prepare import prepare

Settings = dict[str, Any]
INTERLEAVED: Settings = {"pipeline__schedule": "interleaved", "pipeline__chunks": 2}
ZB_H1: Settings = {"pipeline__schedule": "zb-h1"}
ZB_V: Settings = {"pipeline__schedule": "zb-v", "pipeline__chunks": 2}
LONG: Settings = {
    "model__sequence": 8,
    "train__steps": 20,
    "train__batch": 12,
    "train__accumulate": 3,
    "train__evaluate_every": 10,
    "train__checkpoint_every": 0,
    "train__keep": 0,
    "train__clip": 0.5,
}
LLAMA: Settings = {"model__family": "llama", "model__kv_heads": 2, "model__ffn": 36}
BERT: Settings = {"model__family": "bert", "model__vocabulary": 263}
GRIDS: dict[int, list[tuple[Settings, Settings]]] = {
    2: [
        ({"model__layers": 3}, {"grid__pp": 2, "scheme": "serial", "recompute": "full"}),
        ({"model__layers": 4}, {"grid__pp": 2, "scheme": "serial", **ZB_V}),
    ],
    3: [({"model__layers": 4, **LLAMA}, {"grid__pp": 3, "scheme": "serial", "pipeline__schedule": "gpipe"})],
    4: [
        ({"model__layers": 3, **LLAMA}, {"grid__pp": 2, "grid__y": 2, "scheme": "oned"}),
        ({"model__layers": 4, **BERT, "train__accumulate": 2}, {"grid__pp": 2, "grid__z": 2, "scheme": "cuboid", **INTERLEAVED}),
        ({"model__layers": 4, **LLAMA}, {"grid__pp": 4, "scheme": "serial", "recompute": "full", **ZB_H1}),
    ],
    8: [
        (
            {"model__layers": 2, "train__accumulate": 2},
            {"grid__pp": 2, "grid__x": 2, "grid__y": 2, "scheme": "summa", "pipeline__layers": "2,0"},
        ),
    ],
}
"""Ranks → the model and the pipeline of each run."""


def numbers(folder: Path, name: str) -> list[float]:
    return [line[name] for line in metrics_of(folder) if name in line]


FEW: Settings = {"train__steps": 4, "train__evaluate_every": 2}
"""Enough for the moments of AdamW; in `make test` three ranks take all 20."""


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("few", [FEW, pytest.param({}, marks=pytest.mark.wide)], ids=["few", "all"])
def test_steps_in_a_pipeline_have_the_losses_and_norms_of_one_rank(comm: Any, shared_tmp_path: Path, few: Settings) -> None:
    steps = LONG | (few if comm.size != 3 else {})
    for index, (model, pipeline) in enumerate(GRIDS[comm.size]):
        alone, staged = shared_tmp_path / f"alone{index}", shared_tmp_path / f"staged{index}"
        if comm.rank == 0:
            alone.mkdir()
            staged.mkdir()
            train_small(MPI.COMM_SELF, alone, scheme="serial", **{**steps, **model})
        comm.Barrier()
        train_small(comm, staged, **{**steps, **model, **pipeline})
        for name in ("loss", "grad_norm", "validation_loss"):
            got, want = numbers(staged, name), numbers(alone, name)
            assert got == pytest.approx(want, rel=1e-9), name
        assert len(got) == 2


@pytest.mark.mpi(sizes=(4,))
def test_every_stage_and_replica_knows_the_loss_and_the_norm(comm: Any, shared_tmp_path: Path) -> None:
    settings = {"scheme": "serial", "grid__pp": 2, "grid__dp": 2, "model__layers": 2, "train__accumulate": 3}
    run = prepare(small_config(shared_corpus(comm, shared_tmp_path), **settings), comm, shared_tmp_path / "run")
    step = take_step(run, 1)
    validation = evaluate(run)
    assert set(comm.allgather((step.loss, step.grad_norm, validation))) == {(step.loss, step.grad_norm, validation)}
    assert 5 < step.loss < 6 and abs(validation - step.loss) < 0.5  # of a model that guesses among 256 bytes


LEGS: list[tuple[int, Settings]] = [
    (2, {"grid__pp": 2, "scheme": "serial"}),
    (1, {"scheme": "serial"}),
    (4, {"grid__pp": 4, "scheme": "serial", **INTERLEAVED}),
    (4, {"grid__pp": 4, "scheme": "serial", **ZB_V}),
    (4, {"grid__pp": 2, "grid__z": 2, "scheme": "cuboid"}),
]


@pytest.mark.mpi(sizes=(4,))
def test_a_run_that_changes_its_pipeline_every_two_steps_is_one_run(comm: Any, shared_tmp_path: Path) -> None:
    whole, legs = shared_tmp_path / "whole", shared_tmp_path / "legs"
    keys = {"model__layers": 8, "model__sequence": 8, "train__accumulate": 4, "train__batch": 8, "train__decay_to": 1.0}
    assert len(list(train_in_legs(comm, shared_tmp_path, LEGS, **keys))) == sum(comm.rank < ranks for ranks, _ in LEGS)
    for name in ("loss", "grad_norm", "validation_loss"):
        assert numbers(legs, name)[-1] == pytest.approx(numbers(whole, name)[-1], rel=1e-9), name
    assert numbers(legs, "loss") == pytest.approx(numbers(whole, "loss"), rel=1e-9)


@pytest.mark.mpi(sizes=(2,))
def test_a_pipeline_that_goes_on_has_the_bits_of_one_that_was_never_stopped(comm: Any, shared_tmp_path: Path) -> None:
    """In bfloat16, whose copies are made once a step; and one rank, the run's stages and those of a checkpoint say the same."""
    keys = {"grid__pp": 2, "scheme": "serial", "dtype": "bfloat16", "model__layers": 4, "train__accumulate": 4}
    keys |= {**INTERLEAVED, "train__decay_to": 1.0, "train__checkpoint_every": 2, "train__evaluate_every": 2}
    whole, halves = shared_tmp_path / "whole", shared_tmp_path / "halves"
    if comm.rank == 0:
        whole.mkdir()
        halves.mkdir()
    comm.Barrier()
    train_small(comm, whole, train__steps=4, **keys)
    train_small(comm, halves, train__steps=2, **keys)
    samples = {"train__sample_tokens": 3, "train__sample_prompts": '["class ", "x"]', "train__sample_every": 3}
    summary = train_small(comm, halves, resume=True, train__steps=4, **samples, **keys)
    for name in ("loss", "grad_norm", "validation_loss"):
        assert numbers(halves, name) == numbers(whole, name), name
    index = json.loads((halves / "run" / "checkpoints" / "step-4" / "index.json").read_text())
    sizes = [entry["bytes"] for entry in index["files"].values()]
    assert len(sizes) == 2 and max(sizes) <= 1.05 * sum(sizes) / 2  # of the tied table each stage writes half
    assert summary["grid"]["pp"] == 2 and summary["sample"] == summary["samples"][0]
    ((step, meanwhile),) = ((line["step"], line["samples"]) for line in metrics_of(halves) if "samples" in line)
    assert step == 3
    for prompt, early, late in zip(["def ", "class ", "x"], meanwhile, summary["samples"], strict=True):
        assert early.startswith(prompt) and late.startswith(prompt) and min(len(early), len(late)) > len(prompt)
    staged = train_small(comm, whole, resume=True, **{**keys, "train__steps": 4, "train__sample_tokens": 3, "train__keep": 0})
    model, plan, settings, tokenizer = generate.load(halves / "run", comm)
    with plan.whole.ledger.watch() as moved:
        text = generate.sample(model, plan, settings.model, tokenizer, "def ", 3)
    assert text == summary["sample"] == staged["sample"]
    streams, logits = (4 + 5 + 6) * 24, 3 * 256  # one row of growing length; two of four stages receive on rank 1, one on rank 0
    assert moved.words == (2 * streams if comm.rank else streams + logits)
    plan.whole.free()
