"""Hosted axes: index 0 holds the block, all others an empty one; slices, distribution, collection, redistribution."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from summa3d.errors import LayoutError
from summa3d.layout import Layout, Redistribution, collect, distribute, redistribute
from summa3d.layout.redistribute import Placement

GRID = {"x": 2, "y": 2, "z": 2}


def test_only_index_0_of_a_hosted_axis_holds_elements():
    layout = Layout(("x",), ("z",), root_only=("y",))
    assert layout.local_shape((5, 7), GRID, {"x": 0, "y": 0, "z": 1}) == (3, 3)
    assert layout.local_shape((5, 7), GRID, {"x": 0, "y": 1, "z": 1}) == (0, 0)
    held = np.zeros((5, 7), int)
    for _, slices in layout.blocks((5, 7), GRID):
        held[slices] += 1
    assert (held == 1).all()


def test_hosting_is_part_of_a_layouts_identity():
    layout = Layout(("x",), (), root_only=("y",))
    assert layout != Layout(("x",), ()) and layout == Layout(("x",), (), root_only=("y",))
    assert layout.transposed() == Layout((), ("x",), root_only=("y",)) and str(layout) == "0:x 1 @y=0"
    with pytest.raises(LayoutError):
        Layout(("x",), (), root_only=("x",))


def test_a_layout_survives_being_sent_to_another_rank():
    for layout in (Layout(("z", "x"), root_only=("y",), follows={"y": "z"}), Layout(("x",), (), root_only=("y",))):
        assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_host_that_follows_another_axis_holds_the_diagonal():
    layout = Layout(("z", "x"), root_only=("y",), follows={"y": "z"})
    assert layout != Layout(("z", "x"), root_only=("y",)) and "y=z" in repr(layout)
    held, owners = np.zeros(7, int), 0
    for coordinates, slices in layout.blocks((7,), GRID):
        held[slices] += 1
        owners += layout.is_primary(coordinates)
        assert layout.holds_block(coordinates) == (coordinates["y"] == coordinates["z"])
    assert (held == 1).all() and owners == 4


@pytest.mark.mpi(sizes=(8,))
def test_a_vector_on_the_diagonal_is_collected_and_redistributed(make_grid):
    grid, whole = make_grid(**GRID), np.arange(7.0)
    diagonal, copied = Layout(("z", "x"), root_only=("y",), follows={"y": "z"}), Layout(("y",))
    block = distribute(whole, grid, diagonal)
    assert np.array_equal(collect(block, grid, diagonal, whole.shape), whole)
    assert np.array_equal(redistribute(block, whole.shape, grid, diagonal, copied), distribute(whole, grid, copied))
    assert np.array_equal(redistribute(distribute(whole, grid, copied), whole.shape, grid, copied, diagonal), block)


@pytest.mark.mpi(sizes=(8,))
def test_a_hosted_matrix_is_distributed_collected_and_redistributed(comm, make_grid):
    grid, whole = make_grid(**GRID), np.arange(35.0).reshape(5, 7)
    faces, cuboid = Layout(("x",), ("z",), root_only=("y",)), Layout(("x", "y"), ("z",))
    block = distribute(whole, grid, faces)
    assert block.size == 0 or grid.coordinates["y"] == 0
    assert np.array_equal(collect(block, grid, faces, whole.shape), whole)
    for source, target in ((faces, cuboid), (cuboid, faces), (faces, Layout((), ()))):
        moved = redistribute(distribute(whole, grid, source), whole.shape, grid, source, target)
        assert np.array_equal(moved, distribute(whole, grid, target))
    plan = Redistribution(whole.shape, Placement.on(grid, faces), Placement.on(grid, Layout((), ())))
    held = block.size
    assert plan.words_of(grid.rank) == whole.size - held
