"""Misuses of models, layers and checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from campaigns.calls import ANY, Case
from campaigns.core import MODES
from campaigns.misuses_of_grids import LAYOUTS
from campaigns.spoilt import NUMBERS, MustRefuse, as_numpy, one_rank, spoilt_arrays

MODEL = {"family": "gpt2", "layers": 1, "hidden": 24, "heads": 6, "sequence": 6, "vocabulary": 12}


def spoilt_tokens(tokens: Any) -> dict[str, Any]:
    """Tokens, or labels, of other types, shapes and values; not all of them are wrong."""
    import torch

    def with_one(value: int) -> Any:
        changed = tokens.clone()
        changed[-1, -1] = value
        return changed

    return {
        **{f"dtype {one}": tokens.to(one) for one in (torch.int32, torch.uint8, torch.float32, torch.bool, torch.complex64)},
        **{f"the id {one}": with_one(one) for one in (12, -1, 2**40, -(2**40))},
        "numpy": tokens.numpy(),
        "a list": tokens.tolist(),
        "None": None,
        "a number": 3,
        "one sequence": tokens[0],
        "one more dim": tokens[None],
        "one row less": tokens[1:],
        "no rows": tokens[:0],
        "no columns": tokens[:, :0],
        "longer": torch.cat([tokens, tokens], 1),
        "transposed": tokens.t(),
        "without memory": tokens.to("meta"),
        "sparse": tokens.to_sparse(),
        "every other column": torch.cat([tokens, tokens], 1)[:, ::2],
    }


def models(chance: random.Random, rank: int, size: int) -> Case:
    """A model's loss, or a layer, with one argument spoilt."""
    import torch

    tokens = torch.arange(72).reshape(12, 6) * 7 % 12
    good: dict[str, Any] = {"tokens": tokens, "labels": tokens.roll(-1, 1)}
    values = {repr(one): one for one in (0, -1, 7, 5.0, "6", None, True, [2], 2**40, "gpt2", "bert")}
    others = {repr(one): one for one in ("serial", "oned", "summa", "cannon", "", None, 3, ["cuboid"], "cuboid ")}
    dtypes = {repr(one): one for one in (torch.int64, "float32", None, torch.complex64, torch.float64, 3)}
    spoils: dict[str, dict[str, Any]] = {
        **{"tokens": spoilt_tokens(tokens), "labels": spoilt_tokens(tokens), "attention_mask": spoilt_tokens(tokens)},
        **{"documents": spoilt_tokens(tokens), "step": NUMBERS, "first_row": NUMBERS, "count": NUMBERS, "seed": NUMBERS},
        **{f"model {one}": values for one in MODEL},
        **{"scheme": others, "dtype": dtypes, "unknown": {"a key": 1}},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])
    mode = chance.choice([*MODES])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.nn import ModelConfig, build, scheme

        changes = {one.removeprefix("model "): value for one, value in arguments.items() if one.startswith("model ")}
        plan, dtype = scheme(arguments.get("scheme", "cuboid"), grid), arguments.get("dtype", torch.float64)
        model = build(ModelConfig(**{**MODEL, **changes}), plan, dtype, arguments.get("seed", 1))
        rest = {one: arguments[one] for one in ("attention_mask", "documents", "step", "first_row", "count") if one in arguments}
        loss = model(arguments["tokens"], arguments["labels"], **rest)
        loss.backward()
        return loss.detach().reshape(1)

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        """The loss of one rank alone."""
        from summa3d.comm.grid import Place

        if key in ("dtype", "scheme"):
            return ANY
        try:
            return as_numpy(call(Place(dict.fromkeys("xyz", 1)), {**good, key: spoils[key][name], "scheme": "serial"}))
        except Exception as error:
            raise MustRefuse from error

    return Case("model", f"{key}: {name}", mode, None, good, {**good, key: spoils[key][name]}, call, oracle, close=1e-9)


