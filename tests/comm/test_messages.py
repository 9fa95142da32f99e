"""A message that is not the awaited one is an error, in every mode: MPI takes fewer elements, and other dtypes, in silence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from summa3d.comm.transport.p2p import CODES, HEADER
from summa3d.errors import AgreementError, ShapeError

F8 = np.arange(8.0)
SENT = {
    "fewer elements": (F8[:4], "4 elements"),
    "more elements": (np.arange(9.0), "more than 8 elements"),
    "no elements": (F8[:0], "0 elements"),
    "another dtype of as many bytes": (np.arange(16, dtype="f4"), "16 elements of float32"),
    "another dtype of as many elements": (np.arange(8, dtype="f4"), "8 elements of float32"),
    "whole numbers": (np.arange(8), "8 elements of int64"),
    "complex numbers": (np.arange(4, dtype="c16"), "4 elements of complex128"),
    "halves": (torch.arange(32).bfloat16(), "32 elements of bfloat16"),
    "many of another dtype": (np.zeros(1 << 20, "f4"), "1048576 elements of float32"),
}


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize(("node_memory", "check"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("name", SENT)
def test_a_message_of_another_length_or_dtype_is_refused_and_the_next_ones_are_right(comm, make_grid, node_memory, check, name):
    axis, (array, said) = make_grid(x=2, node_memory=node_memory, check=check)["x"], SENT[name]
    for tag in (0, 5):
        if axis.index == 0:
            axis.send(array, 1, tag)
        else:
            with pytest.raises(
                AgreementError, match=rf"member 0 has sent {said} with tag {tag}; this member awaits 8 of float64"
            ):
                axis.receive(np.full(8, -1.0), 0, tag)
        comm.Barrier()  # messages of two dtypes are two streams, each in order
        if axis.index == 0:
            axis.send(F8, 1, tag)
        else:
            assert axis.receive(np.full(8, -1.0), 0, tag).tolist() == F8.tolist()
        assert axis.all_reduce(np.ones(2)).tolist() == [2, 2]


@pytest.mark.mpi(sizes=(2,))
def test_messages_of_several_dtypes_in_one_tag_arrive_each_where_its_dtype_is_awaited(comm, make_grid):
    axis, dtypes = make_grid(x=2)["x"], ("f8", "f4", "i8", "c8")
    arrays = [np.arange(3).astype(dtype) for dtype in dtypes]
    if axis.index == 0:
        for pending in [axis.start_send(array, 1) for array in arrays]:
            pending.wait()
    else:
        pending = [axis.start_receive(np.zeros_like(array), 0) for array in arrays[::-1]]
        for array, arrived in zip(arrays[::-1], pending, strict=True):
            assert arrived.wait().tolist() == array.tolist()


@pytest.mark.mpi(sizes=(2,))
@pytest.mark.parametrize("node_memory", [True, False])
def test_a_small_message_that_overtakes_a_large_one_of_another_dtype_is_no_error(comm, make_grid, node_memory):
    axis, large, small = make_grid(x=2, node_memory=node_memory)["x"], np.arange(1 << 20, dtype="f4"), F8
    for _ in range(20):
        if axis.index == 0:
            for pending in [axis.start_send(array, 1) for array in (large, small)]:
                pending.wait()
        else:
            assert np.array_equal(axis.receive(np.zeros_like(large), 0), large)
            assert np.array_equal(axis.receive(np.zeros_like(small), 0), small)


@pytest.mark.mpi(sizes=(2,))
def test_tags_go_as_far_as_mpis_leave_room_for_the_dtypes(comm, make_grid):
    axis = make_grid(x=2)["x"]
    with pytest.raises(ShapeError, match=r"a tag is a whole number from 0 to (\d+)") as caught:
        axis.start_send(F8, 1 - axis.index, 1 << 40)
    most = int(str(caught.value).split("from 0 to ")[1].split(";")[0])
    arriving = axis.start_receive(np.zeros(8), 1 - axis.index, most)
    axis.send(F8 + axis.index, 1 - axis.index, most)
    assert arriving.wait().tolist() == (F8 + 1 - axis.index).tolist()
    assert len({tag * CODES + code for tag, code in itertools.product(range(3), (*range(9), HEADER))}) == 30
