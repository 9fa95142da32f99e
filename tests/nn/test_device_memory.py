"""What a step holds on a device is what the closed forms say of one.

No masks kept, no node's memory, NCCL's sums without parts, and nothing of a communication that has been waited for.
"""

from __future__ import annotations

import pretended
import pytest
from memory_cases import BATCH, FAMILIES, PEAK, SAVED, measured, places
from nn_oracle.memory import ModelMemory
from summa3d.kernels import launch

from summa3d.nn import ModelConfig, build, scheme

SETTINGS = [
    ({}, ("none", 1)),
    ({"dropout": 0.1, "attention_dropout": 0.1}, ("none", 1)),
    ({"dropout": 0.1}, ("full", 1)),
    ({"dropout": 0.1}, ("selective", 1)),
]
TURNS = "gpt2", "bert", "llama", "vit"
IN_TURN = [pytest.param(family, marks=[pytest.mark.wide] if family != "llama" else []) for family in FAMILIES]


@pytest.mark.mpi(sizes=(1, 4))
@pytest.mark.parametrize("order", [TURNS, pytest.param(None, marks=pytest.mark.wide)], ids=["turns", "all"])
@pytest.mark.parametrize("family", IN_TURN)
def test_a_step_on_a_device_holds_what_its_closed_forms_say(make_grid, world_size, family, order, kernel_libraries, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setattr(launch, "SUMMING_BLOCKS_A_PROCESSOR", 1)  # partial sums, not counted, are some MB on any device
    wrong = []
    for turn, name, axes in places(world_size, family, order):
        first = (turn if world_size > 1 else list(FAMILIES).index(family)) % 2
        for more, recompute in SETTINGS if world_size == 1 and order is None else SETTINGS[first::2]:
            config = ModelConfig(**FAMILIES[family], **more)
            with pretended.pretended(monkeypatch, kernel_libraries):
                on_grid = scheme(name, make_grid(check=False, node_memory=False, transport="nccl", **axes))
                with pretended.CUDA:
                    model = build(config, on_grid)
                model.recompute(*recompute)
                saved, peak = measured(model, pretended.CUDA)
                peak += sum(weight.nbytes for weight in model.parameters())
            predicted = ModelMemory(config, on_grid, BATCH, config.sequence, "float32", *recompute, device=True)
            memory = predicted.memory(training=False)
            if abs(memory.activations - saved) > SAVED * saved or abs(memory.peak - peak) > PEAK * peak or memory.node:
                wrong.append((name, axes, more, recompute, memory.activations / saved, memory.peak / peak))
    assert not wrong