def layers(chance: random.Random, rank: int, size: int) -> Case:
    """A linear layer or a norm with one argument spoilt."""
    import torch

    x = torch.arange(72.0).reshape(12, 6) % 5
    good: dict[str, Any] = {"x": x[: 12 // size]}
    sizes = {repr(one): one for one in (0, -6, 7, 6.0, "6", None, True, [6], 2**70)}
    spoils: dict[str, dict[str, Any]] = {
        **{"x": spoilt_arrays(good["x"].numpy()), "k": sizes, "n": sizes, "layout": LAYOUTS, "rows": NUMBERS},
        **{"dtype": {"int64": torch.int64, "float64": torch.float64, "a text": "float32", "None": None}, "std": NUMBERS},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        from summa3d.nn import Linear, initialise, scheme

        plan = scheme("cuboid", grid)
        rest = {one: arguments[one] for one in ("layout", "std", "dtype") if one in arguments}
        layer = Linear(arguments.get("k", 6), arguments.get("n", 6), plan, **rest)
        initialise(layer, plan, 1)
        y = layer(arguments["x"], *([arguments["rows"]] if "rows" in arguments else []))
        y.sum().backward()
        return None

    return Case(
        *("layer", f"{key}: {name}", chance.choice([*MODES]), None, good, {**good, key: spoils[key][name]}, call),
        lambda everyone, rank: None,
    )


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "altered": lambda file: file.write_bytes(file.read_bytes()[:-3] + b"abc"),
    "missing": lambda file: file.unlink(),
    "a folder": lambda file: file.unlink() or file.mkdir(),
    "another one": lambda file: file.with_name("rank-99.safetensors").write_bytes(file.read_bytes()) and None,
}


def checkpoints(chance: random.Random, rank: int, size: int) -> Case:
    """A checkpoint that is written, damaged or not, and read, by this grid or by another, with one argument spoilt."""
    import numpy as np
    import torch
    from mpi4py import MPI

    from summa3d import Grid, Layout, Sharding
    from summa3d.train import config
    from summa3d.train.checkpoint import folder as checkpoint
    from summa3d.train.checkpoint import writer
    from summa3d.train.checkpoint.shards import TensorBlock

    whole = {"w": torch.arange(84.0).reshape(12, 7), "b": torch.arange(5.0)}
    good: dict[str, Any] = {"step": 3}
    spoils: dict[str, dict[str, Any]] = {
        "step": NUMBERS,
        "damage": {f"{damage}: {file}": (damage, file) for damage in DAMAGES for file in ("rank-0.safetensors", "index.json")},
        "read": {repr(one): one for one in ("step-4", "nowhere", "", "..", "step-3/index.json", "step-3/", "\0", "a" * 300)},
        "blocks": {one: one for one in ("of another name", "of another dtype", "of another shape", "none", "twice")},
        "grid": {repr(one): one for one in ({"z": size}, {"x": 1, "y": size}, {"y": size})},
    }
    key = chance.choice([*spoils])
    name = chance.choice([*spoils[key]])
    mode, victim = chance.choice([*MODES]), None if key in ("damage", "grid") else one_rank(chance, size)
    folders: list[Path] = []

    @contextlib.contextmanager
    def around(grid: Any) -> Any:
        folders[:] = [Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if rank == 0 else None))]
        yield
        MPI.COMM_WORLD.Barrier()
        if rank == 0:
            shutil.rmtree(folders[0])

    def blocks(grid: Any, filled: bool, how: str = "") -> list[TensorBlock]:
        layouts = {"w": [("x",), ("y",)], "b": [("y",)]}
        found = []
        for tensor, dims in layouts.items():
            layout = Layout(*(dim if set(dim) <= set(grid.shape) else () for dim in dims))
            sharding = Sharding(layout, whole[tensor].shape)
            block = whole[tensor][sharding.slices(grid)].clone()
            found.append(TensorBlock(tensor, block if filled else torch.full_like(block, torch.nan), sharding))
        one = found[0]
        odd = {
            "of another name": TensorBlock("v", one.tensor, one.sharding),
            "of another dtype": TensorBlock("w", one.tensor.double(), one.sharding),
            "of another shape": TensorBlock("w", one.tensor, Sharding(one.sharding.layout, (12, 8))),
        }
        return {"none": [], "twice": found * 2}.get(how, [odd.get(how, one), *found[1:]])

    def call(grid: Any, arguments: dict[str, Any]) -> Any:
        folder, step = folders[0], arguments["step"]
        path = writer.save(folder, step, blocks(grid, True), grid, config.load("demo", ["dtype=float32"]))
        if "damage" in arguments and grid.rank == 0:
            damage, file = arguments["damage"]
            DAMAGES[damage](path / file)
        grid.comm.Barrier()
        with Grid(grid.communicators.common, arguments["grid"]) if "grid" in arguments else contextlib.nullcontext(grid) as reads:
            found = checkpoint.read(folder / arguments["read"] if "read" in arguments else path, grid.comm)
            found.verify(grid.comm)
            wanted = blocks(reads, False, arguments.get("blocks", ""))
            found.load(wanted, reads)
            off = [(one.tensor - whole[one.name][one.sharding.slices(reads)]).abs().max() for one in wanted if one.tensor.numel()]
        return np.array([max(map(float, off), default=0.0)])

    def oracle(everyone: list[dict[str, Any]], rank: int) -> Any:
        read = {one.get("read", "step-3/") for one in everyone}
        wrong = any("damage" in one or one.get("blocks", "").startswith("of another") for one in everyone)
        if wrong or read != {"step-3/"} or len({whole_step(one["step"]) for one in everyone}) > 1:
            raise MustRefuse
        return np.zeros(1)

    def whole_step(step: Any) -> int:
        if not isinstance(step, int) or step < 0:
            raise MustRefuse
        return step

    bad = {**good, key: spoils[key][name]}
    return Case("checkpoint", f"{key}: {name}", mode, victim, good, bad, call, oracle, around)
