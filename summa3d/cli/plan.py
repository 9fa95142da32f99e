"""`summa3d plan`: which grid to take; measured steps beside predictions; schedules, drawn; closed formulas. Starts no MPI."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..comm.health.processes import launched_as
from ..errors import ConfigError, DataError
from ..figures import FORMATS, draw
from ..interpreter import module
from ..launcher.runtime import find_launcher, loaded_runtime
from ..nn.config import MOST_LAYERS
from ..parallel import draw as drawing
from ..parallel.schedule import SCHEDULES, build, split_layers
from ..parallel.simulate import ScheduleTimeline, in_flight, messages_of, timeline

if TYPE_CHECKING:
    from ..plan.programs.search import ProgramPlans
    from ..plan.search.command import Measure
    from ..train.config import Config

FORMULAS = "Parameters, operations, days and bubble of a GPT by the closed formulas of Narayanan et al. 2021."
MOST_OPS = 2**18
MOST_COLUMNS = 2**20
"""Of the rows of all ranks."""
MOST_RANKS = 2048
"""A schedule is put in order in sweeps over all ranks, about as many as there are ranks: 1 s for these."""
MOST_ROWS = 512
"""Ranks of a figure, which no format draws without end."""
TIMES = (1e-6, 1e6)
"""The least and the most that an op may take."""
SIZES = (1e-30, 1e30)
"""The same of a number that formulas take, so that what they give is one."""
CLUSTER = "Describe a cluster of your own: a file that --cluster takes."
SCHEDULE = "Draw the order of a pipeline's forwards and backwards: a row for each rank, time from left to right."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d plan` to `parser`."""
    _add_moved(parser, "--paper", "python -m papers NAME")
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="Price measured steps of any program from a JSON file: errors, band, null model.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON in place of the table.")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="Write a figure of several counts of ranks into DIR, as PNG and SVG."
    )
    _add_search(
        parser.add_argument_group(
            "search", "Find the fastest plans of a model on a cluster (--model, --cluster, --ranks, --batch)."
        )
    )
    plans = parser.add_subparsers(dest="plan", metavar="PLAN")
    schedule = plans.add_parser("schedule", help=SCHEDULE, description=SCHEDULE)
    schedule.add_argument("--pp", type=int, required=True, metavar="P", help="Number of ranks of the pipeline.")
    schedule.add_argument("--micro-batches", type=int, required=True, metavar="M", help="Number of micro-batches of a step.")
    schedule.add_argument("--schedule", default="1f1b", metavar="NAME", help=f"One of {', '.join(SCHEDULES)}.")
    schedule.add_argument("--chunks", type=int, default=1, metavar="V", help="Number of stages a rank.")
    schedule.add_argument(
        "--layers",
        type=layers,
        metavar="L|L,L,…",
        help="Number of layers of the model, or of each stage. The default is as many in each.",
    )
    schedule.add_argument("--forward", type=float, default=1.0, metavar="T", help="Time of a rank's forward over its layers.")
    schedule.add_argument("--backward", type=float, default=2.0, metavar="T", help="Time of a rank's backward over its layers.")
    schedule.add_argument(
        "--weights",
        type=float,
        metavar="T",
        help="Time that the gradients of weights take of it, where a schedule splits the backward. The default is half.",
    )
    schedule.add_argument("--png", type=Path, metavar="FILE", help=f"Write a figure too, as FILE ends in: {', '.join(FORMATS)}.")
    schedule.add_argument(
        "--json", action="store_true", help="Print JSON in place of text: totals, and all ops with their times."
    )
    template = plans.add_parser("cluster", help=CLUSTER, description=CLUSTER)
    template.add_argument("--template", action="store_true", required=True, help="Print a complete description, as TOML.")
    _add_formulas(plans.add_parser("formulas", help=FORMULAS, description=FORMULAS))


