"""AdamW and Muon on the local blocks of a sharded model, the learning rate, and the factor that clips gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, inf, pi
from typing import TYPE_CHECKING, Any

import torch

from summa3d.kernels import dispatch

from ..comm.grid import agree_on_call
from ..errors import ConfigError, ShapeError
from ..nn.copies import grid_of
from ..nn.gradients import TINY, norm_and_votes
from ..nn.muon.matrices import matrices_of
from ..nn.muon.newton_schulz import SCALES, NewtonSchulz, averaged
from ..nn.muon.optimizer import closure_loss
from ..nn.muon.orthogonalise import MatrixOwners
from ..nn.parameter import ShardedParameter
from ..parallel.replicas import Replicas
from ..parallel.states import states_of
from .config import TrainConfig

if TYPE_CHECKING:
    from ..comm.grid import BaseGrid
    from ..parallel.states import ParameterState

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's first and second moments."""
MUON_MOMENTS = ("momentum_buffer",)
"""torch's name of Muon's."""
BLOCKS = "blocks."
"""How the names of parameters of a model's blocks begin."""


def moments_of(name: str, dims: int, optimizer: str) -> tuple[str, ...]:
    """The names of a parameter's moments: with `optimizer` "muon", matrices of blocks have Muon's; all others have AdamW's.

    >>> moments_of("blocks.0.mlp.up.weight", 2, "muon"), moments_of("embedding.weight", 2, "muon")
    (('momentum_buffer',), ('exp_avg', 'exp_avg_sq'))
    """
    return MUON_MOMENTS if optimizer == "muon" and dims == 2 and name.startswith(BLOCKS) else MOMENTS


