"""Muon as an optimizer of one's own module: torch.optim.Muon for parameters of which ranks hold blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ...comm.grid import BaseGrid, agree_on_call
from ...dtypes import HALVES
from ...errors import ConfigError, ShapeError
from ..copies import grid_of
from ..parameter import ShardedParameter
from .matrices import matrices_of
from .newton_schulz import SCALES, NewtonSchulz, averaged
from .orthogonalise import MatrixOwners


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure computes, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon of the whole matrices, for weights of summa3d's layers, of which each rank holds a block.

    Parameters
    ----------
    params : weights of 2 dims of hidden layers, or groups of them with `lr`, `weight_decay`, `momentum` and `nesterov` of their
        own; embeddings, a head and vectors are for torch.optim.AdamW
    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps : as of torch.optim.Muon
    adjust_lr_fn : "original", lr · √max(1, outputs / inputs) of a weight [inputs, outputs], or "match_rms_adamw",
        0.2 · lr · √max(inputs, outputs), which takes AdamW's rates; None is the first
    dtype : what Newton–Schulz is computed in; None, that of the parameters, which gives the same on every grid. torch's own
        takes torch.bfloat16
    ranks : ranks that compute a matrix together; None, as many as are predicted to take the fewest seconds: one, where there are
        matrices enough for all ranks

    Making it is collective over the grid, and so is `step`, over all axes but a pipeline's, in at most two all-to-alls, and the
    products of groups of several ranks: of a matrix its owner receives what it lacks, and all others their blocks of the result.
    q, k and v of a fused weight are matrices of their own. The gradients are complete, and summed over dp, before; clip them with
    `clip_grad_norm_`. A weight that has no gradient, on all ranks alike, is left alone. The momentum of a rank's block stands in
    `state`, one word an element.

    Raises, on every rank alike, ShapeError for a parameter that is no matrix of a layer of summa3d, GridError where there is none
    of one, ConfigError for 16-bit parameters, numbers out of range and `ranks` that do not divide the grid's, AgreementError
    where ranks pass other `ranks` or numbers of parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        dtype: torch.dtype | None = None,
        ranks: int | None = None,
    ) -> None:
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        for name, value in numbers.items():
            if not value >= 0:
                raise ConfigError(f"Muon: {name} is {value}; it must be 0 or more.")
        if not 0 < ns_steps < 100 or len(ns_coefficients) != 3 or not eps > 0:
            raise ConfigError(
                f"Muon: ns_steps = {ns_steps}, ns_coefficients = {ns_coefficients}, eps = {eps}; it takes 1 to 99 steps, three "
                "coefficients and a positive eps."
            )
        if adjust_lr_fn is not None and adjust_lr_fn not in SCALES:
            raise ConfigError(f"Muon: adjust_lr_fn = {adjust_lr_fn!r} is not known. Use one of {', '.join(SCALES)}.")
        super().__init__(params, {**numbers, "nesterov": nesterov})
        self._scale = SCALES[adjust_lr_fn or "original"]
        self._parameters = {
            f"parameter {place}": cast(ShardedParameter, p)
            for place, p in enumerate(p for group in self.param_groups for p in group["params"])
        }
        grid = self._checked_grid(ranks)
        cut = [item for name, p in self._parameters.items() for item in matrices_of(name, p.sharding, p.joined)]
        how = NewtonSchulz(ns_coefficients, ns_steps, eps, dtype)
        self._owners = MatrixOwners(cut, grid, how, next(iter(self._parameters.values())).dtype, ranks)
        self._shapes = {matrix.weight: matrix.shape for matrix in self._owners.plan.matrices}

    def _checked_grid(self, ranks: int | None) -> BaseGrid:
        """The grid of all parameters. Raises as the class says."""
        named = self._parameters
        grid = grid_of("Muon", list(named.values()))
        shapes = {name: p.sharding.shape if hasattr(p, "sharding") else None for name, p in named.items()}
        wrong = [f"{name} {tuple(shapes[name] or p.shape)}" for name, p in named.items() if len(shapes[name] or ()) != 2]
        halves = [f"{name}, {p.dtype}" for name, p in named.items() if str(p.dtype).removeprefix("torch.") in HALVES]
        agree_on_call(grid, "Muon", {"parameters": len(named), "ranks": ranks})
        if wrong:
            raise ShapeError(
                f"Muon takes matrices of layers of summa3d; it was given {wrong[0]}. "
                "Give torch's own parameters, vectors and biases to torch.optim.AdamW: p.decay says which are matrices."
            )
        if halves:
            raise ConfigError(
                f"Muon: {halves[0]} would lose its updates to rounding. Keep master weights in float32; dtype=torch.bfloat16 "
                "computes Newton–Schulz in 16 bits."
            )
        return grid

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; collective over the grid. closure : computes the loss again, which is returned."""
        loss = closure_loss(closure)
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        mine = {name: self._parameters[name] for name in self._shapes}
        updates = self._owners.orthogonalised({name: self._averaged(p, groups[id(p)]) for name, p in mine.items()})
        for name, p in mine.items():
            if p.grad is not None:
                group = groups[id(p)]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(updates[name], alpha=-group["lr"] * self._scale(*self._shapes[name]))
        return loss

    def _averaged(self, p: ShardedParameter, group: Mapping[str, Any]) -> Tensor:
        """The matrix to orthogonalise for a weight; updates its momentum. Zeros where there is no gradient."""
        if p.grad is None:
            return torch.zeros_like(p)
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return averaged(p.grad, state["momentum_buffer"], group["momentum"], group["nesterov"])
