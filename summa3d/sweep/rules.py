"""How sizes grow in weak scaling: the rules of papers by name, and formulas."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from ..errors import ConfigError
from .file import flat

RULES: dict[str, dict[str, dict[str, float]]] = {
    "gemm": {"cube": dict.fromkeys(("m", "n", "k"), 1 / 3), "rows": {"m": 1.0}},
    "block": {
        "cube": dict.fromkeys(("model.heads", "model.hidden"), 1 / 3),
        "rows": {"train.batch": 1.0},
        "optimus": dict.fromkeys(("model.heads", "model.hidden", "train.batch"), 1 / 2),
    },
}
RULES["train"] = {**RULES["block"], "ptdp": {"model.layers": 1.0, "grid.pp": 1.0}}
"""What is measured → name of a rule → key → the power of the rank count that it grows with.

cube: m, n and k of a product grow alike, so that the work of a rank stays. rows: more rows of the same matrices. optimus: hidden
size, heads and batch grow with √ranks (arXiv 2104.05343, table 2: 2-D). ptdp: layers grow with the stages of the pipeline
(arXiv 2104.04473, figure 11).
"""
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def grown(
    what: str, rule: str | Mapping[str, Any], config: Mapping[str, Any], ranks: int, first: int, index: int
) -> dict[str, Any]:
    """The configuration of `ranks` ranks, where `config` is that of `first`; `index` is the place of `ranks` among the counts.

    Raises ConfigError for an unknown rule, a key that `config` lacks, and a formula that cannot be worked out.

    >>> grown("gemm", "cube", {"m": 10, "n": 10, "k": 20}, ranks=8, first=1, index=3)
    {'m': 20, 'n': 20, 'k': 40}
    """
    if not rule:
        return dict(config)
    if isinstance(rule, str):
        if rule not in RULES[what]:
            raise ConfigError(f"weak = {rule!r} is no rule of {what}; it has {', '.join(RULES[what])}, or a table of formulas.")
        return _by_powers(RULES[what][rule], rule, config, ranks / first)
    result = dict(config)
    for key, formula in flat(rule).items():
        if isinstance(formula, list):
            if index >= len(formula):
                raise ConfigError(f"weak.{key} has {len(formula)} values, and none for {ranks} ranks.")
            result[key] = formula[index]
        elif key not in config:
            raise ConfigError(f"weak.{key} = {formula!r} has no base: give {key} in base.")
        else:
            base = config[key]
            if isinstance(base, bool) or not isinstance(base, int | float):
                raise ConfigError(f"weak.{key} = {formula!r}: its base, {base!r}, is no number.")
            value = formula_value(str(formula), {"base": base, "ranks": ranks, "first": first})
            result[key] = round(value) if isinstance(base, int) else value
    return result


def _by_powers(powers: Mapping[str, float], rule: str, config: Mapping[str, Any], factor: float) -> dict[str, Any]:
    missing = [key for key in powers if key not in config and key != "grid.pp"]
    if missing:
        raise ConfigError(f"weak = {rule!r} needs {', '.join(missing)} in base.")
    result = dict(config)
    for key, power in powers.items():
        result[key] = round(config.get(key, 1) * factor**power)
    if "model.hidden" in powers:  # heads of equal size
        heads = result["model.heads"]
        result["model.hidden"] = heads * round(config["model.hidden"] * factor ** powers["model.hidden"] / heads)
    return result


def formula_value(text: str, names: Mapping[str, float]) -> float:
    """The value of a formula of numbers, names and + - * / // **. Raises ConfigError for anything else.

    >>> formula_value("base * ranks ** 0.5", {"base": 8, "ranks": 4})
    16.0
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            results = OPERATORS[type(node.op)](value(node.left), value(node.right))
            if isinstance(results, complex):
                raise ArithmeticError("it is the root of a negative number")
            return float(results)
        if isinstance(node, ast.Name) and node.id in names:
            return names[node.id]
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return float(str(node.value))
        raise ConfigError(f"the formula {text!r} may hold numbers, {', '.join(names)} and + - * / // **.")

    try:
        result = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:  # the latter two of thousands of brackets
        raise ConfigError(f"the formula {text!r} cannot be worked out: {error}.") from None
    if not isfinite(result):
        raise ConfigError(f"the formula {text!r} cannot be worked out: it is {result}.")
    return result
