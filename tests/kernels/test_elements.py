"""Fused element-wise kernels against float64 torch and the reference, in every dtype, size and alignment."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, SHAPES, assert_close, leaf, normal
from summa3d.kernels import reference
from summa3d.kernels.mask import Mask
from torch.nn import functional

from summa3d.layout.random import key
from summa3d.nn.random import keep_mask

GELU = {"gelu_tanh": "tanh", "gelu": "none"}
FORMS = [*GELU, "relu2"]
SIXTEEN = [torch.bfloat16, torch.float16]


def plain(x, form):
    return functional.relu(x) ** 2 if form == "relu2" else functional.gelu(x, approximate=GELU[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "plain"])
def test_bias_activation_and_its_gradients_are_torchs(fused, dtype, form, biased):
    for rows, columns in SHAPES:
        x, grad = (normal(rows, columns, dtype=dtype, seed=seed, scale=2) for seed in (1, 2))
        bias = normal(columns, dtype=dtype, seed=3) if biased else None
        wide = [leaf(t) for t in ([x, bias] if biased else [x])]
        want = plain(sum(wide), form)
        want.backward(grad.double())
        assert_close(fused.bias_activation(x, bias, form), want.detach(), dtype)
        of_x, of_bias = fused.bias_activation_gradient(grad, x, bias, form)
        assert_close(of_x, wide[0].grad, dtype)
        if biased:
            assert_close(of_bias, wide[1].grad, dtype, times=4)  # a sum cancels
        else:
            assert of_bias is None


def test_rows_apart_and_of_three_dims_are_read_where_they_lie(fused, dtype):
    joined, grads = (normal(4, 5, 3 * 19, dtype=dtype, seed=seed) for seed in (4, 5))
    x, grad, bias = joined[..., 19:38], grads[..., 3:22], normal(19, dtype=dtype, seed=6)
    want = torch.ops.aten.gelu_backward(grad.double(), x.double() + bias.double(), approximate="tanh")
    of_x, of_bias = fused.bias_activation_gradient(grad, x, bias, "gelu_tanh")
    assert_close(
        fused.bias_activation(x, bias, "gelu_tanh"), functional.gelu(x.double() + bias.double(), approximate="tanh"), dtype
    )
    assert_close(of_x, want, dtype)
    assert_close(of_bias, want.sum((0, 1)), dtype, times=4)


@pytest.mark.parametrize("form", FORMS)
def test_an_activation_far_out_and_of_nothing_finite_is_as_torchs(fused, form):
    x = torch.tensor([-torch.inf, -200, -30, -9, -5, 0, 5, 9, 30, 200, torch.inf, torch.nan], device=DEVICE)
    want = reference.bias_activation(x.double(), None, form).float()
    assert torch.allclose(fused.bias_activation(x[None], None, form)[0][1:], want[1:], rtol=1e-5, atol=1e-6, equal_nan=True)
    wide = leaf(x[1:11])
    plain(wide, form).sum().backward()
    got, _ = fused.bias_activation_gradient(torch.ones_like(x)[None, 1:10], x[None, 1:10], None, form)
    assert torch.allclose(got[0].double(), wide.grad[:9], rtol=1e-5, atol=1e-6)


def test_swiglu_and_its_gradients_are_torchs(fused, dtype):
    for rows, columns in SHAPES:
        joined = normal(rows, 2 * columns + 1, dtype=dtype, seed=7, scale=2)  # gate and up as columns of one product
        gate, up, grad = joined[:, :columns], joined[:, columns + 1 :], normal(rows, columns, dtype=dtype, seed=8)
        wide = [leaf(t) for t in (gate, up)]
        want = functional.silu(wide[0]) * wide[1]
        want.backward(grad.double())
        assert_close(fused.swiglu(gate, up), want.detach(), dtype)
        for got, operand in zip(fused.swiglu_gradient(grad, gate, up), wide, strict=True):
            assert_close(got, operand.grad, dtype)


def test_rotation_is_the_references_and_turns_back(fused, dtype):
    for batch, heads, sequence, size in [(2, 3, 5, 14), (1, 1, 1, 2), (3, 2, 7, 64), (2, 1, 33, 2 * 263), (0, 3, 5, 4)]:
        x = normal(batch, sequence, heads, size, dtype=dtype, seed=9).transpose(1, 2)  # as attention has it
        angles = normal(sequence, size // 2, dtype=torch.float64, seed=10, scale=3)
        cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
        want = reference.rotate(x.double(), cosine.double(), sine.double())
        assert_close(fused.rotate(x, cosine, sine), want, dtype)
        assert_close(
            fused.rotate(x, cosine, sine, back=True), reference.rotate(x.double(), cosine.double(), -sine.double()), dtype
        )


def block_of(shape, slices, stream, probability):
    return Mask.of(stream, shape, slices, lambda: keep_mask(stream, shape, slices, probability))


BLOCKS = {  # global shape, this block
    "whole": ((5, 3, 64), (slice(0, 5), slice(0, 3), slice(0, 64))),
    "columns": ((4, 6, 61), (slice(1, 4), slice(0, 6), slice(13, 50))),
    "tokens": ((4, 9, 24), (slice(0, 4), slice(3, 8), slice(0, 24))),
    "attention": ((3, 4, 7, 11), (slice(1, 3), slice(2, 4), slice(0, 7), slice(0, 11))),
    "far": ((2**36, 3, 2), (slice(2**36 - 4, 2**36), slice(0, 3), slice(0, 2))),  # indices beyond 32 bits, rows of 2
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_mask_drawn_in_a_kernel_is_bit_for_bit_the_one_of_the_global_tensor(fused, dtype, name):
    shape, slices = BLOCKS[name]
    for probability in (0.1, 0.5):
        mask = block_of(shape, slices, key(seed=11, name=f"dropout/{name}", step=3), probability)
        keep = mask.draw().to(DEVICE)
        ones = torch.ones(mask.sizes, dtype=dtype, device=DEVICE)
        assert torch.equal(fused.dropout_add(ones, mask, probability) != 0, keep)
        assert torch.equal(fused.dropout_gradient(ones, mask, probability)[0] != 0, keep)
        swapped = mask.swapped()
        ones = torch.ones(swapped.sizes, dtype=dtype, device=DEVICE)
        assert torch.equal(fused.dropout_add(ones, swapped, probability) != 0, keep.transpose(0, 1))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("added", [True, False], ids=["residual", "alone"])
def test_bias_dropout_and_residual_are_added_as_in_the_reference(fused, dtype, biased, added):
    shape, slices = BLOCKS["columns"]
    mask = block_of(shape, slices, key(1, "dropout/blocks.0.mlp_branch"), 0.3)
    x, residual, grad = (normal(*mask.sizes, dtype=dtype, seed=seed) for seed in (12, 13, 14))
    bias = normal(mask.columns, dtype=dtype, seed=15) if biased else None
    residual, keep = residual if added else None, mask.draw().to(DEVICE)
    wide = [None if t is None else t.double() for t in (residual, bias)]
    assert_close(fused.dropout_add(x, mask, 0.3, residual, bias), reference.dropout_add(x.double(), keep, 0.3, *wide), dtype)
    of_x, of_bias = fused.dropout_gradient(grad, mask, 0.3, summed=biased)
    want, summed = reference.dropout_gradient(grad.double(), keep, 0.3, summed=biased)
    assert_close(of_x, want, dtype)
    assert (of_bias is None) is not biased
    if biased:
        assert_close(of_bias, summed, dtype, times=4)


def test_a_block_without_elements_is_dropped_from_without_a_launch(fused, dtype):
    for rest in ((slice(0, 0), slice(0, 3), slice(0, 8)), (slice(0, 2), slice(0, 3), slice(5, 5))):
        mask = block_of((2, 3, 8), rest, 5, 0.5)
        empty = torch.empty(mask.sizes, dtype=dtype, device=DEVICE)
        assert fused.dropout_add(empty, mask, 0.5, empty).shape == empty.shape
        _, of_bias = fused.dropout_gradient(empty, mask, 0.5, summed=True)
        assert torch.equal(of_bias, torch.zeros(mask.columns, dtype=dtype, device=DEVICE))


PAIRS = [
    (torch.float64, None),
    (torch.float32, None),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize(("gradient", "copied"), PAIRS, ids=str)
def test_three_steps_of_adamw_are_torchs(fused, gradient, copied):
    sizes, master = [(3, 7), (0,), (11, 13, 2), (5, 4099)], torch.float64 if gradient == torch.float64 else torch.float32
    weights = [normal(*size, dtype=master, seed=16) for size in sizes]
    moments = [[torch.zeros_like(w) for w in weights] for _ in range(2)]
    copies = None if copied is None else [torch.zeros_like(w, dtype=copied) for w in weights]
    plain = [torch.nn.Parameter(w.double().clone()) for w in weights]
    optimizer = torch.optim.AdamW(plain, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, foreach=False)
    for step in (1, 2, 3):
        grads = [normal(*size, dtype=gradient, seed=20 + step) for size in sizes]
        fused.adamw(weights, grads, *moments, [step] * 4, 0.01, (0.8, 0.95), 1e-6, 0.2, factor=0.125, copies=copies)
        for parameter, grad in zip(plain, grads, strict=True):
            parameter.grad = grad.double() * 0.125
        optimizer.step()
    for index, (weight, parameter) in enumerate(zip(weights, plain, strict=True)):
        assert_close(weight, parameter.detach(), master)
        state = optimizer.state[parameter]
        assert_close(moments[0][index], state["exp_avg"], master)
        assert_close(moments[1][index], state["exp_avg_sq"], master)
        if copies is not None:
            assert torch.equal(copies[index], weight.to(copied))


def test_moments_that_cannot_be_updated_in_place_are_refused(fused):
    weight, spread = torch.ones(4, 3, device=DEVICE), torch.ones(3, 4, device=DEVICE).t()
    with pytest.raises(ValueError, match="contiguous"):
        fused.adamw([weight], [weight], [spread], [weight], [1], 0.1, (0.9, 0.99), 1e-8, 0.0)


@pytest.mark.parametrize("to", SIXTEEN, ids=str)
def test_rounding_to_sixteen_bits_is_torchs_for_every_kind_of_number(fused, to):
    bits = torch.randint(-(2**31), 2**31, (60_000,), generator=torch.Generator().manual_seed(17)).to(torch.int32)
    edges = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(to).float()  # every 16-bit number, and its neighbours
    halves = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), (edges + edges.roll(-1)) / 2])
    weight = torch.cat([bits.view(torch.float32), halves]).to(DEVICE)
    still, copy = [torch.zeros_like(weight) for _ in range(3)], torch.zeros_like(weight, dtype=to)
    fused.adamw([weight], [still[0]], [still[1]], [still[2]], [1], 0.0, (0.9, 0.9), 1e-8, 0.0, copies=[copy])
    want = weight.to(to)
    same = (copy.view(torch.int16) == want.view(torch.int16)) | (copy.isnan() & want.isnan())
    assert bool(same.all())


@pytest.mark.parametrize("of", SIXTEEN, ids=str)
def test_every_sixteen_bit_number_is_read_as_torch_reads_it(fused, of):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(of)[None].to(DEVICE)
    most = fused.row_maximum(every.t().contiguous())  # one number a row: its widened self
    assert torch.equal(most.nan_to_num(1e9), every[0].float().nan_to_num(1e9))


@pytest.mark.parametrize("of", SIXTEEN, ids=str)
def test_parts_are_added_bit_for_bit_as_on_the_host(fused, of):
    for many, columns in [(1, 7), (2, 8), (5, 4099), (37, 61), (3, 0)]:
        parts = normal(many, columns, dtype=of, seed=30, scale=3)
        want, out = torch.empty(columns, dtype=of, device=DEVICE), torch.zeros(2, columns, dtype=of, device=DEVICE)
        reference.sum_parts(parts, want)
        fused.sum_parts(parts, out[1])
        apart = torch.zeros(columns, 2, dtype=of, device=DEVICE)
        fused.sum_parts(parts, apart[:, 1])
        assert torch.equal(out[1], want) and torch.equal(apart[:, 1], want) and not out[0].any() and not apart[:, 0].any()
