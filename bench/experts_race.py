"""Benchmark of a layer of experts on axis ep: ours against gloo's all-to-alls around the same experts, and against Transformers'.

Every rank holds its share of the experts and tokens of its own; a round is a forward and a backward pass of each side, router
and combination included. gloo's side is the same layer in plain torch and torch.distributed; Transformers' is the Mixtral layer
that it distributes itself (`AllToAllEP`). Loads are as uneven as a random router makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import about, beside, conclude, itself, not_slower, note, options, quotient, save
from ranks import alternating, started, tell

SHAPE = {"tokens": 1024, "hidden": 512, "width": 1024, "experts": 8, "chosen": 2}
SMALL = {"tokens": 24, "hidden": 16, "width": 12, "experts": 8, "chosen": 2}
RANKS = (2, 4)
OURS, TILED, GLOO, THEIRS = "ours", "in tiles", "gloo", "transformers"
TOLERANCE = 1e-4
WARM_UP = 2


def main() -> None:
    """Race on each number of ranks, and print the ratios and whether ours is not slower."""
    parser = options(__doc__, 11, "Time this many rounds; they take turns in the order of the sides.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[*RANKS], metavar="P", help="Run on these rank counts.")
    parser.add_argument("--tile", type=int, metavar="R", help="Time our layer in tiles of R rows, too.")
    parser.add_argument("--small", action="store_true", help="Take few tokens and a narrow layer, for a quick try.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.rounds, SMALL if args.small else SHAPE, args.tile)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        result = itself(ranks)
        print(about(result["machine"]))
        if result["error"]:
            print(f"{THEIRS} on {ranks} ranks: {result['error']}")
        seconds = result["seconds"]
        if TILED in seconds:
            print(beside(f"{ranks} ranks", f"{TILED} of {args.tile}", seconds[TILED], seconds[OURS]))
        for peer in (GLOO, THEIRS):
            if peer in seconds:
                rows.append({"peer": peer, "ranks": ranks, "ours": seconds[OURS], "theirs": seconds[peer]})
                print(beside(f"{ranks} ranks", peer, seconds[peer], seconds[OURS]))
    middles = {f"{row['peer']}, {row['ranks']} ranks": quotient(row["theirs"], row["ours"]).middle for row in rows}
    conclude([not_slower("peer", middles)])
    save({"kind": "experts-race", "machine": result["machine"], "rows": rows}, args.json)


def measure(rounds: int, shape: Mapping[str, int], tile: int | None) -> None:
    """Run on every rank: check that all sides compute the same, and time them in turn; rank 0 prints JSON."""
    world = started()
    import torch
    import torch_step

    from summa3d.bench.clock import Clock
    from summa3d.bench.machine import machine
    from summa3d.comm.grid import Grid

    found, grid = machine(world), Grid(world, {"ep": world.size})
    torch_step.join(world)
    draw = torch.Generator().manual_seed(1 + world.rank)
    given = [torch.randn(1, shape["tokens"], shape["hidden"], generator=draw) for _ in range(2)]
    weights = drawn(shape)
    sides = {OURS: ours(grid, shape, weights), GLOO: by_gloo(world, shape, weights)}
    if tile is not None:
        sides[TILED] = ours(grid, shape, weights, tile)
    error = ""
    try:
        sides[THEIRS] = by_transformers(world, shape, weights)
    except (ImportError, RuntimeError, NotImplementedError, ValueError) as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    acts = {name: passes(layer, *given) for name, layer in sides.items()}
    want = acts[GLOO]()
    for name, act in acts.items():
        if any((got - expected).norm() > TOLERANCE * expected.norm() for got, expected in zip(act(), want, strict=True)):
            raise ValueError(f"{name} computes another layer than gloo's side.")
    seconds = alternating(acts, rounds, Clock(grid), WARM_UP)
    if world.rank == 0:
        note(f"{world.size} ranks: done")
    tell(world, {"machine": found, "seconds": seconds, "error": error})
    torch.distributed.destroy_process_group()


def drawn(shape: Mapping[str, int]) -> dict[str, Any]:
    """The weights of the layer, whole, the same on every rank: of the router [h, E], of gates, of what they gate, and back."""
    import torch

    draw = torch.Generator().manual_seed(0)
    experts, hidden, width = (shape[name] for name in ("experts", "hidden", "width"))
    sizes = {"router": (hidden, experts), "gate": (experts, hidden, width), "up": (experts, hidden, width)}
    sizes["down"] = experts, width, hidden
    return {name: torch.randn(size, generator=draw) * size[-2] ** -0.5 for name, size in sizes.items()}


def passes(layer: Callable[[Any], Any], x: Any, gradient: Any) -> Callable[[], list[Any]]:
    """A forward and a backward pass of a layer: its output, and the gradients of the input and of the router's weight [h, E].

    layer : a module whose parameter `router` is found by `router_of`
    """
    x = x.clone().requires_grad_()

    def act() -> list[Any]:
        x.grad = None
        layer.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        out = layer(x)
        out.backward(gradient)
        router = router_of(layer).grad
        return [out.detach(), x.grad, router if router.shape[0] == x.shape[-1] else router.T]

    return act


def router_of(layer: Any) -> Any:
    """The router's weight of a side."""
    return next(
        parameter for name, parameter in layer.named_parameters() if name in ("layer.router.weight", "router", "gate.weight")
    )


