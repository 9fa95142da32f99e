"""`summa3d checkpoint inspect|verify|import|export`: contents of checkpoints, and import and export of Transformers folders."""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dtypes import FLOATS
from ..errors import CheckpointError, ConfigError, printable

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..train.checkpoint.folder import Checkpoint

MEBI = 1 << 20


ACTIONS = {
    "inspect": "Show the step, model, files and tensors of a checkpoint.",
    "verify": "Check that a checkpoint is complete: its index, the files' sizes, checksums and tensors, and the model's.",
    "import": "Make a run folder from a Transformers folder (gpt2, llama, bert, mixtral, qwen2_moe, qwen3_moe, olmoe).",
    "export": "Write a checkpoint as a Transformers folder.",
}
CHECKPOINT = "Read the newest checkpoint of this run folder, or the checkpoint in this folder step-N."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands inspect, verify, import and export with their options to `parser`."""
    parser.description = (
        "Show what a checkpoint holds, verify it, import a local Transformers folder as a checkpoint, or export one."
    )
    commands = parser.add_subparsers(dest="action", required=True, metavar="inspect|verify|import|export")
    inspect, verify, take, give = (commands.add_parser(action, help=text, description=text) for action, text in ACTIONS.items())
    for command in (inspect, verify):
        command.add_argument("path", type=Path, metavar="DIR", help=CHECKPOINT)
    take.add_argument(
        "source", type=Path, metavar="TRANSFORMERS_DIR", help="Read this folder, which holds config.json and model.safetensors."
    )
    take.add_argument("path", type=Path, metavar="DIR", help="Make this run folder, for train --resume and generate.")
    take.add_argument(
        "--verify",
        action="store_true",
        help="Compare the imported model's logits with those of the folder's own model, which needs the package transformers.",
    )
    take.add_argument("--overwrite", action="store_true", help="Delete the checkpoints that DIR already holds.")
    give.add_argument("path", type=Path, metavar="DIR", help=CHECKPOINT)
    give.add_argument("target", type=Path, metavar="TRANSFORMERS_DIR", help="Write to this folder, which must be new or empty.")
    give.add_argument(
        "--dtype", choices=FLOATS, help="Set the dtype of the files. The default is the dtype that the model computed in."
    )
    give.add_argument(
        "--file-size",
        type=int,
        default=5 * 1024,
        metavar="MIB",
        help="Limit the size of a file. A larger model is written to several files with an index.",
    )
    give.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="Export this tokenizer.json, or that of this folder, with the model. The default is that in the run folder.",
    )
    for command in (inspect, verify, take, give):
        command.add_argument("--json", action="store_true", help="Print the result as one JSON line.")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action, print its result on rank 0, and return the exit status; collective over all ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    result, text = {"inspect": _inspect, "verify": _verify, "import": _import, "export": _export}[args.action](args, comm)
    if comm.rank == 0:
        print(json.dumps(result) if args.json else printable(text), flush=True)
    return 0


def _inspect(args: argparse.Namespace, comm: MPI.Intracomm) -> tuple[dict[str, Any], str]:
    saved = _open(args.path, comm)
    tensors = {
        name: {"shape": entry["shape"], "dtype": entry["dtype"], "pieces": len(entry["pieces"])}
        for name, entry in saved.index["tensors"].items()
    }
    model = {name: entry for name, entry in tensors.items() if name.startswith("model.")}
    kept = ("step", "dtype", "model", "written_on", "loss_scale")
    result = {
        "path": str(saved.path),
        **{key: saved.index.get(key) for key in kept},
        "parameters": sum(prod(entry["shape"]) for entry in model.values()),
        "optimizer": saved.has_moments,
        "bytes": sum(entry["bytes"] for entry in saved.index["files"].values()),
        "files": len(saved.index["files"]),
        "tensors": tensors,
    }
    on = result["written_on"]
    place = ",".join((on["scheme"], *(f"{axis}={size}" for axis, size in on["grid"].items())))
    sizes = " · ".join(f"{key} {value}" for key, value in result["model"].items())
    lines = [
        f"{saved.path}: step {saved.step}, computed in {result['dtype']}, written on {place}",
        sizes,
        f"{result['parameters']:,} parameters, {'with' if saved.has_moments else 'without'} the optimizer's moments; "
        f"{result['bytes'] / MEBI:,.1f} MiB in {result['files']} file(s)",
        *(f"  {name:<44} {entry['dtype']:<9} {'×'.join(map(str, entry['shape']))}" for name, entry in model.items()),
    ]
    return result, "\n".join(lines)


def _verify(args: argparse.Namespace, comm: MPI.Intracomm) -> tuple[dict[str, Any], str]:
    saved = _open(args.path, comm)
    saved.verify(comm)
    saved.check_tensors()
    files, tensors = saved.index["files"], saved.index["tensors"]
    size = sum(entry["bytes"] for entry in files.values())
    result = {"path": str(saved.path), "step": saved.step, "files": len(files), "tensors": len(tensors), "bytes": size}
    held = f"{len(tensors)} tensors, {size / MEBI:,.1f} MiB in {len(files)} file(s)"
    return result, f"{saved.path}: step {saved.step}, complete and as its index says: {held}"


def _import(args: argparse.Namespace, comm: MPI.Intracomm) -> tuple[dict[str, Any], str]:
    from ..train.checkpoint import compare
    from ..train.checkpoint.huggingface import import_folder
    from ..train.config import load
    from ..train.on_root import on_root

    if args.verify:
        on_root(comm, compare.check_installed, ConfigError)
    path = import_folder(args.source, args.path, comm, args.overwrite)
    result: dict[str, Any] = {"checkpoint": str(path), "run": str(args.path)}
    if args.verify:
        result["largest_difference"] = on_root(comm, lambda: compare.logits(args.source, args.path), CheckpointError)
    if comm.rank != 0:
        return result, ""
    train = f"summa3d train --run {args.path} --resume --set data.path=FILE --set train.learning_rate=RATE"
    lines = [str(path), f"Train it with: {train}"]
    if load(str(args.path / "config.toml")).data.tokenizer == "bytes":
        lines.insert(1, "The run has no tokenizer and reads bytes. Name one with --set data.tokenizer=FOLDER.")
    if args.verify:
        lines.append(f"logits as those of transformers: they differ by {result['largest_difference']:.1e} of the largest at most")
    return result, "\n".join(lines)


def _export(args: argparse.Namespace, comm: MPI.Intracomm) -> tuple[dict[str, Any], str]:
    from ..train.checkpoint.huggingface import TOKENIZER, export_folder, tokenizer_name
    from ..train.config import master_dtype
    from ..train.on_root import on_root

    if args.file_size < 1:
        raise ConfigError(f"--file-size is {args.file_size}; it must be at least 1 (MiB).")
    saved = _open(args.path, comm)
    saved.verify(comm)
    size, own = args.file_size * MEBI, args.tokenizer
    paths = on_root(comm, lambda: export_folder(saved, args.target, args.dtype, size, own), CheckpointError)
    dtype, kept = args.dtype or saved.index["dtype"], master_dtype(saved.index["dtype"])
    how = "bit for bit; headers of files may differ from those of an import" if dtype == kept else f"as {dtype}"
    files = [path for path in paths if path.suffix == ".safetensors"]
    others = [str(path) for path in paths if path not in files]
    if not others:
        named = f'the run\'s data.tokenizer is "{tokenizer_name(saved)}"'
        outside = "" if tokenizer_name(saved).startswith(("bytes", "numbers:")) else ", not in its folder: --tokenizer FILE"
        others = [f"no tokenizer written: {named}{outside}"]
    text = "\n".join((*map(str, files), f"the checkpoint's {kept} tensors, {how}", *others))
    written = TOKENIZER if args.target / TOKENIZER in paths else None
    result = {"folder": str(args.target), "files": [file.name for file in files], "tokenizer": written}
    return result, text


def _open(path: Path, comm: MPI.Intracomm) -> Checkpoint:
    """The checkpoint in a folder step-N, or the newest one of a run folder."""
    from ..train.checkpoint import folder as checkpoint
    from ..train.on_root import on_root

    def find() -> Path:
        result = path if (path / "index.json").is_file() else checkpoint.newest(path / "checkpoints")
        if result is None:
            raise CheckpointError(f"{path} is neither a checkpoint (a folder step-N with index.json) nor a run that holds one.")
        return result

    return checkpoint.read(on_root(comm, find, CheckpointError), comm)