class AdamW:
    """AdamW with decoupled weight decay on matrices (parameters with `p.decay`), and none on vectors.

    `moments[moment][name]` is a moment of the parameter `name`, in its state's sharding of moments. Memory: two words per
    element of it. Nothing is communicated.
    """

    def __init__(self, states: Sequence[ParameterState], config: TrainConfig) -> None:
        self.config = config
        self.states = {state.name: state for state in states}
        self.moments: dict[str, dict[str, torch.Tensor]] = {}
        for state in states:
            for moment in moments_of(state.name, len(state.shardings.used.shape), config.optimizer):
                self.moments.setdefault(moment, {})[state.name] = torch.zeros_like(state.weight)
        self._steps = dict.fromkeys(self.states, 0)

    def start_at(self, step: int) -> None:
        """Set the number of steps already taken, on which the bias corrections depend."""
        self._steps = dict.fromkeys(self.states, step)

    def counted_gradients(self) -> list[tuple[torch.Tensor, bool]]:
        """The gradients of this rank, each with whether this rank is the one that counts it: what `norm_and_votes` takes.

        They are the same with moments that are copied over the replicas and with sharded ones, and so is the norm.
        """
        pairs = [(state.counted_gradient, state.shardings.counts) for state in self.states.values()]
        return [(gradient, counts) for gradient, counts in pairs if gradient is not None]

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update this rank's part of every weight that has a gradient, from gradient · factor, with learning rate `rate`.

        The call may leave gradients multiplied by `factor`.
        """
        mine = [state for state in self.states.values() if state.name in self.moments.get(MOMENTS[0], {})]
        for decay in (True, False):
            updates = [(state, state.gradient) for state in mine if state.parameter.decay is decay]
            given = [(state, gradient) for state, gradient in updates if gradient is not None]
            self._take(given, rate, self.config.weight_decay if decay else 0.0, factor)

    def _take(self, given: list[tuple[ParameterState, torch.Tensor]], rate: float, weight_decay: float, factor: float) -> None:
        first, second = (self.moments[moment] for moment in MOMENTS)
        rows: list[tuple[torch.Tensor, ...]] = []
        steps: list[int] = []
        for state, gradient in given:
            name = state.name
            self._steps[name] += 1
            blocks = state.weight, gradient, first[name], second[name]
            pieces = list(zip(*map(state.pieces, blocks), strict=True)) if state.shardings.cut else [blocks]
            rows += pieces
            steps += [self._steps[name]] * len(pieces)
        if rows:
            weights, *others = map(list, zip(*rows, strict=True))
            settings = self.config.betas, self.config.epsilon, weight_decay, factor
            dispatch.kernels_for(weights[0]).adamw(weights, *others, steps, rate, *settings)


class MuonAdamW(AdamW):
    """Muon on the matrices of blocks, and AdamW on all other parameters, with one learning rate and decay.

    Muon's moment, in its state's sharding of moments, is torch.optim.Muon's momentum buffer: one word per element. What is
    orthogonalised is whole on an owner each, or in parts on a group of ranks (`nn.muon.owners`); q, k and v of a fused weight are
    matrices of their own. Making it is collective. A step moves the words of `owners.plan`, over all axes but a pipeline's.
    Matrices of a weight without a gradient travel as zeros, so that words stay the plan's.
    """

    def __init__(self, states: Sequence[ParameterState], config: TrainConfig, grid: BaseGrid) -> None:
        super().__init__(states, config)
        settings = config.muon
        dtype = None if settings.dtype == "master" else torch.bfloat16
        how = NewtonSchulz(settings.coefficients, settings.steps, settings.eps, dtype)
        hidden = (self.states[name] for name in self.moments.get(MUON_MOMENTS[0], {}))
        matrices = [(item.name, item.shardings.moments, getattr(item.parameter, "joined", (1, 1))) for item in hidden]
        result = [matrix for item in matrices for matrix in matrices_of(*item)]
        own = states[0].weight.dtype if states else torch.float32
        self.owners = MatrixOwners(result, grid, how, own, settings.group)
        self._shapes = {matrix.weight: matrix.shape for matrix in self.owners.plan.matrices}

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """As `AdamW.step`; collective over the ranks of a stage."""
        super().step(rate, factor)
        given = {name: self.states[name].gradient for name in self._shapes}
        blocks = {name: self._averaged(self.states[name], gradient, factor) for name, gradient in given.items()}
        updates = self.owners.orthogonalised(blocks)
        for name, gradient in given.items():
            if gradient is not None:
                self._update(self.states[name], updates.pop(name), rate)

    def _averaged(self, state: ParameterState, gradient: torch.Tensor | None, factor: float) -> torch.Tensor:
        """The matrix to orthogonalise for a weight, in a new tensor; updates the momentum."""
        moment, settings = self.moments[MUON_MOMENTS[0]][state.name], self.config.muon
        if gradient is None:
            return torch.zeros_like(moment)
        gradient = gradient.to(moment.dtype) if factor == 1 else gradient.to(moment.dtype).mul_(factor)
        pairs = zip(state.pieces(gradient), state.pieces(moment), strict=True)
        pieces = [averaged(*pair, settings.momentum, settings.nesterov) for pair in pairs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _update(self, state: ParameterState, update: torch.Tensor, rate: float) -> None:
        weight_decay = self.config.weight_decay if state.parameter.decay else 0.0
        scaled = rate * SCALES[self.config.muon.adjust](*self._shapes[state.name])
        for weight, piece in zip(state.pieces(state.weight), state.pieces(update), strict=True):
            weight.mul_(1 - rate * weight_decay).add_(piece, alpha=-scaled)


class ZeroAdamW(torch.optim.Optimizer):
    """AdamW for a module of one's own whose replicas (axis dp) take other rows: sums of gradients, clipping, ZeRO-1 and 2.

    Parameters
    ----------
    module : of summa3d's layers alone, whose weights are written
    lr, betas, eps, weight_decay : as of torch.optim.AdamW; only matrices decay (`p.decay`). lr is read from `param_groups`
        in each step, so that torch's schedulers work
    max_norm : the largest norm of the whole gradient, over which it is clipped, as torch clips; 0, it is not
    zero : 0, each replica keeps all moments; 1, its share of them; 2, its share of the accumulated gradients too
    bucket : bytes of gradients that travel in one message

    A loss is this rank's part of the mean over the rows of all replicas (`replica_rows`). ``step`` sums the gradients over dp,
    clips, updates, and gathers what it needs; behind it all replicas have the same weights, and `norm` is that of the gradient
    before clipping. Before it, ``p.grad`` is the replica's own, and with zero 2 there is none. All are collective over the grid:
    making it, and ``step``; with zero 2 ``backward`` too.

    A step moves 2(D−1)/D words per element of a parameter with D replicas, with zero 2 (m+1)(D−1)/D for m backwards, and two
    all-reduces of one complex word. Memory: two words per element for moments, with zero ≥ 1 over D.
    ``summa3d.train.save_checkpoint`` keeps its moments, for any grid; `state_dict` refuses, for it would be one rank's.
    Raises ShapeError for a parameter that is of no layer of summa3d, and ConfigError for numbers out of range, on every rank.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float = 0.0,
        zero: int = 1,
        bucket: int = 1 << 22,
    ) -> None:
        grid = grid_of("ZeroAdamW", list(module.parameters()))
        plain = [name for name, p in module.named_parameters() if not isinstance(p, ShardedParameter)]
        agree_on_call(grid, "ZeroAdamW", {"zero": zero, "bucket": bucket, "max_norm": max_norm})
        if plain:
            raise ShapeError(
                f"ZeroAdamW takes a module of summa3d's layers; {plain[0]} is torch's own. torch.optim.AdamW takes it, with "
                "gradients that you sum over dp."
            )
        if zero not in (0, 1, 2):
            raise ConfigError(f"ZeroAdamW: zero is 0, 1 or 2; it is {zero!r}. ZeRO-3 is that of `summa3d train`.")
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm}
        if wrong := [f"{name} = {value}" for name, value in numbers.items() if not 0 <= value < inf]:
            raise ConfigError(f"ZeroAdamW: {wrong[0]}; it must be 0 or more.")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"ZeroAdamW: betas = {betas}; they are two numbers of at least 0, and below 1.")
        super().__init__(module.parameters(), {"lr": lr})
        config = TrainConfig(betas=betas, epsilon=eps, weight_decay=weight_decay, clip=max_norm)
        self.adamw = AdamW(states_of(module, grid, zero), config)
        self.norm = 0.0
        self._grid = grid
        self._replicas = Replicas.of(list(self.adamw.states.values()), grid, zero, bucket)
        self._replicas.check()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; collective over the grid. closure : computes the loss again, which is returned."""
        loss = closure_loss(closure)
        self._replicas.reduce()
        self._replicas.settle(0.0)
        self.norm, _ = norm_and_votes(self.adamw.counted_gradients(), self._grid)
        limit = self.adamw.config.clip
        factor = min(1.0, limit / (self.norm + TINY)) if limit else 1.0
        self._replicas.update(lambda: self.adamw.step(self.param_groups[0]["lr"], factor))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients."""
        for state in self.adamw.states.values():
            state.clear()

    def state_dict(self) -> Any:
        """Refuse, with ConfigError: the moments here are this rank's."""
        raise ConfigError("ZeroAdamW: the moments are in parts on all ranks. summa3d.train.save_checkpoint keeps them.")

    def load_state_dict(self, state_dict: Any) -> None:
        """Refuse, with ConfigError, as `state_dict`."""
        self.state_dict()


