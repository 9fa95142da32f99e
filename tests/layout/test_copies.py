"""Parts of arrays of which ranks hold equal copies."""

from __future__ import annotations

import pytest
import torch

from summa3d.layout.copies import Copies
from summa3d.nn import scheme


@pytest.mark.mpi(sizes=(3,))
def test_parts_of_uneven_sizes_are_gathered_to_the_whole_in_their_words(make_grid):
    grid = make_grid(y=3)
    whole = torch.arange(14.0).view(2, 7).t()  # 14 elements on 3 ranks, and not contiguous
    copies = scheme("oned", grid).copies
    part = copies.part(whole)
    assert copies.axis is grid["y"] and part.tolist() == whole.reshape(-1).split([5, 5, 4])[grid["y"].index].tolist()
    assert part.untyped_storage().nbytes() == part.nbytes  # the whole can be freed
    with grid.ledger.watch() as moved:
        assert torch.equal(copies.whole(part, whole.shape), whole)
    assert moved.words == 14 - len(part)


@pytest.mark.mpi(sizes=(4,))
def test_only_axes_that_neither_split_the_stream_nor_leave_it_to_one_hold_copies(make_grid):
    """Copies of one member are the array itself."""
    for name, axes in (("summa", {"x": 2, "y": 2}), ("oned-sp", {"y": 4}), ("cuboid", {"y": 2, "z": 2})):
        copies = scheme(name, make_grid(**axes)).copies
        whole = torch.ones(2, 3)
        assert copies.axis.size == 1 and copies.part(whole).data_ptr() == whole.data_ptr()
        assert copies.whole(copies.part(whole), (2, 3)).data_ptr() == whole.data_ptr()
    outer = make_grid(y=2, dp=2)
    assert scheme("oned", outer).copies == Copies(outer["y"])
