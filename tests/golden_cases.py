"""The golden figures: words, messages and bytes of models, as the closed forms gave them before the dry run replaced them.

`python tests/golden_cases.py` writes golden_cases.json anew from the oracle; dry/test_golden.py holds the dry run to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("golden_cases.json")
PHASES = ("forward", "backward", "optimizer")
PLACEMENTS = ("mpi", "node", "device")
"""Where bytes are counted: every axis through MPI, every axis through its node's memory, and on devices through NCCL."""
TERMS = ("parameters", "gradients", "optimizer", "activations", "workspace", "in_flight", "peak", "node")
"""What the numbers of a placement are."""
GRIDS: list[tuple[str, dict[str, int], str]] = [
    ("serial", {"x": 1}, "copied"),
    ("oned", {"y": 1}, "copied"),
    ("oned", {"y": 2}, "copied"),
    ("oned", {"y": 4}, "copied"),
    ("oned", {"y": 6}, "copied"),
    ("oned-sp", {"y": 2}, "copied"),
    ("oned-sp", {"y": 4}, "copied"),
    ("oned-sp", {"y": 12}, "copied"),
    ("summa", {"x": 2, "y": 1}, "copied"),
    ("summa", {"x": 2, "y": 2}, "copied"),
    ("summa", {"x": 2, "y": 2}, "root-only"),
    ("summa", {"x": 2, "y": 3}, "copied"),
    ("summa", {"x": 3, "y": 3}, "copied"),
    ("summa", {"x": 3, "y": 4}, "root-only"),
    ("summa-transposed", {"x": 2, "y": 2}, "copied"),
    ("summa-transposed", {"x": 3, "y": 2}, "root-only"),
    ("tesseract", {"d": 4}, "copied"),
    ("tesseract", {"x": 2, "y": 2, "d": 2}, "copied"),
    ("tesseract", {"x": 2, "y": 2, "d": 3}, "copied"),
    ("cuboid", {"x": 3}, "copied"),
    ("cuboid", {"x": 2, "y": 2, "z": 1}, "copied"),
    ("cuboid", {"x": 1, "y": 2, "z": 2}, "diagonal"),
    ("cuboid", {"x": 2, "y": 1, "z": 3}, "copied"),
    ("cuboid", {"x": 2, "y": 2, "z": 2}, "copied"),
    ("cuboid", {"x": 2, "y": 2, "z": 2}, "diagonal"),
    ("cuboid", {"x": 3, "y": 2, "z": 2}, "copied"),
    ("cuboid-sequence", {"y": 3}, "copied"),
    ("cuboid-sequence", {"x": 1, "y": 2, "z": 2}, "copied"),
    ("cuboid-sequence", {"x": 2, "y": 2, "z": 2}, "copied"),
    ("cuboid-sequence", {"x": 2, "y": 3, "z": 2}, "copied"),
]
TEXT = {"hidden": 96, "heads": 12, "sequence": 24, "vocabulary": 191}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": TEXT | {"family": "gpt2", "dropout": 0.1},
    "llama": TEXT | {"family": "llama", "kv_heads": 2},
    "bert": TEXT | {"family": "bert"},
    "vit": {"family": "vit", "hidden": 96, "heads": 12, "image": 20, "patch": 4, "channels": 3, "classes": 11, "dropout": 0.1},
}
OPTIONS = list(product([("none", 1), ("selective", 1), ("full", 1), ("full", 2)], [True, False], ["float32", "bfloat16"]))


@dataclass(frozen=True)
class Case:
    """One model on one grid; `sizes` are the keys of its ModelConfig."""

    scheme: str
    axes: dict[str, int]
    vectors: str
    sizes: dict[str, Any]
    batch: int
    recompute: tuple[str, int]
    regather: bool
    dtype: str

    @property
    def name(self) -> str:
        grid = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        kept = "regather" if self.regather else "keep"
        options = f"{self.vectors} {self.recompute[0]}{self.recompute[1]} {kept} {self.dtype}"
        return f"{self.sizes['family']} {self.scheme} {grid} {options} layers={self.sizes['layers']}"

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Case:
        """The case as the file has it."""
        return cls(**{**entry, "recompute": tuple(entry["recompute"])})


def cases() -> Iterator[Case]:
    """Every family on every grid, under three settings each that go through all of OPTIONS in turn."""
    for turn, ((scheme, axes, vectors), family) in enumerate(product(GRIDS, FAMILIES)):
        for again in range(3):
            recompute, regather, dtype = OPTIONS[(5 * turn + 3 * again) % len(OPTIONS)]
            sizes = FAMILIES[family] | {"layers": 2 + (turn + again) % 3}
            case = Case(scheme, axes, vectors, sizes, 0, recompute, regather, dtype)
            fitted = _fitted(case)
            if fitted is not None:
                yield fitted


def _fitted(case: Case) -> Case | None:
    """The case with a batch, and kv heads, that its grid can split; None where it cannot split the sequence."""
    from summa3d.comm.grid import Place
    from summa3d.errors import LayoutError
    from summa3d.nn import ModelConfig, scheme

    on_grid = scheme(case.scheme, Place(case.axes), case.regather, case.vectors)
    shape, inner = on_grid.grid.shape, on_grid.scheme.after_linear(on_grid.residual)
    least = lcm(on_grid.residual.num_shards(0, shape), inner.num_shards(0, shape))
    case = replace(case, batch=least * -(-8 // least))
    if case.sizes["family"] == "llama" and inner.num_shards(-1, shape) % 3 == 0:
        case = replace(case, sizes=case.sizes | {"kv_heads": 6})
    try:
        on_grid.scheme.check_even(ModelConfig(**case.sizes), case.batch)
    except LayoutError:
        return None
    return case


def figures(case: Case) -> dict[str, Any]:
    """Return what the closed forms say of a case: words and messages of the first and the last rank, and bytes of rank 0."""
    from nn_oracle.memory import ModelMemory
    from nn_oracle.volume_models import model_volume

    from summa3d.comm.grid import Place
    from summa3d.nn import ModelConfig, scheme

    config = ModelConfig(**case.sizes)
    found: dict[str, Any] = {"words": {}, "messages": {}}
    size = Place(case.axes).size
    for rank in sorted({0, size - 1}):
        on_rank = scheme(case.scheme, Place(case.axes, rank), case.regather, case.vectors)
        volume = model_volume(config, on_rank, case.batch, config.sequence)
        step = volume.step()
        again = volume.block().times(config.layers).forward if case.recompute[0] == "full" else None
        backward = step.backward if again is None else step.backward + again
        costs = (step.forward, backward, step.optimizer)
        found["words"][str(rank)] = [cost.words for cost in costs]
        found["messages"][str(rank)] = [cost.messages for cost in costs]
    on_rank = scheme(case.scheme, Place(case.axes, 0), case.regather, case.vectors)
    staged = tuple(axis for axis, size in on_rank.grid.shape.items() if size > 1)
    for placement in PLACEMENTS:
        held = staged if placement == "node" else ()
        where = (*case.recompute, held, placement == "device")
        memory = ModelMemory(config, on_rank, case.batch, config.sequence, case.dtype, *where)
        found[placement] = list(asdict(memory.memory()).values())
    return found


def write() -> None:
    """Write the file: a line a case."""
    lines = [json.dumps({**asdict(case), "figures": figures(case)}, separators=(",", ":")) for case in cases()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{len(lines)} cases")


def read() -> list[tuple[Case, dict[str, Any]]]:
    """Every case with its figures."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    return [(Case.of(entry), figures) for entry in entries for figures in [entry.pop("figures")]]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    write()
