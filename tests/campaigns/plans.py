"""Searches beside exhaustive prices: small models, clusters and limits of memory, every plan of which is traced and priced."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from campaigns import core

from summa3d.cluster import Cluster, load
from summa3d.errors import ConfigError, GridError, LayoutError
from summa3d.nn.config import ModelConfig
from summa3d.plan.search.memory import memory
from summa3d.plan.search.plans import Plan, Space, columns, refused, tiles
from summa3d.plan.search.search import Found, PlanSearch
from summa3d.plan.search.store import Store
from summa3d.plan.search.timing import Times

TOP = 10
SAME = 1e-9
MIXED = 7
"""One case in so many has a model with experts, and one contexts."""


@dataclass(frozen=True)
class Case:
    """What is searched, on a cluster, within so many bytes a rank."""

    space: Space
    cluster: Cluster
    limit: float

    def __str__(self) -> str:
        space, model = self.space, self.space.model
        sizes = f"{model.family} {model.layers} × {model.hidden}, {model.sequence} tokens, {model.num_experts} experts"
        return f"{sizes}, {space.ranks} ranks, batch {space.batch}, {space.fixed}, {space.most}, {self.limit / 2**20:.3g} MiB"


def case_of(number: int, seed: int) -> Case:
    """The case of a number: what is fixed keeps its plans to some thousands at most."""
    draw = random.Random(f"{seed} {number}")
    ranks = draw.choice([4, 4, 6, 8, 8])
    heads, kind = draw.choice([4, 8]), number % MIXED
    sizes = {"layers": draw.randint(2, 6), "hidden": 64 * draw.choice([1, 4, 16]), "heads": heads}
    sizes |= {"sequence": 64, "vocabulary": 512, **({"experts": 4} if kind == 0 else {})}
    model = ModelConfig(family="mixtral" if kind == 0 else draw.choice(["gpt2", "llama"]), **sizes)
    fixed = {"scheme": draw.choice(["oned", "oned-sp", "summa", "summa-transposed", "tesseract", "cuboid", "cuboid-sequence"])}
    fixed |= draw.choice([{}, {"recompute": "none"}, {"regather": False}, {"dp": 2}, {"pp": 2}])
    most = {"grid.cp": 4, "pp": 2} if kind == 1 else {"pp": draw.choice([1, 2, 4])}
    cluster = load(draw.choice(["selene", "dgx-h100"]))
    node = draw.choice([2, 4])
    faster = {key: cluster[key] * draw.choice([0.1, 1, 10]) for key in ("network.bandwidth", "elements.launch")}
    cluster = cluster.replaced({"node.size": float(node), **faster}, "assumed")
    batch = ranks * draw.choice([1, 2, 4])
    space = Space(model, ranks, batch, "bfloat16", "cuda", (node,), most=most, fixed=fixed)
    return Case(space, cluster, draw.choice([80e9, 2.0 ** draw.uniform(24, 30)]))


def every(case: Case, times: Times) -> Iterator[tuple[float, Plan]]:
    """Seconds of every plan with its weights gathered ahead, and of its placements.

    Left out are those that save memory where one fits that saves less.
    """
    for rows in columns(case.space, Counter()):
        fitting: dict[int, set[tuple[int, int]]] = {}
        for saving, there in rows.savings.items():
            for row in there.nonzero()[0].tolist():
                plan = rows.plan(row, saving)
                if refused(case.space, plan):
                    continue
                try:
                    cells, units = times.store.cells(plan.inner, plan.units)
                except (LayoutError, GridError, ConfigError):
                    continue
                if memory(plan, cells, units).total > case.limit:
                    continue
                more = any(one != saving and all(map(int.__le__, one, saving)) for one in fitting.setdefault(row, set()))
                fitting[row].add(saving)
                if not more:
                    several = (ahead(one, case.limit, times) for one in reversed([*tiles(plan, case.space.nodes)]))
                    yield from {round(seconds, 15): one for seconds, one in several}.items()


def ahead(plan: Plan, limit: float, times: Times) -> tuple[float, Plan]:
    """Seconds of a plan with as many weights gathered ahead as gains and fits."""
    best = times.seconds(plan), plan
    for inner in plan.inner.with_prefetch:
        other = replace(plan, inner=inner)
        held = memory(other, *times.store.cells(other.inner, other.units)).total
        if held > limit or times.seconds(other) >= best[0]:
            break
        best = times.seconds(other), other
    return best


def verdict(case: Case) -> tuple[str, str]:
    """Return whether the best plans that a search finds, and the best of each family, are those of all."""
    times = Times(case.cluster, Store())
    search = PlanSearch(case.space, times, case.limit, TOP)
    try:
        found: Found | None = search.run(lambda *state: None)
    except ConfigError as error:
        found, said = None, str(error)
    prices = sorted(((seconds, str(plan), plan.family) for seconds, plan in every(case, times)))
    if found is None:
        return ("refused", said) if not prices else (f"{len(prices)} plans fit", said)
    told = [(item.seconds, str(item.plan)) for item in found.best]
    wrong = [place for place, (one, other) in enumerate(zip(prices, told, strict=False)) if abs(one[0] / other[0] - 1) > SAME]
    if wrong or len(told) < min(TOP, len(prices)):
        rows = [f"{one[0]:.9g} {one[1]}" for one in (*prices[:TOP], *told)]
        return f"plan {wrong[0] + 1 if wrong else len(told) + 1} of {len(prices)} is another", "\n".join(rows)
    firsts = {family: (seconds, plan) for seconds, plan, family in reversed(prices)}
    for family, (seconds, plan) in firsts.items():
        if family not in found.families or abs(found.families[family].seconds / seconds - 1) > SAME:
            return f"the best plan of {family} is another", f"{seconds:.9g} {plan}; {found.families.get(family)}"
    return "right", f"{len(prices)} plans"


def main() -> int:
    """Run the cases of the command line."""
    settings = core.options(__doc__, cases=100).parse_args()
    lines = []
    for number in settings.only or range(settings.cases):
        began, case = time.monotonic(), case_of(number, settings.seed)
        ended, said = verdict(case)
        lines.append(core.Line(number, str(case.space.fixed["scheme"]), str(case), ended, said, time.monotonic() - began))
        lines[-1].tell()
    return core.report(lines, "searches", "longest: s")
