"""Mistakes that other tensor-parallel libraries have made in their layers, each as a test that such a mistake would fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nn_parity import whole
from scheme_table import FAMILIES, next_tokens, rows_for, sequence_for
from torch.nn import functional

from summa3d.layout import collect, distribute
from summa3d.nn import Batch, Dropout, LayerNorm, Linear, ModelConfig, RMSNorm, build, cross_entropy, initialise, scheme

GRIDS = [
    ("oned", {"y": 4}),
    ("summa", {"x": 2, "y": 2}),
    ("cuboid", {"x": 1, "y": 2, "z": 2}),
    ("cuboid-sequence", {"x": 2, "z": 2}),
]


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_blocks_of_a_matrix_begin_equal(make_grid, family):
    for name, axes in GRIDS:
        on_grid = scheme(name, grid := make_grid(**axes))
        for weight, parameter in build(FAMILIES[family].config(on_grid), on_grid).named_parameters():
            if parameter.dim() == 2:
                blocks = grid.comm.allgather((repr(parameter.sharding.slices(grid)), parameter.data.numpy().tobytes()))
                assert len({block for _, block in blocks}) == len({where for where, _ in blocks}), (name, weight)


@pytest.mark.mpi(sizes=(4,))
def test_dropout_differs_between_blocks_and_is_equal_on_copies(make_grid):
    for name, axes in GRIDS:
        on_grid = scheme(name, grid := make_grid(**axes))
        stream = on_grid.residual
        drop = Dropout(0.5, "branch", on_grid, stream)
        block = torch.ones(stream.local_shape((8, 8, 12), grid.shape, grid.coordinates))
        dropped = on_grid.batch_first(drop(on_grid.as_stored(block), (8, 12), Batch(8, 8, seed=1)))
        found = grid.comm.allgather((repr(stream.slices((8, 8, 12), grid.shape, grid.coordinates)), dropped.numpy().tobytes()))
        assert len(set(found)) == len({block for _, block in found}) == len({where for where, _ in found}), name


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "vit"])
def test_weight_decay_reaches_matrices_only(family):
    config = ModelConfig(family=family, layers=1, hidden=12, heads=2)
    for name, parameter in build(config, scheme("serial")).named_parameters():
        assert parameter.decay == (parameter.dim() == 2), name


@pytest.mark.mpi(sizes=(8,))
def test_a_bias_gradient_is_summed_over_both_axes_that_split_rows_and_over_no_other(make_grid):
    cuboid = scheme("cuboid", grid := make_grid(x=2, y=2, z=2))
    layer = Linear(6, 10, cuboid, dtype=torch.float64)
    initialise(layer, cuboid, 1)
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out = layer(distribute(x, grid, cuboid.residual))
    weights = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (out * distribute(weights, grid, layer.output_layout)).sum().backward()
    assert torch.allclose(whole(layer, "bias", layer.bias.grad), weights.sum((0, 1)), rtol=1e-13)


@pytest.mark.mpi(sizes=(4,))
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_label_weighs_the_same_on_whichever_rank_it_lies(make_grid, family):
    for name, axes in GRIDS:
        on_grid = scheme(name, make_grid(**axes))
        config = replace(FAMILIES[family].config(on_grid), dropout=0.0, attention_dropout=0.0)
        model = build(config, on_grid, torch.float64)
        batch = next_tokens(config, 2 * rows_for(on_grid), sequence_for(on_grid, config.sequence))
        batch["labels"][1:] = -100
        batch["labels"][1, 2] = 3
        alone = build(config, scheme("serial"), torch.float64)
        loss, want = model(**batch), alone(**batch)
        loss.backward()
        want.backward()
        assert abs(loss - want) <= 1e-12 * want, name
        name_of, parameter = next(iter(model.named_parameters()))
        want_gradient = alone.get_parameter(name_of).grad
        assert (whole(model, name_of, parameter.grad) - want_gradient).norm() <= 1e-10 * want_gradient.norm(), name


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 300.0), (torch.bfloat16, 1e18), (torch.float32, 1e18)], ids=str)
def test_a_norm_of_large_rows_does_not_overflow(make_grid, kind, dtype, size):
    cuboid = scheme("cuboid", grid := make_grid(z=2))
    norm = kind(20, cuboid, dtype=dtype)
    initialise(norm, cuboid, 1)
    x = (size * torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(2))).to(dtype)
    got = collect(norm(distribute(x, grid, cuboid.residual)).detach(), grid, cuboid.residual, x.shape).double()
    wide = x.double()
    want = functional.layer_norm(wide, (20,)) if kind is LayerNorm else functional.rms_norm(wide, (20,), eps=1e-5)
    assert (got - want).norm() <= {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6}[dtype] * want.norm()


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_of_equal_elements_is_finite_with_the_smallest_eps(make_grid, kind):
    cuboid = scheme("cuboid", make_grid(z=2))
    norm = kind(20, cuboid, eps=1e-12)
    initialise(norm, cuboid, 1)
    x = torch.full((1, 2, 10), 0.1, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.mpi(sizes=(8,))
@pytest.mark.parametrize("regather", [True, False])
def test_a_layer_used_twice_sums_both_gradients(make_grid, regather):
    cuboid = scheme("cuboid", grid := make_grid(x=2, y=2, z=2), regather)
    up = Linear(6, 10, cuboid, dtype=torch.float64)
    down = Linear(10, 6, cuboid, up.output_layout, dtype=torch.float64)
    for layer in (up, down):
        initialise(layer, cuboid, 1)
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = [whole(layer, "weight", layer.weight.data).requires_grad_() for layer in (up, down)]
    out, want = distribute(x, grid, cuboid.residual), x
    for _ in range(2):
        out, want = down(up(out).tanh()), (want @ plain[0]).tanh() @ plain[1]
    out.square().sum().backward()
    want.square().sum().backward()
    for layer, weight in zip((up, down), plain, strict=True):
        got = whole(layer, "weight", layer.weight.grad)
        assert (got - weight.grad).norm() <= 1e-12 * weight.grad.norm()


@pytest.mark.mpi(sizes=(2,))
def test_a_positional_argument_is_heard_and_an_unknown_one_refused(make_grid):
    cuboid = scheme("cuboid", make_grid(y=2))
    inner = cuboid.scheme.after_linear(cuboid.residual)
    layer = Linear(4, 6, cuboid, inner, False, 0.5, torch.float64)
    assert (layer.input_layout, layer.bias, layer.weight.initial, layer.weight.dtype) == (
        inner,
        None,
        ("normal", 0.5),
        torch.float64,
    )
    with pytest.raises(TypeError, match="nonsense"):
        Linear(4, 6, cuboid, nonsense=3)
    with pytest.raises(TypeError, match="nonsense"):
        build(ModelConfig(layers=1), scheme("serial"))(torch.zeros(1, 2), torch.zeros(1, 2), nonsense=3)


@pytest.mark.mpi(sizes=(4,))
def test_a_loss_leaves_its_logits_alone_and_can_go_backward_twice(make_grid):
    cuboid = scheme("cuboid", grid := make_grid(y=2, z=2))
    layout = cuboid.scheme.after_linear(cuboid.residual)
    logits = distribute(torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(3)), grid, layout).requires_grad_()
    before = logits.detach().clone()
    labels = cuboid.block_of(torch.arange(10).view(2, 5) % 7, layout)
    loss = cross_entropy(logits, labels, cuboid, layout, 7, 10)
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.detach(), before)
    assert torch.equal(logits.grad, 2 * once)
