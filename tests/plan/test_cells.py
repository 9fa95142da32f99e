"""Cells stand for all ranks: the largest blocks, and the most words of every communication."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from summa3d.dry.record import Op
from summa3d.dry.step import Rank, Setting
from summa3d.nn.config import ModelConfig
from summa3d.nn.schemes.registry import SCHEME_SPECS
from summa3d.plan import cells as of
from summa3d.plan.programs.programs import PROGRAMS, edited, edits_of
from summa3d.plan.search.cells import StageGrid, traced


def setting(scheme: str, axes: dict[str, int], batch: int, heads: int = 12) -> Setting:
    model = ModelConfig(layers=1, hidden=4 * heads, heads=heads, sequence=8, vocabulary=37, dropout=0.1, attention_dropout=0.1)
    return Setting(model, batch, scheme, axes, recompute=("full", 1), on_device=True)


CASES = (
    ("summa", {"x": 2, "y": 2}, 4),
    ("summa", {"x": 5, "y": 1}, 10),
    ("cuboid", {"x": 1, "y": 2, "z": 3}, 6),
    ("cuboid", {"x": 2, "y": 2, "z": 3}, 12),
    ("oned", {"y": 4}, 3),
)


@pytest.mark.parametrize(("scheme", "axes", "batch"), CASES)
def test_no_rank_has_a_larger_product_or_receives_more_words(scheme: str, axes: dict[str, int], batch: int) -> None:
    stands_for_all(setting(scheme, axes, batch))


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(200))
def test_a_random_grid_has_no_rank_with_more_than_its_cells(seed: int) -> None:
    chosen = random.Random(seed)
    scheme = chosen.choice(("oned", "oned-sp", "summa", "tesseract", "cuboid", "cuboid-sequence"))
    axes = chosen.choice([grid for ranks in range(2, 49) for grid in SCHEME_SPECS[scheme].grids(ranks)])
    shape = {"x": 1, "y": 1, "z": 1, "d": 1, **axes}
    heads = 2 * shape["y"] * shape["z"]
    one = setting(scheme, axes, prod(shape.values()), heads)
    model = replace(one.model, hidden=4 * heads, sequence=8 * shape["y"], vocabulary=chosen.randint(50, 90))
    one = replace(one, model=replace(model, ffn=chosen.randint(50, 90) * shape["y"] * shape["z"]))
    size = one.place().size
    stands_for_all(one, {0, size - 1, *chosen.sample(range(size), min(size, 4))})


def stands_for_all(one: Setting, ranks: Collection[int] | None = None) -> None:
    """Check that no rank of the setting's grid has more than its cells have."""
    cells = of.cells(one)

    def sizes(ops: of.OpTrace) -> list[tuple[str, str, int]]:
        moves = [(op.layer, f"{op.name} {op.axis}", op.words) for op in ops if op.kind == "move"]
        return moves + [(op.layer, "product", op.flops) for op in ops if op.kind == "product"]

    for rank in range(one.place().size) if ranks is None else ranks:
        for name, cell in of._traced(replace(one, rank=rank)).items():
            for largest, trace in zip(cells[name], cell, strict=True):
                for most, mine in zip(sizes(largest), sizes(trace), strict=True):
                    assert most[:2] == mine[:2] and mine[2] <= most[2], (rank, name, most, mine)


