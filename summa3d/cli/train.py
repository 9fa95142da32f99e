"""`summa3d train`: trains a model from a configuration, and reports the memory of a run without training (--dry-run)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import preemption
from ..errors import ConfigError, DataError, GridError, Summa3dError
from ..figures import FORMATS
from ..files import whole
from ..launcher.runtime import leave_core, threads_are_free
from .traces import add_trace_arguments, check_trace_arguments, ranges_for

if TYPE_CHECKING:
    from ..nn.config import ModelConfig
    from ..train.config import Choose, Config

MEBI = 1 << 20
GIGA = 1e9
CORE_TIME = (
    *("cores", "arithmetic_share", "communication_share", "idle_share", "waited_seconds"),
    *("exposed_communication", "model_flops_per_second", "mfu"),
)
"""The keys of a summary that describe the use of the cores."""
MOST_LISTED = 12
"""Runs that an error names."""
TEAM_PRODUCT = 1 << 24
"""m·n·k of a product that is worth a team of threads: about a millisecond of one core."""
TRACED = (3, 5)
"""The steps that --trace writes by default."""
PRICED_SECONDS = 20
"""Seconds of training from which a run's end says what the planner predicted: pricing it takes a second or more itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d train` to `parser`."""
    parser.description = "Train a transformer on a grid of MPI ranks."
    parser.add_argument(
        "config",
        nargs="?",
        help="Train this configuration: one that is shipped with summa3d (demo), a model's (llama-7b), a TOML file, or a "
        "Transformers folder, the model of the run. A run that is resumed has its own by default.",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="Write config.toml, metrics.jsonl, checkpoints/ and loss.png to this folder. The default is runs/CONFIG.",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="Change a key of the configuration, as in train.steps=20. The option may be repeated.",
    )
    parser.add_argument(
        "--resume", action="store_true", help="Continue the run in DIR from its newest complete checkpoint; an error without one."
    )
    parser.add_argument("--start-or-resume", action="store_true", help="Start a run in DIR, or continue the one that is there.")
    parser.add_argument("--overwrite", action="store_true", help="Delete the checkpoints in DIR and start again.")
    _add_dry_run(parser)
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="Write the metrics as TensorBoard's events too, to tensorboard/ in DIR. It needs the package tensorboard.",
    )
    add_trace_arguments(parser, "some steps")
    parser.add_argument("--trace-steps", type=_steps, metavar="A:B", help="Trace the steps A to B. The default is 3:5.")
    parser.add_argument("--json", action="store_true", help="Print the summary as one JSON line.")


def _add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of a dry run."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Report what each rank of the grid would compute, move and hold, without training, on any number of ranks.",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="Choose a grid of N ranks for --dry-run, where the configuration has none."
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="Let N consecutive ranks share a node in the report of --dry-run. By default it covers one rank per node and all "
        "ranks on one node.",
    )
    parser.add_argument(
        "--grids",
        metavar="all|GRID;GRID…",
        help="Compare grids in --dry-run, a row each by predicted seconds: all of --ranks, or 'x=2,z=4;dp=8;scheme=oned,y=8'.",
    )
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="Predict the seconds of --grids on this cluster. The default is this machine."
    )
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="Let the experts in --dry-run take the tokens of this file: counts as JSON, or the last step of a run's "
        "metrics.jsonl. By default all take as many.",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="Say in --dry-run whether it fits a device of this memory, as 40GB, less a reserve."
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="With --dry-run, draw words against bytes of a rank on every grid of as many ranks into this file, in the format of "
        f"its ending ({', '.join(FORMATS)}).",
    )


