"""The norm of the gradients of a whole model, of which every rank holds blocks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, isnan
from typing import NoReturn
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from ..comm.grid import BaseGrid, agree_on_call
from ..comm.health.agreement import check_agreement, who_passed_what
from ..errors import AgreementError, ConfigError, Summa3dError
from .copies import fingerprint, first_holders, grid_of

NORMS = (1.0, 2.0, inf)
TINY = 1e-6
"""What torch adds to a norm before it divides by it."""
MARK_BITS, WEIGHTS = 20, 61
"""A vote is a sum of marks of so many bits, times weights up to WEIGHTS, over ranks and parameters: exact up to 2⁵³."""

Parameters = nn.Module | Tensor | Iterable[Tensor]
Counted = tuple[Tensor, bool]
"""A rank's block of a gradient, and whether this rank is the one that counts it (`Sharding.is_primary`)."""


def clip_grad_norm_(parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scale the gradients of the whole model, in place, so that their norm is at most `max_norm`; collective over the grid.

    The same as ``torch.nn.utils.clip_grad_norm_`` of the model on one rank; torch's own function would take each rank's norm of
    the blocks that it holds, scale copies differently, and let them drift apart.

    Parameters
    ----------
    parameters : a module, or parameters: layers of summa3d, and torch's own, of which all ranks hold copies with equal
        gradients. All of them at once: a second call knows nothing of the first
    max_norm : the largest norm, equal on all ranks; a larger one is scaled to max_norm · norm / (norm + 1e-6), as torch does
    norm_type, error_if_nonfinite : as of `grad_norm`

    Returns the norm before clipping, equal on all ranks, float64 on the host. Where it is inf, gradients become 0 or nan, and
    where it is nan, nan, as in torch. Words, grids and errors: those of `grad_norm`.
    """
    if not isinstance(max_norm, (int, float)) or isnan(max_norm) or max_norm < 0:
        raise ConfigError(f"clip_grad_norm_: max_norm is a number, 0 or more; it is {max_norm!r}.")
    result = ModelGradients.of("clip_grad_norm_", parameters, norm_type, max_norm=float(max_norm))
    norm = result.norms()[0]
    if error_if_nonfinite:
        result.check_finite(norm)
    factor = float(torch.clamp(max_norm / (norm + TINY), max=1.0))
    for gradient in result.gradients if factor != 1.0 else ():
        if gradient is not None:
            gradient.mul_(factor)
    return norm


def grad_norm(
    parameters: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    each: bool = False,
) -> Tensor:
    """The norm of the gradients of the whole model, each element counted once, equal on all ranks; collective over the grid.

    Parameters
    ----------
    parameters : a module, or parameters: layers of summa3d, and torch's own, of which all ranks hold copies with equal
        gradients. Those without a gradient, on all ranks alike, count as 0
    norm_type : 2, 1 or inf
    error_if_nonfinite : whether to raise Summa3dError, which names a parameter and ranks, for a norm that is inf or nan
    each : whether to return the norms of all parameters, in their order, in place of that of all together

    Returns a tensor of float64 on the host, without dims, or with `each` a vector. Not finite if some gradient on some rank is
    not, copies included. On any grid. Copies on replicas (axis dp) are counted once: sum gradients over them before. What a rank
    of a pipeline (pp) holds no block of, it takes no part in.

    Moves an all-reduce of one complex word, with `each` of one a parameter; with inf an all-gather of as many. The first call of
    a kind compares the number of parameters besides. Raises, on all ranks alike, AgreementError where ranks differ in an
    argument, in which parameters have gradients, or in the gradient of a torch parameter; GridError where no parameter belongs
    to a layer of summa3d, or they lie on several grids; ConfigError for another norm_type.
    """
    gradients = ModelGradients.of("grad_norm", parameters, norm_type, each=bool(each))
    norms = gradients.norms(each)
    if error_if_nonfinite:
        gradients.check_finite(norms.max())
    return norms if each else norms[0]


@dataclass(frozen=True)
class ModelGradients:
    """The gradients of parameters on this rank of their grid, for one call of `operation`.

    facts : what all ranks must pass alike
    """

    operation: str
    names: list[str]
    parameters: list[Tensor]
    grid: BaseGrid
    norm_type: float
    facts: dict[str, object]

    @classmethod
    def of(cls, operation: str, parameters: Parameters, norm_type: float, **facts: object) -> ModelGradients:
        """The gradients of a module or of parameters. Raises ConfigError and GridError as `grad_norm` says."""
        if norm_type not in NORMS:
            raise ConfigError(f"{operation}: norm_type is 1, 2 or inf; it is {norm_type!r}.")
        if isinstance(parameters, nn.Module):
            named: list[tuple[str, Tensor]] = list(parameters.named_parameters())
        else:
            listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            named = [(f"parameter {place} {tuple(getattr(p, 'shape', ()))}", p) for place, p in enumerate(listed)]
        for name, p in named:
            if not isinstance(p, Tensor):
                raise ConfigError(f"{operation} takes a module or its parameters; {name} is a {type(p).__name__}.")
        names, values = [name for name, _ in named], [p for _, p in named]
        grid = grid_of(operation, values)
        agree_on_call(grid, operation, {"parameters": len(named)})
        return cls(operation, names, values, grid, float(norm_type), {"norm_type": float(norm_type), **facts})

    @cached_property
    def gradients(self) -> list[Tensor | None]:
        """The gradients, detached."""
        return [None if p.grad is None else p.grad.detach() for p in self.parameters]

    @cached_property
    def firsts(self) -> list[np.ndarray]:
        """Of each parameter, `first_holders`."""
        return [first_holders(getattr(p, "sharding", None), self.grid) for p in self.parameters]

    @torch.no_grad()
    def norms(self, each: bool = False) -> Tensor:
        """The norm of all, or of each: a vector. Raises AgreementError as `grad_norm` says."""
        rank, groups, votes = self.grid.rank, [], []
        for place, (gradient, first) in enumerate(zip(self.gradients, self.firsts, strict=True)):
            counted = gradient is not None and gradient.numel() > 0
            groups.append([(gradient, bool(first[rank] == rank))] if gradient is not None and counted else [])
            votes.append((1 + place % WEIGHTS) * self._vote(first, self.marks[place]))
        votes[0] += self._vote(first_holders(None, self.grid), _bits(crc32(repr(self.facts).encode())))
        if not each:
            groups, votes = [[item for group in groups for item in group]], [sum(votes)]
        norms, result = norms_and_votes(groups, self.grid, votes, self.norm_type)
        if result.any():
            self._disagree()
        return torch.from_numpy(norms)

    @cached_property
    def marks(self) -> list[int]:
        """A number for each gradient, equal on all ranks that hold a block of it if these agree.

        0 where there is none; else 1, or of a torch parameter, whose copies have equal gradients, a hash.
        """
        return [
            0 if gradient is None else 1 if hasattr(p, "sharding") else 1 + _bits(fingerprint(gradient))
            for p, gradient in zip(self.parameters, self.gradients, strict=True)
        ]

    def _vote(self, first: np.ndarray, mark: int) -> int:
        """This rank's summand of a sum over the grid that is 0 where all ranks that hold a block have equal marks.

        The first of them adds its mark once for each, and each takes its own away.
        """
        held, rank = first >= 0, self.grid.rank
        return int(mark * ((np.argmax(held) == rank) * np.count_nonzero(held) - int(held[rank])))

    def _disagree(self) -> NoReturn:
        """Raise AgreementError for the first thing in which ranks differ."""
        comm = self.grid.ranked.comm
        check_agreement(comm, self.operation, self.facts)
        of_ranks = comm.allgather(self.marks)
        for place, (name, first) in enumerate(zip(self.names, self.firsts, strict=True)):
            holders = np.flatnonzero(first >= 0).tolist()
            marks = [of_ranks[rank][place] for rank in holders]
            if len(set(marks)) == 1:
                continue
            plain = not hasattr(self.parameters[place], "sharding")
            said = who_passed_what(["none" if not mark else f"hash {mark:05x}" if plain else "one" for mark in marks], holders)
            advice = (
                "It belongs to no layer of summa3d, and each rank has the gradient of what it computed alone: pass the parameter "
                "through summa3d.autograd.sum_gradient in forward, or take a layer of summa3d."
                if plain
                else "Parameters without a gradient have none on any rank."
            )
            raise AgreementError(f"{self.operation}: ranks differ in the gradient of {name}: {said}.\n  {advice}")
        raise AgreementError(f"{self.operation}: ranks differ in their gradients.")

    def check_finite(self, norm: Tensor) -> None:
        """Raise Summa3dError on all ranks for a norm that is not finite, naming a parameter and the ranks that have it so."""
        if torch.isfinite(norm):
            return
        wrong = [
            name
            for name, gradient in zip(self.names, self.gradients, strict=True)
            if gradient is not None and not torch.isfinite(gradient).all()
        ]
        places = self.grid.ranked.comm.allgather(wrong[:1])
        where = "; ".join(f"{names[0]} on rank {rank}" for rank, names in enumerate(places) if names)
        raise Summa3dError(f"{self.operation}: the norm of the gradients is {norm.item()}. Gradients with inf or nan: {where}.")


STRETCH = 2048
"""Elements of a gradient whose norm torch computes in their own dtype."""


def _bits(number: int) -> int:
    return number % (1 << MARK_BITS)


def norm_and_votes(gradients: Sequence[Counted], grid: BaseGrid, votes: int = 0) -> tuple[float, int]:
    """The 2-norm of all gradients of the whole model and the sum of all ranks' `votes`, equal on every rank; collective.

    What `norms_and_votes` returns of one group. Moves one all-reduce of one complex word.
    """
    norms, result = norms_and_votes([gradients], grid, [votes])
    return float(norms[0]), round(result[0])


def norms_and_votes(
    groups: Sequence[Sequence[Counted]], grid: BaseGrid, votes: Sequence[int], norm_type: float = 2.0
) -> tuple[np.ndarray, np.ndarray]:
    """The norm of each group of gradients of the whole model, and the sums of all ranks' `votes`; collective over the grid.

    Parameters
    ----------
    groups : this rank's blocks
    votes : for each group whatever ranks have to agree on once a step; sums are exact up to 2⁵³
    norm_type : 2, 1 or inf

    Every element is counted once, by its primary rank, and norms have seven digits or more. Moves one all-reduce of one complex
    word a group, whose imaginary part are the votes; with inf an all-gather. A norm is finite only if all its gradients on all
    ranks are finite, copies included, so that all ranks take the same decision. The host synchronizes with a device once.
    """
    norms = iter(_read([item for group in groups for item, _ in group], norm_type))
    mine = np.zeros(len(groups), complex)
    for place, (group, vote) in enumerate(zip(groups, votes, strict=True)):
        whole = 0.0
        for _, is_primary in group:
            norm = next(norms)
            if is_primary or not isfinite(norm):
                whole = float(np.maximum(norm, whole)) if norm_type == inf else whole + (norm * norm if norm_type == 2 else norm)
        mine[place] = complex(whole, vote)
    if norm_type == inf:
        everyone = grid.world.all_gather(mine).reshape(grid.world.size, len(groups))
        return everyone.real.max(0), everyone.imag.sum(0)
    total = grid.world.all_reduce(mine)
    return np.sqrt(total.real) if norm_type == 2 else total.real, total.imag


def _read(tensors: list[Tensor], norm_type: float) -> list[float]:
    """Their norms, read at once; 0 of tensors without memory or without elements.

    A norm is that of the norms of stretches, in float64. torch's own is at most 2e-7 off for a stretch of float32, 1e-5 for a
    million, and its norm in float64 copies them first.
    """
    if not tensors or tensors[0].is_meta:
        return [0.0] * len(tensors)
    norms = [_of_stretches(tensor.float() if tensor.dtype.itemsize < 4 else tensor, norm_type) for tensor in tensors]
    values = np.array(torch.cat([item for several in norms for item in several]).double().tolist() if any(norms) else [])
    ends = np.cumsum([sum(map(len, several)) for several in norms])
    return [float(np.linalg.norm(of, norm_type)) if of.size else 0.0 for of in np.split(values, ends[:-1])]


def _of_stretches(tensor: Tensor, norm_type: float) -> list[Tensor]:
    """The norms of a tensor's stretches, in its dtype: those of whole stretches, and of what is left."""
    flat, result = tensor.flatten(), []
    many, left = divmod(len(flat), STRETCH)
    if many:
        result.append(torch.linalg.vector_norm(flat[: many * STRETCH].view(many, STRETCH), norm_type, dim=1))
    if left:
        result.append(torch.linalg.vector_norm(flat[many * STRETCH :], norm_type)[None])
    return result
