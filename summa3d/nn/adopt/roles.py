"""What a plan says of each linear layer: that it is the first of two, which leaves the residual stream, or the second."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from ...errors import ConfigError
from .source import config_of

FIRST, SECOND, HEAD, KEPT = "first", "second", "head", "kept"
STYLES = {
    FIRST: FIRST,
    SECOND: SECOND,
    "colwise": FIRST,
    "colwise_gather_output": FIRST,
    "colwise_rep": FIRST,
    "rowwise": SECOND,
    "rowwise_split_input": SECOND,
    "rowwise_rep": SECOND,
    **dict.fromkeys(("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "embedding_colwise"), KEPT),
}
"""Style of Transformers' plans, or word of one's own → role. Of tables and what is kept, the trace finds more than plans say."""
REFUSED = {
    "moe": "experts are not adopted",
    "packed": "the fused weights of experts are not adopted",
    "grouped_gemm": "experts are not adopted",
    "mla": "a latent that all heads share is not adopted",
    "local_params": "parameters of single heads that are no linear layer are not adopted",
    "sequence": "schemes that split the sequence are not adopted",
}
"""The beginning of a style that no role stands for → why."""


def plan_of(module: nn.Module) -> dict[str, str]:
    """The plan that a Transformers model has of itself: its body's and its head's."""
    body, top = getattr(getattr(module, "config", None), "base_model_tp_plan", None), getattr(module, "_tp_plan", None)
    if not body:
        raise ConfigError(
            f"{type(module).__name__} has no plan: its config has no base_model_tp_plan.\n"
            '  Give one: plan={"fc1": "first", "fc2": "second"} names the linear layers that leave the residual stream, and '
            "those that return to it."
        )
    return {**body, **(top or {})}


def owner_of(name: str) -> str:
    """Name of the module that holds a module or parameter."""
    return name.rpartition(".")[0]


def _matches(pattern: str, name: str) -> bool:
    """Tell whether the last components of a module's name are those of the pattern, where * is anything but a dot."""
    return re.search(r"(^|\.)" + re.escape(pattern).replace(r"\*", r"[^.]*") + "$", name) is not None


def styles_of(module: nn.Module, plan: Mapping[str, str], head: nn.Module | None, is_listed: bool) -> dict[str, str]:
    """Name of each module that the plan names → its style. Raises ConfigError for a plan that is wrong.

    head : the module that makes logits, whatever the plan calls it
    is_listed : whether it is a model's own: that names what some of its configurations lack, such as experts
    """
    there = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
    if is_listed:
        plan = {pattern: style for pattern, style in plan.items() if any(_matches(pattern, name) for name in there)}
    for pattern, style in plan.items():
        why = next((reason for word, reason in REFUSED.items() if str(style).startswith(word)), "it is not known")
        if style not in STYLES:
            raise ConfigError(
                f"the plan's style {style!r} of {pattern!r} has no place in a scheme: {why}.\n  Known: {', '.join(STYLES)}."
            )
    names = {name: item for name, item in module.named_modules() if name and item is not head}
    result: dict[str, str] = {}
    for pattern, style in plan.items():
        matched = [name for name in names if _matches(pattern, name)]
        if not matched and not (head is not None and any(_matches(pattern, n) for n, m in module.named_modules() if m is head)):
            linears = [name for name, item in names.items() if isinstance(item, nn.Linear)]
            raise ConfigError(
                f"the plan's pattern {pattern!r} matches no module.\n  Linear layers here: {', '.join(linears[:12]) or 'none'}."
            )
        for name in matched:
            if STYLES[result.get(name, style)] != STYLES[style]:
                raise ConfigError(f"the plan says both {result[name]} and {style} of {name}; each layer has one role.")
            result[name] = style
    for name, style in result.items():
        if STYLES[style] != KEPT and type(names[name]) is not nn.Linear:
            raise ConfigError(
                f"the plan says {style} of {name}, a {type(names[name]).__name__}; roles are those of torch.nn.Linear alone."
            )
    return result


def products_of(text: str) -> dict[str, tuple[str, ...]]:
    """The products of a layer, "qkv", "out", "up" and "down" → the names of their modules in a block, by a config.json's plan."""
    plan: Mapping[str, str] = getattr(config_of(text), "base_model_tp_plan", None) or {}
    result: dict[str, tuple[str, ...]] = {"qkv": (), "out": (), "up": (), "down": ()}
    for pattern, style in plan.items():
        role, (_, dot, name) = STYLES.get(style), pattern.partition("*.")
        if dot and role in (FIRST, SECOND):
            product = ("qkv", "out") if "attn" in name or "attention" in name else ("up", "down")
            result[product[role == SECOND]] += (f"layer.{name}",)
    return result