def _add_search(search: argparse._ArgumentGroup) -> None:
    """Add the options of a search."""
    search.add_argument(
        "--model",
        nargs="+",
        metavar="MODEL",
        help="A model's name, a configuration or TOML file, or a Transformers folder, and KEY=VALUE of its sizes.",
    )
    search.add_argument("--cluster", metavar="NAME|FILE", help="Plan for this cluster: one that is shipped, or a TOML file.")
    search.add_argument(
        "--ranks", metavar="N|N,N,…", help="Plan for N ranks; for several counts, compare their fastest plans: efficiency."
    )
    search.add_argument("--batch", metavar="B|Mtokens", help="Sequences of a step, or tokens, as 4Mtokens.")
    search.add_argument("--tokens", type=tokens_of, metavar="T", help="Tokens to train on, as 300e9 or 300B: days and GPU-hours.")
    search.add_argument("--price", type=float, metavar="X", help="Price of a GPU-hour: what --tokens cost.")
    search.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=2x",
        help="Another number of the cluster, as network.bandwidth=2x; or train.optimizer=muon.",
    )
    search.add_argument("--top", type=int, default=8, metavar="K", help="Show the K fastest plans, and the best of each family.")
    search.add_argument("--fix", action="append", default=[], metavar="KEY=VALUE", help="Only plans with this value, as pp=8.")
    search.add_argument("--limit", action="append", default=[], metavar="KEY<=N", help="Only plans within it, as 'y<=8'.")
    search.add_argument(
        "--memory",
        metavar="SIZE",
        help="Memory of a device, as 40GB or 80GiB, in place of the cluster's; a reserve is kept free.",
    )
    search.add_argument(
        "--era", default="now", metavar="YEAR", help="now, or 2021: all-reduces, every layer recomputed, no ZeRO."
    )
    search.add_argument(
        "--program", metavar="NAME", help="Plan for another program, as megatron-core or fsdp2. A wrong name lists all."
    )
    search.add_argument(
        "--try",
        dest="tries",
        type=int,
        metavar="K",
        help="Run the K fastest plans for five steps each on ranks of this machine; refit the cluster's numbers to them.",
    )
    search.add_argument("--rule", choices=("ptdp",), help="Show beside them the plan of PTD-P's rule.")
    search.add_argument("--explain", type=int, metavar="N", help="Say why plan N is where it is.")
    search.add_argument("--write", type=Path, metavar="DIR", help="Write plan 1 as a configuration and a Slurm job into DIR.")


def tokens_of(text: str) -> float:
    """Parse the text of --tokens. Raises argparse.ArgumentTypeError for what is no number, nor one of M, B or T.

    >>> tokens_of("300e9"), tokens_of("1.5T")
    (300000000000.0, 1500000000000.0)
    """
    scale = {"M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        return float(text[:-1]) * scale if scale else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: write 300e9, 300B or 1.5T") from None


def _add_formulas(formulas: argparse.ArgumentParser) -> None:
    """Add the options of `summa3d plan formulas`."""
    sizes = (("layers", None), ("hidden", None), ("vocabulary", 51200), ("sequence", 2048))
    for name, default in sizes:
        formulas.add_argument(
            f"--{name}", type=int, required=default is None, default=default, metavar="N", help=f"The GPT's {name}."
        )
    formulas.add_argument("--batch", type=int, default=1, metavar="B", help="Sequences of a step.")
    formulas.add_argument("--tokens", type=tokens_of, metavar="T", help="Tokens to train on, as 450B: the days that it takes.")
    formulas.add_argument("--ranks", type=int, metavar="N", help="GPUs that train on them.")
    formulas.add_argument("--tflops", type=float, metavar="X", help="Teraflop/s of each of them.")
    formulas.add_argument("--pp", type=int, default=1, metavar="P", help="Ranks of a pipeline: its bubble.")
    formulas.add_argument("--micro-batches", type=int, default=1, metavar="M", help="Micro-batches of a step.")
    formulas.add_argument("--chunks", type=int, default=1, metavar="V", help="Stages of each rank.")
    for option in ("--costs", "--isoefficiency", "--plots"):
        _add_moved(formulas, option, f"python -m papers formulas --hidden H {option} …")
    formulas.add_argument("--json", action="store_true", help="Print JSON in place of text.")


