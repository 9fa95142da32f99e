"""What a step holds is what its closed forms say: bytes saved for backward exactly, the peak of torch's own account to 5 %."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from memory_cases import BATCH, BERT, FAMILIES, GPT2, IN_FLIGHT, LLAMA, PEAK, SAVED, SCHEMES, VIT, measured, places
from nn_oracle.memory import ModelMemory
from pairs import turns

from summa3d.comm.grid import Place
from summa3d.errors import GridError, LayoutError
from summa3d.nn import ModelConfig, build, parameter, scheme
from summa3d.nn.overlap import Overlap
from summa3d.nn.schemes.heads import heads_of
from summa3d.nn.schemes.registry import SCHEME_SPECS


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    yield


def check(config: ModelConfig, built: Any, recompute: tuple[str, int] = ("none", 1), close: float = PEAK) -> None:
    model = build(config, built)
    model.recompute(*recompute)
    saved, peak = measured(model)
    staged = built.grid.staged
    predicted = ModelMemory(config, built, BATCH, config.sequence, "float32", *recompute, staged=staged)
    memory = predicted.memory(training=False)
    held = sum(weight.nbytes for weight in model.parameters())
    assert memory.parameters == memory.gradients == held
    assert abs(memory.activations - saved) <= SAVED * saved, (built.scheme.name, built.grid, memory.activations / saved)
    assert abs(memory.peak - peak - held) <= close * (peak + held), (built.scheme.name, built.grid, memory.peak / (peak + held))
    slots = sum(axis.node_bytes for axis in (built.grid[name] for name in staged))
    assert slots <= memory.node + len(staged) * (2 << 18)


TURNS = "bert", "gpt2", "vit", "llama"


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("order", [TURNS, pytest.param(None, marks=pytest.mark.wide)], ids=["turns", "all"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("node_memory", [None, False], ids=["node", "mpi"])
@pytest.mark.pairs
def test_saved_bytes_and_the_peak_are_those_of_the_closed_forms(make_grid, world_size, family, node_memory, order):
    for _, name, axes in places(world_size, family, order):
        check(ModelConfig(**FAMILIES[family]), scheme(name, make_grid(check=False, node_memory=node_memory, **axes)))


PLACED = {
    2: [("summa", {"x": 2}, "root-only")],
    4: [("summa", {"x": 2, "y": 2}, "root-only"), ("cuboid", {"y": 2, "z": 2}, "diagonal")],
}


@pytest.mark.mpi(sizes=tuple(PLACED))
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_on_a_host_or_a_diagonal_are_counted_where_they_lie_and_where_they_are_spread(make_grid, world_size, family):
    first = list(FAMILIES).index(family) + world_size // 4  # places and families take turns to recompute
    for turn, (name, axes, vectors) in enumerate(PLACED[world_size], first):
        recompute = ("none" if turn % 2 else "full", 1)
        check(ModelConfig(**FAMILIES[family]), scheme(name, make_grid(check=False, **axes), vectors=vectors), recompute)


PLACES = [(kind, ranks) for kind in SCHEME_SPECS.values() if not kind.limits for ranks in (1, 2, 4, 6, 8)]
PLACED_CASES = [turns(PLACES, tuple(FAMILIES)), pytest.param([*product(PLACES, FAMILIES)], marks=pytest.mark.wide)]


@pytest.mark.parametrize("cases", PLACED_CASES, ids=["turns", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_exact_on_every_rank_of_every_grid_in_every_scheme_and_storage(family, cases, monkeypatch):
    monkeypatch.setattr(parameter, "normal_", lambda *_: None)  # their values do not matter
    sizes = {**FAMILIES[family], "layers": 1, "hidden": 48, "heads": 24} | ({"kv_heads": 12} if family == "llama" else {})
    config = ModelConfig(**sizes)
    for kind, ranks in (place for place, whose in cases if whose == family):
        for axes, vectors in product(kind.grids(ranks), kind.vectors):
            for rank in range(ranks):
                try:
                    on_rank = scheme(kind.name, Place(axes, rank), vectors=vectors)
                    model = build(config, on_rank)
                except (GridError, LayoutError):
                    continue  # a diagonal of unequal sides
                if heads_of(config, on_rank.scheme).of_q > 1:
                    continue  # kv heads that are split unevenly; the closed form knows columns
                held = sum(weight.nbytes for weight in model.parameters())
                memory = ModelMemory(config, on_rank, 48, config.sequence).memory()
                found = (memory.parameters, memory.gradients, memory.optimizer)
                assert found == (held, held, 2 * held), (kind.name, axes, vectors, rank)


@pytest.mark.mpi(sizes=(4,))
def test_operands_that_are_kept_are_counted(make_grid):
    for name in ("cuboid", "cuboid-sequence"):
        check(ModelConfig(**GPT2), scheme(name, make_grid(check=False, x=2, y=2, z=1), regather=False))


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("family", FAMILIES)
def test_dropouts_masks_and_unfused_attention_are_counted(make_grid, world_size, family):
    name, axes = SCHEMES[world_size][-1]
    for more in ({"dropout": 0.1}, {"attention_dropout": 0.1}):
        check(ModelConfig(**FAMILIES[family], **more), scheme(name, make_grid(check=False, **axes)))


AGAIN = {"each": ("full", 1), "pairs": ("full", 2), "selective": ("selective", 1)}
MODELS = [(GPT2, None, -1), (LLAMA, False, -1), (BERT, None, -1), (VIT, False, -1), (GPT2, None, 0)]
"""Models, transports and schemes: the last of those, and oned, whose stream is whole on every rank."""


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.wide)], ids=["turns", "all"])
@pytest.mark.parametrize("again", AGAIN)
def test_what_is_computed_again_is_not_kept(make_grid, world_size, again, stride):
    """On one rank each model with each; on four they take turns, as in test_device_memory.py."""
    recompute, first = AGAIN[again], list(AGAIN).index(again) if stride == 3 else 0
    for sizes, node_memory, turn in MODELS if world_size == 1 else MODELS[first::stride]:
        name, axes = SCHEMES[world_size][turn]
        check(ModelConfig(**sizes), scheme(name, make_grid(check=False, node_memory=node_memory, **axes)), recompute)


@pytest.mark.mpi(sizes=(1, 4))
def test_the_loss_of_16_bit_logits_is_counted_in_32(make_grid, world_size):
    """Of a model so small, and a vocabulary so large, that little else is held."""
    config = ModelConfig(**{**GPT2, "layers": 1, "hidden": 24, "vocabulary": 4003})
    name, axes = SCHEMES[world_size][-1]
    on_grid = scheme(name, make_grid(check=False, node_memory=False, **axes))
    model = build(config, on_grid, torch.bfloat16)
    saved, peak = measured(model)
    memory = ModelMemory(config, on_grid, BATCH, config.sequence, "bfloat16").memory(training=False)
    assert abs(memory.activations - saved) <= 10 * SAVED * saved
    assert abs(memory.peak - memory.parameters - peak) <= PEAK * peak


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("recompute", [("none", 1), ("full", 1)], ids=["kept", "again"])
@pytest.mark.parametrize("node_memory", [None, False], ids=["node", "mpi"])
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["cover", "all"])
def test_what_is_in_flight_between_layers_is_counted(make_grid, recompute, node_memory, every):
    """Each case on either transport, kept or again: in a cover of those pairs."""
    first = (node_memory is None) != (recompute == ("full", 1))  # Llama's keeps what it has gathered through MPI
    cases = [(GPT2, {"x": 2, "z": 2}), (GPT2, {"x": 4}), (LLAMA, {"x": 2, "z": 2})]
    overlaps = (Overlap(1), Overlap(3), Overlap(2, False))
    for (sizes, axes), overlap in [*zip(cases, overlaps, strict=True)][0 if every else first :: 1 if every else 2]:
        grid = make_grid(check=False, node_memory=node_memory, **axes)
        regather = sizes is GPT2 or node_memory is None or recompute == ("full", 1)
        check(ModelConfig(**sizes), scheme("cuboid", grid, regather, overlap=overlap), recompute, IN_FLIGHT)


def test_the_dry_terms_say_what_is_in_flight():
    config, place = ModelConfig(**GPT2), Place({"x": 2, "y": 1, "z": 2})
    whole = {n: 4 * n * 96 // 2 for n in (96, 288, 384)}  # gathered weights of h·n words, halves along z

    def in_flight(**overlap: int) -> int:
        return ModelMemory(config, scheme("cuboid", place, overlap=Overlap(**overlap)), 8, 32).memory().in_flight

    assert in_flight() == 0
    assert in_flight(gather=1) == whole[384]
    assert in_flight(gather=2) == 2 * whole[384]


def test_a_rank_of_a_grid_that_nobody_started_has_its_share():
    config = ModelConfig(**GPT2)
    whole = ModelMemory(config, scheme("cuboid", Place({"x": 1, "y": 1, "z": 1})), 64, 32).memory()
    parts = [ModelMemory(config, scheme("cuboid", Place({"x": 2, "y": 2, "z": 2}, rank)), 64, 32).memory() for rank in range(8)]
    assert sum(part.parameters for part in parts) > whole.parameters  # vectors are copied
    assert 8 * max(part.activations for part in parts) < 1.05 * whole.activations
    assert whole.optimizer == 2 * whole.parameters == 2 * whole.gradients
    half = ModelMemory(config, scheme("serial"), 64, 32, "bfloat16").memory()
    assert half.parameters == whole.parameters * 3 // 2 and half.gradients == whole.gradients