def test_the_roots_of_broadcasts_know_the_size_of_their_messages() -> None:
    moves = [op for op in of.cells(setting("summa", {"x": 3, "y": 3}, 12))[of.BLOCK].forward if op.name == "broadcast"]
    assert len(moves) == 4 * 3 * 2 and all(op.words for op in moves)
    rows, h = 12 * 8 // 3, 48
    assert {op.words for op in moves if op.axis == "y"} == {rows * h // 3, rows * 4 * h // 3}


def words(ops: of.OpTrace, name: str) -> int:
    return sum(op.words for op in ops if op.name == name)


def test_programs_edits_are_the_released_programs_counts() -> None:
    rows, h, ranks = 4 * 8, 48, 4
    cell = of.cells(setting("oned", {"y": ranks}, 4))[of.BLOCK]
    kept = edited(cell, PROGRAMS["megatron-2020"].edits)
    assert kept.forward == cell.forward and words(kept.backward, "all_gather") == rows * h * (ranks - 1) // ranks
    assert kept.backward[0].name == "all_gather" and kept.backward[1].kind == "wait"
    square = of.cells(setting("summa", {"x": 3, "y": 3}, 12))[of.BLOCK]
    copies = [op for op in edited(square, PROGRAMS["optimus-2021"].edits).forward if op not in square.forward]
    rows = 12 * 8
    assert sum(op.read for op in copies) == 4 * 3 * (7 * rows * h + 12 * h * h) // 9
    assert all(op.read == op.written for op in copies)


def test_megatrons_kernels_pass_once_over_the_scores() -> None:
    fused = edited(of.cells(setting("oned", {"y": 4}, 4))[of.BLOCK], PROGRAMS["megatron-2021"].edits)

    def scores(op: Op) -> bool:
        return op.kind == "elements" and op.layer.startswith("blocks.0.attention.core")

    assert [op.name for op in fused.forward if scores(op)] == ["_softmax", "dropout_add_float32"]


@pytest.mark.parametrize(("program", "width"), [("megatron-2021", 2), ("bigscience-bf16", 4), ("megatron-2022", 0)])
def test_gradients_of_weights_are_added_up_apart_in_their_dtype_or_by_their_products(program: str, width: int) -> None:
    """Of the four products of a block's weights alone: what attention multiplies has gradients that nobody adds up."""
    own = PROGRAMS[program]
    cell = of.cells(setting("oned", {"y": 4}, 4))[of.BLOCK]
    edited_cell = edited(cell, edits_of(own, own.switches, "full"))
    sums = [op for op in edited_cell.backward if op.name == "accumulate"]
    h, ranks = 48, 4
    held = 12 * h * h // ranks
    assert len(sums) == (4 if width else 0)
    assert sum(op.written for op in sums) == width * held and sum(op.read for op in sums) == (2 + width) * held * bool(width)
    pairs = [
        (op, new)
        for op, new in zip(*([op for op in each.backward if op.kind == "product"] for each in (cell, edited_cell)), strict=True)
        if op != new
    ]
    assert sum(new.read - op.read for op, new in pairs) == (0 if width else 4 * held)
    assert sum(new.written for _, new in pairs) == (0 if width else 4 * held)


KEPT = (
    ("gpt2", "tesseract", {"x": 2, "y": 2, "z": 1, "d": 2}, {"recompute": "full", "split": True}),
    ("llama", "oned-sp", {"y": 3}, {"replicas": 2}),
    ("gpt2", "cuboid-sequence", {"x": 2, "y": 1, "z": 3}, {"regather": True, "device": "cpu", "dtype": "float32", "shared": 6}),
    ("llama", "summa", {"x": 3, "y": 2}, {"device": "cpu", "recompute": "full", "regather": False}),
)


@pytest.mark.parametrize(("family", "scheme", "axes", "rest"), KEPT)
def test_cells_are_those_behind_a_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch, family: str, scheme: str, axes: dict[str, int], rest: dict[str, Any]
) -> None:
    model = ModelConfig(family=family, layers=1, hidden=72, heads=6, sequence=12, vocabulary=43)
    rest = {"recompute": "none", "regather": False, "dtype": "bfloat16", "device": "cuda"} | rest
    inner = StageGrid(model, scheme, tuple(axes.items()), unit=12, **rest)
    found = traced(inner, True)
    assert found is not None and (found.kept.base > 0) == (scheme != "cuboid-sequence")
    monkeypatch.setattr(Rank, "_first", lambda rank, program, between: [step for step in program if step.op.micro == 0])
    assert found == traced(inner, True)