class MovedOption(argparse.Action):
    """An option that is no longer here: its use is an error that says what to type."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not of summa3d: in a checkout of its sources, type `{self.const}`")


def _add_moved(parser: argparse.ArgumentParser, option: str, now: str) -> None:
    parser.add_argument(option, action=MovedOption, nargs="?", const=now, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def layers(text: str) -> list[int]:
    """Numbers with commas between them. Raises ArgumentTypeError for others, and for more layers than models have."""
    try:
        result = [int(number) for number in text.split(",")]
    except ValueError:
        result = []
    if not result or sum(result) > MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers up to {MOST_LAYERS}, nor 3,3,2 of as many")
    return result


def run(args: argparse.Namespace) -> int:
    """Run the plan that the options name; returns the exit status. Raises ConfigError where they name none."""
    if args.plan == "schedule":
        return draw_schedule(args)
    if args.plan == "formulas":
        return show_formulas(args)
    if args.plan == "cluster":
        from ..plan.questions import TEMPLATE

        print(TEMPLATE.read_text(encoding="utf-8"), end="")
        return 0
    if args.rows is not None:
        return show_rows(args)
    if args.model is not None:
        return show_plans(args)
    raise ConfigError("say what to plan: --model and --cluster, --rows FILE, schedule, or formulas; see summa3d help plan.")


def show_plans(args: argparse.Namespace) -> int:
    """Search for the fastest plans, and print them; returns the exit status. Raises ConfigError for what cannot be planned."""
    missing = [f"--{name}" for name in ("cluster", "ranks", "batch") if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"a search takes --model, --cluster, --ranks and --batch; {', '.join(missing)} is missing.")
    if args.price is not None and args.tokens is None:
        raise ConfigError("--price is of --tokens, which it lacks.")
    for name, value in (("tokens", args.tokens), ("price", args.price)):
        if value is not None and not SIZES[0] <= value <= SIZES[1]:
            raise ConfigError(f"--{name} is {value}; it must be positive, from {SIZES[0]:g} to {SIZES[1]:g}.")
    if args.tries is not None:
        check_try(args)
    say_plan(f"{' '.join(args.model)} on {args.ranks} ranks of {args.cluster}")
    import mpi4py

    mpi4py.rc.initialize = False  # a dry run needs the names of MPI alone
    from ..launcher import trial
    from ..plan import questions
    from ..plan.search.command import check_write
    from ..plan.search.command import run as run_search
    from ..plan.search.request import OPTIMIZER, request

    args.model += [item for item in args.set if item.startswith(OPTIMIZER)]
    args.cluster = questions.cluster_with(args.cluster, [item for item in args.set if not item.startswith(OPTIMIZER)])
    counts, config = questions.rank_counts(args.ranks), request(args.model, 1, args.cluster).config
    if args.tries is not None:
        args.cluster = trial.cluster_here(args.cluster, counts[0], say_plan)
        config.check_text()
    sequence = config.model.sequence
    asked, args.batch = args.batch, questions.sequences(args.batch, sequence)
    args.step_tokens = args.batch * sequence
    if asked != str(args.batch):
        say_plan(f"{asked}: {args.batch} sequences, {args.step_tokens:,} tokens a step")
    if len(counts) > 1:
        return show_scaling(args, counts)
    args.ranks = counts[0]
    if args.plots is not None:
        raise ConfigError("--plots draws several counts of --ranks; a search of one has none.")
    if args.program is not None:
        return show_program(args)
    if args.write is not None:
        check_write(args)
    return run_search(args, None if args.tries is None else measure_on(args.ranks))


def check_try(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that --try does not go with."""
    if args.tries < 1:
        raise ConfigError(f"--try is {args.tries}; it must be at least 1.")
    if "," in args.ranks:
        raise ConfigError(f"--try is of one count of --ranks, not of {args.ranks}.")
    if args.program is not None:
        raise ConfigError(f"--try runs the library's own plans, not those of {args.program}.")
    if launched_as() is not None:
        raise ConfigError("--try starts ranks of its own; start summa3d plan without a launcher.")


