"""The parts of a dry run: cells composed, layers named, communications ended, devices, ranks that are one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from dry_real import config_of, lines_of
from golden_cases import Case
from pairs import turns
from summa3d.kernels import reference

from summa3d.comm.device.arrays import overlap
from summa3d.comm.transport.node_memory import SLOTS
from summa3d.dry import place
from summa3d.dry import step as dry_step
from summa3d.dry.place import DryPlace
from summa3d.dry.rank_classes import classes
from summa3d.dry.record import Op, RepeatedSegment, Segment, joined, moved, net_of, operations, peak_of, repeated
from summa3d.dry.step import Setting, run
from summa3d.nn import ModelConfig
from summa3d.nn.context_parallel import parts
from summa3d.nn.context_parallel.options import ContextOptions
from summa3d.nn.overlap import Overlap
from summa3d.train.dry_run import training_of

MODEL = ModelConfig(layers=5, hidden=96, heads=4, sequence=32, vocabulary=191, dropout=0.1)
CUBOID = Setting(MODEL, 8, "cuboid", {"x": 2, "y": 2, "z": 2})


def training(dtype: str = "float32") -> Any:
    return training_of(config_of(Case("", {}, "", {}, 0, ("none", 1), True, dtype)))


SETTINGS = {
    "cuboid": CUBOID,
    "full": replace(CUBOID, recompute=("full", 1), accumulate=2),
    "pairs": replace(CUBOID, model=replace(MODEL, layers=9), recompute=("full", 2), regather=False),
    "ahead": replace(CUBOID, recompute=("selective", 1), overlap=Overlap(gather=2)),
    "summa": replace(CUBOID, scheme="summa", axes={"x": 2, "y": 2}, vectors="root-only"),
    "llama": replace(
        CUBOID, scheme="oned", axes={"y": 4}, model=ModelConfig(**{**vars(MODEL), "family": "llama", "dropout": 0.0})
    ),
    "device": replace(CUBOID, on_device=True),
    "node": replace(CUBOID, ranks_per_node=8),
}
TURNS = turns(SETTINGS, ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(*case, marks=() if case in TURNS else pytest.mark.wide) for case in product(SETTINGS, ("float32", "bfloat16"))],
)
def test_a_deep_model_composed_of_its_cells_is_that_model_traced_whole(name, dtype, monkeypatch) -> None:
    setting = SETTINGS[name]
    composed = run(setting, training(dtype))
    monkeypatch.setattr(dry_step, "TRACED", 100)
    whole = run(setting, training(dtype))
    assert len(list(operations(whole.parts))) > len(list(operations(composed.parts)))
    assert lines_of(composed) == lines_of(whole)
    assert composed.operations() == whole.operations()
    held, said = whole.bytes(), composed.bytes()
    rough = {"peak": 0, "workspace": 0} if dtype == "bfloat16" else {}  # weights' 16-bit copies go one after the other
    assert said | rough == held | rough
    assert all(abs(said[term] - held[term]) <= 0.01 * held[term] for term in rough)
    assert composed.elements == whole.elements


def test_operations_carry_their_layers_and_phases_and_every_move_is_waited_for() -> None:
    step = run(replace(CUBOID, recompute=("full", 1)), training())
    ops = [op for op, _ in operations(step.parts)]
    assert {op.phase for op in ops} == {"forward", "recompute", "backward", "optimizer"}
    layers = {op.layer for op in ops}
    branches = {
        f"blocks.{block}.{part}" for block in range(3) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    }
    assert layers >= branches | {"embedding", "positions", "norm", "head", "optimizer", "blocks.1.attention.core"}
    for part in branches:
        forms = [(op.phase, op.name) for op in ops if op.kind == "product" and op.layer == part]
        assert sorted(forms) == [("backward", "nt"), ("backward", "tn"), ("forward", "nn"), ("recompute", "nn")]
    moves, waits = ([op.id for op in ops if op.kind == kind] for kind in ("move", "wait"))
    assert sorted(moves) == sorted(waits) and len(set(moves)) == len(moves)
    at = {(op.kind, op.id): place for place, op in enumerate(ops)}
    assert all(at["move", move] < at["wait", move] for move in moves)


def test_what_no_slot_of_a_node_can_hold_is_gathered_in_a_dry_run_too() -> None:
    axis = DryPlace({"y": 2}, ranks_per_node=2)["y"]
    assert axis.start_all_gather(torch.empty(2**32, device="meta")).wait().shape == (2**33,)


def test_more_may_be_started_than_there_are_slots_in_a_dry_run_too() -> None:
    """A rank that takes a slot again has its last result combined first; it stays there for those that wait, in any order."""
    axis = DryPlace({"y": 2}, ranks_per_node=2)["y"]
    started = [axis.start_all_gather(torch.empty(rows)) for rows in range(1, 2 * SLOTS + 2)]
    assert [pending.wait().shape for pending in started[::-1]] == [(2 * rows,) for rows in range(2 * SLOTS + 1, 0, -1)]


def test_a_step_multiplies_as_much_as_its_matrices_say() -> None:
    """Of all ranks: 6·tokens·weights, and fused attention's 2 products forward and 5 backward of half of a·s²·d."""
    b, s, h, a = 8, MODEL.sequence, MODEL.hidden, MODEL.heads
    step = run(CUBOID, training())
    ops = [(op, times) for op, times in operations(step.parts) if op.kind == "product"]
    matrices = sum(op.flops * times for op, times in ops if op.name != "attention")
    attention = sum(op.flops * times for op, times in ops if op.name == "attention")
    weights = MODEL.layers * 12 * h * h
    head = 6 * b * s * h * MODEL.vocabulary
    assert abs(8 * matrices - 6 * b * s * weights - head) <= 0.02 * head  # 191 columns are halved unevenly
    assert 8 * attention == 7 * MODEL.layers * b * a * s * s * (h // a)


def test_a_device_keeps_no_masks_and_takes_its_own_kernels() -> None:
    host, device = run(CUBOID, training()).bytes(), run(replace(CUBOID, on_device=True), training()).bytes()
    assert device["activations"] < host["activations"] and device["node"] == 0
    kernels = {op.name for op, _ in operations(run(replace(CUBOID, on_device=True), training()).parts) if op.kind == "elements"}
    assert {"layer_norm_float32", "dropout_add_float32", "adamw_float32_float32", "bias_gelu_tanh_float32"} <= kernels


def test_ranks_are_one_where_their_blocks_and_roles_are() -> None:
    even, uneven = (replace(CUBOID, model=replace(MODEL, layers=1, vocabulary=words)) for words in (192, 191))
    assert classes(even) == {0: 8}
    assert sum(classes(uneven).values()) == 8 and len(classes(uneven)) == 3  # rows of the table over y and x, columns over y
    root_only = replace(even, scheme="summa", axes={"x": 2, "y": 2}, vectors="root-only")
    assert classes(root_only) == {0: 2, 2: 2}
    for setting in (uneven, root_only):
        found = {rank: run(replace(setting, rank=rank), training()).bytes() for rank in range(sum(classes(setting).values()))}
        assert {str(found[rank]) for rank in classes(setting)} == set(map(str, found.values()))


def test_a_peak_is_the_most_of_what_repeats() -> None:
    parts = repeated(
        [Segment("a", False, 5, 7), Segment("b", False, 2, 9), Segment("b", False, 1, 1), Segment("c", True, -8, 0)], "b", 4
    )
    assert parts[1] == RepeatedSegment(Segment("b", False, 3, 9), 4)
    assert net_of(parts) == 5 + 12 - 8 and peak_of(parts) == 5 + 9 + 9
    assert peak_of([RepeatedSegment(Segment("a", True, -3, 8), 4)]) == 8  # the first holds most
    assert joined([Segment("b", False, 5, 7), Segment("b", False, 1, 4)]) == Segment("b", False, 6, 9)
    received = Op("move", "forward", "", "send", axis="pp", words=7, written=28)
    assert moved([RepeatedSegment(Segment("b", False, ops=[received]), 4)], "words") == {"forward": {"pp": 28}}


def test_the_gradient_of_the_loss_is_the_same_bits_as_by_its_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.float64):
        softmax = torch.rand(40, 17, generator=generator, dtype=dtype).softmax(1)
        softmax[softmax < 0.05] = 0.0
        labels = torch.randint(-5, 60, (40,), generator=generator)
        scale = torch.rand(40, generator=generator, dtype=dtype) - 0.5
        column = labels - 20
        rows = ((column >= 0) & (column < 17) & (labels >= 0)).nonzero()[:, 0]
        want = softmax.clone()
        want[rows, column[rows]] -= 1
        want.mul_(scale[:, None])
        found = reference.cross_entropy_gradient((softmax,), labels, 20, scale)
        assert torch.equal(found, want) and torch.equal(torch.signbit(found), torch.signbit(want))
    assert reference.cross_entropy_gradient((softmax[:, :0],), labels, 20, scale).shape == (40, 0)


