"""Outer axes as data: those around the grid of a stage that the planner searches beside replicas and stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError, GridError, LayoutError
from ..nn.config import ModelConfig
from ..nn.context_parallel.options import ContextOptions
from ..nn.context_parallel.split import ContextSplit


class OuterAxis(NamedTuple):
    """An axis around the grid of a stage, along which ranks hold copies of dense weights.

    A search gives it every size that divides the ranks, where sequences are long enough, or --fix or --limit names it. What its
    ranks compute, keep and move is what the dry run traces of a configuration with it; a size or choice that the run itself
    refuses is no plan.

    name : of `comm.topology.OUTER` and `GridConfig`. splits_rows : whether its ranks take other rows of a micro-batch, as
    replicas do; else all take the same rows, and other positions of them. misfit : (model, sizes of all axes of a stage, one of
    `choices`) → why that cannot be, said before anything is traced, or "". choices : dotted keys of a configuration with the
    values that are searched together where the axis has several ranks. sequence : the fewest positions of sequences that are
    searched with it unasked. mixtures : whether models with experts alone are searched with it
    """

    name: str
    splits_rows: bool
    misfit: Callable[[ModelConfig, Mapping[str, int], Mapping[str, Any]], str]
    choices: tuple[Mapping[str, Any], ...] = ({},)
    sequence: int = 1
    mixtures: bool = False

    def is_searched(self, model: ModelConfig, asked: Collection[str]) -> bool:
        """Return whether plans of a model have it. asked : the dotted keys that are fixed or limited."""
        if self.mixtures and not model.num_experts:
            return False
        return model.sequence >= self.sequence or not {f"grid.{self.name}", *self.values}.isdisjoint(asked)

    @property
    def values(self) -> dict[str, list[Any]]:
        """Each dotted key of its choices → its values."""
        keys = dict.fromkeys(key for choice in self.choices for key in choice)
        return {key: list(dict.fromkeys(choice[key] for choice in self.choices if key in choice)) for key in keys}


def context_misfit(model: ModelConfig, grid: Mapping[str, int], values: Mapping[str, Any]) -> str:
    """Reason why contexts cannot split a model's sequences, whatever the scheme is; empty where they can.

    >>> context_misfit(ModelConfig(family="gpt2", sequence=18), {"cp": 4}, {"context.kind": "ring"})
    'sequence 18 cannot be split over cp = 4: contexts (ring) take 2·4 equal parts, two for each.'
    >>> context_misfit(ModelConfig(family="gpt2"), {"cp": 3}, {"context.kind": "mesh", "context.heads": 2})
    'context.heads 2 does not divide cp = 3. Values that do: 1, 3.'
    """
    heads = values.get("context.heads", 1)
    if heads >= grid["cp"] > 1 < heads:
        return f"groups of {heads} contexts are all of cp = {grid['cp']}, which is kind heads"
    try:
        split = ContextSplit(grid["cp"], options=ContextOptions(values["context.kind"], heads=heads))
        split.check_family(model.family, model.attention_dropout)
        split.check(model.sequence, model.heads)
    except (ConfigError, GridError, LayoutError) as error:
        return str(error).partition("\n")[0]
    return ""


def expert_misfit(model: ModelConfig, grid: Mapping[str, int], values: Mapping[str, Any]) -> str:
    """Reason why ranks cannot share a model's experts; empty where they can.

    >>> expert_misfit(ModelConfig(family="mixtral"), {"ep": 9}, {})
    'ep 9 is more than 8 experts'
    """
    return "" if grid["ep"] <= model.num_experts else f"ep {grid['ep']} is more than {model.num_experts} experts"


LONG = 65_536
"""Positions of a sequence from which on a search has contexts unasked: each of their sizes and kinds has cells to trace."""

KINDS: tuple[Mapping[str, Any], ...] = (
    *({"context.kind": kind} for kind in ("gather", "ring", "heads")),
    *({"context.kind": "mesh", "context.heads": heads} for heads in (2, 4, 8)),
)
"""How contexts attend to each other's parts, as a search tries it."""

SEARCHED: tuple[OuterAxis, ...] = (
    OuterAxis("cp", False, context_misfit, KINDS, LONG),
    OuterAxis("ep", True, expert_misfit, mixtures=True),
)
"""The axes that are searched, in the order of ranks; `dp` and `pp`, to which ZeRO and schedules belong, are always."""
