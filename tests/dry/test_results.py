"""Results of operations without memory that are worked out here: those of torch itself, or left to it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from summa3d.dry.results import RULES, result_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
UNARY = ("log", "exp", "neg", "cos", "sin", "rsqrt", "tanh", "sigmoid")
BINARY = ("add", "sub", "mul", "div", "bitwise_and", "ge", "gt", "le", "lt", "eq", "ne")


def tensor(draw: Random, shape: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without memory, of any layout: contiguous, transposed, a slice, or expanded."""
    dtype = dtype or draw.choice(DTYPES)
    kind = draw.choice(("whole", "whole", "turned", "slice", "expanded"))
    if kind == "turned" and len(shape) > 1:
        return torch.empty(shape[::-1], dtype=dtype, device="meta").permute(*reversed(range(len(shape))))
    if kind == "slice" and shape:
        return torch.empty([*shape[:-1], 2 * shape[-1] + 1], dtype=dtype, device="meta")[..., 1::2]
    if kind == "expanded" and shape:
        return torch.empty([1, *shape[1:]], dtype=dtype, device="meta").expand(shape)
    return torch.empty(shape, dtype=dtype, device="meta")


def case(draw: Random, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operation, as autograd and layers give them, and others."""
    shape = [draw.choice((1, 2, 3, 5)) for _ in range(draw.randrange(1, 5))]
    dtype = draw.choice(DTYPES)
    one = tensor(draw, shape, dtype)
    if name in ("new_empty", "new_zeros"):
        return (one, [3, 2]), draw.choice(({}, {"dtype": torch.float64}, {"pin_memory": False}))
    if name in ("empty_like", "ones_like", "zeros_like", "clone", "_to_copy"):
        options: list[dict[str, Any]] = [{}, {"memory_format": torch.contiguous_format}, {"memory_format": torch.preserve_format}]
        return (one,), {**draw.choice(options), **({} if name == "clone" else draw.choice(({}, {"dtype": torch.float32})))}
    if name == "mm":
        return (tensor(draw, [3, 5], torch.float32), tensor(draw, [5, 2], torch.float32)), {}
    if name == "clamp":
        return (one, *draw.choice(((0, 3), (0,), (0.5, 1.5)))), {}
    if name == "cat":
        dim = draw.randrange(-len(shape), len(shape))
        other = [draw.choice((1, 4)) if at == dim % len(shape) else size for at, size in enumerate(shape)]
        return ([one, tensor(draw, other, draw.choice((dtype, dtype, torch.float32)))], dim), {}
    if name == "stack":
        return ([one, tensor(draw, shape, dtype)], draw.randrange(-len(shape) - 1, len(shape) + 1)), {}
    if name in UNARY:
        return (one,), {}
    cut = [size if draw.random() < 0.7 else 1 for size in shape][draw.choice((0, 0, 1)) :]
    other_one = draw.choice((tensor(draw, shape, dtype), tensor(draw, shape), tensor(draw, cut), 2, 0.5))
    return (one, other_one), draw.choice(({}, {}, {"alpha": 2})) if name in ("add", "sub") else {}


@pytest.mark.parametrize("name", RULES)
def test_a_result_that_is_worked_out_has_the_shape_the_strides_and_the_dtype_of_torchs_own(name: str) -> None:
    draw, known = Random(name), 0
    for _ in range(60):
        args, kwargs = case(draw, name)
        given = [
            one.untyped_storage()._cdata
            for part in args
            for one in (part if isinstance(part, list) else [part])
            if isinstance(one, torch.Tensor)
        ]
        found = result_of(name, args, kwargs)
        if found is None:
            continue
        known += 1
        packet = getattr(torch.ops.aten, name)
        want = packet(*args, **kwargs)
        assert (found.shape, found.dtype, found.is_meta) == (want.shape, want.dtype, True), (args, kwargs)
        strides = [[stride for stride, size in zip(one.stride(), one.shape, strict=True) if size > 1] for one in (found, want)]
        assert strides[0] == strides[1], (args, kwargs)
        assert found.untyped_storage()._cdata not in given and found.untyped_storage().nbytes() == want.untyped_storage().nbytes()
    assert known >= 8, "the rule is of use"


def test_what_torch_refuses_is_left_to_it() -> None:
    one, other = torch.empty(2, 3, device="meta"), torch.empty(4, 3, device="meta")
    for name in ("add", "mul", "eq", "mm"):
        assert result_of(name, (one, other), {}) is None
    assert result_of("cat", ([one, torch.empty(2, device="meta")],), {}) is None
    assert result_of("stack", ([one, other],), {}) is None
    assert result_of("add", (torch.ones(2), torch.ones(2)), {}) is None, "tensors with memory"


def test_a_search_does_not_import_torchs_compiler_and_one_whose_cells_are_on_disk_no_torch(tmp_path: Path) -> None:
    words = """
import mpi4py, sys
mpi4py.rc.initialize = False
from summa3d import find_plans
sizes = ["layers=2", "hidden=32", "heads=4", "sequence=16", "vocabulary=64"]
for model, scheme in (("llama3-8b", "cuboid"), ("gpt3-175b", "oned")):
    print(find_plans([model, *sizes, "kv_heads=4"], "dgx-h100", 4, 8, fix={"scheme": scheme, "dp": 1, "pp": 1}, top=1))
print([name for name in ("torch._dynamo", "torch") if name in sys.modules])
"""
    environment = {**os.environ, "SUMMA3D_CACHE": str(tmp_path)}
    first, second = (
        subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, env=environment) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.splitlines()[-1] == "['torch']" and second.stdout.splitlines()[-1] == "[]"
    assert "s/step" in first.stdout
