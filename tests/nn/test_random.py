"""Counter-based random numbers: pure functions of the global index, with the distribution they claim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.errors import ConfigError
from summa3d.layout.random import bits, key
from summa3d.nn import Linear, scheme
from summa3d.nn.random import keep_mask, normal_


def whole(shape):
    return tuple(slice(0, n) for n in shape)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=4, max_size=4),
    first=st.integers(0, 50),
)
@settings(max_examples=150, deadline=None)
def test_a_block_holds_the_numbers_of_its_global_elements(shape, cuts, first):
    stream = key(3, "weight")
    slices = tuple(slice(round(min(cut) * n), round(max(cut) * n)) for n, cut in zip(shape, cuts, strict=False))
    assert np.array_equal(bits(stream, shape, slices, first), bits(stream, shape, whole(shape), first)[slices])


@pytest.mark.parametrize("std", ["much", None, np.zeros(2), float("nan"), float("inf"), 10**400, -(2**200)], ids=str)
def test_a_deviation_is_a_finite_number(std):
    with pytest.raises(ConfigError, match="a finite number as their deviation"):
        Linear(3, 5, scheme("serial"), std=std)


def test_wide_rows_are_drawn_one_by_one_and_hold_the_same_numbers():
    shape, part = (3, 40_001), (slice(1, 3), slice(20_003, 20_016))
    assert np.array_equal(bits(5, shape, part), bits(5, shape, whole(shape))[part])


def test_the_numbers_are_philox4x64_of_the_key_and_the_counter():
    drawn = np.random.Philox(key=9, counter=0).random_raw(8).view(np.uint32)
    assert np.array_equal(bits(9, (16,), (slice(0, 16),)), drawn)
    assert np.array_equal(bits(9, (16,), (slice(9, 14),)), drawn[9:14])


@pytest.mark.parametrize("other", [(2, "a", 0), (1, "b", 0), (1, "a", 1)])
def test_seed_name_and_step_each_change_the_stream(other):
    assert key(1, "a", 0) != key(*other)
    same = bits(key(1, "a", 0), (1000,), whole((1000,))) == bits(key(*other), (1000,), whole((1000,)))
    assert same.mean() < 0.01


def test_normal_numbers_have_the_moments_asked_for():
    shape = (400, 500)
    x = normal_(torch.empty(shape, dtype=torch.float64), key(1, "w"), shape, whole(shape), 0.5)
    assert abs(x.mean()) < 0.005
    assert abs(x.std() - 0.5) < 0.005
    assert abs((x / 0.5).pow(4).mean() - 3) < 0.05
    assert abs(torch.corrcoef(torch.stack((x[:, :-1].flatten(), x[:, 1:].flatten())))[0, 1]) < 0.01


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_masks_keep_one_minus_p(probability):
    mask = keep_mask(key(1, "mask"), (500, 400), whole((500, 400)), probability)
    assert abs(mask.double().mean() - (1 - probability)) < 0.005