def measure_on(ranks: int) -> Measure:
    """The function that runs configurations on `ranks` ranks of this machine. Raises LaunchError where none can be started."""
    from ..launcher import trial
    from .launch import mpi_command

    runtime = loaded_runtime()
    find_launcher(runtime)

    def start(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        command, environ, _ = mpi_command(ranks, module("summa3d", *words), runtime=runtime)
        return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    def measure(configs: Sequence[Config], peak: int) -> Sequence[Sequence[float]]:
        trial.check_memory(ranks, peak, trial.free_memory())
        return trial.measure(configs, start, say_plan)

    return measure


def say_plan(line: str) -> None:
    """Print a line on stderr, in the name of the command."""
    print(f"summa3d plan: {line}", file=sys.stderr, flush=True)


def show_scaling(args: argparse.Namespace, counts: list[int]) -> int:
    """Print the fastest plan on each count of ranks, and how efficient it is; returns the exit status."""
    from ..plan import questions
    from ..plan.search.command import progress
    from ..plan.search.find import find_plans

    lacking = [f"--{name}" for name in ("rule", "explain", "write") if getattr(args, name) is not None]
    if lacking:
        raise ConfigError(f"{', '.join(lacking)} is of one count of --ranks, not of {len(counts)}.")

    def best(ranks: int) -> tuple[str, float]:
        if args.program is not None:
            plan = program_plans(args, ranks).best[0]
            return str(plan), plan.seconds
        options = {"fix": args.fix, "limit": args.limit, "memory": args.memory, "era": args.era}
        with progress(f"on {ranks} ranks, ") as tell:
            plans = find_plans(args.model, args.cluster, ranks, args.batch, top=1, tell=tell, **options)
        return str(plans.best), plans.seconds

    lines = questions.scaling_json(questions.scaling(counts, best), args.step_tokens, args.tokens, args.price)
    about = {"model": args.model, "cluster": args.cluster.name, "batch": args.batch, "program": args.program or "summa3d"}
    print(json.dumps({**about, "scaling": lines}) if args.json else "\n".join(questions.scaling_text(lines)))
    if args.plots is not None:
        for file in questions.draw_scaling(lines, f"{' '.join(args.model)} on {args.cluster.name}", args.plots):
            print(f"written: {file}", file=sys.stderr)
    return 0


def show_program(args: argparse.Namespace) -> int:
    """Print the fastest plans of another program; returns the exit status. Raises ConfigError for options that it lacks."""
    from ..plan import questions
    from ..plan.programs import search

    plans = program_plans(args, args.ranks)
    trained = (
        questions.training(plans.best[0].seconds, args.ranks, args.step_tokens, args.tokens, args.price) if args.tokens else {}
    )
    if args.json:
        about = {"model": args.model, "ranks": args.ranks, "batch": args.batch}
        print(json.dumps({**about, **plans.as_json(), **({"training": trained} if trained else {})}))
        return 0
    print("\n".join(search.as_text(plans, " ".join(args.model), args.ranks, args.batch)))
    if trained:
        print(questions.training_text(trained))
    return 0


def program_plans(args: argparse.Namespace, ranks: int) -> ProgramPlans:
    """The plans of another program. Raises ConfigError for options that it lacks."""
    from ..plan.programs.search import search
    from ..plan.search.request import bytes_of, request

    lacking = {"limit": args.limit, "rule": args.rule, "explain": args.explain, "write": args.write}
    given = [f"--{name}" for name, value in lacking.items() if value not in (None, [])]
    if given or args.era != "now":
        raise ConfigError(f"--program plans without {', '.join(given) or '--era'}: those are of the library's own plans.")
    if args.top < 1:
        raise ConfigError(f"--top is {args.top}; it must be at least 1.")
    config, memory = request(args.model, args.batch, args.cluster).config, args.cluster["device.memory"]
    if config.train.optimizer != "adamw":
        raise ConfigError(f"--program prices AdamW; train.optimizer={config.train.optimizer} is of the library's own plans.")
    limit = bytes_of(args.memory) if args.memory else memory  # what is kept free is part of a plan's bytes
    return search(args.program, config.model, args.cluster, ranks, args.batch, args.fix, limit, args.top)


def show_rows(args: argparse.Namespace) -> int:
    """Print measured rows beside what is predicted of them; returns the exit status. Raises ConfigError for a file's faults."""
    import mpi4py

    mpi4py.rc.initialize = False  # a dry run needs the names of MPI alone
    from ..plan.programs import judge, rows, text

    result = judge.judged(rows.read(args.rows))
    if args.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.as_text(result)))
    return 0


