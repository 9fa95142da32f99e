"""Layouts in which tests hold distributed matrices: split, copied, root-only, on a diagonal, held at two indices, dealt out."""

from __future__ import annotations

import numpy as np

GRIDS = {1: {"x": 1, "y": 1}, 4: {"x": 2, "y": 2}, 6: {"x": 2, "y": 3}}
LAYOUTS = (
    "m:x k:y",
    "m:(y,x) k",
    "m k",
    "m:x k @y=0",  # on rank lines alone
    "m:x k @y=x",  # a diagonal
    "m:x k @y=0+1",  # equal copies at two of three
    "m:y k:x @y=0+1",  # a half at each of two
    "m:x[2] k:y[3]",
    "m[2] k:y[1]",
)


def cases(comm):
    """The layouts that the grid of these ranks has."""
    held = GRIDS[comm.size]["y"] > 1
    return [text for text in LAYOUTS if held or "+" not in text]


def random(shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape)
