"""With any communication in flight, losses and gradients are the same bits and words and messages the same numbers.

What is in flight when, and what hooks see of it: test_overlap_order.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scheme_table import LLAMA, rows_for, sequence_for, tokens_and_labels
from small_runs import small_config, train_small
from torch import Tensor

from summa3d.nn import ModelConfig, build, scheme
from summa3d.nn.overlap import Overlap
from summa3d.parallel.states import states_of
from summa3d.train import loop
from summa3d.train.dry_run import predict
from summa3d.train.loop import finish
from summa3d.train.precision import torch_dtype, working_weights

# 12 heads and h = 24 are divided by every axis here; v and f are primes that none divides. GPT's head is tied, Llama's not.
GPT = ModelConfig(layers=2, hidden=24, heads=12, ffn=29, sequence=12, vocabulary=37, dropout=0.1)
FAMILIES = {"gpt2": GPT, "llama": replace(LLAMA, layers=2, attention_dropout=0.0)}
CUBOIDS = {4: {"x": 2, "y": 1, "z": 2}, 8: {"x": 2, "y": 2, "z": 2}}
OTHERS: list[tuple[str, dict[str, int]]] = [("cuboid-sequence", {"x": 2, "y": 2}), ("oned-sp", {"y": 4}), ("oned", {"y": 4})]
EVERY = [Overlap(*switches) for switches in product((0, 1, 3), (True, False))]
ALL = Overlap(1)
SOME = {True: [Overlap(3), Overlap(1, False)], False: [Overlap(1), Overlap(0, False), Overlap(3, False)]}
"""With the node's memory or MPI: every pair of gather and input gradient once."""
RECOMPUTE = [("none", 1), ("selective", 1), ("full", 1), ("full", 2)]
MICRO_BATCHES, STEPS = 2, 2
CASES = [("gpt2", True, True), ("gpt2", True, False), ("llama", True, False), ("gpt2", False, False), ("llama", False, True)]


