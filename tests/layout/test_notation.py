"""The text of a layout: what is printed is accepted, by every function that takes a layout; errors name the position."""

from __future__ import annotations

import copy
import doctest
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from summa3d import DistMatrix
from summa3d.errors import LayoutError
from summa3d.gemm import CuboidPlan
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.layout import BlockCyclic, Layout, collect, distribute, ownership, redistribute

AXES = ("x", "y", "z", "d", "dp", "pp")
NAMES = ("m", "k", "n", "b", "s", "h", "heads", "größe")


@st.composite
def layouts(draw) -> Layout:
    """Any axes on any dims, names or none, root-only axes at 0 or following an axis of the dims."""
    dims: list[list[str]] = [[] for _ in range(draw(st.integers(0, 4)))]
    root_only = []
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-2, len(dims) - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -1:
            root_only.append(axis)
    splitting = [axis for axes in dims for axis in axes]
    follows = {axis: draw(st.sampled_from(splitting)) for axis in root_only if splitting and draw(st.booleans())}
    names = draw(st.none() | st.lists(st.sampled_from(NAMES), min_size=len(dims), max_size=len(dims)))
    indices = st.lists(st.integers(0, 12), min_size=1, max_size=3)
    at = {axis: draw(indices) for axis in root_only if axis not in follows and draw(st.booleans())}
    return Layout(*dims, root_only=root_only, follows=follows, at=at, names=names)


@st.composite
def cyclic_layouts(draw) -> BlockCyclic:
    rows, columns = [], []
    for axis in draw(st.permutations(AXES)):
        draw(st.sampled_from([rows, columns, []])).append(axis)
    return BlockCyclic((tuple(rows), draw(st.integers(1, 300))), (tuple(columns), draw(st.integers(1, 300))))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_what_a_layout_prints_is_the_layout(layout):
    for other in (Layout(str(layout)), ownership(str(layout)), eval(repr(layout))):
        assert type(other) is Layout and other == layout and hash(other) == hash(layout)
        assert (other.dims, other.root_only, other.follows, other.at, other.names or ()) == (
            layout.dims,
            layout.root_only,
            layout.follows,
            layout.at,
            layout.names or (),
        )
        assert str(other) == str(layout)


@given(cyclic_layouts())
def test_what_a_block_cyclic_layout_prints_is_that_layout(layout):
    assert ownership(str(layout)) == BlockCyclic.from_text(str(layout)) == eval(repr(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("b:(x,y) s h:z", Layout(("x", "y"), (), ("z",))),
        ("  m:x   k:y ", Layout(("x",), ("y",))),
        ("m:(x) k", Layout(("x",), ())),
        ("0:x 1", Layout(("x",), ())),
        ("m:x 1:y", Layout(("x",), ("y",))),
        ("", Layout()),
        ("@y=0", Layout(root_only=("y",))),
        ("m:x k:z @y=0", Layout(("x",), ("z",), root_only=("y",))),
        ("h:(z,x) @y=z,d=0", Layout(("z", "x"), root_only=("y", "d"), follows={"y": "z"})),
        ("h n:y @pp=2", Layout((), ("y",), at={"pp": (2,)})),
        ("v h @y=0,pp=0+3", Layout((), (), root_only=("y",), at={"pp": (3, 0)})),
        ("h @pp=0", Layout((), at={"pp": (0,)})),
        ("m:x[64] k:(y,z)[3]", BlockCyclic(("x", 64), (("y", "z"), 3))),
        ("m[8] k:y[3]", BlockCyclic(((), 8), ("y", 3))),
    ],
)
def test_a_text_says_what_the_tuples_say(text, layout):
    assert ownership(text) == layout


def test_names_are_labels_that_equality_ignores_and_copies_keep():
    named, plain = Layout("m:(x,y) k:z"), Layout(("x", "y"), ("z",))
    assert named == plain and hash(named) == hash(plain) and {named: 1}[plain] == 1
    assert str(plain) == "0:(x,y) 1:z" and str(plain.named("m", "k")) == "m:(x,y) k:z" == str(named)
    assert str(named.transposed()) == "k:z m:(x,y)"
    for other in (pickle.loads(pickle.dumps(named)), copy.deepcopy(named)):
        assert str(other) == "m:(x,y) k:z"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m:(x,y k:z", r"at position 6: found ' k:z', expected ',' or '\)'"),
        ("m:(x", r"at position 4: found the end, expected ',' or '\)'"),
        ("m:() k", r"at position 3: found '\) k', expected an axis"),
        ("m:", "at position 2: found the end, expected an axis"),
        ("m: x", "at position 2: found ' x', expected an axis"),
        (":x", "at position 0: found ':x', expected the name of a dim"),
        ("m:x,y", "at position 3: found ',y', expected a blank"),
        ("m:x 0:y", "at position 4: found '0:y', expected 1, which is the number"),
        ("m:x[0] k:y[1]", "at position 4: found '0] k:y.*whole number of at least 1"),
        ("m:x[8 k:y[8]", r"at position 5: .*expected '\]'"),
        ("h:z @y", "at position 6: found the end, expected '='"),
        ("h:z @y=1+", "at position 7: found '1\\+', expected an index, indices such as 0\\+3, or an axis"),
        ("h:z @y=0 s", "at position 9: found 's', expected ',' or the end"),
        ("h:z @y=0,y=0", "at position 9: found 'y=0', expected another axis"),
        ("m:x k:x", "Axis 'x' splits two dims"),
        ("m:x k @x=0", "Axis 'x' splits two dims"),
    ],
)
def test_a_text_that_cannot_be_read_names_the_position_and_what_would_do(text, message):
    with pytest.raises(LayoutError, match=message) as caught:
        ownership(text)
    if "position" in message:
        assert "'b:(x,y) s h:z'" in str(caught.value)


