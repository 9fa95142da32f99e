"""Fused norms and cross entropy against float64 torch.

With rows split over simulated ranks, in every dtype, size and alignment.
"""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, SHAPES, assert_close, instead, leaf, normal
from summa3d.kernels import reference
from summa3d.kernels.reference import wide_dtype
from torch.nn import functional

EPS = 1e-5


def rms_norm(x, gamma):
    return gamma * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@pytest.mark.parametrize("ways", [1, 3])
def test_layer_norm_over_split_rows_and_its_gradients_are_torchs(fused, dtype, ways):
    for rows, columns in [(rows, columns) for rows, columns in SHAPES if columns > 1]:
        x, grad = (normal(rows, columns, dtype=dtype, seed=seed) for seed in (1, 2))
        gamma, beta = (normal(columns, dtype=dtype, seed=seed) + 1 for seed in (3, 4))
        wide = [leaf(t) for t in (x, gamma, beta)]
        want = functional.layer_norm(wide[0], (columns,), *wide[1:], EPS)
        want.backward(grad.double())
        blocks = list(zip(*(t.tensor_split(ways, -1) for t in (x, grad, gamma, beta)), strict=True))  # rows lie apart
        sums = sum(fused.norm_sums(block[0]) for block in blocks)
        mean, inverse = fused.norm_statistics(sums, columns, EPS, dtype)
        normal_x = (x.double() - mean) * inverse
        weighted = grad.double() * gamma.double()
        row_sums = torch.stack((weighted.sum(-1), (weighted * normal_x).sum(-1)), -1).to(mean.dtype)
        got = []
        for part, of_y, g, b in blocks:
            y = fused.norm(part, mean, inverse, g, b)
            of_x, vectors = fused.norm_gradient(of_y, part, g, mean, inverse, columns, instead(row_sums))
            got.append((y, of_x, *vectors))
        for values, result in zip(zip(*got, strict=True), (want.detach(), *(t.grad for t in wide)), strict=True):
            assert_close(torch.cat(values, -1), result, dtype, times=6)


@pytest.mark.parametrize("ways", [1, 3])
def test_rms_norm_over_split_rows_and_its_gradients_are_torchs(fused, dtype, ways):
    for rows, columns in [(rows, columns) for rows, columns in SHAPES if columns > 1]:
        x, grad = (normal(rows, columns, dtype=dtype, seed=seed) for seed in (5, 6))
        gamma = normal(columns, dtype=dtype, seed=7) + 1
        wide = [leaf(t) for t in (x, gamma)]
        want = rms_norm(*wide)
        want.backward(grad.double())
        blocks = list(zip(*(t.tensor_split(ways, -1) for t in (x, grad, gamma)), strict=True))
        sums = sum(fused.norm_sums(block[0], centred=False) for block in blocks)
        mean, inverse = fused.norm_statistics(sums, columns, EPS, dtype)
        assert mean is None
        along = (grad.double() * gamma.double() * x.double() * inverse).sum(-1, keepdim=True).to(inverse.dtype)
        got = []
        for part, of_y, g in blocks:
            of_x, (of_gamma,) = fused.norm_gradient(of_y, part, g, None, inverse, columns, instead(along))
            got.append((fused.norm(part, None, inverse, g, None), of_x, of_gamma))
        for values, result in zip(zip(*got, strict=True), (want.detach(), *(t.grad for t in wide)), strict=True):
            assert_close(torch.cat(values, -1), result, dtype, times=6)


@pytest.mark.parametrize("name", ["layer", "rms"])
def test_what_backward_sums_over_ranks_is_what_the_formulas_say(fused, dtype, name):
    for rows, columns in [(7, 61), (3, 4099), (1, 1)]:
        x, grad, gamma = normal(rows, columns, dtype=dtype, seed=8), normal(rows, columns, dtype=dtype, seed=9), None
        gamma, inverse = normal(columns, dtype=dtype, seed=10), normal(rows, 1, dtype=torch.float64, seed=11)
        mean, started = normal(rows, 1, dtype=torch.float64, seed=12), []
        narrow = torch.float64 if dtype == torch.float64 else torch.float32
        mean, inverse = mean.to(narrow), inverse.to(narrow)
        weighted = grad.double() * gamma.double()

        def start(sums, started=started):
            started.append(sums)
            return instead(sums)(sums)

        if name == "layer":
            fused.norm_gradient(grad, x, gamma, mean, inverse, columns, start)
            want = [weighted.sum(-1), (weighted * (x.double() - mean) * inverse).sum(-1)]
        else:
            fused.norm_gradient(grad, x, gamma, None, inverse, columns, start)
            want = [(weighted * x.double() * inverse).sum(-1)]
        assert started[0].dtype == narrow
        scale = torch.linalg.vector_norm(weighted, dim=-1).max()  # sums cancel: close on the scale of what is summed
        close = {torch.float64: 1e-13}.get(dtype, 1e-5)
        assert (started[0].double() - torch.stack(want, -1)).abs().max() <= close * scale * (1 + inverse.abs().max()) * 3


