"""Benchmark of torch's product of two tensors against numpy's BLAS on the same memory, one thread: who is faster, by shape.

It claims nothing: which BLAS multiplies host tensors is set by its table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from common import about, itself, options, save
from ranks import in_turn, on_machine, seconds, spread, tell

DTYPES = ("float32", "float64")
FORMS = ("nn", "nt", "tn")
CUBES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHAPES = {  # m, n, k
    "large": ((1024, 1024, 1024), (512, 2048, 512), (2048, 512, 2048)),
    "thin": ((4096, 64, 512), (64, 4096, 512), (512, 512, 32), (64, 64, 4096)),
    "small": ((64, 48, 16), (128, 384, 128), (64, 512, 128), (16, 512, 512)),
    "one row": ((1, 512, 512), (1, 2048, 512)),
    "cube": tuple((size, size, size) for size in CUBES),
}
QUICK = {"large": ((256, 256, 256),), "small": ((64, 48, 16),), "cube": ((8, 8, 8), (32, 32, 32))}
BURST = 0.004  # seconds of calls between two readings of the clock
MOST_CALLS = 1000
EQUAL = 1.03


def main() -> None:
    """Time all shapes in one rank's process, and print the table and where the order changes."""
    parser = options(__doc__, 7, "Time this many interleaved rounds of each shape.")
    parser.add_argument("--quick", action="store_true", help="Time four small shapes only.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.rounds, QUICK if args.quick else SHAPES)
    os.environ["SUMMA3D_BLAS"] = "numpy"  # the C interface of numpy's BLAS is one of the contenders
    result = itself(1)
    print(about(result["machine"]))
    print(f"torch {result['torch']} with {result['torch_blas']}; processor family, model, stepping: {result['family']}")
    print(
        "kind, m×n×k, form, dtype; µs: torch.mm, torch.addmm (C += A·B), np.matmul, BLAS, BLAS (C += A·B); "
        "Gflop/s: torch.mm, BLAS; time of torch.mm ÷ the faster of np.matmul and BLAS, time of torch.addmm ÷ BLAS"
    )
    for row in result["rows"]:
        print(in_one_line(row))
    for dtype in DTYPES:
        for which in ("product", "sum"):
            print(crossover([row for row in result["rows"] if row["dtype"] == dtype], dtype, which))
    save(result, args.json)


def measure(rounds: int, shapes: dict[str, tuple[tuple[int, int, int], ...]]) -> None:
    """Run on the one rank: time every shape, form and dtype; print JSON."""
    world, found = on_machine()
    import torch

    torch.set_num_threads(1)
    rows = [
        {"kind": kind, "m": m, "n": n, "k": k, "form": form, "dtype": dtype, **compare(m, n, k, form, dtype, rounds)}
        for dtype in DTYPES
        for kind, sizes in shapes.items()
        for m, n, k in sizes
        for form in (FORMS if kind != "cube" else FORMS[:1])
    ]
    shown = torch.__config__.show().splitlines()
    blas = next((line.strip(" -") for line in shown if "Math Kernel" in line or "BLAS_INFO" in line), "an unknown BLAS")
    about_torch = {"torch": torch.__version__, "torch_blas": blas, "family": family()}
    tell(world, {"kind": "local_blas", "machine": found, **about_torch, "rows": rows})


def family() -> str:
    """Family, model and stepping of the processor, by which libraries choose kernels."""
    from summa3d.bench.machine import CPU_FACTS

    lines = CPU_FACTS.read_text().splitlines() if CPU_FACTS.exists() else []
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in reversed(lines) if ":" in line]))
    return ", ".join(facts.get(key, "?") for key in ("cpu family", "model", "stepping"))


