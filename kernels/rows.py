# Fused kernels with sums along rows, which grid axes may split: layer and root-mean-square norms, cross entropy.
# Imports elements, launch. Signatures are those of reference.py; what must be summed over an axis is given back for the caller.
# Next: norm.cu, loss.cu; dispatch.py, which chooses between these and reference.py.
from __future__ import annotations

import torch
from torch import Tensor

from .elements import Elements
from .launch import THREADS, compute_dtype, matrix, row_threads, suffix
from .reference import StartSum, wide_dtype


class Fused(Elements):
    """Every fused kernel, by the name of its reference."""

    # -- norms: `name` is layer or rms ---------------------------------------------------------------------------------------

    def norm_sums(self, x: Tensor) -> Tensor:
        return self._norm_sums("layer", x)

    def rms_sums(self, x: Tensor) -> Tensor:
        return self._norm_sums("rms", x)

    def norm_statistics(self, sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Mean and 1/σ, [rows, 1] each, in `compute_dtype(dtype)`: 16-bit rows keep statistics of 32."""
        mean, inverse = (self._statistic(sums, dtype) for _ in range(2))
        self._by_rows("layer_norm_statistics", mean.numel(), THREADS, dtype, sums, mean, inverse, float(n), eps)
        return mean, inverse

    def rms_inverse(self, sums: Tensor, n: int, eps: float, dtype: torch.dtype) -> Tensor:
        inverse = self._statistic(sums, dtype)
        self._by_rows("rms_norm_statistics", inverse.numel(), THREADS, dtype, sums, None, inverse, float(n), eps)
        return inverse

    def layer_norm(self, x: Tensor, mean: Tensor, inverse: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return self._norm("layer", x, mean, inverse, gamma, beta)

    def rms_norm(self, x: Tensor, inverse: Tensor, gamma: Tensor) -> Tensor:
        return self._norm("rms", x, None, inverse, gamma, None)

    def layer_norm_gradient(
        self, gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, inverse: Tensor, n: int, start_sum: StartSum
    ) -> tuple[Tensor, Tensor]:
        return self._norm_gradient("layer", gradient, x, gamma, mean, inverse, n, start_sum)

    def rms_norm_gradient(
        self, gradient: Tensor, x: Tensor, gamma: Tensor, inverse: Tensor, n: int, start_sum: StartSum
    ) -> tuple[Tensor, Tensor]:
        of_x, vectors = self._norm_gradient("rms", gradient, x, gamma, None, inverse, n, start_sum)
        return of_x, vectors[0]

    def _norm_sums(self, name: str, x: Tensor) -> Tensor:
        flat, terms = matrix(x), 2 if name == "layer" else 1
        sums = torch.empty((*x.shape[:-1], terms), dtype=wide_dtype(x.dtype), device=x.device)
        threads = row_threads(flat.columns, x.dtype)
        self._row_blocks(f"{name}_norm_sums", threads, x.dtype, flat.data, sums, flat.stride, flat.rows, flat.columns)
        return sums

    def _statistic(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty((*sums.shape[:-1], 1), dtype=compute_dtype(dtype), device=sums.device)

    def _norm(self, name: str, x: Tensor, mean: Tensor | None, inverse: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        flat = matrix(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype)
        beta = None if beta is None else beta.contiguous()
        self._walk(
            f"{name}_norm", tiles, x.dtype, flat.data, gamma.contiguous(), beta, mean, inverse, y,
            flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return y

    def _norm_gradient(
        self, name: str, gradient: Tensor, x: Tensor, gamma: Tensor, mean: Tensor | None, inverse: Tensor, n: int,
        start_sum: StartSum,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x's gradient, and γ's and β's [1 or 2, columns]: both come from one pass, once the rows' sums are there."""
        of_y, flat, gamma, terms = matrix(gradient), matrix(x), gamma.contiguous(), 2 if name == "layer" else 1
        sums = torch.empty((*x.shape[:-1], terms), dtype=compute_dtype(x.dtype), device=x.device)
        operands = (of_y.data, flat.data, gamma, mean, inverse)
        strides = (of_y.stride, flat.stride, flat.rows, flat.columns)
        self._row_blocks(f"{name}_norm_gradient_sums", row_threads(flat.columns, x.dtype), x.dtype, *operands, sums, *strides)
        summed = start_sum(sums).wait()
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype, summing=True)
        parts = self.parts(terms, tiles, flat.columns, x.dtype)
        self._walk(f"{name}_norm_gradient", tiles, x.dtype, *operands, summed, of_x, parts, float(n), *strides)
        return of_x, self.sum_lanes(parts, x.dtype)

    # -- cross entropy -------------------------------------------------------------------------------------------------------

    def loss_input(self, logits: Tensor) -> Tensor:
        """As they are: 16-bit logits are widened as they are read."""
        return logits

    def row_maximum(self, logits: Tensor) -> Tensor:
        flat = matrix(logits)
        maximum = torch.empty(flat.rows, dtype=compute_dtype(logits.dtype), device=logits.device)
        threads = row_threads(flat.columns, logits.dtype)
        self._row_blocks("row_maximum", threads, logits.dtype, flat.data, maximum, flat.stride, flat.rows, flat.columns)
        return maximum

    def cross_entropy_sums(self, logits: Tensor, maximum: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor]:
        flat = matrix(logits)
        sums = torch.empty((flat.rows, 2), dtype=maximum.dtype, device=logits.device)
        self._row_blocks(
            "cross_entropy_sums", row_threads(flat.columns, logits.dtype), logits.dtype, flat.data, maximum, labels.contiguous(),
            sums, first, flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return logits, sums

    def cross_entropy_kept(self, logits: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        """The logits and two numbers a row: backward takes the softmax again."""
        return logits, maximum, total.contiguous()

    def cross_entropy_gradient(
        self, kept: tuple[Tensor, ...], labels: Tensor, first: int, scale: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """out : the logits themselves, to be overwritten by their gradient; default a new tensor."""
        logits, maximum, total = kept
        flat = matrix(logits)
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if out is None else out
        to = matrix(gradient)
        if gradient.shape != logits.shape or gradient.dtype != logits.dtype or to.data.data_ptr() != gradient.data_ptr():
            raise ValueError(f"out must be rows of {logits.dtype} {tuple(logits.shape)}; it is {out}.")
        self._row_blocks(
            "cross_entropy_gradient", row_threads(flat.columns, logits.dtype), logits.dtype, flat.data, maximum, total,
            labels.contiguous(), scale.to(maximum.dtype).contiguous(), gradient, first, flat.stride, to.stride, flat.rows,
            flat.columns,
        )  # fmt: skip
        return gradient

    # -- launches ------------------------------------------------------------------------------------------------------------

    def _row_blocks(self, kernel: str, threads: int, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
        """Start a kernel that gives each row a block; `arguments` end with rows, columns."""
        rows = arguments[-2]
        if isinstance(rows, int) and rows:
            self.launch(f"{kernel}_{suffix(dtype)}", min(rows, self.launch.most_blocks), threads, *arguments)

    def _by_rows(self, kernel: str, rows: int, threads: int, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
        """Start a kernel that gives each row a thread."""
        if rows:
            blocks = min(-(-rows // threads), self.launch.most_blocks)
            self.launch(f"{kernel}_{suffix(dtype)}", blocks, threads, *arguments, rows)