def ours(grid: Any, shape: Mapping[str, int], weights: Mapping[str, Any], tile: int | None = None) -> Any:
    """Our layer, with these weights."""
    from torch import nn

    from summa3d.nn.config import MixtureConfig, ModelConfig
    from summa3d.nn.context import scheme
    from summa3d.nn.experts.moe import MoE
    from summa3d.nn.layers.dropout import Batch

    context = scheme("serial", grid)
    sizes: dict[str, Any] = {"experts": shape["experts"], "experts_per_token": shape["chosen"], "balance": None}
    sizes["moe"] = MixtureConfig(tile=tile)
    config = ModelConfig(family="mixtral", hidden=shape["hidden"], ffn=shape["width"], heads=1, kv_heads=1, layers=1, **sizes)

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import torch

            self.layer = MoE(config, context, 0.02, torch.float32)

        def forward(self, x: Any) -> Any:
            return self.layer(x, Batch(*x.shape[:2]))

    layer = Ours()
    layer.layer.router.weight.data.copy_(weights["router"])
    for number, expert in enumerate(layer.layer.experts):
        for name in ("gate", "up", "down"):
            weight = getattr(expert, name).weight
            if weight.numel():
                weight.data.copy_(weights[name][number])
    return layer


def by_gloo(world: Any, shape: Mapping[str, int], weights: Mapping[str, Any]) -> Any:
    """The same layer in plain torch, whose tokens travel by torch.distributed's all-to-alls."""
    import torch
    from torch import distributed, nn
    from torch.nn import functional

    class Exchanged(torch.autograd.Function):
        """All-to-all of rows; backward the other way."""

        @staticmethod
        def forward(ctx: Any, rows: Any, sent: list[int], received: list[int]) -> Any:
            ctx.sizes = sent, received
            found = rows.new_empty(sum(received), rows.shape[1])
            distributed.all_to_all_single(found, rows, received, sent)
            return found

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            sent, received = ctx.sizes
            found = gradient.new_empty(sum(sent), gradient.shape[1])
            distributed.all_to_all_single(found, gradient.contiguous(), sent, received)
            return found, None, None

    own, chosen = shape["experts"] // world.size, shape["chosen"]
    mine = slice(world.rank * own, (world.rank + 1) * own)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Parameter(weights["router"].clone())
            joined = torch.cat((weights["gate"], weights["up"]), 2)
            self.inward = nn.ParameterList(one.T.contiguous() for one in joined[mine])
            self.outward = nn.ParameterList(one.T.contiguous() for one in weights["down"][mine])

        def forward(self, x: Any) -> Any:
            flat = x.flatten(0, 1)
            scores, picks = (flat @ self.router).softmax(-1).topk(chosen)
            scores = scores / scores.sum(-1, keepdim=True)
            order = picks.flatten().argsort(stable=True)
            counts = torch.bincount(picks.flatten(), minlength=shape["experts"]).view(world.size, own)
            arriving = torch.empty_like(counts)
            distributed.all_to_all_single(arriving, counts)
            sent, received = counts.sum(1).tolist(), arriving.sum(1).tolist()
            rows = Exchanged.apply(flat[order // chosen], sent, received)
            pieces = rows.split(arriving.flatten().tolist())
            done = [
                self.expert(torch.cat(pieces[number::own]), number).split(arriving[:, number].tolist()) for number in range(own)
            ]
            back = torch.cat([done[number][source] for source in range(world.size) for number in range(own)])
            found = Exchanged.apply(back, received, sent)
            restored = torch.empty_like(found).index_copy(0, order, found).view(-1, chosen, flat.shape[1])
            return (restored * scores[..., None]).sum(1).view_as(x)

        def expert(self, rows: Any, number: int) -> Any:
            gate, up = functional.linear(rows, self.inward[number]).chunk(2, -1)
            return functional.linear(functional.silu(gate) * up, self.outward[number])

    return Plain()


def by_transformers(world: Any, shape: Mapping[str, int], weights: Mapping[str, Any]) -> Any:
    """Transformers' layer of a Mixtral, whose experts it distributes by its own plan."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from transformers import MixtralConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"num_local_experts": shape["experts"], "num_experts_per_tok": shape["chosen"]}
    config = MixtralConfig(hidden_size=shape["hidden"], intermediate_size=shape["width"], **sizes)
    config._experts_implementation = "grouped_mm"
    layer = MixtralSparseMoeBlock(config)
    mesh = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("ep", "tp"))
    prefix = "layers.*.mlp."
    plan = {key.removeprefix(prefix): style for key, style in config.base_model_ep_plan.items() if key.startswith(prefix)}
    apply_expert_parallelism(layer, mesh["ep"], mesh["tp"], plan, "all_to_all")
    own = shape["experts"] // world.size
    mine = slice(world.rank * own, (world.rank + 1) * own)
    joined = torch.cat((weights["gate"], weights["up"]), 2)
    with torch.no_grad():
        layer.gate.weight.copy_(weights["router"].T)
        for parameter, whole in ((layer.experts.gate_up_proj, joined), (layer.experts.down_proj, weights["down"])):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(whole[mine].transpose(1, 2))
    return layer


if __name__ == "__main__":
    main()
