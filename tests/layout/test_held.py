"""Layouts held at some indices of an axis: pipeline stages, tied tables on two of them, and shards of copies."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d.errors import LayoutError
from summa3d.layout import Layout, Redistribution, collect, distribute, redistribute
from summa3d.layout.layout import Sharding, split_sizes
from summa3d.layout.redistribute import Placement

GRID = {"z": 2, "dp": 2, "pp": 3}
STAGE, TIED = Layout("h:z n @pp=2"), Layout("h:z n @pp=0+2")


def test_a_held_block_lies_at_its_indices_and_is_empty_elsewhere():
    for layout, indices in ((STAGE, (2,)), (TIED, (0, 2))):
        held, primary = np.zeros((5, 7), int), np.zeros((5, 7), int)
        for coordinates, slices in layout.blocks((5, 7), GRID):
            held[slices] += 1
            assert layout.holds_block(coordinates) == (coordinates["pp"] in indices)
            assert (layout.local_shape((5, 7), GRID, coordinates) != (0, 0)) == (coordinates["pp"] in indices)
            if layout.is_primary(coordinates):
                assert (coordinates["pp"], coordinates["dp"]) == (indices[0], 0)
                primary[slices] += 1
        assert (held == 2 * len(indices)).all() and (primary == 1).all()


def test_indices_that_hold_copies_hold_a_part_each_where_the_axis_splits_a_dim():
    layout = Layout("v:(z,dp) h @pp=0+2").sharded_over(("pp",))
    assert str(layout) == "v:(z,dp,pp) h @pp=0+2" and Layout(str(layout)) == layout and layout.num_shards(0, GRID) == 8
    held = np.zeros((13, 3), int)
    for coordinates, slices in layout.blocks((13, 3), GRID):
        held[slices] += 1
        assert layout.is_primary(coordinates) == layout.holds_block(coordinates) == (coordinates["pp"] != 1)
    assert (held == 1).all()
    assert [layout.local_shape((13, 3), GRID, {"z": 0, "dp": 0, "pp": pp}) for pp in range(3)] == [(2, 3), (0, 0), (2, 3)]


def test_where_a_layout_is_held_is_part_of_its_identity():
    copied = Layout("h:z n")
    assert STAGE not in (TIED, copied) and copied.held_at({"pp": (2,)}) == STAGE
    assert Layout((), at={"pp": (0,)}) == Layout((), root_only=("pp",)) and Layout("h").held_at({}) == Layout("h")
    assert str(TIED.transposed()) == "n h:z @pp=0+2" and str(TIED.named("v", "h")) == "v:z h @pp=0+2"
    assert STAGE.held_at({"pp": (0,)}) == Layout("h:z n @pp=0") and TIED.held_at({"pp": (1,)}) == Layout("h:z n @pp=1")
    assert TIED.held_at({"dp": (1,)}) == Layout("h:z n @pp=0+2,dp=1")
    for layout in (STAGE, TIED, Layout("h:z @y=z,pp=1")):
        assert pickle.loads(pickle.dumps(layout)) == layout == eval(repr(layout))
    assert len({STAGE, TIED, STAGE.transposed(), Layout("h:z n @pp=2")}) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(("z",), at={"pp": ()}), "must name the indices that hold the block"),
        (lambda: Layout(("z",), at={"pp": (-1,)}), "must name the indices that hold the block"),
        (lambda: Layout(("z",), at={"z": (1,)}), "Axis 'z' splits two dims"),
        (lambda: Layout(("z",), root_only=("y",), follows={"y": "z"}, at={"y": (1,)}), "cannot be held at .* and follow 'z'"),
        (lambda: Layout("h:z", at={"pp": (1,)}), "The text says everything"),
        (lambda: Layout("h:z @dp=0").sharded_over(("dp",)), "Axis 'dp' splits two dims"),
        (lambda: Layout("h @pp=3").slices((4,), GRID, {"z": 0, "dp": 0, "pp": 0}), r"index 3 of axis pp, whose size is 3"),
        (lambda: Layout("h @cp=1").slices((4,), GRID, {"z": 0, "dp": 0, "pp": 0}), r"whose size is not known"),
    ],
)
def test_layouts_that_cannot_be_held_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


@given(st.integers(0, 9), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_shards_of_copies_are_the_parts_of_each_block_in_order(n, dp, cp, held):
    """The nested split: dp cuts a block, cp each part; short vectors have empty shards, and each element is stored once."""
    grid = {"z": 2, "dp": dp, "cp": cp, "pp": 2}
    used = Layout("h:z @pp=1") if held else Layout("h:z")
    stored = used.sharded_over(("dp", "cp"))
    assert stored.dims == (("z", "dp", "cp"),) and stored.at == used.at
    assert Sharding(used, (n,)).sharded_over(("dp", "cp")) == Sharding(stored, (n,))
    for z, pp in itertools.product(range(2), range(2)):
        (whole,) = used.slices((n,), grid, {"z": z, "dp": 0, "cp": 0, "pp": pp})
        parts = [
            stored.slices((n,), grid, {"z": z, "dp": i, "cp": j, "pp": pp})[0] for i, j in itertools.product(range(dp), range(cp))
        ]
        if used.holds_block({"z": z, "pp": pp}):
            assert [part.start for part in parts] == [whole.start, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == whole.stop
        sizes = [split_sizes(size, cp) for size in split_sizes(whole.stop - whole.start, dp)]
        assert [part.stop - part.start for part in parts] == list(itertools.chain(*sizes))


@pytest.mark.mpi(sizes=(12,))
def test_held_and_sharded_tensors_are_collected_and_redistributed(make_grid):
    grid, whole = make_grid(**GRID), np.arange(35.0).reshape(5, 7)
    layouts = [STAGE, TIED, STAGE.sharded_over(("dp",)), TIED.sharded_over(("dp",)), Layout("m:(dp,pp) n:z"), Layout("m n")]
    layouts.append(TIED.sharded_over(("dp", "pp")))
    for source, target in itertools.permutations(layouts, 2):
        block = distribute(whole, grid, source)
        assert np.array_equal(collect(block, grid, source, whole.shape), whole)
        assert np.array_equal(redistribute(block, whole.shape, grid, source, target), distribute(whole, grid, target))
        plan = Redistribution(whole.shape, Placement.on(grid, source), Placement.on(grid, target))
        assert sum(piece.words for piece in plan.received_by(grid.rank)) == plan.words_of(grid.rank)
    assert not Redistribution(whole.shape, Placement.on(grid, TIED), Placement.on(grid, STAGE)).moves()
