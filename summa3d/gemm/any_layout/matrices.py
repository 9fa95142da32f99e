"""Blocks whose dims have letters, seen as the matrices that a BLAS multiplies, and the product of many of them."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ...comm.device.arrays import Array, is_half, is_on_device, is_torch, library_of, permuted, quiet
from ..algorithms.workspace import Workspace
from ..local.blas import SMALL, scale


class MatrixView(NamedTuple):
    """How a block whose dims have letters is seen as matrices, one for each index of its batch letters.

    dims : the block's dims in the order of its matrices: batch letters, then the two groups of each matrix. is_turned : these
    stand in the other order. is_copied : the block lies otherwise in memory, and its matrices are a copy.
    """

    dims: tuple[int, ...]
    groups: tuple[str, str, str]
    is_turned: bool
    is_copied: bool

    def turned(self, block: Array) -> Array:
        """The block with its dims in that order: a view."""
        return block if self.dims == tuple(range(len(self.dims))) else permuted(block, self.dims)

    def matrices(self, turned: Array) -> Array:
        """The matrices [batch, first, second] of a turned block, without a batch [first, second]: a view."""
        sizes, dims = [], iter(turned.shape)
        for group in self.groups:
            sizes.append(prod(next(dims) for _ in group))
        shape = tuple(sizes if self.groups[0] else sizes[1:])
        return turned if tuple(turned.shape) == shape else turned.reshape(shape)


def matrix_view(names: str, batch: str, first: str, second: str) -> MatrixView:
    """The matrices first × second of a block with the dims `names`, C-ordered; a view where each group's letters are adjacent.

    And where the last dim is not of the batch: a BLAS wants elements of a row or of a column side by side.
    """
    is_strided = names[-1] in batch and bool(first or second)
    is_copied = is_strided or not all(group in names for group in (batch, first, second))
    is_turned = not is_copied and bool(first and second) and names.index(first) > names.index(second)
    groups = (batch, second, first) if is_turned else (batch, first, second)
    return MatrixView(tuple(names.index(letter) for group in groups for letter in group), groups, is_turned, is_copied)


def multiply_each(workspace: Workspace, a: Array, b: Array, form: str, out: Array, alpha: Any, beta: int = 0) -> None:
    """out = α·op(A)·op(B) + β·out of matrices, or of each of as many matrices; with β = 0 what `out` held is not read.

    Many small ones are multiplied by one call of their library.
    """
    scratch = workspace.scratch(out) if beta else None
    if len(out.shape) == 2:
        return workspace.accumulate(a, b, form, out, alpha, beta, scratch)
    if beta or is_half(a) or (prod(out.shape[1:]) * a.shape[1 if form[0] == "t" else 2] >= SMALL and not is_on_device(a)):
        for entry in range(len(out)):
            part = None if scratch is None else scratch[entry]
            workspace.accumulate(a[entry], b[entry], form, out[entry], alpha, beta, part)
        return
    with workspace.ledger.product(a, b, form, out):
        _multiply_at_once(a, b, form, out)
    if alpha != 1:
        scale(out, alpha)


@quiet
def _multiply_at_once(a: Array, b: Array, form: str, out: Array) -> None:
    left, right = (permuted(item, (0, 2, 1)) if letter == "t" else item for item, letter in zip((a, b), form, strict=True))
    if is_torch(out):
        import torch

        torch.bmm(left, right, out=out)
    else:
        library_of(out).matmul(left, right, out=out)
