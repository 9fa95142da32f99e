"""Benchmark of our product on one GPU against the bare cuBLAS call that it contains, for CuPy arrays and torch tensors.

--device cpu tries the script on the host, with numpy arrays and torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from common import conclude, save
from gpu import benchmark_parser, in_turn, taken
from mpi4py import MPI

from summa3d import Grid
from summa3d.comm.device.arrays import is_half, is_torch, widen
from summa3d.gemm import CuboidPlan
from summa3d.gemm.algorithms.cuboid import Cuboid

SHARE = 0.97
DTYPES = ("bfloat16", "float64")


def main() -> None:
    """Time our product and the bare call for each library and dtype, and print whether the claim holds."""
    args = benchmark_parser(__doc__, "products", 10, size=8192).parse_args()
    device = taken(args.device, "a product's share of cuBLAS's speed")
    if device is None:
        return
    n, rows = args.size, []
    with Grid(MPI.COMM_SELF, {"x": 1, "y": 1, "z": 1}) as grid:
        executor = Cuboid(CuboidPlan("nn", n, n, n), grid)
        for library in ("cupy" if args.device == "cuda" else "numpy", "torch"):
            for dtype in DTYPES:
                if (library, dtype) == ("numpy", "bfloat16"):
                    continue
                a, b, c, other = (matrix(library, dtype, n, args.device) for _ in range(4))
                runs = {"ours": lambda a=a, b=b, c=c: executor.run(a, b, c), "bare": bare(a, b, other)}
                times = in_turn(runs, args)
                c, other = (widen(one) if is_half(one) else one for one in (c, other))
                difference = float(abs(c - other).max()) / float(abs(other).max())
                rows.append(row(library, dtype, n, times, difference))
    for one in rows:
        rate = f"ours {one['tflops']:.1f} Tflop/s, {one['share']:.3f} of the bare call's speed"
        print(f"{one['library']} {one['dtype']} {n}³: {rate}")
        if args.device == "cuda":
            conclude([(f"≥ {SHARE:.0%}; the results differ by {one['difference']:.1e}", one["share"] >= SHARE)])
    save({"kind": "cublas", "device": device, "rows": rows}, args.json)


def row(library: str, dtype: str, n: int, times: dict[str, list[float]], difference: float) -> dict[str, Any]:
    """A row of the result: our speed in Tflop/s and as a fraction of the bare call's."""
    share = median(bare / ours for ours, bare in zip(times["ours"], times["bare"], strict=True))
    tflops = 2 * n**3 / median(times["ours"]) / 1e12
    return {"library": library, "dtype": dtype, "share": share, "tflops": tflops, "difference": difference, "seconds": times}


def matrix(library: str, dtype: str, n: int, device: str) -> Any:
    """An n×n matrix of normal random numbers."""
    if library == "torch":
        return torch.randn(n, n, device=device).to(getattr(torch, dtype))
    if library == "numpy":
        return np.random.default_rng(0).standard_normal((n, n)).astype(dtype)
    import cupy
    import ml_dtypes

    return cupy.random.standard_normal((n, n), dtype=cupy.float32).astype(getattr(ml_dtypes, dtype, dtype))


def bare(a: Any, b: Any, c: Any) -> Callable[[], object]:
    """The bare call of the library. For row-major arrays, cuBLAS computes Cᵀ = Bᵀ·Aᵀ."""
    if is_torch(a):
        return lambda: torch.mm(a, b, out=c)
    if isinstance(a, np.ndarray):
        return lambda: np.matmul(a, b, out=c)
    from cupy import cuda

    cublas, handle, n = cuda.cublas, cuda.get_cublas_handle(), len(a)
    kind = {"bfloat16": cuda.runtime.CUDA_R_16BF, "float64": cuda.runtime.CUDA_R_64F}[str(a.dtype)]
    sums = cublas.CUBLAS_COMPUTE_64F if str(a.dtype) == "float64" else cublas.CUBLAS_COMPUTE_32F
    factors = np.array([1, 0], np.float64 if str(a.dtype) == "float64" else np.float32)
    one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    plain = cublas.CUBLAS_OP_N

    def call() -> np.ndarray:
        cublas.gemmEx(
            *(handle, plain, plain, n, n, n, one, b.data.ptr, kind, n, a.data.ptr, kind, n, zero, c.data.ptr, kind, n),
            *(sums, cublas.CUBLAS_GEMM_DEFAULT),
        )
        return factors  # keeps the factors alive as long as the call

    return call


if __name__ == "__main__":
    main()
