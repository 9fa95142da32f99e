"""The bytes of a step by hand: what is held while ops run, what is on its way, and what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from summa3d.bench.memory import peak_bytes
from summa3d.comm.transport.node_memory import SLOTS
from summa3d.dry.place import DryPlace
from summa3d.dry.rank_classes import classes
from summa3d.dry.record import Op, RepeatedSegment, Segment, TracedOp, held_in
from summa3d.dry.step import DryStep, OpKey, Setting, run
from summa3d.dry.storages import Storages, bytes_of
from summa3d.nn import ModelConfig
from summa3d.train.config import Config
from summa3d.train.dry_run import training_of

MODEL = ModelConfig(layers=3, hidden=24, heads=2, sequence=6, vocabulary=30)
FORWARD, BACKWARD = OpKey("F", 0, 0), OpKey("B", 0, 0)
BEFORE = [RepeatedSegment(Segment("enter", False, net=3, top=5), 1)]
TRACED = {
    FORWARD: TracedOp(0, [RepeatedSegment(Segment("0", False, net=10, top=30), 1)], 0),
    BACKWARD: TracedOp(7, [RepeatedSegment(Segment("0", True, net=-10, top=5), 1)], -7),
}


def step(update: Segment, traced: dict[OpKey, TracedOp] = TRACED, parts: list[RepeatedSegment] = BEFORE) -> DryStep:
    """A forward and a backward, 4 bytes of a message, 100 of parameters, 40 of moments, 1 that is kept."""
    return DryStep(
        parts, traced, [FORWARD, BACKWARD], [RepeatedSegment(update, 1)], {0: 10}, message=4, parameters=100, gradients=100,
        copied=0, moments=40, kept=1, node=0,
    )  # fmt: skip


def test_a_message_and_the_next_receive_are_held_beside_an_op() -> None:
    program = [TRACED[FORWARD], TRACED[BACKWARD]]
    assert held_in(program, 3, 4) == (3 + 7 + 4 + 30, 3)  # what is received goes with the op behind, which is none here
    assert held_in(program, 3, 0) == (3 + 7 + 30, 3)
    three = [TRACED[FORWARD], TRACED[BACKWARD], TRACED[BACKWARD]]
    assert held_in(three, 0, 2)[0] == 7 + 2 + 30 and held_in(three[1:], 20, 0) == (20 + 7 + 7 + 5, 0)


def test_the_update_comes_on_top_of_what_the_ops_have_left() -> None:
    small, large = Segment("optimizer", False, top=2), Segment("optimizer", False, top=50)
    assert step(small).peak == 100 + 40 + 1 + 44
    assert step(large).peak == 100 + 40 + 1 + 3 + 50


def test_in_flight_is_what_another_layer_waits_for() -> None:
    def move(layer: str, number: int, size: int) -> Op:
        return Op("move", "forward", layer, "all_gather", written=size, id=number)

    def wait(layer: str, number: int) -> Op:
        return Op("wait", "forward", layer, "all_gather", id=number)

    ops = [move("a", 1, 8), move("a", 2, 100), wait("a", 2), move("a", 3, 16), wait("b", 1), wait("b", 3), move("b", 4, 50)]
    traced = {**TRACED, FORWARD: TracedOp(0, [RepeatedSegment(Segment("0", False, ops=ops), 1)], 0)}
    assert step(Segment("optimizer", False), traced).in_flight == 8 + 16


def test_a_sum_in_another_dtype_holds_a_copy_on_the_host_alone() -> None:
    for converts, copy in ((True, 80), (False, 0)):
        with Storages(lambda name, given: None, lambda *work: None) as storages:
            storages.on_host = converts
            x = torch.empty(10, device="meta")
            total = x.sum(dtype=torch.float64)
            same = x.sum()
            assert (storages.alive, storages.top) == (40 + 8 + 4, max(40 + 8 + copy, 40 + 8 + 4))
        del total, same


@pytest.mark.parametrize("layers", [4, 9])
def test_each_layer_keeps_its_rotary_tables(layers: int) -> None:
    llama = ModelConfig(**{**vars(MODEL), "family": "llama", "dropout": 0.0})
    setting = Setting(llama, 4, "cuboid", {"y": 2})
    deep = replace(setting, model=replace(llama, layers=layers))
    assert 3 * run(deep).kept == layers * run(setting).kept > 0


def test_ranks_that_receive_other_words_are_of_other_classes() -> None:
    """The first member of y alone gets 2 words of the norm's all-reduce where 3 ranks share out 2 parts."""
    setting = Setting(replace(MODEL, hidden=102, heads=6, sequence=30, vocabulary=192, layers=1), 9, "oned-sp", {"y": 3})
    words = [run(replace(setting, rank=rank), training_of(Config())).words() for rank in range(3)]
    assert classes(setting) == {0: 1, 1: 2}
    assert words[0] != words[1] == words[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_products_own_scratch_memory_is_left_out_of_a_measured_peak(dtype: torch.dtype) -> None:
    """Of 16 bits, some processors' products convert an operand, or keep a result in float32, meanwhile."""
    a, b = torch.ones(60, 96, dtype=dtype), torch.ones(96, 70, dtype=dtype)

    def step() -> None:
        kept = a @ b
        del kept

    result = 60 * 70 * dtype.itemsize
    assert peak_bytes(step, scratch=False) == result <= peak_bytes(step)


def test_a_release_of_what_an_earlier_profile_saw_at_the_same_address_lowers_no_peak(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    large, held = 10_000_000, []
    peak_bytes(lambda: held.append(torch.empty(large)))
    seen = held.pop().data_ptr()
    held.append(torch.empty(large))
    assert held[0].data_ptr() == seen, "the allocator gives large blocks the address of the last one"

    def step():
        held.clear()
        held.append(torch.empty(1000))
        held.append(torch.empty(70))
        del held[0]
        held.append(torch.empty(300))

    assert peak_bytes(step) == 4 * 1070


def test_an_axis_of_a_dry_run_has_as_many_slots_as_a_real_one():
    place, elements = DryPlace({"x": 2}, ranks_per_node=2), 1 << 18
    place["x"].all_gather(np.zeros(elements))
    assert place["x"].node_bytes == SLOTS * 2 * elements * 8 // 2 and place.node_bytes() == place["x"].node_bytes


def test_a_destination_that_is_given_is_written_and_not_read() -> None:
    x, y = torch.empty(3, 5, device="meta"), torch.empty(3, 5, device="meta")
    both, product = torch.empty(6, 5, device="meta"), torch.empty(3, 3, device="meta")
    acts: dict[str, tuple[Callable[[], object], int, int]] = {
        "copy_": (lambda: x.copy_(y), 60, 60),
        "copy_ of a row": (lambda: x.copy_(y[0]), 20, 60),
        "cat": (lambda: torch.cat([x, y], out=both), 120, 120),
        "mm": (lambda: torch.mm(x, y.T, out=product), 120, 36),
        "zero_": (lambda: x.zero_(), 0, 60),
        "fill_": (lambda: x.fill_(2.0), 0, 60),
        "add_": (lambda: x.add_(y), 120, 60),
        "add": (lambda: torch.add(x, y, out=x), 120, 60),
        "addmm": (lambda: torch.addmm(product, x, y.T, out=product), 120 + 36, 36),
    }
    for name, (act, read, written) in acts.items():
        found: list[tuple[str, int, int]] = []

        def worked(name: str, args: object, given: list[Tensor], made: list[Tensor], to: Any = found) -> None:
            to.append((name, bytes_of(given), bytes_of(made)))

        with Storages(lambda name, given: None, worked):
            act()
        assert found == [(name.partition(" ")[0], read, written)], name
