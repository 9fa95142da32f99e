"""Benchmark of an adopted Llama's training pass against our own family's, and against Transformers' own tensor parallelism.

The same MPI ranks hold all models, with as many weights and equal rows, and take forward and backward in turn; the peer's ranks
talk over gloo.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import Any

from common import about, conclude, from_ranks, options, quotient, save
from ranks import alternating, on_machine, tell

RANKS = (2, 4)
GRIDS = {
    2: (("oned", {"y": 2}), ("cuboid", {"x": 2}), ("cuboid", {"z": 2})),
    4: (("oned", {"y": 4}), ("cuboid", {"x": 4}), ("cuboid", {"y": 2, "z": 2})),
}
SIZES = {"large": (1024, 1024), "small": (256, 256)}
"""Hidden, and rows (batch · sequence) a rank."""
LAYERS, HEAD, SEQUENCE, VOCABULARY = 1, 32, 256, 1024
WARM_UPS = 1
LEAST, AHEAD = 0.95, 1.0


def main() -> None:
    """Run on each number of ranks, and print the ratios and whether the claims hold."""
    import sys

    parser = options(__doc__, 5, "Time this many rounds; every other one has the sides the other way round.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[*RANKS], choices=RANKS, metavar="P", help="Run on these.")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES], help="Run these sizes. The default is all.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.sizes, args.rounds)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        result = from_ranks(ranks, *sys.argv, "--on-ranks")
        print(about(result["machine"]))
        for row in result["rows"]:
            print(line(row))
        rows += result["rows"]
    conclude(claims(rows))
    save({"kind": "adopted", "machine": result["machine"], "rows": rows}, args.json)
    return None


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    times = ", ".join(f"{side} {median(seconds) * 1e3:.0f} ms" for side, seconds in row["seconds"].items())
    found = quotient(row["seconds"][row["peer"]], row["seconds"]["adopted"])
    about_it = f"{row['what']}, {row['ranks']} ranks, hidden {row['hidden']}, {row['rows']} rows a rank: {times}"
    return f"{about_it}; {row['peer']} ÷ adopted {found.middle:.2f} [{found.ends}]"


def claims(rows: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Adopted models are as fast as our own where sizes are large, and ahead of Transformers' own plan."""
    found = []
    for peer, limit in (("ours", LEAST), ("transformers", AHEAD)):
        ratios = {
            f"{row['what']}, {row['ranks']} ranks, hidden {row['hidden']}": quotient(
                row["seconds"][peer], row["seconds"]["adopted"]
            ).middle
            for row in rows
            if row["peer"] == peer and (row["hidden"] >= SIZES["large"][0] or peer == "transformers")
        }
        if ratios:
            worst = min(ratios, key=lambda name: ratios[name])
            found.append((f"{peer} ÷ adopted ≥ {limit}: the least is {ratios[worst]:.2f} ({worst})", ratios[worst] >= limit))
    return found


def measure(sizes: list[str], rounds: int) -> None:
    """Run on every rank: time the sides of each size and grid in turn; rank 0 prints JSON."""
    world, found = on_machine()
    import torch_step

    torch_step.join(world)
    rows = []
    for size in sizes:
        hidden, here = SIZES[size]
        for name, axes in GRIDS[world.size]:
            peers = ("ours", "transformers") if name == "oned" else ("ours",)
            times = race(name, axes, hidden, here * world.size // SEQUENCE, peers, rounds, world)
            about_it = {"what": f"{name} {axes}", "ranks": world.size, "hidden": hidden, "rows": here}
            rows += [{**about_it, "peer": peer, "seconds": {side: times[side] for side in ("adopted", peer)}} for peer in peers]
            gc.collect()
    tell(world, {"machine": found, "rows": rows})
    import torch

    torch.distributed.destroy_process_group()


def race(
    name: str, axes: dict[str, int], hidden: int, batch: int, peers: tuple[str, ...], rounds: int, world: Any
) -> dict[str, list[float]]:
    """Seconds of forward and backward of each side in each round, once the losses of those of equal weights agree."""
    import torch

    from summa3d import Grid
    from summa3d.bench.clock import Clock

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (batch, SEQUENCE), generator=generator)
    grid = Grid(world, axes)
    sides = {"adopted": adopted_side(name, grid, hidden, ids), "ours": own_side(name, grid, hidden, ids)}
    if "transformers" in peers:
        sides["transformers"] = their_side(hidden, ids)
        losses = [float(sides[side]()) for side in ("adopted", "transformers")]
        if abs(losses[0] - losses[1]) > 1e-4 * losses[1]:
            raise ValueError(f"Transformers' own plan computes another loss: {losses}")
    times = alternating(sides, rounds, Clock(grid), WARM_UPS)
    grid.free()
    return times


def config_of(hidden: int) -> Any:
    """A Llama's configuration."""
    import transformers

    transformers.logging.set_verbosity_error()
    heads = hidden // HEAD
    return transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=LAYERS, num_attention_heads=heads,
        num_key_value_heads=heads // 2, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE,
    )  # fmt: skip


def whole_model(hidden: int) -> Any:
    """A Llama with random weights, alike on every rank."""
    import torch
    import transformers

    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(config_of(hidden))


def passes(model: Any, loss_of: Callable[[], Any]) -> Callable[[], Any]:
    """Forward and backward, whose gradients are dropped; the loss."""

    def act() -> Any:
        model.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        return loss.detach()

    return act


def adopted_side(name: str, grid: Any, hidden: int, ids: Any) -> Callable[[], Any]:
    """The adopted model's pass."""
    from summa3d.nn import parallelise, scheme

    model = parallelise(whole_model(hidden), scheme(name, grid))
    return passes(model, lambda: model(input_ids=ids, labels=ids).loss)


def own_side(name: str, grid: Any, hidden: int, ids: Any) -> Callable[[], Any]:
    """The pass of our family of the same sizes."""
    from summa3d.nn import ModelConfig, build, scheme

    heads = hidden // HEAD
    config = ModelConfig(
        family="llama", layers=LAYERS, hidden=hidden, heads=heads, kv_heads=heads // 2, ffn=hidden * 11 // 4, sequence=SEQUENCE,
        vocabulary=VOCABULARY, tied_head=False,
    )  # fmt: skip
    model = build(config, scheme(name, grid))
    return passes(model, lambda: model(ids, ids))


def their_side(hidden: int, ids: Any) -> Callable[[], Any]:
    """The pass of Transformers' own plan over gloo, from a folder that rank 0 writes."""
    import tempfile

    import torch
    import transformers

    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    if torch.distributed.get_rank() == 0:
        whole_model(hidden).save_pretrained(folder[0])
    torch.distributed.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto", dtype=torch.float32)
    torch.distributed.barrier()
    return passes(model.train(), lambda: model(input_ids=ids, labels=ids).loss)


if __name__ == "__main__":
    main()