def show_formulas(args: argparse.Namespace) -> int:
    """Print what the closed formulas say of a GPT; returns the exit status. Raises ConfigError for what is not positive."""
    from ..plan import formulas

    training = (args.tokens, args.ranks, args.tflops)
    if any(given is not None for given in training) and None in training:
        raise ConfigError("the days of a training take --tokens, --ranks and --tflops, all three.")
    for name, value in vars(args).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not SIZES[0] <= value <= SIZES[1]:
            limits = "" if value <= 0 else f", from {SIZES[0]:g} to {SIZES[1]:g}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be positive{limits}.")
    sizes = (args.layers, args.hidden, args.vocabulary, args.sequence)
    numbers = formulas.of_gpt(*sizes, args.batch) + formulas.of_pipeline(args.pp, args.micro_batches, args.chunks)
    if args.tokens is not None:
        numbers += formulas.of_training(*sizes, args.tokens, args.ranks, args.tflops * 1e12)
    if args.json:
        print(json.dumps({entry.name: entry.value for entry in numbers}))
        return 0
    width = max(len(entry.what) for entry in numbers)
    for item in numbers:
        print(f"{item.what:<{width}}  {item.value:>10.4g}  {item.source}")
    return 0


def draw_schedule(args: argparse.Namespace) -> int:
    """Print a schedule, and write its figure; returns the exit status. Raises ConfigError for sizes that do not fit."""
    drawn, stages = simulated(args)
    if args.png is not None:
        _write(drawn, args.png)
    if args.json:
        print(json.dumps(as_json(drawn, stages)))
        return 0
    columns = round(drawn.time / drawing.column(drawn)) * args.pp
    if columns > MOST_COLUMNS:
        raise ConfigError(
            f"the rows of text would have {columns} columns, and at most {MOST_COLUMNS} are drawn; --json has no rows."
        )
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    title, total = drawing.summary(drawn)
    split = f" (weights {weights_time(args):g})" if drawn.schedule.split else ""
    console.print(f"{title}; forward {args.forward:g}, backward {args.backward:g}{split}\n")
    for line in drawing.as_text(drawn, console.width if console.is_terminal else None):
        console.print(line, no_wrap=True)
    backward = (
        "0A the gradient of its input, 0w those of its weights (chunk b: 0x)" if drawn.schedule.split else "0A its backward"
    )
    console.print(f"\n0a is the forward of micro-batch 0 in chunk a of its rank, {backward}, · no op.")
    console.print(total)
    console.print("\n".join(table(drawn)))
    if args.png is not None:
        print(f"written: {args.png}", file=sys.stderr)
    return 0


