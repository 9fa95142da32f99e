"""One product of any algorithm, run and judged on every rank: its result, words, messages and workspace."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import devices
import numpy as np
from kinds import array, plain

from summa3d.comm.device.arrays import is_on_device
from summa3d.gemm.algorithms.registry import ALGORITHMS
from summa3d.layout import distribute

ACCUMULATED = {"int32": 0.0, **dict.fromkeys(("float64", "complex128"), 2.0**-53)}
ACCUMULATED |= dict.fromkeys(("float32", "complex64", "float16", "bfloat16"), 2.0**-24)
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the type that sums are taken in, and of the 16-bit types that the result is rounded to."""


def op(matrix: np.ndarray, letter: str) -> np.ndarray:
    return matrix if letter == "n" else matrix.T if letter == "t" else matrix.conj().T


def operand(shape: tuple[int, int], dtype: str, kind: str, seed: int) -> Any:
    """A global operand, the same on every rank: normal numbers, or small whole ones for int32."""
    random = np.random.default_rng(seed)
    if dtype == "int32":
        return array(kind, dtype, random.integers(-9, 10, shape))
    values = random.standard_normal(shape)
    return array(kind, dtype, values + 1j * random.standard_normal(shape) if dtype.startswith("complex") else values)


def stored(block: Any, order: str) -> Any:
    """The block in another memory order: by columns, or with gaps (every second row and column of a larger array)."""
    if order == "C":
        return block
    if order == "F":
        return np.asfortranarray(block) if isinstance(block, np.ndarray) else block.T.contiguous().T
    shape = [2 * extent for extent in block.shape]
    wide = np.zeros(shape, block.dtype) if isinstance(block, np.ndarray) else block.new_zeros(shape)
    wide[::2, ::2] = block
    return wide[::2, ::2]


@dataclass
class Judge:
    """Runs products on one grid and collects what is wrong with them, so that no rank stops while others still communicate."""

    grid: Any
    name: str
    cases: list[Any] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    wrong: list[Any] = field(default_factory=list)

    def product(
        self,
        form: str,
        dtype: str,
        sizes: tuple[int, int, int],
        alpha: Any = 1,
        beta: Any = 0,
        order: str = "C",
        kind: str = "numpy",
        repeat: int = 1,
        **options: Any,
    ) -> None:
        """Run one product `repeat` times on one executor and judge the last."""
        algorithm, (m, n, k) = ALGORITHMS[self.name], sizes
        plan = algorithm.plan(form, m, n, k, **options)
        wholes = [operand(shape, dtype, kind, seed) for seed, shape in enumerate((plan.a_shape, plan.b_shape, plan.c_shape))]
        layouts = (plan.a_layout, plan.b_layout, plan.c_layout)
        blocks = (distribute(whole, self.grid, layout) for whole, layout in zip(wholes, layouts, strict=True))
        a, b, c = (devices.on_device(stored(block, order)) for block in blocks)
        case = (self.name, dict(self.grid.shape), form, dtype, sizes, alpha, beta, order, kind, options)
        ledger, executor = self.grid.ledger, algorithm.executor(plan, self.grid)
        for _ in range(repeat - 1):
            executor.run(a, b, None)
        held = ledger.workspace_bytes if repeat == 1 else 0
        ledger.reset_peak()
        with ledger.watch() as moved:
            if beta == 0:
                c[...] = 77  # never read
            out = executor.run(a, b, c, alpha, beta)
        on_device = is_on_device(a)
        cost = algorithm.volume(plan, self.grid.shape, dtype, self.grid.staged, on_device).cost_of(self.grid.coordinates)
        if out is not c:
            self.wrong.append((*case, "out is not written in place"))
        if (moved.words, moved.messages) != (cost.words, cost.messages):
            self.wrong.append((*case, f"{moved.words} words in {moved.messages} messages, the formula has {cost}"))
        peak, formula = ledger.workspace_peak - held, cost.workspace * a.itemsize
        # Sums in the node's memory need no room of the caller's; what a device held for earlier products goes meanwhile.
        exact = not on_device and (self.name == "cuboid" or not self.grid.staged)
        if repeat == 1 and order == "C" and (peak != formula if exact else peak > formula):
            self.wrong.append((*case, f"workspace {peak} bytes, the formula has {formula}"))
        self._compare(case, devices.to_host(out), wholes, plan, alpha, beta)

    def _compare(self, case: Any, out: Any, wholes: list[Any], plan: Any, alpha: Any, beta: Any) -> None:
        whole_a, whole_b, whole_c = (plain(whole) for whole in wholes)
        want = alpha * (op(whole_a, plan.form[0]) @ op(whole_b, plan.form[1])) + beta * whole_c
        slices = plan.c_layout.slices(plan.c_shape, self.grid.shape, self.grid.coordinates)
        dtype = str(wholes[0].dtype).removeprefix("torch.")
        bound = 8 * ACCUMULATED[dtype] * sqrt(max(plan.k, 1)) + ROUNDED.get(dtype, 0)
        self.cases.append(case)
        used = plan.c_layout.axes | set(plan.c_layout.root_only)
        copies = prod(size for axis, size in self.grid.shape.items() if axis not in used)
        self.squares.append(float(np.linalg.norm(plain(out) - want[slices]) ** 2) / copies)
        self.bounds.append(bound * float(np.linalg.norm(want)))

    def verdict(self) -> None:
        """Compare the errors of all ranks together with the bounds, and fail for anything wrong on this rank."""
        squares = np.array(self.squares)
        total = np.sqrt(self.grid.comm.allreduce(squares))
        judged = zip(self.cases, total, self.bounds, strict=True)
        wrong = [
            *self.wrong,
            *((*case, f"error {error}, the bound is {bound}") for case, error, bound in judged if error > bound),
        ]
        assert not wrong, f"{len(wrong)} of {len(self.cases)} products: " + "\n".join(map(str, wrong[:5]))