class Trace(NamedTuple):
    """What steps computed, and what they moved."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    moved: list[tuple[int, int]]


def steps(model: Any, recompute: tuple[str, int], dtype: str = "float64") -> Trace:
    """Two micro-batches in a step and one in the next, after each of which the weights change in place; an evaluation between."""
    plan, model_config = model.context, model.config
    model.recompute(*recompute)
    states, dtype = states_of(model, plan.grid), torch_dtype(dtype)
    rows, trace, before = rows_for(plan), Trace([], [], []), [p.detach().clone() for p in model.parameters()]
    batches = [tokens_and_labels(model_config, rows, sequence_for(plan, 12)) for part in range(MICRO_BATCHES)]
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        with plan.grid.ledger.watch() as moved:
            for part, (tokens, labels) in enumerate(batches[: MICRO_BATCHES - step]):
                with working_weights(model, states, dtype):
                    loss = model(tokens, labels, step=step, first_row=part * rows)
                loss.backward()
                trace.losses.append(loss.item())
        trace.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        trace.moved.append((moved.words, moved.messages))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=-0.1)
            if step == 0:
                model(*batches[0])
    for parameter, value in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(value)
    return trace


def check_same(found: Trace, want: Trace, what: Any) -> None:
    assert found.losses == want.losses, what
    assert found.moved == want.moved, what
    for mine, others in zip(found.gradients, want.gradients, strict=True):
        assert [name for name in others if not torch.equal(mine[name], others[name])] == [], what


def check(
    grid: Any,
    name: str,
    family: str,
    regather: bool,
    overlaps: list[Overlap],
    kinds: list[tuple[str, int]] = RECOMPUTE,
    dtype: str = "float64",
    pieces: int = 1,
) -> None:
    weights = torch.float64 if dtype == "float64" else torch.float32
    plain = build(FAMILIES[family], scheme(name, grid, regather, overlap=Overlap(pieces=pieces)), weights, seed=3)
    want = {recompute: steps(plain, recompute, dtype) for recompute in kinds}
    assert all(grad.any() for name, grad in want[kinds[0]].gradients[-1].items() if "blocks" in name)
    for overlap in overlaps:
        overlap = replace(overlap, pieces=pieces)
        model = build(FAMILIES[family], scheme(name, grid, regather, overlap=overlap), weights, seed=3)
        for recompute in kinds:
            check_same(steps(model, recompute, dtype), want[recompute], (name, grid, family, overlap, recompute))


@pytest.mark.mpi(sizes=tuple(CUBOIDS))
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=[f"{kind}{layers}" for kind, layers in RECOMPUTE])
@pytest.mark.parametrize(("family", "regather", "node_memory"), CASES)
@pytest.mark.turns
def test_all_switches_on_change_no_bit_and_no_word(make_grid, world_size, family, regather, node_memory, recompute):
    grid = make_grid(check=False, node_memory=node_memory, **CUBOIDS[world_size])
    check(grid, "cuboid", family, regather, [ALL], [recompute])


@pytest.mark.pairs
@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("recompute", RECOMPUTE[::2], ids=["none", "full"])
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
@pytest.mark.parametrize(("name", "axes"), OTHERS, ids=[name for name, _ in OTHERS])
def test_nor_in_the_other_schemes_that_start_what_they_wait_for(make_grid, name, axes, node_memory, recompute):
    grid = make_grid(check=False, node_memory=node_memory, **axes)
    check(grid, name, "llama", True, [Overlap(1, False)], [recompute])


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["turns", "every"])
@pytest.mark.parametrize("node_memory", [True, False], ids=["node", "mpi"])
def test_no_combination_of_switches_changes_a_bit_or_a_word(make_grid, node_memory, every):
    grid = make_grid(check=False, node_memory=node_memory, x=2, z=2)
    check(grid, "cuboid", "gpt2", True, EVERY[1:] if every else SOME[node_memory], RECOMPUTE[2:3])


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize(
    ("axes", "family", "regather", "dtype"),
    [
        ({"x": 4}, "gpt2", True, "float64"),
        ({"x": 2, "y": 2}, "llama", True, "bfloat16"),
        ({"x": 2, "z": 2}, "gpt2", False, "float64"),
        ({"x": 2, "y": 2}, "gpt2", True, "float64"),
    ],
    ids=["x4", "x2-y2-bfloat16", "x2-z2-keep", "x2-y2"],
)
def test_weights_on_their_way_in_pieces_change_no_bit_and_no_word(make_grid, axes, family, regather, dtype):
    """Those that products of them take as far as they have come, which begin behind attention, too."""
    grid = make_grid(check=False, node_memory=False, **axes)
    check(grid, "cuboid", family, regather, [Overlap(1), Overlap(2, False)], RECOMPUTE[::2], dtype, pieces=3)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_copies_of_weights_are_gathered_ahead_and_their_gradients_widened(make_grid, family):
    grid = make_grid(check=False, node_memory=False, x=4)
    check(grid, "cuboid", family, True, [ALL], RECOMPUTE[::2], "bfloat16")


@pytest.mark.mpi(sizes=(2,))
def test_a_run_overlaps_as_its_configuration_says(comm: Any, shared_tmp_path: Path) -> None:
    overlap = {"overlap__gather": 2, "overlap__input_gradient": False}
    summaries: list[Any] = []
    plans: list[Any] = []
    for changes in ({}, overlap):
        folder = shared_tmp_path / str(len(summaries))
        if comm.rank == 0:
            folder.mkdir()
        comm.Barrier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "finish", lambda run, *rest: (plans.append(run.model.context), finish(run, *rest))[1])
            summaries.append(train_small(comm, folder, grid__x=2, train__steps=3, train__keep=0, **changes))
    assert [plan.overlap for plan in plans] == [Overlap(0), Overlap(2, False)]
    assert summaries[0]["loss"] == summaries[1]["loss"] and summaries[0]["words_per_rank"] == summaries[1]["words_per_rank"]
    settings = small_config("stdlib", grid__x=2, **overlap)
    assert predict(settings)["bytes"]["in_flight"] > 0
