"""Faults between pieces: a rank that is killed, stopped or raises is named, and nothing is left; delays change no number."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaigns import pieces

ROOM = 60.0


@pytest.mark.parametrize(
    ("how", "copies"),
    [
        ("kill", True),
        *(pytest.param(*how, marks=pytest.mark.wide) for how in (("stop", True), ("raise", True), ("delays", False))),
    ],
    ids=str,
)
def test_a_fault_between_pieces_is_named_and_leaves_nothing_and_delays_change_no_number(
    tmp_path: Path, how: str, copies: bool
) -> None:
    """Delays without copies between processes, where MPI moves a large message while both ranks are inside it."""
    assert pieces.trial(tmp_path, how, 2, 1, ROOM, copies) == []
