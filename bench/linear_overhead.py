"""Python time of a tiny `Linear`, forward + backward on one rank, beyond torch's own, in µs; and its calls of functions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import about, overhead, save, verdict

SIZES = {"batch": 2, "sequence": 4, "features": 16}
SCHEMES = {"serial": {}, "cuboid": {"x": 1, "y": 1, "z": 1}}
TORCH = "torch"
LIMIT = 100.0  # µs
WARM_UPS = 50
BATCH = 50  # calls whose median is one sample of a round


def main() -> None:
    """Measure the overhead with each scheme, and print whether it stays below the limit."""
    what = f"Time this many rounds of {BATCH} calls of each layer, in turn."
    result, file = overhead(__file__, __doc__, 1, "--rounds", 21, what, measure)
    print(about(result["machine"]))
    its = result["rows"].pop(TORCH)
    print(f"torch {result['torch']}: {in_words(its)}")
    for name, row in result["rows"].items():
        more = [(mine - other) * 1e6 for mine, other in zip(row["seconds"]["both"], its["seconds"]["both"], strict=True)]
        row["overhead_us"] = {"median": median(more), "min": min(more), "max": max(more)}
        print(f"{name}: {in_words(row)}; {median(more):.1f} µs more [{min(more):.1f}–{max(more):.1f}]")
        print("  " + verdict(f"at most {LIMIT:.0f} µs more than torch's, forward + backward", median(more) <= LIMIT))
    save(result | {"rows": {TORCH: its, **result["rows"]}}, file)


def in_words(row: dict[str, Any]) -> str:
    """A row as text."""
    forward, backward, both = (median(row["seconds"][part]) * 1e6 for part in ("forward", "backward", "both"))
    calls = row["calls"]
    return (
        f"{both:.1f} µs a call (forward {forward:.1f}, backward {backward:.1f}), "
        f"{calls['forward']} + {calls['backward']} calls of functions"
    )


def measure(rounds: int) -> None:
    """Run on the one rank: time all layers in turn; print JSON."""
    from summa3d.cli.main import start_mpi

    start_mpi()
    import torch
    from mpi4py import MPI

    from summa3d.bench.machine import machine

    found, layers = machine(MPI.COMM_WORLD), {name: Layer(layer) for name, layer in built().items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": [], "both": []} for name in layers}
    for layer in layers.values():
        layer.seconds(WARM_UPS)
    for _ in range(rounds):
        for name, layer in layers.items():
            for part, taken in layer.seconds(BATCH).items():
                seconds[name][part].append(taken)
    rows = {name: {"seconds": seconds[name], "calls": layer.calls()} for name, layer in layers.items()}
    print(json.dumps({"kind": "linear_overhead", "machine": found, "torch": torch.__version__, **SIZES, "rows": rows}))


def built() -> dict[str, Any]:
    """torch's layer and ours, with equal weights."""
    import torch
    from mpi4py import MPI

    from summa3d import Grid
    from summa3d.nn import Linear, initialise, scheme

    h = SIZES["features"]
    layers = {TORCH: torch.nn.Linear(h, h)}
    for name, grid in SCHEMES.items():
        bound = scheme(name, Grid(MPI.COMM_WORLD, grid) if grid else None)
        layers[name] = Linear(h, h, bound)
        initialise(layers[name], bound, seed=1)
    with torch.no_grad():
        layers[TORCH].weight.copy_(layers["serial"].weight.t())
        layers[TORCH].bias.copy_(layers["serial"].bias)
    return layers


class Layer:
    """A layer with an input and a gradient of its output; checked against torch's own product."""

    def __init__(self, layer: Any) -> None:
        import torch

        shape = (SIZES["batch"], SIZES["sequence"], SIZES["features"])
        x, self.gradient = torch.randn((2, *shape), generator=torch.Generator().manual_seed(1))
        self.layer, self.x = layer, x.requires_grad_()

    def forward(self) -> None:
        """One forward."""
        self.y = self.layer(self.x)

    def backward(self) -> None:
        """One backward, of the last forward."""
        self.y.backward(self.gradient)

    def forget(self) -> None:
        """Set all gradients to None."""
        self.x.grad = None
        self.layer.zero_grad(set_to_none=True)

    def seconds(self, calls: int) -> dict[str, float]:
        """Median seconds of a forward, of a backward and of both."""
        taken = []
        for _ in range(calls):
            start = time.perf_counter()
            self.forward()
            middle = time.perf_counter()
            self.backward()
            end = time.perf_counter()
            taken.append((middle - start, end - middle, end - start))
            self.forget()
        return dict(zip(("forward", "backward", "both"), map(median, zip(*taken, strict=True)), strict=True))

    def calls(self) -> dict[str, int]:
        """Calls of Python's and C's functions in a forward and in a backward, as sys.setprofile sees them."""
        counted = {"forward": count(self.forward), "backward": count(self.backward)}
        self.forget()
        return counted


def count(act: Callable[[], None]) -> int:
    """Calls of functions in `act`, beside that of `act` itself and of the one that ends the count."""
    calls = -2

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    act()
    sys.setprofile(None)
    return calls


if __name__ == "__main__":
    main()