def test_row_sums_are_as_accurate_as_the_references(fused, dtype):
    x = normal(29, 517, dtype=dtype, seed=13) + 300  # far from zero, where E[x²] − E[x]² cancels
    want = torch.stack((x.double().sum(-1), x.double().square().sum(-1)), -1)
    got = fused.norm_sums(x)
    assert got.dtype == wide_dtype(dtype) == reference.norm_sums(x).dtype
    assert torch.equal(fused.norm_sums(x, centred=False)[:, 0], got[:, 1])
    close = 1e-15 if got.dtype == torch.float64 else 3e-7
    assert ((got.double() - want).abs() <= close * want).all()
    mean, inverse = fused.norm_statistics(got, 517, EPS, dtype)
    if got.dtype == torch.float64:
        assert torch.allclose(mean[:, 0].double(), x.double().mean(-1), rtol=1e-7)
        want_inverse = (x.double().var(-1, correction=0) + EPS).rsqrt()
        assert torch.allclose(inverse[:, 0].double(), want_inverse, rtol=3e-7 if dtype == torch.float32 else 1e-8)


def test_rows_of_one_number_have_no_variance_below_zero(fused, dtype):
    x = torch.linspace(100, 40_000, 41, dtype=torch.float64)[:, None].expand(41, 517).to(DEVICE, dtype)
    mean, inverse = fused.norm_statistics(fused.norm_sums(x), 517, EPS, dtype)
    assert bool(inverse.isfinite().all()) and bool((inverse > 0).all())
    assert torch.allclose(mean.double(), x[:, :1].double(), rtol=1e-6)


def test_a_rank_without_columns_adds_nothing(fused, dtype):
    none, labels = normal(3, 0, dtype=dtype, seed=14), torch.tensor([0, 1, -1], device=DEVICE)
    assert torch.equal(fused.norm_sums(none), torch.zeros(3, 2, dtype=wide_dtype(dtype), device=DEVICE))
    most = fused.row_maximum(none)
    assert torch.equal(most, torch.full_like(most, -torch.inf))
    _, sums = fused.cross_entropy_sums(none, torch.zeros_like(most), labels, 7)
    assert torch.equal(sums, torch.zeros_like(sums))


@pytest.mark.parametrize("ways", [1, 4])
def test_cross_entropy_over_a_split_vocabulary_and_its_gradient_are_torchs(fused, dtype, ways):
    for rows, words in [(1, 1), (13, 3), (7, 191), (5, 4099), (0, 9)]:
        logits = normal(rows, words, dtype=dtype, seed=15, scale=20)
        labels = torch.randint(-1, words, (rows,), generator=torch.Generator().manual_seed(16)).to(DEVICE)
        wide, scale = leaf(logits), 0.25 + torch.rand(rows, device=DEVICE, dtype=torch.float64)
        scale = torch.where(labels >= 0, scale, 0.0)
        want = functional.cross_entropy(wide, labels, reduction="none", ignore_index=-1)
        (want * scale).sum().backward()
        parts = logits.tensor_split(ways, -1)
        firsts = [sum(part.shape[1] for part in parts[:index]) for index in range(ways)]
        maximum = torch.stack([fused.row_maximum(part) for part in parts]).amax(0)
        assert torch.equal(maximum, logits.amax(-1).to(maximum.dtype) if rows else maximum)
        total, picked = sum(
            fused.cross_entropy_sums(part, maximum, labels, first)[1] for part, first in zip(parts, firsts, strict=True)
        ).unbind(-1)
        loss = torch.where(labels >= 0, total.log() - picked, 0.0)
        assert_close(loss, want.detach(), torch.float32 if dtype.itemsize < 4 else dtype, times=3)
        for part, first, grad in zip(parts, firsts, wide.grad.tensor_split(ways, -1), strict=True):
            kept = fused.cross_entropy_kept(part, maximum, total)
            before = part.clone()
            got = fused.cross_entropy_gradient(kept, labels, first, scale)
            difference = torch.linalg.vector_norm(got.double() - grad)
            assert difference <= {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 3e-3) * (1e-3 + wide.grad.norm())
            assert torch.equal(part, before)


def test_words_that_cannot_come_have_no_share_and_what_is_not_a_number_is_not_hidden(fused, dtype):
    logits = normal(4, 37, dtype=dtype, seed=17)
    logits[1, 5:30], logits[2, 8] = -torch.inf, torch.nan
    labels = torch.tensor([3, 2, 1, 0], device=DEVICE)
    maximum = fused.row_maximum(logits)
    assert torch.equal(maximum.isnan(), torch.tensor([False, False, True, False], device=DEVICE))
    kept, sums = fused.cross_entropy_sums(logits, maximum, labels, 0)
    total, picked = sums.unbind(-1)
    want = functional.cross_entropy(logits.double(), labels, reduction="none")
    assert torch.allclose((total.log() - picked).double(), want, rtol=1e-5, equal_nan=True)
    grad = fused.cross_entropy_gradient(fused.cross_entropy_kept(kept, maximum, total), labels, 0, torch.ones_like(total))
    assert torch.equal(grad[1, 5:30], torch.zeros_like(grad[1, 5:30])) and bool(grad[2].isnan().all())
