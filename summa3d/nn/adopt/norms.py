"""Which norm a module of another library computes: found by running it beside the formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import ConfigError


class Norm(NamedTuple):
    """centred : layer norm, else root-mean-square norm; offset : what is added to the stored γ; eps"""

    centred: bool
    offset: float
    eps: float


def _rms(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma


def _layer(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gamma, beta, eps)


FORMULAS: dict[bool, Callable[[Tensor, Tensor, Tensor | None, float], Tensor]] = {False: _rms, True: _layer}
EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps")
CLOSE = 1e-4
"""Relative: modules compute in float32 at least, and formulas differ by far more."""


def recognise(name: str, module: nn.Module, n: int) -> Norm:
    """The norm that `module` computes of rows of n elements. Raises ConfigError, naming it, where it is none of the formulas.

    Two rows are normalised: of ordinary size, and so small that eps matters.
    """
    with torch.device("cpu"):  # the module may be without data
        return _recognise(name, module, n)


def _recognise(name: str, module: nn.Module, n: int) -> Norm:
    generator = torch.Generator().manual_seed(n)
    values = {key: torch.randn(n, generator=generator) for key, parameter in module.named_parameters() if parameter.shape == (n,)}
    x = torch.randn(2, n, generator=generator) + 0.5
    eps = next((float(value) for key in EPS if isinstance(value := getattr(module, key, None), (int, float))), 1e-5)
    x[1] *= eps**0.5
    unknown = [key for key, _ in module.named_parameters() if key not in values or key not in ("weight", "bias")]
    if not unknown:
        with torch.no_grad():
            result = torch.func.functional_call(module, values, (x,)).float()
        for centred, formula in FORMULAS.items():
            for offset in (0.0, 1.0) if "weight" in values else (0.0,):
                gamma = values["weight"] + offset if "weight" in values else torch.ones(n)
                if (formula(x, gamma, values.get("bias"), eps) - result).abs().max() <= CLOSE * result.abs().max():
                    return Norm(centred, offset, eps)
    raise ConfigError(
        f"{name}, a {type(module).__name__} of {n}, is neither layer norm nor root-mean-square norm, with γ or 1 + γ"
        + (f": it has the parameters {', '.join(unknown)}." if unknown else ".")
    )
