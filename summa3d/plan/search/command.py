"""What `summa3d plan --model …` does: search, print, explain, write."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np

from ...cluster import load
from ...errors import ConfigError
from ...interpreter import spawns_safely
from ...node_support import affinity
from .explain import explain
from .export import export
from .memory import memory, reserve
from .plans import Plan, Space, columns, refused
from .request import bytes_of, request, space_of
from .search import PlanSearch, Priced, Tell
from .store import Store
from .text import as_json, as_text
from .timing import Times

GIB = 2**30


def run(args: argparse.Namespace) -> int:
    """Search, and print what was found; returns the exit status. Raises ConfigError and ClusterError for what cannot be."""
    if args.top < 1:
        raise ConfigError(f"--top is {args.top}; it must be at least 1.")
    if args.explain is not None and args.explain < 1:
        raise ConfigError(f"--explain is {args.explain}; the plans are numbered from 1.")
    if args.explain is not None and args.json:
        raise ConfigError("--explain prints text; leave out --json.")
    cluster = load(args.cluster)
    asked = request(args.model, args.batch, cluster)
    space = space_of(asked, cluster, args.ranks, args.batch, args.era, args.fix, args.limit)
    whole = cluster["device.memory"]
    limit = whole - reserve(whole) if args.memory is None else bytes_of(args.memory)
    cores = len(affinity())
    store = Store(lambda line: print(f"summa3d plan: {line}", file=sys.stderr), cores if cores > 1 and spawns_safely() else 0)
    searched = PlanSearch(space, Times(cluster, store), limit, max(args.top, args.explain or 0))
    with progress() as tell, closing(store):
        found = searched.run(tell)
    print(f"summa3d plan: {store.traces} cells traced, {store.read} read from disk", file=sys.stderr)
    whole_json = as_json(found, asked)
    rule = None if args.rule is None else by_rule(space, searched)
    explained = None if args.explain is None else explain(found, args.explain, store)
    if args.json:
        if rule is not None:
            whole_json["rule"] = {"plan": str(rule.plan), "seconds": rule.seconds}
        print(json.dumps(whole_json))
    else:
        print("\n".join(as_text(found, asked)))
        if rule is not None:
            print(f"the rule of PTD-P: {rule.plan}: {rule.seconds:.4g} s ({rule.seconds / found.best[0].seconds - 1:+.1%})")
        if explained is not None:
            print("\n".join(explained))
    if args.write is not None:
        best = found.best[0]
        held = export(args.write, best.plan, best.seconds, asked.config, cluster, whole_json["plans"][0])
        more = "" if held["peak"] <= limit else f", which is more than {limit / GIB:.1f}"
        print(
            f"written: {args.write}/plan.toml, job.sh, plan.json; a dry run has {held['peak'] / GIB:.2f} GiB{more}",
            file=sys.stderr,
        )
    return 0


def by_rule(space: Space, searched: PlanSearch) -> Priced | None:
    """PTD-P's rule: the fewest stages, with tensor parallelism up to a node before them, that fit; replicas for the rest.

    Of the micro-batches and chunks that such a grid leaves, the fastest. None where no grid fits.
    """
    node = searched.times.cluster.node or space.ranks
    narrow: dict[tuple[int, int], list[Plan]] = {}
    for rows in columns(space, type(searched.rejected)()):
        if rows.inners[0].scheme not in ("oned", "oned-sp") or rows.inners[0].split:
            continue
        wide = (rows.sizes["y"] <= node) & ((rows.pp == 1) | (rows.sizes["y"] == _widest(space, node)))
        for plan in (
            rows.plan(int(row), saving) for saving, there in rows.savings.items() for row in np.flatnonzero(there & wide)
        ):
            if not refused(space, plan):
                narrow.setdefault((plan.inner.ranks * plan.pp, plan.pp), []).append(plan)
    for key in sorted(narrow):
        priced = []
        for plan in narrow[key]:
            cells, units = searched.times.store.cells(plan.inner, plan.units)
            held = memory(plan, cells, units)
            if held.total <= searched.limit:
                priced.append((searched.times.closed(plan), str(plan), plan, held))
        if priced:
            _, _, plan, held = min(priced, key=lambda one: one[:2])
            return searched.priced(plan, held)
    return None


def _widest(space: Space, node: int) -> int:
    """The most ranks of a node that divide heads and ranks."""
    return max(y for y in range(1, node + 1) if space.ranks % y == 0 and space.model.heads % y == 0)


@contextmanager
def progress() -> Iterator[Tell]:
    """A bar on a terminal's stderr: plans done, and cells traced."""
    if not sys.stderr.isatty():
        yield lambda *state: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("plans"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[cells]} cells traced"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("plans", cells=0)
        yield lambda done, total, traced: bar.update(task, completed=done, total=total, cells=traced)