def test_a_text_of_the_wrong_kind_names_the_right_one():
    with pytest.raises(LayoutError, match=r"block-cyclic. BlockCyclic.from_text makes it"):
        Layout("m:x[8] k:y[8]")
    for text in ("m:x k:y", "m:x[8] k:y", "m:x[8]", "m:x[8] k:y[8] n:z[8]", "m:x[8] k:y[8] @z=0"):
        with pytest.raises(LayoutError, match="is not block-cyclic: two dims, each with the size"):
            BlockCyclic.from_text(text)
    with pytest.raises(LayoutError, match="The text says everything"):
        Layout("m:x k:z", root_only=("y",))
    with pytest.raises(LayoutError, match="is not the axes of one dim"):
        Layout("m:x", "k:y")
    with pytest.raises(LayoutError, match="needs 'y' in root_only"):
        Layout(("x",), follows={"y": "x"})
    for names in ("m", "mkn", ("m", "a b"), ("1", "k")):
        with pytest.raises(LayoutError, match=r"names|cannot name dim"):
            Layout(("x",), ("y",), names=names)


def test_the_layouts_of_every_plan_print_the_names_of_their_dims():
    for entry in ALGORITHMS.values():
        for form in ("nn", "nt", "tn", "tt"):
            plan = entry.plan(form, 7, 5, 3)
            stored = [("mk", "km")[form[0] != "n"], ("kn", "nk")[form[1] != "n"], "mn"]
            for layout, names in zip((plan.a_layout, plan.b_layout, plan.c_layout), stored, strict=True):
                assert layout.names == tuple(names) and Layout(str(layout)) == layout, (entry, form)
    plan = CuboidPlan("nn", 7, 5, 3)
    assert f"{plan.a_layout} · {plan.b_layout} · {plan.c_layout}" == "m:(x,y) k:z · k:(z,x) n:y · m:(x,z) n:y"


def test_the_examples_of_docstrings_run():
    from summa3d.layout import layout

    failed, attempted = doctest.testmod(layout)
    assert failed == 0 and attempted >= 3


@pytest.mark.mpi(sizes=(4,))
def test_layers_take_the_text_of_their_input(make_grid):
    pytest.importorskip("torch")
    from summa3d import nn

    cuboid = nn.scheme("cuboid", make_grid(x=2, y=1, z=2))
    for text in ("b:(x,y) s h:z", cuboid.residual, None):
        layer, norm = nn.Linear(6, 4, cuboid, text), nn.LayerNorm(6, cuboid, text)
        assert str(layer.input_layout) == str(norm.layout) == "b:(x,y) s h:z" == str(cuboid.residual)
        assert str(layer.output_layout) == "b:(x,z) s n:y" and layer.weight.sharding.layout == Layout("k:(z,x) n:y")


def test_comparing_and_hashing_a_layout_is_one_call():
    one, other, calls = Layout("m:(x,y) k:z"), Layout(("x", "y"), ("z",)), []

    def count(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    same = one == other
    hash(one)
    sys.setprofile(None)
    assert same and calls == ["__eq__", "__hash__"]


@pytest.mark.mpi(sizes=(1, 4))
def test_every_function_that_takes_a_layout_takes_its_text(make_grid, comm, tmp_path):
    grid = make_grid(x=2, y=2) if comm.size == 4 else make_grid(x=1, y=1)
    whole = np.arange(35.0).reshape(7, 5)
    matrix = DistMatrix.from_global(whole, grid, "m:x k:y")
    again = DistMatrix.from_function(lambda i, j: 5.0 * i + j, (7, 5), grid, "m:x k:y")
    assert matrix.layout == again.layout == Layout(("x",), ("y",)) and np.array_equal(matrix.block, again.block)
    assert "m:x k:y on" in matrix.summary
    for text in ("m:(x,y) k", "m k:(y,x)", "m:x[2] k:y[1]", "m:x k @y=0"):
        moved = matrix.redistribute(text)
        assert moved.layout == ownership(text) and np.array_equal(moved.to_global(), whole)
        assert np.array_equal(moved.redistribute(str(matrix.layout)).block, matrix.block)
    block = distribute(whole, grid, "m:(x,y) k")
    assert np.array_equal(block, distribute(whole, grid, Layout(("x", "y"), ())))
    assert np.array_equal(collect(block, grid, "m:(x,y) k", (7, 5)), whole)
    assert np.array_equal(redistribute(block, (7, 5), grid, "m:(x,y) k", "m:x k:y"), matrix.block)
    path = comm.bcast(str(tmp_path / "matrix.npy"))
    matrix.to_file(path)
    assert np.array_equal(DistMatrix.from_file(path, grid, "m:x k:y").block, matrix.block)
    with pytest.raises(LayoutError, match="at position 1"):
        matrix.redistribute("m, k")
