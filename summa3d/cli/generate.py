"""`summa3d generate`: continues a prompt with a trained model, on one rank or on the grid of the run, token by token."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

from ..comm.device.arrays import DEVICES
from ..errors import ConfigError
from .train import chooser, one_thread_if_small


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d generate` to `parser`."""
    parser.description = (
        "Continue a prompt with the model of a run's newest checkpoint: on one rank, on as many as the run's grid has, or on any "
        "number where train has chosen the grid."
    )
    parser.add_argument("run", type=Path, metavar="DIR", help="Read this run folder, the --run of `summa3d train`.")
    parser.add_argument("--prompt", required=True, help="Continue this text.")
    parser.add_argument("--tokens", type=int, default=200, help="Add this many tokens.")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="Divide the logits by this number. 0 always takes the likeliest token."
    )
    parser.add_argument("--top-k", type=int, default=0, help="Choose among the k likeliest tokens only. 0 means all tokens.")
    parser.add_argument("--seed", type=int, default=1, help="Set the seed: equal seeds give equal texts on every grid.")
    parser.add_argument("--device", choices=DEVICES, help="Compute there. The default is the device of the run.")
    parser.add_argument("--json", action="store_true", help="Print the result as one JSON line.")


def run(args: argparse.Namespace) -> int:
    """Generate text, print it on rank 0, and return the exit status; collective over all ranks."""
    from ..train.config import at_least
    from ..train.toml import is_unicode

    for name, lowest in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        at_least(f"--{name.replace('_', '-')}", getattr(args, name), lowest)
    if not args.prompt:
        raise ConfigError("--prompt is empty; give at least one character to continue.")
    if not is_unicode(args.prompt):
        raise ConfigError(f"--prompt {args.prompt!r} is no Unicode text: it holds bytes that are not UTF-8.")
    from mpi4py import MPI

    from ..train.device import open_device
    from ..train.generate import load, sample

    device = None if args.device is None else open_device(args.device, MPI.COMM_WORLD)
    model, plan, config, tokenizer = load(
        args.run, MPI.COMM_WORLD, device, chooser("generate") if MPI.COMM_WORLD.size > 1 else None
    )
    one_thread_if_small(config.model, config.model.sequence)
    began, choice = time.perf_counter(), (args.temperature, args.top_k, args.seed)
    show = partial(print, end="", flush=True) if MPI.COMM_WORLD.rank == 0 and not args.json else None
    text = sample(model, plan, config.model, tokenizer, args.prompt, args.tokens, *choice, show)
    seconds = time.perf_counter() - began
    if MPI.COMM_WORLD.rank == 0:
        result = {"prompt": args.prompt, "text": text, "tokens": args.tokens, "seed": args.seed, "seconds": seconds}
        print(json.dumps(result) if args.json else "", flush=True)
    return 0
