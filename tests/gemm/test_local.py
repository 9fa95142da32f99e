"""One product on one process: forms, alpha, beta, out, dtypes, views, empty sizes, for numpy and torch."""

from __future__ import annotations

import itertools
from math import sqrt

import numpy as np
import pytest
from kinds import array, plain

from summa3d.gemm.local.blas import accumulate, add
from summa3d.gemm.local.multiply import multiply

FORMS = ("nn", "nt", "tn", "tt")
UNIT = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
KINDS = [("numpy", name) for name in UNIT if name != "bfloat16"] + [("torch", name) for name in UNIT]


def operands(kind, dtype, form, m, n, k):
    """Operands as stored for `form`, and op(A), op(B) as numpy holds them."""
    random = np.random.default_rng(3)
    left, right = random.standard_normal((m, k)), random.standard_normal((k, n))
    if dtype.startswith("complex"):
        left, right = left + 1j * random.standard_normal((m, k)), right - 1j * random.standard_normal((k, n))
    a = array(kind, dtype, left.T if form[0] == "t" else left)
    b = array(kind, dtype, right.T if form[1] == "t" else right)
    return a, b, plain(a).T if form[0] == "t" else plain(a), plain(b).T if form[1] == "t" else plain(b)


def assert_close(got, want, dtype, k):
    assert plain(got).shape == want.shape
    assert np.linalg.norm(plain(got) - want) <= 8 * UNIT[dtype] * sqrt(max(k, 1)) * np.linalg.norm(want)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_with_alpha_beta_and_out(kind, dtype, form):
    a, b, left, right = operands(kind, dtype, form, 13, 7, 29)
    want = left @ right
    assert_close(multiply(a, b, form), want, dtype, 29)
    poison = array(kind, dtype, np.full((13, 7), np.nan))
    assert multiply(a, b, form, out=poison) is poison
    assert_close(poison, want, dtype, 29)  # what it held was never read
    before = array(kind, dtype, np.arange(91.0).reshape(13, 7) % 5)
    for alpha, beta in ((0.5, 0), (1, 1), (2, -0.5)) if (kind, dtype) != ("numpy", "float16") else ():  # executors widen it
        out = array(kind, dtype, plain(before) if beta else np.full((13, 7), np.nan))
        accumulate(a, b, form, out, alpha, beta)
        assert_close(out, alpha * want + beta * plain(before), dtype, 29)
    assert str(multiply(a, b, form).dtype).removeprefix("torch.") == dtype
    assert np.array_equal(plain(a), left.T if form[0] == "t" else left)  # operands are only read


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_empty_sizes_give_empty_or_zero_products(kind, form):
    for m, n, k in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        a, b, _, _ = operands(kind, "float64", form, m, n, k)
        assert np.array_equal(plain(multiply(a, b, form)), np.zeros((m, n)))
        out = array(kind, "float64", np.full((m, n), 2.0))
        assert np.array_equal(plain(multiply(a, b, form, out=out)), np.zeros((m, n)))
        out[...] = 2
        accumulate(a, b, form, out, 2, 3)
        assert np.array_equal(plain(out), np.full((m, n), 6.0))


def test_float16_sums_are_taken_in_float32():
    """2048 + 1 is 2048 in float16: adding 4096 ones to it in 16 bits would give 2048."""
    a, b = np.ones((1, 4097), np.float16), np.ones((4097, 1), np.float16)
    a[0, 0] = 2048
    assert multiply(a, b, "nn")[0, 0] == 6144


def test_add_never_reads_out_where_beta_is_zero():
    out = np.full(3, np.inf)
    add(np.ones(3), out, 0)
    assert out.tolist() == [1, 1, 1]
    add(np.ones(3), out, -2)
    assert out.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("form", ["nn", "tn", "nt", "tt"])
def test_rows_that_overlap_or_are_one_are_no_rows_to_a_blas(form):
    """Windows that slide over a vector, and one row shown many times: a BLAS would be given a step shorter than a row."""
    vector = np.random.default_rng(1).standard_normal(60)
    shown = np.lib.stride_tricks.sliding_window_view(vector, 30), np.broadcast_to(vector[:31], (31, 31))
    for left, right in itertools.product(shown, repeat=2):
        out = np.ones((31 if form[0] == "n" else left.shape[1], right.shape[1] if form[1] == "n" else 31))
        first, second = (one if letter == "n" else one.T for one, letter in zip((left, right), form, strict=True))
        if first.shape[1] != second.shape[0]:
            continue
        accumulate(left, right, form, out, 2, 3)
        np.testing.assert_allclose(out, 2 * first @ second + 3, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha", [1, 2])
def test_no_output_that_is_read_only_is_written(alpha):
    a, out = np.ones((130, 130)), np.zeros((130, 130))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        accumulate(a, a, "nn", out, alpha)
    assert not out.any()