def new_optimizer(states: Sequence[ParameterState], config: TrainConfig, grid: BaseGrid) -> AdamW:
    """The optimizer of a configuration; collective where it is Muon."""
    return MuonAdamW(states, config, grid) if config.optimizer == "muon" else AdamW(states, config)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of `step` (the first step is 1): linear warm-up, then as `schedule` says, down to decay_to · peak.

    A stable phase with a decay at the end (wsd): Hu et al. 2024, MiniCPM; Hägele et al. 2024.

    >>> from summa3d.train.config import TrainConfig
    >>> config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, decay_to=0.1)
    >>> [round(learning_rate(step, config), 3) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.55, 0.1]
    >>> config = TrainConfig(steps=100, warmup=10, learning_rate=1.0, schedule="wsd", decay_to=0.0)
    >>> [round(learning_rate(step, config), 3) for step in (1, 10, 80, 90, 100)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    if config.schedule == "constant":
        return config.learning_rate
    falls = config.steps - config.warmup
    if config.schedule == "wsd":
        falls = min(falls, config.decay_steps or max(1, config.steps // 5))
    done = min(1.0, max(0, step - config.steps + falls) / max(1, falls))
    left = (1 + cos(pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.learning_rate * (config.decay_to + (1 - config.decay_to) * left)


def clip_factor(norm: float, limit: float, scale: float = 1.0) -> float:
    """The factor that unscales gradients and clips them.

    Parameters
    ----------
    norm : global norm of the unscaled gradients
    limit : largest norm after clipping; 0 turns clipping off
    scale : loss scale that the gradients are still multiplied by

    >>> clip_factor(4.0, 1.0), clip_factor(0.5, 1.0), clip_factor(4.0, 1.0, scale=2.0)
    (0.25, 1.0, 0.125)
    """
    return (limit / norm if limit and norm > limit else 1.0) / scale