def _steps(text: str) -> tuple[int, int]:
    first, last = (whole(part) for part in text.partition(":")[::2])
    if first is None or last is None:
        raise argparse.ArgumentTypeError(f"{text!r} names no steps; write the first and the last, as 3:5")
    return first, last


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if args.resume and args.start_or_resume:
        raise ConfigError("--resume continues a run, and --start-or-resume starts one too. Give one of them.")
    resumes = "--resume" if args.resume else "--start-or-resume" if args.start_or_resume else ""
    if resumes and args.overwrite:
        raise ConfigError(f"{resumes} continues from checkpoints that --overwrite deletes. Give one of them.")
    if args.config is None and not (resumes and args.run):
        raise ConfigError(
            "Name a configuration: `summa3d train demo`, a TOML file, or a Transformers folder. "
            "Only --resume --run DIR goes without."
        )
    for option in ("grids", "cluster", "memory", "load"):
        if getattr(args, option) is not None and not args.dry_run:
            raise ConfigError(f"--{option} is for --dry-run, which trains nothing.")
    if args.load is not None and (args.grids is not None or args.plot is not None):
        raise ConfigError(
            "--load is of one grid's dry run; --grids and --plot take as many tokens for each expert. Leave one out."
        )
    if args.cluster is not None and args.grids is None:
        raise ConfigError("--cluster predicts the seconds of --grids. Give both.")
    if args.ranks is not None and not args.dry_run:
        raise ConfigError("--ranks is for --dry-run. A run trains on the ranks that were started: summa3d launch -n N train …")
    if args.plot is not None and not args.dry_run:
        raise ConfigError("--plot draws what --dry-run reports of every grid. A run's losses are drawn by `summa3d plot`.")
    if args.plot is not None and args.grids is not None:
        raise ConfigError("--plot draws every grid of the scheme by itself, and --grids prints a table. Give one of them.")
    if args.plot is not None and args.plot.suffix[1:] not in FORMATS:
        raise ConfigError(f"--plot {args.plot} names no format; end it in one of .{', .'.join(FORMATS)}.")
    if args.dry_run and args.trace:
        raise ConfigError("--dry-run takes no steps, and so --trace has none to write. Give one of them.")
    if args.trace_steps and not args.trace:
        raise ConfigError("--trace-steps selects the steps that --trace writes. Give --trace FILE as well.")