def simulated(args: argparse.Namespace) -> tuple[ScheduleTimeline, tuple[int, ...] | None]:
    """The timeline that the options ask for, and the layers of each stage. Raises ConfigError for what does not fit."""
    if not all(TIMES[0] <= item <= TIMES[1] for item in (args.forward, args.backward)):
        raise ConfigError(
            f"--forward {args.forward:g} and --backward {args.backward:g} are times of an op: they must be positive, "
            f"from {TIMES[0]:g} to {TIMES[1]:g}."
        )
    weights = weights_time(args)
    if not 0 < weights < args.backward:
        raise ConfigError(f"--weights {weights:g} is a part of --backward {args.backward:g}: it must be positive and smaller.")
    ops = 2 * args.pp * args.micro_batches * args.chunks
    if ops > MOST_OPS:
        sizes = f"--pp {args.pp}, --micro-batches {args.micro_batches} and --chunks {args.chunks}"
        raise ConfigError(f"{sizes} make {ops} ops; at most {MOST_OPS} are drawn.")
    if args.pp > MOST_RANKS:
        raise ConfigError(f"plan schedule draws at most {MOST_RANKS} ranks; --pp is {args.pp}.")
    if args.png is not None and args.pp > MOST_ROWS:
        raise ConfigError(f"--png draws at most {MOST_ROWS} ranks; --pp is {args.pp}.")
    schedule = build(args.schedule, args.pp, args.micro_batches, args.chunks)
    stages = None
    if args.layers is not None:
        stages = split_layers(sum(args.layers), args.pp, args.chunks, args.layers if len(args.layers) > 1 else None)
    seconds = {"F": args.forward, "B": args.backward, "X": args.backward - weights, "W": weights}
    return timeline(schedule, seconds, stages), stages


def weights_time(args: argparse.Namespace) -> float:
    """The time of the gradients of weights."""
    return args.backward / 2 if args.weights is None else float(args.weights)


def of_ranks(drawn: ScheduleTimeline) -> Iterator[dict[str, Any]]:
    """A table of what each rank holds, waits for, keeps and exchanges."""
    schedule = drawn.schedule
    for rank in range(schedule.p):
        program = list(messages_of(schedule, rank))
        yield {
            "stages": schedule.stages[rank],
            "idle": drawn.idle[rank],
            "in_flight": max(in_flight(schedule.ops_of(rank))),
            "received": sum(received is not None for _, received, _ in program),
            "sent": sum(sent is not None for _, _, sent in program),
        }


def table(drawn: ScheduleTimeline) -> Iterator[str]:
    """The lines of a table of the ranks, and of all messages."""
    rows = list(of_ranks(drawn))
    yield f"{'rank':<6}{'stages':<12}{'idle':>8}{'in flight':>12}{'received':>12}{'sent':>8}"
    for rank, row in enumerate(rows):
        stages = " ".join(map(str, row["stages"]))
        yield f"{rank:<6}{stages:<12}{row['idle']:>8.6g}{row['in_flight']:>12}{row['received']:>12}{row['sent']:>8}"
    sent = sum(row["sent"] for row in rows)
    yield f"{sent} messages in all. In flight: the most inputs of its stages that a rank keeps for backward."


def as_json(drawn: ScheduleTimeline, stages: tuple[int, ...] | None) -> dict[str, Any]:
    """Totals, ranks and ops of a timeline."""
    schedule, ranks = drawn.schedule, list(of_ranks(drawn))
    return {
        "schedule": schedule.name,
        "pp": schedule.p,
        "micro_batches": schedule.m,
        "chunks": schedule.v,
        "layers": stages,
        "time": drawn.time,
        "work": drawn.ideal,
        "bubble": drawn.time - drawn.ideal,
        "messages": sum(row["sent"] for row in ranks),
        "ranks": ranks,
        "ops": [
            {"rank": rank, "kind": op.kind, "chunk": op.chunk, "micro_batch": op.micro, "start": start, "end": end}
            for rank, op, start, end in drawn.spans
        ],
    }


def _write(drawn: ScheduleTimeline, file: Path) -> None:
    if file.suffix[1:] not in FORMATS:
        raise DataError(f"--png {file} names no format; end it in one of .{', .'.join(FORMATS)}.")
    try:
        draw(partial(drawing.as_figure, drawn=drawn), [file])
    except ImportError as error:
        raise DataError(f"a figure needs matplotlib ({error}): pip install 'summa3d[plot]'.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error}") from None
