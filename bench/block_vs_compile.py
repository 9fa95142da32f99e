"""Benchmark of one GPT block on one GPU, forward and backward, against the same block under torch.compile.

Also reports the model's flop rate as a fraction of the rate of a bare product. --device cpu tries the script without a GPU.
"""

from __future__ import annotations

from statistics import median

import torch
from common import conclude, save
from gpu import benchmark_parser, in_turn, taken
from mpi4py import MPI
from plain_block import plain_stack

from summa3d.bench.blocks import BlockEntry, BlockRunner, Case, inputs
from summa3d.nn import ModelConfig

SPEED, SHARE = 1.0, 0.7
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-4}


def main() -> None:
    """Time both blocks, check that their outputs agree, and print whether the claims hold."""
    parser = benchmark_parser(__doc__, "steps", 5, hidden=4096, heads=32, sequence=2048, batch=8, product=8192)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16", help="Set the dtype of weights and activations.")
    args = parser.parse_args()
    device = taken(args.device, "a block's speed against torch.compile")
    if device is None:
        return
    config = ModelConfig(layers=1, hidden=args.hidden, heads=args.heads, sequence=args.sequence)
    case = Case(config, args.batch, args.dtype, args.device)
    ours = BlockRunner(BlockEntry("serial", {"x": 1, "y": 1, "z": 1}), case, MPI.COMM_SELF)
    plain = plain_stack(case)
    compiled = torch.compile(plain)
    x, gradient = inputs(case)
    x.requires_grad_()

    def our_step() -> None:
        ours.backward(ours.forward())
        ours.forget()

    def step(model: torch.nn.Module) -> None:
        model(x).backward(gradient)
        x.grad = None
        plain.zero_grad(set_to_none=True)

    with torch.no_grad():
        wanted = plain(x)
        difference = float((ours.output() - wanted).norm() / wanted.norm())
    if difference > TOLERANCE[args.dtype]:
        raise ValueError(f"the two blocks compute different functions: their outputs differ by {difference:.1e}")
    a, b, c = (torch.randn(args.product, args.product, device=args.device).to(getattr(torch, args.dtype)) for _ in range(3))
    runs = {
        "ours": our_step,
        "compiled": lambda: step(compiled),
        "eager": lambda: step(plain),
        "product": lambda: torch.mm(a, b, out=c),
    }
    times = in_turn(runs, args)
    speed = median(other / own for own, other in zip(times["ours"], times["compiled"], strict=True))
    rate = 2 * args.product**3 / median(times["product"])
    share = model_flops(case) / median(times["ours"]) / rate
    sizes = f"h = {args.hidden}, a = {args.heads}, s = {args.sequence}, b = {args.batch}"
    print(f"{sizes}, {args.dtype}: outputs differ by {difference:.1e}")
    print("  " + ", ".join(f"{name} {1e3 * median(taken):.2f} ms" for name, taken in times.items()))
    print(f"  a product of {args.product}³ runs at {rate / 1e12:.1f} Tflop/s")
    claims = [
        (f"≥ {SPEED:.1f}× the speed of torch.compile ({speed:.2f}×)", speed >= SPEED),
        (f"the model's flops at ≥ {SHARE:.0%} of that product's rate ({share:.0%})", share >= SHARE),
    ]
    if args.device == "cuda":
        conclude(claims)
    save({"kind": "compile", "device": device, "speed": speed, "share": share, "seconds": times}, args.json)


def model_flops(case: Case) -> float:
    """Flops of forward and backward; of attention's s² scores, the half that a causal mask leaves counts."""
    config = case.config
    return case.flops - 6 * case.batch * config.sequence * config.layers * config.sequence * config.hidden


if __name__ == "__main__":
    main()
