"""JAX's side of gemm_vs_jax.py, run by the Python that has JAX: one process, N devices of the host, products on request.

It answers each line of JSON with one: a case (files of A, B and of our C, with which it compares its own), or a sharding to time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHARDINGS = {  # of A, B and C over the mesh axes x and y; no operand is replicated
    "rows": (("x", None), ("x", None), ("x", None)),
    "columns": ((None, "x"), (None, "x"), (None, "x")),
    "rows by columns": (("x", None), (None, "x"), ("x", None)),
    "k": ((None, "x"), ("x", None), ("x", None)),
    "2-D": (("x", "y"), ("x", "y"), ("x", "y")),
}


def mesh(name: str) -> Mesh:
    """All devices in a line, or as near to a square as their number allows."""
    devices = np.array(jax.devices())
    rows = len(devices)
    if name == "2-D":
        rows = max(size for size in range(1, rows + 1) if rows % size == 0 and size * size <= rows)
    return Mesh(devices.reshape(rows, -1), ("x", "y"))


def load(files: dict[str, str]) -> dict[str, Any]:
    """The products of a case in each sharding, compiled; with the difference of each from our C."""
    a, b, wanted = (np.load(files[name]) for name in "abc")
    products, differences = {}, {}
    for name, specs in SHARDINGS.items():
        left, right, out = (NamedSharding(mesh(name), PartitionSpec(*spec)) for spec in specs)
        operands = jax.device_put(a, left), jax.device_put(b, right)
        compiled = jax.jit(jax.numpy.matmul, out_shardings=out).lower(*operands).compile()
        products[name] = (compiled, operands)
        found = np.asarray(compiled(*operands))
        differences[name] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return {"products": products, "differences": differences}


def main() -> None:
    """Answer requests until there are no more."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # a rank is batch work, and its child would be
    jax.config.update("jax_enable_x64", True)
    versions = f"{jax.__version__}, jaxlib {jax.lib.__version__}, {len(jax.devices())} devices of the host"
    print(json.dumps(versions), flush=True)
    products: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "a" in request:
            case = load(request)
            products = case["products"]
            print(json.dumps(case["differences"]), flush=True)
            continue
        product, operands = products[request["sharding"]]
        start = time.perf_counter()
        product(*operands).block_until_ready()
        print(json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
