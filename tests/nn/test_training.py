"""Eight steps of training in every scheme, of one family on four ranks twenty, are plain torch's.

What a single gradient cannot show, such as copies that drift apart.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn_parity import global_weights
from pairs import turns
from scheme_table import FAMILIES, GPT2, LLAMA

from summa3d.comm.grid import Place
from summa3d.nn import build, scheme
from summa3d.nn.context import Context

GRIDS = {
    4: [
        ("oned", {"y": 4}),
        ("oned-sp", {"y": 4}),
        ("summa", {"x": 2, "y": 2}),
        ("cuboid-sequence", {"x": 1, "y": 2, "z": 2}),
    ],
    8: [("tesseract", {"x": 2, "y": 2, "d": 2}), ("cuboid", {"x": 2, "y": 2, "z": 2})],
}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "bert": FAMILIES["bert"].config(scheme("serial", Place({"x": 1})))}
CASES = [(name, family) for grids in GRIDS.values() for name, _ in grids for family in CONFIGS]
TURNS = turns((name for grids in GRIDS.values() for name, _ in grids), tuple(CONFIGS))
ROWS, SEQUENCE = 8, 12


def losses(model: Any, parameters: Any, loss: Any, family: str, steps: int) -> list[float]:
    """Train on a new batch each step; AdamW acts on each element alone, so torch's own serves blocks and whole tensors."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    found = []
    for step in range(steps):
        batch = FAMILIES[family].batch(CONFIGS[family], ROWS, SEQUENCE)
        batch = {name: part.roll(step, 0) for name, part in batch.items()}
        optimizer.zero_grad()
        value = loss(model, **batch, step=step, first_row=0)
        value.backward()
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.mpi(sizes=tuple(GRIDS))
@pytest.mark.parametrize("cases", [TURNS, pytest.param(CASES, marks=pytest.mark.wide)], ids=["turns", "all"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.turns
def test_losses_of_many_steps_equal_plain_torchs_to_seven_digits(comm, make_grid, world_size, family, cases):
    grids = [grid for grid in GRIDS[world_size] if (grid[0], family) in cases]
    if not grids:
        pytest.skip("the turn of this family is on another number of ranks")
    steps = 20 if cases is CASES or (world_size, family) == (4, "llama") else 8

    def trained(on_grid: Context) -> list[float]:
        model = build(CONFIGS[family], on_grid, torch.float64, seed=3)
        global_weights(model)
        return losses(model, model.parameters(), lambda model, **batch: model(**batch), family, steps)

    serial = build(CONFIGS[family], scheme("serial"), torch.float64, seed=3)
    plain = FAMILIES[family].plain(CONFIGS[family], global_weights(serial), seed=3)
    want = comm.bcast(
        losses(plain, plain.weights.values(), lambda plain, **batch: plain.loss(**batch), family, steps)
        if comm.rank == 0
        else None
    )
    assert want[-1] < want[0] - 0.1
    for name, axes in grids:
        got = trained(scheme(name, make_grid(check=False, **axes)))
        worst = max(abs(ours - theirs) / theirs for ours, theirs in zip(got, want, strict=True))
        assert worst <= 1e-7, (name, worst)