def compare(m: int, n: int, k: int, form: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Seconds of a call of each contender, in turn, and the quotients of torch's times and the best of numpy's BLAS."""
    calls = contenders(m, n, k, form, dtype)
    counts = {name: min(MOST_CALLS, max(1, round(BURST / burst(call, 3)))) for name, call in calls.items()}
    taken = in_turn({name: partial(burst, call, counts[name]) for name, call in calls.items()}, rounds)
    products = [min(pair) for pair in zip(taken["numpy"], taken["blas"], strict=True)]
    return {
        "seconds": taken,
        "product": spread(a / b for a, b in zip(taken["mm"], products, strict=True)),
        "sum": spread(a / b for a, b in zip(taken["addmm"], taken["blas_sum"], strict=True)),
    }


def contenders(m: int, n: int, k: int, form: str, dtype: str) -> dict[str, Callable[[], Any]]:
    """C = op(A)·op(B) and C += op(A)·op(B) by torch and by numpy's BLAS, from the same tensors into the same tensor."""
    import numpy as np
    import torch

    from summa3d.blas_library import gemm

    bound = gemm(dtype)
    if bound is None:
        sys.exit(f"the C interface of numpy's BLAS cannot be reached for {dtype}")
    shapes = ((m, k) if form[0] == "n" else (k, m), (k, n) if form[1] == "n" else (n, k), (m, n))
    a, b, c = (torch.from_numpy(np.sin(np.arange(h * w)).astype(dtype).reshape(h, w)) for h, w in shapes)
    left, right = a if form[0] == "n" else a.t(), b if form[1] == "n" else b.t()
    expected = left.double() @ right.double()
    calls: dict[str, Callable[[], Any]] = {
        "mm": lambda: torch.mm(left, right, out=c),
        "numpy": lambda: np.matmul(left.detach().numpy(), right.detach().numpy(), out=c.numpy()),
        "blas": lambda: bound(a.detach().numpy(), b.detach().numpy(), form, c.numpy(), 1, 0),
        "addmm": lambda: torch.addmm(c, left, right, out=c),
        "blas_sum": lambda: bound(a.detach().numpy(), b.detach().numpy(), form, c.numpy(), 1, 1),
    }
    for name in calls:
        start = c.double().clone() if name in ("addmm", "blas_sum") else 0
        calls[name]()
        torch.testing.assert_close(c.double(), expected + start, rtol=1e-4, atol=1e-3)
    return calls


def burst(call: Callable[[], Any], count: int) -> float:
    """Seconds of a call, the mean of `count` in a row."""
    return seconds(lambda: [call() for _ in range(count)]) / count


def in_one_line(row: dict[str, Any]) -> str:
    """A row as text."""
    taken = {name: median(times) for name, times in row["seconds"].items()}
    shape = f"{row['m']}×{row['n']}×{row['k']}"
    times = " ".join(f"{taken[name] * 1e6:8.1f}" for name in ("mm", "addmm", "numpy", "blas", "blas_sum"))
    rates = " ".join(f"{2e-9 * row['m'] * row['n'] * row['k'] / taken[name]:6.1f}" for name in ("mm", "blas"))
    ratios = " ".join(f"{row[key]['median']:.2f} [{row[key]['min']:.2f}–{row[key]['max']:.2f}]" for key in ("product", "sum"))
    return f"{row['kind']:8} {shape:>15} {row['form']} {row['dtype']} {times}; {rates}; {ratios}"


def crossover(rows: list[dict[str, Any]], dtype: str, which: str) -> str:
    """Up to which m·n·k torch's call is the quicker in all cases, and from which on in none; times within EQUAL are equal."""
    name = {"product": "torch.mm", "sum": "torch.addmm"}[which]
    ordered = [(row["m"] * row["n"] * row["k"], row[which]["median"]) for row in rows]
    quicker = [size for size, ratio in ordered if ratio * EQUAL < 1]
    slower = [size for size, ratio in ordered if ratio > EQUAL]
    never, always = max(quicker, default=0), min(slower, default=None)
    below = "every size" if always is None else f"m·n·k < {always:,} ({always ** (1 / 3):.0f}³)"
    return (
        f"{name}, {dtype}: never the slower for {below}, never the quicker for m·n·k > {never:,} ({never ** (1 / 3):.0f}³); "
        f"quicker in {len(quicker)} of {len(rows)} cases, slower in {len(slower)} (by more than {EQUAL - 1:.0%})"
    )


if __name__ == "__main__":
    main()
