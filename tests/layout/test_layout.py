"""The rules of ownership, for random shapes, grids and layouts: nothing here starts MPI."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.errors import LayoutError
from summa3d.layout import Layout, Sharding, split_sizes
from summa3d.layout.layout import split_range

AXES = ("x", "y", "z", "d")


@dataclass
class Place:
    """What a Sharding asks of a grid."""

    shape: dict[str, int]
    coordinates: dict[str, int]


@st.composite
def split_tensors(draw):
    """(layout, tensor shape, grid shape): some axes of a grid, in any order, dealt out over the dims of a tensor."""
    grid_shape = {name: draw(st.integers(1, 4)) for name in AXES[: draw(st.integers(1, 4))]}
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    dims = [[] for _ in shape]
    for name in draw(st.permutations(list(grid_shape))):
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            dims[place].append(name)
    return Layout(*dims), shape, grid_shape


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_split_sizes_are_balanced_larger_first_and_sum_to_the_whole(n, parts):
    sizes = split_sizes(n, parts)
    assert len(sizes) == parts and sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    ends = np.cumsum(sizes).tolist()
    assert [split_range(5, 5 + n, parts, index) for index in range(parts)] == [
        (5 + end - size, 5 + end) for end, size in zip(ends, sizes, strict=True)
    ]


@given(split_tensors())
@settings(max_examples=150, deadline=None)
def test_the_blocks_cover_each_element_exactly_once_per_copy(case):
    layout, shape, grid_shape = case
    held, owned = np.zeros(shape, int), np.zeros(shape, int)
    ranks = 0
    for coordinates, slices in layout.blocks(shape, grid_shape):
        sharding, place = Sharding(layout, shape), Place(grid_shape, coordinates)
        assert sharding.slices(place) == slices == layout.slices(shape, grid_shape, coordinates)
        held[slices] += 1
        owned[slices] += sharding.is_primary(place)
        extents = tuple(part.stop - part.start for part in slices)
        assert layout.local_shape(shape, grid_shape, coordinates) == sharding.local_shape(place) == extents == held[slices].shape
        ranks += 1
    copies = prod(size for name, size in grid_shape.items() if name not in layout.axes)
    assert ranks == prod(grid_shape.values())
    assert (held == copies).all() and (owned == 1).all()


@given(split_tensors())
@settings(max_examples=100, deadline=None)
def test_splits_nest_and_each_level_is_balanced(case):
    """Without its last axis, a dim's block is the union of the blocks it is cut into, in order, in the sizes of `split_sizes`."""
    layout, shape, grid_shape = case
    for dim, axes in enumerate(layout.dims):
        if not axes:
            continue
        coarse = Layout(*(names[:-1] if place == dim else names for place, names in enumerate(layout.dims)))
        for coordinates, slices in coarse.blocks(shape, grid_shape):
            parts = [
                layout.slices(shape, grid_shape, {**coordinates, axes[-1]: index})[dim] for index in range(grid_shape[axes[-1]])
            ]
            whole = slices[dim]
            assert [part.stop - part.start for part in parts] == split_sizes(whole.stop - whole.start, len(parts))
            assert parts[0].start == whole.start and parts[-1].stop == whole.stop
            assert all(left.stop == right.start for left, right in itertools.pairwise(parts))
        assert layout.num_shards(dim, grid_shape) == prod(grid_shape[name] for name in axes)


def test_a_worked_example_by_hand():
    """7 rows over x=2: 4 and 3; each over y=3: 2,1,1 and 1,1,1. 5 columns over z=2: 3 and 2."""
    layout, grid_shape = Layout(("x", "y"), ("z",)), {"x": 2, "y": 3, "z": 2}
    rows = [layout.slices((7, 5), grid_shape, {"x": x, "y": y, "z": 0})[0] for x in range(2) for y in range(3)]
    assert rows == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 6), slice(6, 7)]
    assert [layout.slices((7, 5), grid_shape, {"x": 0, "y": 0, "z": z})[1] for z in range(2)] == [slice(0, 3), slice(3, 5)]
    turned = Layout(("y", "x"), ("z",))  # y first: 3,2,2, each over x: 2,1 1,1 1,1
    assert turned.local_shape((7, 5), grid_shape, {"x": 1, "y": 0, "z": 1}) == (1, 2)


def test_layouts_are_values():
    layout = Layout(("x", "y"), (), ["z"])
    assert layout == Layout(["x", "y"], [], "z") and hash(layout) == hash(Layout(("x", "y"), (), ("z",)))
    assert layout != Layout(("y", "x"), (), ("z",)) and layout != (("x", "y"), (), ("z",))
    assert layout.axes == {"x", "y", "z"} and layout.dims == (("x", "y"), (), ("z",))
    assert layout.transposed() == Layout(("z",), (), ("x", "y"))
    assert str(layout) == "0:(x,y) 1 2:z" and repr(layout) == "Layout('0:(x,y) 1 2:z')"
    with pytest.raises(AttributeError, match="immutable"):
        layout.dims = ()
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
        assert other == layout
    assert copy.deepcopy(Sharding(layout, (3, 4, 5))) == Sharding(layout, (3, 4, 5))


def test_errors_name_the_axis_the_dims_and_the_grid():
    with pytest.raises(LayoutError, match="Axis 'x' splits two dims, or one dim twice, in Layout"):
        Layout(("x",), ("x",))
    with pytest.raises(LayoutError, match="Axis 'y' splits"):
        Layout(("y", "y"))
    with pytest.raises(LayoutError, match=r"describes 2 dims; a tensor of shape \(3, 4, 5\) has 3"):
        Layout(("x",), ()).slices((3, 4, 5), {"x": 2}, {"x": 0})
    with pytest.raises(LayoutError, match="names axis 'w'; the grid has the axes x, y"):
        Layout(("w",)).local_shape((3,), {"x": 2, "y": 1}, {"x": 0, "y": 0})
