"""What `summa3d plan --model …` does: search, print, explain, write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...cluster import write as write_cluster
from ...errors import ConfigError, DataError
from ...interpreter import spawns_safely
from ...jobs.script import site_of
from ...node_support import affinity
from ...train.config import Config
from ...train.progress import Pulse
from ..questions import training, training_text
from ..refit import Refit, refit
from .export import export
from .find import Plans, find_plans
from .plans import Plan, Space, columns, refused
from .request import device_of, request
from .search import PlanSearch, Priced, ProgressCallback

GIB = 2**30
Measure = Callable[[Sequence[Config], int], Sequence[Sequence[float]]]
"""Configurations, and the bytes of their fullest rank → the seconds of each measured step of each."""


def check_write(args: argparse.Namespace) -> None:
    """Raise ConfigError, before the search, where no job can be written for the cluster."""
    site_of(args.cluster.name, device_of(request(args.model, args.batch, args.cluster), args.cluster))


def run(args: argparse.Namespace, measure: Measure | None = None) -> int:
    """Search, and print what was found; returns the exit status. Raises ConfigError and ClusterError for what cannot be.

    measure : runs the first plans (`--try`).
    """
    if args.top < 1:
        raise ConfigError(f"--top is {args.top}; it must be at least 1.")
    if args.explain is not None and args.explain < 1:
        raise ConfigError(f"--explain is {args.explain}; the plans are numbered from 1.")
    if args.explain is not None and args.json:
        raise ConfigError("--explain prints text; leave out --json.")
    cores = len(affinity())
    with progress() as tell:
        plans = find_plans(
            args.model,
            args.cluster,
            args.ranks,
            args.batch,
            fix=args.fix,
            limit=args.limit,
            memory=args.memory,
            era=args.era,
            top=max(args.top, args.explain or 0, args.tries or 0),
            processes=cores if cores > 1 and spawns_safely() else 0,
            say=lambda line: print(f"summa3d plan: {line}", file=sys.stderr),
            tell=tell,
        )
    result, store = plans.result, plans.searched.times.store
    print(f"summa3d plan: {store.traces} cells traced, {store.read} read from disk", file=sys.stderr)
    rule = None if args.rule is None else by_rule(result.space, plans.searched)
    trained = {}
    if args.tokens is not None:
        trained = training(plans.seconds, args.ranks, args.step_tokens, args.tokens, args.price)
    explained = None if args.explain is None else plans.explain(args.explain)
    tried = None if measure is None else try_plans(plans, args.tries, measure)
    if args.json:
        priced = {} if rule is None else {"rule": {"plan": str(rule.plan), "seconds": rule.seconds}}
        measured = {} if tried is None else {"try": tried.as_json()}
        print(json.dumps({**plans.as_json(), **priced, **({"training": trained} if trained else {}), **measured}))
    else:
        print(plans)
        if rule is not None:
            print(f"the rule of PTD-P: {rule.plan}: {rule.seconds:.4g} s ({rule.seconds / plans.seconds - 1:+.1%})")
        if trained:
            print(training_text(trained))
        if explained is not None:
            print("\n".join(explained))
        if tried is not None:
            print("\n".join(["", *tried.as_text()]))
    if args.write is not None:
        held = export(args.write, plans.best, plans.seconds, plans.asked.config, result.cluster, plans.as_json()["plans"][0])
        more = "" if held["peak"] <= result.limit else f", which is more than {result.limit / GIB:.1f}"
        print(
            f"written: {args.write}/plan.toml, job.sh, plan.json; a dry run has {held['peak'] / GIB:.2f} GiB{more}",
            file=sys.stderr,
        )
        if tried is not None:
            write_refit(tried, args.write / "cluster.toml")
    return 0


def try_plans(plans: Plans, many: int, measure: Measure) -> Refit:
    """Run the first plans, and refit the cluster to what they took."""
    best = plans.result.best[:many]
    peak = max(item.memory.total for item in best)
    return refit(plans, measure([plans.config(place) for place in range(len(best))], peak))


def write_refit(tried: Refit, file: Path) -> None:
    """Write the refitted cluster. Raises DataError where the file cannot be written."""
    about = f"{tried.before.name} with numbers refitted to {len(tried.plans)} plans that were run: summa3d plan --try"
    try:
        write_cluster(tried.after, file, about)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error}") from None
    print(f"written: {file}; --cluster {file} plans by it", file=sys.stderr)


def by_rule(space: Space, searched: PlanSearch) -> Priced | None:
    """PTD-P's rule: the fewest stages, with tensor parallelism up to a node before them, that fit; replicas for the rest.

    Of the micro-batches and chunks that such a grid leaves, the fastest. None where no grid fits.
    """
    node = searched.times.cluster.node or space.ranks
    widest = max(y for y in range(1, node + 1) if space.ranks % y == 0 and space.model.heads % y == 0)
    narrow: dict[tuple[int, int], list[Plan]] = {}
    for rows in columns(space, type(searched.rejected)()):
        if {*rows.family} != {"1-D"} or rows.inners[0].split:
            continue
        wide = (rows.sizes["y"] <= node) & ((rows.pp == 1) | (rows.sizes["y"] == widest))
        for plan in (
            rows.plan(int(row), saving) for saving, there in rows.savings.items() for row in np.flatnonzero(there & wide)
        ):
            if not refused(space, plan):
                narrow.setdefault((plan.stage_ranks // plan.dp * plan.pp, plan.pp), []).append(plan)
    for key in sorted(narrow):
        priced = []
        for plan in narrow[key]:
            held = searched.memory(plan)
            if held.total <= searched.limit:
                priced.append((searched.times.estimate(plan), str(plan), plan, held))
        if priced:
            _, _, plan, held = min(priced, key=lambda item: item[:2])
            return searched.priced(plan, held)
    return None


@contextmanager
def progress(label: str = "") -> Iterator[ProgressCallback]:
    """A bar on a terminal's stderr: plans done, and cells traced; elsewhere a line every 10 s, which begins with a label."""
    if not sys.stderr.isatty():
        pulse = Pulse("plan")
        yield lambda done, total, traced: pulse.say(f"{label}{done:,} of {total:,} plans done, {traced} cells traced")
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("plans"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[cells]} cells traced"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("plans", cells=0)
        yield lambda done, total, traced: bar.update(task, completed=done, total=total, cells=traced)
