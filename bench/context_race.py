"""Benchmark of attention over contexts: each kind of ours against keys and values all-gathered by gloo around torch's attention.

Every rank holds the q, k and v of its part of each sequence; a round is a forward and a backward pass of each side. torch's own
`context_parallel` has no attention on CPUs: its error is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from common import about, beside, conclude, itself, not_slower, note, options, quotient, save
from ranks import alternating, started, tell

SHAPE = {"rows": 1, "heads": 8, "kv_heads": 4, "sequence": 4096, "size": 64}
SMALL = {"rows": 2, "heads": 4, "kv_heads": 4, "sequence": 48, "size": 8}
RANKS = (2, 4)
KINDS = ("gather", "ring", "heads")
PEER, TOLERANCE = "gloo", 1e-4
WARM_UP = 2


class Contender(NamedTuple):
    """A side of the race. attend : the q, k and v of a context → its outputs. split : the positions that a context holds."""

    attend: Callable[..., Any]
    split: Any


def main() -> None:
    """Race on each number of ranks, and print the ratios and whether no kind is slower."""
    parser = options(__doc__, 11, "Time this many rounds; they take turns in the order of the sides.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[*RANKS], metavar="P", help="Run on these rank counts.")
    parser.add_argument("--small", action="store_true", help="Take few and short sequences, for a quick try.")
    args = parser.parse_args()
    if args.on_ranks:
        return measure(args.rounds, SMALL if args.small else SHAPE)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        result = itself(ranks)
        print(about(result["machine"]))
        print(f"torch's context_parallel on {ranks} ranks without a GPU: {result['error']}")
        for kind in KINDS:
            row = {"kind": kind, "ranks": ranks, "ours": result["seconds"][kind], "peer": result["seconds"][PEER]}
            print(beside(f"{kind}, {ranks} ranks", PEER, row["peer"], row["ours"]))
            rows.append(row)
    middles = {f"{row['kind']}, {row['ranks']} ranks": quotient(row["peer"], row["ours"]).middle for row in rows}
    conclude([not_slower(PEER, middles)])
    save({"kind": "context-race", "machine": result["machine"], "rows": rows}, args.json)


def measure(rounds: int, shape: Mapping[str, int]) -> None:
    """Run on every rank: check that all sides compute the same, and time them in turn; rank 0 prints JSON."""
    world = started()
    import torch
    import torch_step

    from summa3d.bench.clock import Clock
    from summa3d.bench.machine import machine
    from summa3d.comm.grid import Grid

    found, grid = machine(world), Grid(world, {"cp": world.size})
    torch_step.join(world)
    sides = {kind: ours(kind, grid, shape["heads"]) for kind in KINDS}
    sides[PEER] = gathered(sides["gather"].split, shape["sequence"])
    draw = torch.Generator().manual_seed(1)
    counts = (shape["heads"], shape["kv_heads"], shape["kv_heads"], shape["heads"])
    given = [torch.randn(shape["rows"], heads, shape["sequence"], shape["size"], generator=draw) for heads in counts]
    want = passes(Contender(whole, None), given)()
    acts = {name: passes(side, given) for name, side in sides.items()}
    for name, act in acts.items():
        for got, all_positions in zip(act(), want, strict=True):
            expected = own(all_positions, sides[name].split)
            if (got - expected).norm() > TOLERANCE * expected.norm():
                raise ValueError(f"{name} computes another attention than that of whole sequences.")
    seconds = alternating(acts, rounds, Clock(grid), WARM_UP)
    if world.rank == 0:
        note(f"{world.size} ranks: done")
    tell(world, {"machine": found, "seconds": seconds, "error": error_of_torch(world.size)})
    torch.distributed.destroy_process_group()


def own(whole_tensor: Any, split: Any) -> Any:
    """Return what a context holds of a tensor [b, a, s, d]; all of it without a split."""
    from summa3d.nn.context_parallel.positions import part_of

    return whole_tensor if split is None else part_of(whole_tensor, split, 2)


def passes(side: Contender, given: list[Any]) -> Callable[[], list[Any]]:
    """A forward and a backward pass of a side, of q, k, v and the gradient of the output: the output and three gradients."""
    *inputs, gradient = (own(one, side.split).detach().contiguous() for one in given)
    for one in inputs:
        one.requires_grad_()

    def act() -> list[Any]:
        for one in inputs:
            one.grad = None
        out = side.attend(*inputs)
        out.backward(gradient)
        return [out.detach(), *(one.grad for one in inputs)]

    return act


def whole(q: Any, k: Any, v: Any) -> Any:
    """Attention of whole sequences, by torch."""
    from torch.nn import functional

    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(kind: str, grid: Any, heads: int) -> Contender:
    """Our attention of a kind."""
    from summa3d.nn.context import scheme
    from summa3d.nn.context_parallel.options import ContextOptions
    from summa3d.nn.layers.attention import AttentionCore
    from summa3d.nn.layers.attention_mask import Visible
    from summa3d.nn.layers.dropout import Batch

    context = scheme("serial", grid, contexts=ContextOptions(kind))
    core = AttentionCore(heads, True, 0.0, "race", context, context.residual)
    return Contender(lambda q, k, v: core(q, k, v, Batch(q.shape[0], q.shape[2]), Visible()), context.contexts)


def gathered(split: Any, sequence: int) -> Contender:
    """torch's attention of two folded parts to the keys before them, gathered by gloo; backward reduce-scatters by gloo."""
    import torch
    from torch import distributed
    from torch.nn import functional

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, part: Any) -> Any:
            found = part.new_empty(split.size * len(part), *part.shape[1:])
            distributed.all_gather_single(found, part)
            return found

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            found = gradient.new_empty(len(gradient) // split.size, *gradient.shape[1:])
            distributed.reduce_scatter_single(found, gradient.contiguous())
            return found

    runs = split.runs(sequence)
    masks = [torch.arange(run.stop) <= torch.tensor([*run])[:, None] for run in runs]

    def attend(q: Any, k: Any, v: Any) -> Any:
        front, back = Gathered.apply(torch.stack((k, v))).unflatten(0, (-1, 2)).chunk(2, 4)
        kv = torch.cat([*front, *back.flip(0)], 3)
        found, before = [], 0
        for run, mask in zip(runs, masks, strict=True):
            k, v = kv[:, :, :, : run.stop].unbind(0)
            queries = q[:, :, before : (before := before + len(run))]
            found.append(functional.scaled_dot_product_attention(queries, k, v, mask, enable_gqa=True))
        return torch.cat(found, 2)

    return Contender(attend, split)


def error_of_torch(ranks: int) -> str:
    """Return what torch's own context parallelism says of tensors of the host."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    inputs = [torch.randn(1, 2, 8 * ranks, 8) for _ in range(3)]
    try:
        with context_parallel(init_device_mesh("cpu", (ranks,)), buffers=inputs, buffer_seq_dims=[2, 2, 2]):
            whole(*inputs)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "none"


if __name__ == "__main__":
    main()