def holds_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder, or been imported into it."""
    return (folder / "config.toml").is_file() or any((folder / "checkpoints").glob("step-*"))


def check_run(folder: Path) -> None:
    """Raise ConfigError, which lists the runs beside it, where a folder holds no run."""
    if holds_run(folder):
        return
    beside = folder.parent
    runs = sorted(item.name for item in beside.iterdir() if holds_run(item)) if beside.is_dir() else []
    more = f" and {len(runs) - MOST_LISTED} more" if len(runs) > MOST_LISTED else ""
    listed = f"Runs in {beside}: {', '.join(runs[:MOST_LISTED])}{more}." if runs else f"There are no runs in {beside}."
    raise ConfigError(f"{folder} holds no run. {listed} --start-or-resume begins one where there is none.")


def default_folder(config: str) -> Path:
    """The run folder of a configuration, without --run.

    >>> default_folder("gpt3-1.3b").as_posix(), default_folder("own/books.toml").as_posix()
    ('runs/gpt3-1.3b', 'runs/books')
    """
    return Path("runs") / Path(config).name.removesuffix(".toml")


def check_folder(folder: Path, used: bool) -> None:
    """Raise ConfigError where a job of this host uses a folder, or where it holds a run but is not to be `used`."""
    from ..train import lease, prepare

    lease.check_free(folder)
    if not used:
        prepare.check_new(folder)


def _continues(args: argparse.Namespace, folder: Path) -> bool:
    """Return whether a run in the folder is to be continued, or started where there is none; the same on every rank. Collective.

    Raises ConfigError where --resume finds no run, and where --start-or-resume finds neither a run nor a configuration.
    """
    from mpi4py import MPI

    from ..train.on_root import on_root

    if args.resume or (args.start_or_resume and args.config is None):
        on_root(MPI.COMM_WORLD, lambda: check_run(folder), ConfigError)
    return bool(args.resume or args.start_or_resume)


def _say_replaced(args: argparse.Namespace, folder: Path, assignments: Sequence[str]) -> None:
    """Say which settings of a run that is continued the configuration named beside --resume replaces, but for the grid's."""
    from ..train import config as configuration
    from ..train import toml

    file = folder / "config.toml"
    if args.config is None or not file.is_file():
        return
    with contextlib.suppress(Summa3dError):  # a run of an older version; its checkpoint is looked at later
        sources = (str(file), args.config)
        own, named = (configuration.to_table(configuration.load(source, assignments)) for source in sources)
        changed = [change for change in toml.changes(own, named) if not change.startswith(("grid.", "scheme ", "chosen "))]
        if changed:
            said = f"{args.config} replaces settings of {folder}: {', '.join(changed)}"
            print(f"summa3d train: {said}; without a configuration the run keeps its own", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Train, print the summary on rank 0, and return the exit status; collective over all ranks."""
    from mpi4py import MPI

    from ..comm.nodes import Nodes
    from ..train import config as configuration
    from ..train.data import corpus
    from ..train.on_root import on_root

    if args.dry_run:
        preemption.stop_listening()  # there is nothing to save
    _check_arguments(args)
    folder = args.run or default_folder(args.config)
    resumes = _continues(args, folder)
    ranks = MPI.COMM_WORLD.size if args.ranks is None else args.ranks
    configuration.at_least("--ranks", ranks, 1)
    assignments = [*args.assignments, *(["train.tensorboard=true"] if args.tensorboard else [])]
    if args.grids is not None:
        return _compare_grids(args, args.config or str(folder / "config.toml"))
    if resumes and not args.dry_run and MPI.COMM_WORLD.rank == 0:
        _say_replaced(args, folder, assignments)
    if not args.dry_run:  # what is soon seen to be wrong, before a grid is chosen
        data = configuration.load(args.config or str(folder / "config.toml"), assignments).data
        on_root(MPI.COMM_WORLD, lambda: corpus.check(data), DataError)
        on_root(MPI.COMM_WORLD, lambda: check_folder(folder, resumes or args.overwrite), ConfigError)
    config = configuration.load_for(
        ranks, args.config or str(folder / "config.toml"), assignments, picker("train", args.ranks_per_node)
    )
    if resumes or args.ranks is not None or MPI.COMM_WORLD.size > 1:  # a dry run on one process is of any grid
        _check_ranks(config, ranks, resumes)
    if args.dry_run:
        return _dry_run(config, args)
    from ..train.loop import TraceWindow, finished, train

    ended = finished(config, MPI.COMM_WORLD, folder) if resumes else None
    if ended is not None:
        if MPI.COMM_WORLD.rank == 0:
            steps = f"{folder} has taken its {config.train.steps} steps; raise train.steps to continue"
            print(json.dumps(ended) if args.json else f"nothing to do: {steps}", flush=True)
        return 0
    one_thread_if_small(config.model, config.train.micro_batch * config.model.sequence // MPI.COMM_WORLD.size)
    if config.grid.pp > 1:
        leave_core()
    check_trace_arguments(args, MPI.COMM_WORLD)
    traced = None if args.trace is None else TraceWindow(args.trace, *(args.trace_steps or TRACED))
    if config.train.signal:
        preemption.listen(config.train.signal)
    summary = train(config, MPI.COMM_WORLD, folder, resumes, args.overwrite, traced, ranges_for(args))
    preempted, nodes = "preempted" in summary, Nodes.of(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0 and args.json:
        print(json.dumps(summary), flush=True)
    elif MPI.COMM_WORLD.rank == 0 and not preempted:
        print(report(summary, beside_prediction(config, summary, max(nodes.ranks), min(nodes.cores))), flush=True)
    return preemption.STATUS if preempted else 0


def one_thread_if_small(model: ModelConfig, rows: int) -> None:
    """Let torch compute with one thread where no product of `rows` rows keeps a team busy; threads that the user has set stay."""
    if threads_are_free() and rows * model.hidden * model.ffn_dim < TEAM_PRODUCT:
        import torch

        torch.set_num_threads(1)


def chooser(command: str) -> Choose:
    """Chooses the scheme and the grid of the fewest words, and says so on rank 0's stderr in the name of `command`."""
    from ..nn.choose import choose

    def chosen(config: Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
        result = choose(config.local_model, config.rows, ranks, schemes, config.regather, config.vectors)
        _say(command, result, config, ranks)
        return result.scheme, result.grid

    return chosen


def picker(command: str, ranks_per_node: int | None = None) -> Choose:
    """Chooses the scheme and the grid of the fastest predicted step; on devices that nothing describes, as `chooser`.

    Without `ranks_per_node` the ranks lie as those that were started, and those of a dry run in one process on one node.
    """

    def chosen(config: Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
        from mpi4py import MPI

        from ..comm.device.select import requested_device
        from ..comm.nodes import Nodes
        from ..plan.pick import Pick, cluster_for, pick
        from ..train.on_root import on_root

        world, device = MPI.COMM_WORLD, requested_device(config.device)
        nodes, total = Nodes.of(world), ranks * config.grid.outer
        node = ranks_per_node or (max(nodes.ranks) if world.size > 1 else total)

        def picked() -> Pick | None:
            cluster = cluster_for(device, total, node, min(nodes.cores))
            return None if cluster is None else pick(config, ranks, schemes, cluster)

        result = on_root(world, picked, ConfigError) if ranks > 1 else None
        if result is None:
            return chooser(command)(config, ranks, schemes)
        _say(command, result, config, ranks)
        return result.scheme, result.grid

    return chosen


def _say(command: str, choice: object, config: Config, ranks: int) -> None:
    from mpi4py import MPI

    outer = config.grid.outer
    if MPI.COMM_WORLD.rank == 0 and ranks * outer > 1:
        parts = f", on each of {outer} replicas and stages" if outer > 1 else ""
        print(f"summa3d {command}: {choice}{parts}", file=sys.stderr, flush=True)


def _check_ranks(config: Config, ranks: int, resumes: bool) -> None:
    """Raise the GridError of a grid that does not fit the number of ranks."""
    from ..comm.topology import Topology

    try:
        Topology.checked(config.grid.axes).check_size(ranks)
    except GridError as error:
        if not resumes:
            raise
        raise GridError(f"{error}\n  {_line_for(config, ranks)} gives the run another grid.") from None


def _line_for(config: Config, ranks: int) -> str:
    """The command line for a grid of so many ranks, of which the replicas and stages stay: that of the fewest words."""
    from ..comm.topology import OUTER
    from ..nn.choose import choose

    outer, generic = config.grid.outer, "--set grid.x=… (y, z)"
    if ranks % outer:
        return generic
    try:
        choice = choose(config.local_model, config.rows, ranks // outer, (config.scheme,), config.regather, config.vectors)
    except GridError:
        return generic
    given = {**choice.grid, **{axis: size for axis, size in config.grid.axes.items() if axis in OUTER and size > 1}}
    return " ".join(f"--set grid.{axis}={size}" for axis, size in given.items())


def _dry_run(config: Config, args: argparse.Namespace) -> int:
    from mpi4py import MPI

    from ..nn.experts.load import read_load
    from ..plan.search.memory import fitting
    from ..plan.search.request import bytes_of
    from ..train.dry_run import dry_run
    from ..train.progress import Pulse

    memory = None if args.memory is None else bytes_of(args.memory)
    tell = Pulse("train", MPI.COMM_WORLD.rank == 0).of("tracing program")
    load = None if args.load is None else read_load(args.load)
    result = dry_run(config, ranks_per_node=args.ranks_per_node, tell=tell, load=load)
    fit = None if memory is None else fitting(result.need, memory)
    if MPI.COMM_WORLD.rank == 0 and args.json:
        print(json.dumps(result.as_json() | ({} if fit is None else {"memory": fit._asdict()})), flush=True)
    elif MPI.COMM_WORLD.rank == 0:
        print(result, *([] if fit is None else ["", fit]), sep="\n", flush=True)
    if MPI.COMM_WORLD.rank == 0 and args.plot is not None:
        _draw_grids(config, args)
    return 0


def _compare_grids(args: argparse.Namespace, source: str) -> int:
    """Print a table of grids on rank 0; returns the exit status. Raises ConfigError for what names no grids."""
    from mpi4py import MPI

    from ..cluster import load
    from ..comm.device.select import requested_device
    from ..launcher.runtime import usable_cores
    from ..plan.grids import ALL, asked_grids, compare
    from ..plan.pick import cluster_for
    from ..plan.search.request import bytes_of
    from ..train import config as configuration
    from ..train import toml
    from ..train.progress import Pulse

    table = configuration.read_table(source)
    toml.override(configuration.Config, table, args.assignments)
    config, ranks = configuration.from_table(table), args.ranks
    if args.grids == ALL and ranks is None:
        raise ConfigError("--grids all compares the grids of so many ranks: give --ranks N.")
    asked = asked_grids(args.grids, config, ranks or 1, "scheme" not in table)
    ranks = ranks or prod(asked[0][1].values())
    node = args.ranks_per_node or ranks
    memory = None if args.memory is None else bytes_of(args.memory)
    here = None if args.cluster is not None else cluster_for(requested_device(config.device), ranks, node, usable_cores())
    cluster = here if args.cluster is None else load(args.cluster)
    if MPI.COMM_WORLD.rank == 0:
        result = compare(config, asked, ranks, node, cluster, memory, Pulse("train").of("grid"))
        print(json.dumps(result.as_json()) if args.json else result.table().text(), flush=True)
    return 0


def _draw_grids(config: Config, args: argparse.Namespace) -> None:
    """Draw the plot of --plot. Raises DataError where it cannot be written, or matplotlib is not installed."""
    from ..plan.grid_points import grid_points, write_points

    points = list(grid_points(config, args.ranks_per_node))
    title = f"{config.scheme}, {prod(config.grid.axes.values())} ranks, {config.dtype}, recompute {config.recompute}"
    try:
        write_points(points, title, args.plot)
    except ImportError as error:
        raise DataError(f"a plot needs matplotlib ({error}): pip install 'summa3d[plot]'.") from None
    except OSError as error:
        raise DataError(f"{args.plot} cannot be written: {error}") from None
    print(f"written: {args.plot}", file=sys.stderr)


def beside_prediction(config: Config, summary: Mapping[str, Any], ranks_per_node: int, cores: int) -> str:
    """One line: the mean measured step of a run beside the planner's price of its configuration; empty for a short run.

    cores : of a node
    """
    from ..plan.grids import seconds_of
    from ..plan.pick import cluster_for, is_assumed

    if summary["training_seconds"] < PRICED_SECONDS or not summary["steps_taken"]:
        return ""
    measured = f"a step took {summary['step_seconds'] / summary['steps_taken']:.2g} s"
    try:
        cluster = cluster_for(summary["device"], summary["ranks"], ranks_per_node, cores)
        if cluster is None:
            return f"{measured}; not predicted: no cluster describes this device (`summa3d bench calibrate --write` measures it)"
        predicted = seconds_of(config, cluster)
    except Summa3dError as error:
        return f"{measured}; not predicted: {str(error).partition(chr(10))[0]}"
    assumed = ", an assumed machine" if is_assumed(cluster) else ""
    return f"{measured}, predicted {predicted:.2g} s on cluster {cluster.name}{assumed}"


def report(summary: dict[str, Any], prediction: str = "") -> str:
    """The summary of a run as text: the sample, then loss, speed, use of the cores, peak memory and the path of the plot.

    prediction : a line behind the speed; empty for none
    """
    from ..train.metrics import CoreTime

    memory, on_devices = summary["peak_memory_bytes"] / MEBI, summary["peak_device_bytes"] / MEBI
    used = CoreTime(*(summary[name] for name in CORE_TIME))
    lines = [
        f"step {summary['step']} · loss {_number(summary['loss'], '.4f')} · "
        f"validation loss {_number(summary['validation_loss'], '.4f')}",
        f"{summary['training_seconds']:.1f} s of training · {_number(summary['tokens_per_second'], ',.0f')} tokens/s · "
        f"{summary['words_per_rank']:,} words moved per rank and step",
        *([prediction] if prediction else []),
        f"{used}{for_a_core(summary)} · peak memory of all ranks {memory:,.0f} MiB"
        + (f", of their devices {on_devices:,.0f} MiB" if on_devices else ""),
    ]
    if used.flops_per_second is not None:
        peak, load = f"{summary['peak_flops_per_second'] / GIGA:,.1f} Gflop/s", summary["peak_load"]
        peak += ", as stated" if load is None else f", the best of two measurements (load {load:.1f})"
        share = f"{used.brief()[0]} of {peak}" if used.utilization is not None else f"no MFU: the peak is too low, {peak}"
        lines.insert(2, f"model FLOPs {used.flops_per_second / GIGA:,.1f} Gflop/s, {share}")
    if summary["checkpoint_cpu_seconds"]:
        blocked, cpu = summary["checkpoint_blocked_seconds"], summary["checkpoint_cpu_seconds"]
        lines.append(f"checkpoints: steps waited {blocked:.2f} s for them, and their threads took {cpu:.2f} s of the cores")
    for text in reversed(summary.get("samples") or [*filter(None, [summary["sample"]])]):  # an older run has one at most
        lines = ["sample:", *("  " + line for line in text.splitlines()), "", *lines]
    if summary["plot"] is not None:
        lines.append(f"plot: {summary['plot']}")
    return "\n".join(lines)


def for_a_core(summary: Mapping[str, Any]) -> str:
    """A note on what waiting means where ranks outnumber the cores; empty elsewhere."""
    ranks, cores = summary["ranks"], summary["cores"]
    return f", for a core too: {ranks} ranks share {cores}" if summary["waited_seconds"] is not None and ranks > cores else ""


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