def test_tensors_without_memory_overlap_only_in_one_storage() -> None:
    x = torch.empty(6, 8, device="meta")
    assert overlap(x, x[2:]) and overlap(x[:, :3], x[:, 2:5])
    assert not overlap(x[:, :3], x[:, 3:]) and not overlap(x, torch.empty(6, 8, device="meta"))


@pytest.mark.parametrize(
    "options",
    [ContextOptions("gather"), ContextOptions("ring"), ContextOptions("ring", fold=False), ContextOptions("mesh", heads=2)],
)
def test_hops_that_are_alike_are_traced_once_and_counted_as_if_each_were(options: ContextOptions, monkeypatch: Any) -> None:
    """In their order, with the number of every move and wait."""
    monkeypatch.setattr(parts, "LEAST_BYTES", 1 << 12)
    model = ModelConfig("llama", layers=1, hidden=48, heads=12, kv_heads=12, ffn=32, sequence=400, vocabulary=20)
    for rank, again in ((0, "none"), (4, "full")):
        found = []
        for most in (place.TURNS, 99):
            monkeypatch.setattr(place, "TURNS", most)
            step = run(Setting(model, 4, "serial", {"x": 1, "cp": 10}, rank, context=options, recompute=(again, 1)))
            found.append((step, [op for segment, _ in step.parts for op in segment.ops]))
        (few, ops), (every, all_ops) = found
        assert ops == all_ops and few.peak == every.peak and few.messages() == every.messages()
        moves = [op.id for op in ops if op.kind == "move"]
        assert moves == [*range(1, 1 + len(moves))] and {op.id for op in ops if op.kind == "wait"} == {*moves}
