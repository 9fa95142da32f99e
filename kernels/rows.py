"""Launches of the row-wise fused kernels, whose rows grid axes may split: layer norm, root-mean-square norm, cross entropy.

Signatures are those of reference.py: a partial sum over a split row is returned, or passed to `start_sum`, for the caller to
all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elements import Elements
from .launch import THREADS, compute_dtype, matrix, row_threads, suffix
from .reference import StartSum, wide_dtype

NORMS = ("rms_norm", "layer_norm")
"""The kernels of a norm without a mean, and with one."""


class Fused(Elements):
    """Every fused kernel, under the name of its reference and called as it is; the host never waits for the device."""

    # -- norms: layer norm, and without a mean and β root-mean-square norm ------------------------------------------------------

    def norm_sums(self, x: Tensor, centred: bool = True) -> Tensor:
        """Σx and Σx² of each row, or Σx² alone; see `reference.norm_sums`."""
        flat = matrix(x)
        sums = torch.empty((*x.shape[:-1], 1 + centred), dtype=wide_dtype(x.dtype), device=x.device)
        threads = row_threads(flat.columns, x.dtype)
        self._row_blocks(f"{NORMS[centred]}_sums", threads, x.dtype, flat.data, sums, flat.stride, flat.rows, flat.columns)
        return sums

    def norm_statistics(self, sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """The mean and 1/σ, or None and 1/rms, [rows, 1] each, in `compute_dtype(dtype)`; see `reference.norm_statistics`."""
        centred = sums.shape[-1] == 2
        inverse = torch.empty((*sums.shape[:-1], 1), dtype=compute_dtype(dtype), device=sums.device)
        mean = torch.empty_like(inverse) if centred else None
        rows = sums.shape[:-1].numel()
        if rows:
            blocks = min(-(-rows // THREADS), self.launch.most_blocks)
            kernel = f"{NORMS[centred]}_statistics_{suffix(dtype)}"
            self.launch(kernel, blocks, THREADS, sums, mean, inverse, float(n), eps, rows)
        return mean, inverse

    def norm(self, x: Tensor, mean: Tensor | None, inverse: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        """γ·x̂ + β, or γ·x̂; see `reference.norm`."""
        flat = matrix(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype)
        beta = None if beta is None else beta.contiguous()
        self._walk(
            NORMS[mean is not None], tiles, x.dtype, flat.data, gamma.contiguous(), beta, mean, inverse, y,
            flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return y

    def norm_gradient(
        self, gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor | None, inverse: Tensor, n: int, start_sum: StartSum
    ) -> tuple[Tensor, Tensor]:
        """The gradients of x, and of γ and β, in one pass after the all-reduce of row sums; see `reference.norm_gradient`."""
        of_y, flat, gamma, name = matrix(gradient), matrix(x), gamma.contiguous(), NORMS[mean is not None]
        sums = torch.empty((*x.shape[:-1], 1 + (mean is not None)), dtype=compute_dtype(x.dtype), device=x.device)
        operands = (of_y.data, flat.data, gamma, mean, inverse)
        strides = (of_y.stride, flat.stride, flat.rows, flat.columns)
        self._row_blocks(f"{name}_gradient_sums", row_threads(flat.columns, x.dtype), x.dtype, *operands, sums, *strides)
        summed = start_sum(sums).wait()
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype, summing=True)
        parts = self.parts(sums.shape[-1], tiles, flat.columns, x.dtype)
        self._walk(f"{name}_gradient", tiles, x.dtype, *operands, summed, of_x, parts, float(n), *strides)
        return of_x, self.sum_lanes(parts, x.dtype)

    # -- cross entropy -------------------------------------------------------------------------------------------------------

    def loss_input(self, logits: Tensor) -> Tensor:
        """Return the logits unchanged: the kernels widen 16-bit logits as they read them."""
        return logits

    def row_maximum(self, logits: Tensor) -> Tensor:
        """The maximum of each row, in `compute_dtype`; see `reference.row_maximum`."""
        flat = matrix(logits)
        maximum = torch.empty(flat.rows, dtype=compute_dtype(logits.dtype), device=logits.device)
        threads = row_threads(flat.columns, logits.dtype)
        self._row_blocks("row_maximum", threads, logits.dtype, flat.data, maximum, flat.stride, flat.rows, flat.columns)
        return maximum

    def cross_entropy_sums(self, logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The unchanged logits, and each row's local sums [rows, 2]; see `reference.cross_entropy_sums`."""
        flat = matrix(logits)
        sums = torch.empty((flat.rows, 2), dtype=maximum.dtype, device=logits.device)
        self._row_blocks(
            "cross_entropy_sums", row_threads(flat.columns, logits.dtype), logits.dtype, flat.data, maximum, labels.contiguous(),
            sums, first, flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return logits, sums

    def cross_entropy_kept(self, logits: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        """The logits and two numbers a row: backward recomputes the softmax."""
        return logits, maximum, total.contiguous()

    def cross_entropy_gradient(self, kept: tuple[Tensor, ...], labels: Tensor, first: int, scale: Tensor) -> Tensor:
        """The gradient of the logits; see `reference.cross_entropy_gradient`."""
        logits, maximum, total = kept
        flat = matrix(logits)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        self._row_blocks(
            "cross_entropy_gradient", row_threads(flat.columns, logits.dtype), logits.dtype, flat.data, maximum, total,
            labels.contiguous(), scale.to(maximum.dtype).contiguous(), gradient, first, flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return gradient

    # -- launches ------------------------------------------------------------------------------------------------------------

    def _row_blocks(self, kernel: str, threads: int, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
        """Launch a kernel with one block per row; `arguments` end with rows, columns."""
        rows = arguments[-2]
        if isinstance(rows, int) and rows:
            self.launch(f"{kernel}_{suffix(dtype)}", min(rows, self.launch.most_blocks), threads, *arguments)
