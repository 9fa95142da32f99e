"""Launches of the element-wise fused kernels: GELU, SwiGLU, dropout, rotary positions, AdamW, and sums down columns.

Signatures are those of reference.py. All tensors of a call are on the launcher's device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from .launch import ACCESS, SUMMED_ACROSS, THREADS, KernelLauncher, Tiling, compute_dtype, matrix, suffix, tiling
from .mask import Mask

NUMBERS = 8  # elements that one Philox counter serves


class Elements:
    """Element-wise kernels: each thread keeps its columns and walks down the rows in a grid-stride loop."""

    def __init__(self, launch: KernelLauncher) -> None:
        self.launch = launch

    def bias_activation(self, x: Tensor, bias: Tensor | None, form: str) -> Tensor:
        """f(x + bias), fused; see `reference.bias_activation`."""
        flat = matrix(x)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype)
        self._walk(f"bias_{form}", tiles, x.dtype, flat.data, _vector(bias), y, flat.stride, flat.rows, flat.columns)
        return y

    def bias_activation_gradient(
        self, gradient: Tensor, x: Tensor, bias: Tensor | None, form: str
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of x and of bias; see `reference.bias_activation_gradient`."""
        flat, of_y = matrix(x), matrix(gradient)
        of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        tiles = self._tiles(flat.rows, flat.columns, x.dtype, summing=bias is not None)
        parts = None if bias is None else self.parts(1, tiles, flat.columns, x.dtype)
        self._walk(
            f"bias_{form}_gradient", tiles, x.dtype, of_y.data, flat.data, _vector(bias), of_x, parts,
            of_y.stride, flat.stride, flat.rows, flat.columns,
        )  # fmt: skip
        return of_x, None if parts is None else self.sum_lanes(parts, x.dtype)[0]

    def dropout_mask(self, x: Tensor, mask: Mask) -> Mask:
        """Return the mask's description: forward and backward each draw the mask in registers, and nothing is saved."""
        return mask

    def dropout_add(
        self, x: Tensor, mask: Mask, probability: float, residual: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """residual + dropout(x + bias), fused, the mask drawn in registers; see `reference.dropout_add`."""
        flat, stream = x.contiguous(), None if residual is None else residual.contiguous()
        y = torch.empty_like(flat)
        rows, columns = mask.rows, mask.columns
        tiles = tiling(self.launch, rows, columns, NUMBERS)
        scale = 1 / (1 - probability)
        self._walk(
            "dropout_add", tiles, x.dtype, flat, _vector(bias), stream, y, scale, *mask.arguments(probability), rows, columns
        )
        return y

    def dropout_gradient(
        self, gradient: Tensor, mask: Mask, probability: float, summed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of x and, where `summed`, of bias; see `reference.dropout_gradient`."""
        flat = gradient.contiguous()
        of_x = torch.empty_like(flat)
        rows, columns = mask.rows, mask.columns
        tiles = tiling(self.launch, rows, columns, NUMBERS, summed)
        parts = self.parts(1, tiles, columns, gradient.dtype) if summed else None
        scale = 1 / (1 - probability)
        self._walk(
            "dropout_gradient", tiles, gradient.dtype, flat, of_x, parts, scale, *mask.arguments(probability), rows, columns
        )
        return of_x, None if parts is None else self.sum_lanes(parts, gradient.dtype)[0]

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor, back: bool = False) -> Tensor:
        """Rotary positions; x is read in place whatever its outer strides; see `reference.rotate`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        batch, heads, sequence, size = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows, half = batch * heads * sequence, size // 2
        outer, head, row, _ = x.stride()
        tiles = self._tiles(rows, half, x.dtype)
        self._walk(
            "rotate", tiles, x.dtype, x, _vector(cosine), _vector(sine), y, -1.0 if back else 1.0, heads, sequence, outer, head,
            row, rows, half,
        )  # fmt: skip
        return y

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU(gate) ∘ up, fused; gate and up may be columns of one matrix; see `reference.swiglu`."""
        first, second = matrix(gate), matrix(up)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        tiles = self._tiles(first.rows, first.columns, gate.dtype)
        self._walk(
            "swiglu", tiles, gate.dtype, first.data, second.data, y, first.stride, second.stride, first.rows, first.columns
        )
        return y

    def swiglu_gradient(self, gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up, fused; see `reference.swiglu_gradient`."""
        of_y, first, second = matrix(gradient), matrix(gate), matrix(up)
        of_gate, of_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
        tiles = self._tiles(first.rows, first.columns, gate.dtype)
        self._walk(
            "swiglu_gradient", tiles, gate.dtype, of_y.data, first.data, second.data, of_gate, of_up,
            of_y.stride, first.stride, second.stride, first.rows, first.columns,
        )  # fmt: skip
        return of_gate, of_up

    def adamw(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[int],
        rate: float,
        betas: tuple[float, float],
        epsilon: float,
        decay: float,
        factor: float = 1.0,
        copies: Sequence[Tensor] | None = None,
    ) -> None:
        """Take one AdamW step in place, one kernel per weight; see `reference.adamw`. The gradients are not changed.

        copies : 16-bit copies of the weights, written in the same pass; or None

        Raises ValueError where a weight, moment or copy is not contiguous.
        """
        for index, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            copy = None if copies is None else copies[index]
            whole = [weight, first[index], second[index], *([] if copy is None else [copy])]
            if not all(tensor.is_contiguous() for tensor in whole):
                raise ValueError(
                    f"AdamW updates weights, moments and copies in place, so they must be contiguous; "
                    f"those of weight {index} {tuple(weight.shape)} are not."
                )
            correction, root = 1 - betas[0] ** steps[index], sqrt(1 - betas[1] ** steps[index])
            numbers = (factor, 1 - rate * decay, *betas, epsilon, rate / correction, root)
            written = gradient.dtype if copy is None else copy.dtype
            width = THREADS * ACCESS // written.itemsize
            blocks = min(-(-weight.numel() // width), self.launch.most_blocks)
            if blocks:
                kernel = f"adamw_{suffix(gradient.dtype)}_{suffix(written)}"
                self.launch(kernel, blocks, THREADS, *whole[:3], gradient.contiguous(), copy, *numbers, weight.numel())

    # -- sums down columns: each lane writes a partial sum, and a second kernel adds the lanes ------------------------------

    def parts(self, vectors: int, tiles: Tiling, columns: int, dtype: torch.dtype) -> Tensor:
        """Allocate the lanes' partial sums of some vectors, [vectors, lanes, columns], in `compute_dtype(dtype)`."""
        device = self.device
        return torch.empty((vectors, tiles.lanes, columns), dtype=compute_dtype(dtype), device=device)

    def sum_lanes(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the lanes' partial sums: [vectors, lanes, columns] → [vectors, columns], in `dtype`."""
        vectors, lanes, columns = parts.shape
        sums = torch.empty((vectors, columns), dtype=dtype, device=parts.device)
        blocks = min(vectors * -(-columns // SUMMED_ACROSS), self.launch.most_blocks)
        if blocks:
            self.launch(f"sum_lanes_{suffix(dtype)}", blocks, THREADS, parts, sums, vectors, lanes, columns)
        return sums

    def sum_parts(self, parts: Tensor, out: Tensor) -> None:
        """out = Σ parts, in their order, in one kernel; see `reference.sum_parts`."""
        whole = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        blocks = min(-(-out.numel() // (THREADS * ACCESS // out.dtype.itemsize)), self.launch.most_blocks)
        if blocks:
            kernel = f"sum_parts_{suffix(parts.dtype)}"
            self.launch(kernel, blocks, THREADS, parts.contiguous(), whole, len(parts), out.numel())
        if whole is not out:
            out.copy_(whole)

    @property
    def device(self) -> torch.device:
        """The device that the launcher's kernels run on."""
        return self.launch.device

    def _tiles(self, rows: int, columns: int, dtype: torch.dtype, summing: bool = False) -> Tiling:
        return tiling(self.launch, rows, columns, ACCESS // dtype.itemsize, summing)

    def _walk(self, kernel: str, tiles: Tiling, dtype: torch.dtype, *arguments: Tensor | int | float | None) -> None:
        """Launch a kernel that walks over tiles; an empty matrix launches nothing."""
        if tiles.blocks:
            self.launch(f"{kernel}_{suffix(dtype)}", tiles.blocks, THREADS, *arguments, tiles.lanes, tiles.across)


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
