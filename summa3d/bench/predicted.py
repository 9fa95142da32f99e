"""Predicted seconds beside measured ones: products and blocks of a benchmark, priced on a described cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ..cluster import Cluster
from ..dtypes import dtype_of
from ..gemm.algorithms.registry import algorithm
from ..gemm.cost.choose import Candidate, in_panels
from ..gemm.cost.machine import Machine
from ..gemm.pieces.timing import predicted
from ..plan.order import kendall

if TYPE_CHECKING:
    from ..dry.step import Setting
    from .blocks import BlockEntry, Case
    from .products import ProductEntry


def of_product(entry: ProductEntry, machine: Machine) -> float:
    """Predicted seconds of an entry of a benchmark of products, as the chooser compares them."""
    problem, rules, grid = entry.problem, algorithm(entry.algorithm), dict(entry.grid)
    plan = rules.plan(problem.form, problem.m, problem.n, problem.k, **entry.options)
    if getattr(plan, "pieces", 1) > 1 and not machine.node:
        return predicted(plan, grid, dict.fromkeys(grid, 0), dtype_of(problem.dtype), machine)
    mean = rules.mean(problem.form, problem.m, problem.n, problem.k, grid)
    if entry.options.get("panel"):
        mean = in_panels(mean, max(mean.products, -(-problem.k // entry.options["panel"])))
    return Candidate(rules.name, grid, entry.ranks, plan, mean, dtype_of(problem.dtype), machine).seconds


def of_block(entry: BlockEntry, case: Case, cluster: Cluster) -> float:
    """Predicted seconds of forward and backward of an entry of a benchmark of blocks: its dry run, priced and replayed."""
    from ..comm.topology import Topology
    from ..plan.cells import BLOCK, cells
    from ..plan.price import Prices
    from ..plan.replay import replay

    topology = Topology.checked(dict(entry.grid))
    prices = Prices(cluster.filled(topology.size), topology)
    traces = cells(setting_of(entry, case, cluster.ranks_per_node(topology.size)))[BLOCK]
    return case.config.layers * sum(replay(trace, prices).seconds for trace in traces)


def setting_of(entry: BlockEntry, case: Case, ranks_per_node: int) -> Setting:
    """The setting of the dry run of an entry of a benchmark of blocks."""
    from ..dry.step import Setting

    return Setting(
        case.config,
        case.batch,
        entry.scheme,
        dict(entry.grid),
        regather=entry.regather,
        overlap=entry.overlap,
        dtype=case.dtype,
        ranks_per_node=ranks_per_node,
        on_device=case.device == "cuda",
    )


def compared(result: Mapping[str, Any], predicted: Sequence[float], cluster: Cluster) -> dict[str, Any]:
    """A result whose rows have `predicted` seconds, and `prediction`: how far off they are, and how alike the order is.

    errors are predicted ÷ measured − 1.
    """
    measured = [_median(row) for row in result["rows"]]
    rows = [{**row, "predicted": seconds} for row, seconds in zip(result["rows"], predicted, strict=True)]
    errors = [seconds / other - 1 for seconds, other in zip(predicted, measured, strict=True)]
    return {
        **result,
        "rows": rows,
        "prediction": {
            "cluster": cluster.name,
            "band": cluster["band.percent"],
            "errors": errors,
            "median_error": median(map(abs, errors)),
            "kendall": kendall(measured, predicted),
        },
    }


def _median(row: Mapping[str, Any]) -> float:
    """The measured seconds of a row: of both passes of a block."""
    return float(row["seconds"].get("both", row["seconds"])["median"])
