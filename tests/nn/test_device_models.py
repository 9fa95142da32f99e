"""Every family in every scheme on a pretended device, through NCCL's calls and the fused kernels.

The host's numbers and words, and nothing that has the host wait.
"""

from __future__ import annotations

import pretended
import pytest
import torch
from nn_parity import gradient_norm
from pairs import some
from plain_vit import PlainViT, pictures
from scheme_table import FAMILIES, FIRST_ROW, GRIDS, STEP, Family, rows_for, sequence_for

from summa3d.bench.blocks import BlockEntry, Case, run_benchmark
from summa3d.nn import ModelConfig, build, scheme
from summa3d.parallel.states import states_of
from summa3d.train.config import TrainConfig
from summa3d.train.device import HOST, on_device
from summa3d.train.optimizer import AdamW, clip_factor

VIT = ModelConfig(
    family="vit",
    layers=1,
    hidden=24,
    heads=12,
    ffn=29,
    image=9,
    patch=3,
    channels=3,
    classes=7,
    dropout=0.1,
    attention_dropout=0.2,
)
KINDS = {**FAMILIES, "vit": Family(lambda scheme: VIT, PlainViT, pictures)}
CASES = [(ranks, name, kind) for ranks in (1, 2, 4) for name, _ in GRIDS[ranks] for kind in KINDS]
GELU = ("layer_norm_sums", "layer_norm_gradient_sums", "dropout_add", "dropout_gradient", "sum_lanes")
ALONE = {  # family → kernels that one step of it starts, whatever the scheme
    "gpt2": (*GELU, "bias_gelu_tanh", "bias_gelu_tanh_gradient"),
    "llama": ("rms_norm_sums", "rms_norm_gradient_sums", "swiglu", "swiglu_gradient", "rotate", "dropout_add"),
    "gpt2-grouped": (*GELU, "bias_relu2", "bias_relu2_gradient"),
    "bert": (*GELU, "bias_gelu", "bias_gelu_gradient"),
    "vit": (*GELU, "bias_gelu", "bias_gelu_gradient"),
}
ALWAYS = ("row_maximum", "cross_entropy_sums", "cross_entropy_gradient", "adamw")


def step_of(family, on_grid, device, dtype=torch.float64):
    """Loss, gradients and weights after one optimizer step, by name, and the words of forward and backward."""
    config = family.config(on_grid)
    if config.family == "vit" and on_grid.residual.num_shards(1, on_grid.grid.shape) not in (1, 2, 5, 10):
        return None
    with device:
        model = build(config, on_grid, dtype, seed=3)
    optimizer = AdamW(states_of(model, on_grid.grid), TrainConfig())
    rows = rows_for(on_grid)
    batch = family.batch(config, rows * (2 if rows < 4 else 1), sequence_for(on_grid, config.sequence))
    counts = {"count": 17} | ({"pairs": 3} if config.family == "bert" else {})
    with on_grid.grid.ledger.watch() as moved:
        loss = model(**on_device(batch, device), step=STEP, first_row=FIRST_ROW, **counts)
        loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = gradient_norm(model.parameters(), on_grid.grid)
    optimizer.step(0.01, clip_factor(norm, 1.0))
    tensors = {"loss": loss.detach(), **gradients} | {f"new {name}": p.detach() for name, p in model.named_parameters()}
    return tensors, norm, moved.words


def compare(found, want, tolerance, what):
    assert found.keys() == want.keys()
    for name, expected in want.items():
        error = (found[name].double() - expected.double()).norm()
        floor = 1e-12 if name.endswith("attention.kv.bias") else 1e-14  # 0 but for rounding: a bias of k moves no softmax
        assert error <= tolerance * expected.double().norm() + floor, (what, name, error)


@pytest.mark.mpi(sizes=(1, 2, 4))
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cases", [some(CASES), pytest.param(CASES, marks=pytest.mark.wide)], ids=["pairs", "all"])
@pytest.mark.turns
def test_a_step_on_a_device_is_the_hosts_word_for_word_and_waits_once(
    comm, make_grid, world_size, name, kernel_libraries, monkeypatch, cases
):
    family = KINDS[name]
    for kind, axes in (grid for grid in GRIDS[world_size] if (world_size, grid[0], name) in cases):
        want = step_of(family, scheme(kind, make_grid(**axes, node_memory=False)), HOST)
        with pretended.pretended(monkeypatch, kernel_libraries) as (device, backends):
            grid = make_grid(**axes, node_memory=False, transport="nccl")
            found = step_of(family, scheme(kind, grid), pretended.CUDA)
        if want is None:
            assert found is None
            continue
        compare(found[0], want[0], 1e-10, (kind, axes))
        assert abs(found[1] - want[1]) <= 1e-12 * want[1]
        assert found[2] == want[2] == sum(backend.words for backend in backends), (kind, axes)
        assert device.waits == ["tolist"], device.waits  # the gradient norm
        assert all(direction == "to device" for direction, _, _ in device.copies), device.copies
        for kernel in (*ALONE[name], *ALWAYS):
            assert any(started.startswith(kernel) for started in device.kernels), (kernel, sorted(set(device.kernels)))


@pytest.mark.mpi(sizes=(2,))
def test_blocks_race_on_a_device_as_on_the_host(comm, kernel_libraries, monkeypatch):
    entries = [BlockEntry("oned", {"y": 2}), BlockEntry("cuboid", {"x": 1, "y": 1, "z": 2}, regather=False)]
    config = ModelConfig(layers=2, hidden=24, heads=4, sequence=5, dropout=0.1)
    host = run_benchmark(entries, Case(config, 4, "float64"), comm, 1)
    with pretended.pretended(monkeypatch, kernel_libraries) as (device, _):
        found = run_benchmark(entries, Case(config, 4, "float64", "cuda"), comm, 1)
    assert device.kernels and found["case"]["device"] == "cuda"
    for ours, theirs in zip(found["rows"], host["rows"], strict=True):
        assert ours["words_per_rank"] == theirs["words_per_rank"] and ours["relative_difference"] < 1e-12
