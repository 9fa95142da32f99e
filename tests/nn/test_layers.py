"""Layers on their own, as a user puts them into a torch module; and the checks that speak before anything runs."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.nn import functional

from summa3d.errors import LayoutError, ShapeError
from summa3d.layout import Layout, Sharding, collect, distribute
from summa3d.nn import GPT, MLP, LayerNorm, Linear, ModelConfig, cross_entropy, initialise, scheme


@pytest.mark.mpi(sizes=(8, 12))
def test_two_linears_in_a_users_module_train_like_torchs(make_grid, world_size):
    grid = make_grid(**{8: {"x": 2, "y": 2, "z": 2}, 12: {"x": 3, "y": 2, "z": 2}}[world_size])
    cuboid = scheme("cuboid", grid)
    up = Linear(10, 13, cuboid, dtype=torch.float64)
    down = Linear(13, 10, cuboid, up.output_layout, dtype=torch.float64)
    model = torch.nn.Sequential(up, torch.nn.Tanh(), down)
    initialise(model, cuboid, seed=1)
    plain = torch.nn.Sequential(torch.nn.Linear(10, 13), torch.nn.Tanh(), torch.nn.Linear(13, 10)).double()
    for ours, theirs in ((up, plain[0]), (down, plain[2])):
        theirs.weight.data = collect(
            ours.weight.data, grid, ours.weight.sharding.layout, ours.weight.sharding.shape
        ).T.contiguous()
        theirs.bias.data.zero_()
    rows = 2 * grid.shape["x"] * grid.shape["y"]
    x = torch.randn(rows, 5, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = distribute(x, grid, cuboid.residual)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]
    for _ in range(3):
        for optimizer, module, block in zip(optimizers, (model, plain), (mine, x), strict=True):
            optimizer.zero_grad()
            (module(block).square().sum() / x.numel()).backward()
            optimizer.step()
    got = collect(down.weight.data, grid, down.weight.sharding.layout, (13, 10))
    assert torch.allclose(got, plain[2].weight.data.T, rtol=1e-12, atol=1e-15)
    got = collect(up.bias.data, grid, up.bias.sharding.layout, (13,))
    assert torch.allclose(got, plain[0].bias.data, rtol=1e-12, atol=1e-15)


@pytest.mark.mpi(sizes=(4,))
def test_a_deep_copy_of_a_model_lies_on_the_same_grid_and_is_another_model(make_grid):
    cuboid = scheme("cuboid", make_grid(x=2, y=1, z=2))
    model = Linear(10, 13, cuboid)
    initialise(model, cuboid, seed=1)
    x = distribute(torch.randn(4, 5, 10, generator=torch.Generator().manual_seed(1)), cuboid.grid, cuboid.residual)
    before = model(x)
    other = copy.deepcopy(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert theirs.sharding == mine.sharding and theirs.decay == mine.decay and theirs.initial == mine.initial
    assert other.context.grid is cuboid.grid and torch.equal(other(x), before)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(model(x), before) and not torch.equal(other(x), before)


@pytest.mark.mpi(sizes=(1, 4, 8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norm_of_rows_far_from_zero_loses_no_digits_but_to_the_rounding_of_its_mean(make_grid, world_size, dtype):
    grid = make_grid(**{1: {"x": 1, "y": 1, "z": 1}, 4: {"x": 1, "y": 1, "z": 4}, 8: {"x": 2, "y": 2, "z": 2}}[world_size])
    cuboid = scheme("cuboid", grid)
    norm = LayerNorm(20, cuboid, dtype=dtype)
    initialise(norm, cuboid, seed=1)
    x = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(2), dtype=dtype) + 300
    got = collect(norm(distribute(x, grid, cuboid.residual)).detach(), grid, cuboid.residual, x.shape)
    want = functional.layer_norm(x.double(), (20,)).to(dtype)
    # A mean of 300 in float32 is off by up to 1.5e-5; whole rows take torch's own layer norm, which rounds once more.
    bound = {torch.float32: 3e-5 if world_size == 1 else 2e-5, torch.float64: 1e-10}[dtype]
    assert (got - want).norm() <= bound * want.norm()


@pytest.mark.mpi(sizes=(1, 3, 4))
def test_cross_entropy_handles_more_ranks_than_words_and_unlabelled_rows(make_grid, world_size):
    grid = make_grid(x=1, y=world_size, z=1)
    cuboid = scheme("cuboid", grid)
    layout = cuboid.scheme.after_linear(cuboid.residual)
    logits = 50 * torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = torch.tensor([[0, 1, 2, -100, 0], [2, 2, -100, 1, 0]])
    want = logits.clone().requires_grad_()
    functional.cross_entropy(want.flatten(0, 1), labels.flatten()).backward()
    block = distribute(logits, grid, layout).requires_grad_()
    loss = cross_entropy(block, labels, cuboid, layout, 3, int((labels >= 0).sum()))
    (loss * 3).backward()
    assert torch.allclose(collect(block.grad, grid, layout, logits.shape), 3 * want.grad, rtol=1e-12, atol=1e-16)


def test_an_unlabelled_row_whose_logits_are_not_finite_costs_nothing():
    serial = scheme("serial")
    logits = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits[0, 1, :5] = -math.inf
    labels = torch.tensor([[3, -1, 6], [0, 2, -100]])
    ours, want = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, labels, serial, Layout("b s v"), 7, 4)
    expected = functional.cross_entropy(want.flatten(0, 1), labels.clamp(-1).flatten(), ignore_index=-1)
    (3 * loss).backward()
    (3 * expected).backward()
    assert abs(loss - expected) <= 1e-14
    torch.testing.assert_close(ours.grad, want.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.mpi(sizes=(1,))
def test_a_loss_is_rounded_once(make_grid):
    cuboid = scheme("cuboid", make_grid(x=1, y=1, z=1))
    layout = cuboid.scheme.after_linear(cuboid.residual)
    logits = torch.tensor([[[0.0, 2.0**24], *[[0.0, math.log(math.e - 1)]] * 3]])  # losses of 2²⁴, 1, 1, 1
    loss = cross_entropy(logits, torch.zeros(1, 4, dtype=torch.long), cuboid, layout, 2, 1)
    assert loss.dtype == torch.float32 and loss == 2**24 + 4


@pytest.mark.mpi(sizes=(4,))
def test_an_mlp_returns_to_the_layout_of_the_stream(make_grid):
    cuboid = scheme("cuboid", make_grid(x=1, y=2, z=2))
    mlp = MLP(8, 11, cuboid)
    assert mlp.up.output_layout == Layout(("x", "z"), (), ("y",))
    assert mlp.down.output_layout == cuboid.residual


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize(
    ("axes", "config", "batch", "says"),
    [
        (
            {"x": 2, "y": 2, "z": 1},
            ModelConfig(),
            6,
            ["batch 6", "x·y = 4", "x=2,y=2,z=1", "4, 8, 12", "heads 8, hidden 256: x=1,y=2,z=2."],
        ),
        ({"x": 2, "y": 1, "z": 2}, ModelConfig(), 6, ["batch 6", "x·z = 4", "4, 8"]),
        ({"x": 1, "y": 4, "z": 1}, ModelConfig(heads=2), 8, ["heads 2", "y = 4", "x=2,y=2,z=1"]),
        ({"x": 1, "y": 1, "z": 4}, ModelConfig(hidden=250, heads=10), 8, ["hidden 250", "z = 4", "248, 252", "x=2,y=1,z=2"]),
    ],
)
def test_a_dim_that_the_grid_cannot_split_is_named_with_what_would_fit(make_grid, axes, config, batch, says):
    with pytest.raises(LayoutError) as raised:
        scheme("cuboid", make_grid(**axes)).scheme.check_even(config, batch)
    for text in says:
        assert text in str(raised.value)


@pytest.mark.mpi(sizes=(2,))
def test_a_batch_that_is_not_the_block_of_the_plan_is_refused(make_grid):
    cuboid = scheme("cuboid", make_grid(x=2, y=1, z=1))
    linear = Linear(6, 4, cuboid)
    with pytest.raises(ShapeError, match=r"(?s)block of A.*Linear\(6 → 4, .*that layer's output_layout"):
        linear(torch.zeros(3, 5))
    model = GPT(ModelConfig(layers=1, hidden=4, heads=2, sequence=5, vocabulary=7), cuboid)
    with pytest.raises(ShapeError, match=r"1 … 5"):
        model(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64))


@pytest.mark.mpi(sizes=(4,))
def test_an_unfilled_parameter_is_nan(make_grid):
    linear = Linear(5, 7, scheme("cuboid", make_grid(x=1, y=2, z=2)))
    assert linear.weight.isnan().all()
    assert isinstance(linear.weight.sharding, Sharding)


@pytest.mark.mpi(sizes=(1,))
def test_sizes_rows_and_masks_that_cannot_be_are_refused(make_grid):
    cuboid = scheme("cuboid", make_grid(x=1, y=1, z=1))
    with pytest.raises(ShapeError, match="at most 2\\^63 − 1 elements"):
        Linear(2**70, 3, cuboid)
    with pytest.raises(ShapeError, match="rows as a whole number"):
        Linear(4, 3, cuboid)(torch.ones(1, 2, 4), rows={})
    model, tokens = GPT(ModelConfig(layers=1, hidden=8, heads=2, sequence=4, vocabulary=5), cuboid), torch.ones(2, 4).long()
    with pytest.raises(ShapeError, match="tokens are on device cpu, attention_mask on meta"):
        model(tokens, tokens, attention_mask=tokens.to("meta"))


@pytest.mark.mpi(sizes=(1, 2))
def test_a_sparse_input_that_is_not_communicated_is_multiplied_as_a_dense_one(make_grid, world_size):
    grid = make_grid(y=world_size)
    context = scheme("oned", grid)
    layer = Linear(16, 24, context)
    initialise(layer, context, 1)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer(x.to_sparse()), layer(x))
