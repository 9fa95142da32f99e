# `summa3d generate`: continue a prompt with a trained model, on one rank or on the grid of the run.
# Imports train.generate, and torch with it, only when it runs.
# Next: train/generate.py.
from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ..comm.arrays import DEVICES
from ..errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a prompt with the model of a run's newest checkpoint."
    parser.add_argument("run", type=Path, metavar="DIR", help="the run folder: --run of `summa3d train`")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token every time")
    parser.add_argument("--top-k", type=int, default=0, help="choose among the k likeliest tokens only; 0 means all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=DEVICES, help="where to compute; default: where the run did")
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def run(args: argparse.Namespace) -> int:
    from ..train.config import at_least

    for name, lowest in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        at_least(f"--{name.replace('_', '-')}", getattr(args, name), lowest)
    if not args.prompt:
        raise ConfigError("--prompt is empty; give at least one character to continue.")
    from mpi4py import MPI

    from ..train.device import open_device
    from ..train.generate import load, sample

    device = None if args.device is None else open_device(args.device, MPI.COMM_WORLD)
    model, plan, config, tokenizer = load(args.run, MPI.COMM_WORLD, device)
    began = time.perf_counter()
    text = sample(model, plan, config.model, tokenizer, args.prompt, args.tokens, args.temperature, args.top_k, args.seed)
    seconds = time.perf_counter() - began
    if MPI.COMM_WORLD.rank == 0:
        result = {"prompt": args.prompt, "text": text, "tokens": args.tokens, "seed": args.seed, "seconds": seconds}
        print(json.dumps(result) if args.json else text, flush=True)
    return 0
