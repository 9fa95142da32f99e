"""Buckets: which gradients are reduced over the replicas in one message, and where each part lies in it. Pure data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from ..errors import ConfigError
from .states import ParameterState, replicas_of


@dataclass(frozen=True)
class ShardRange:
    """The rows start … stop−1 of this rank's block of the parameter `name`: `words` elements, of one replica."""

    name: str
    start: int
    stop: int
    words: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel as one message: of one chunk of layers, over one plane of replicas.

    The message has the parts of the plane's first member, parameter by parameter, then those of the next: a reduce-scatter with
    `sizes` leaves each member its own parts, and an all-gather with `sizes` restores the message. Nothing is padded.

    Attributes
    ----------
    chunk : the chunk of layers whose last backward completes these gradients
    axes : the plane of replicas
    members : the parts of each member of the plane, in its order
    """

    chunk: int
    axes: tuple[str, ...]
    members: tuple[tuple[ShardRange, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in the order of the message."""
        return tuple(part.name for part in self.members[0])

    @property
    def sizes(self) -> list[int]:
        """The words of each member's parts."""
        return [sum(part.words for part in parts) for parts in self.members]

    def pack(self, blocks: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """The message of this rank's whole blocks: a copy, in `out` where it is given."""
        parts = [blocks[part.name][part.start : part.stop].reshape(-1) for part in itertools.chain(*self.members)]
        return torch.cat(parts) if out is None else torch.cat(parts, out=out)

    def unpack(self, message: Tensor, blocks: Mapping[str, Tensor], here: int | None = None) -> None:
        """Overwrite this rank's whole blocks by a message: the inverse of `pack`. here : a member whose parts they have."""
        start = 0
        for member, parts in enumerate(self.members):
            for part in parts:
                if member != here:
                    rows = blocks[part.name][part.start : part.stop]
                    rows.copy_(message[start : start + part.words].view(rows.shape))
                start += part.words

    def parts_in(self, own: Tensor, index: int, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
        """The parts of member `index`, as views of what a reduce-scatter left it: rows of blocks of these shapes."""
        result, start = {}, 0
        for part in self.members[index]:
            result[part.name] = own[start : start + part.words].view(part.stop - part.start, *shapes[part.name][1:])
            start += part.words
        return result


def buckets_of(states: Sequence[ParameterState], chunk_of: Callable[[str], int], size: int) -> list[Bucket]:
    """The buckets of a model's gradients on this rank, equal on all replicas of it.

    Parameters
    ----------
    chunk_of : the chunk of a parameter, by its name
    size : bytes; a bucket that has reached them takes no more parameters. At least 1: then every parameter has its own

    Parameters are taken in the reverse of their order, which is about the order in which backward completes them; those of
    another chunk, of other replicas or of another dtype have other buckets. Parameters without replicas, and those that this
    rank holds nothing of, have none. Raises ConfigError for a size below 1.
    """
    if size < 1:
        raise ConfigError(f"A bucket of {size} bytes holds no gradient. Sizes are at least 1 byte.")
    kinds: dict[tuple[int, tuple[str, ...], torch.dtype], list[ParameterState]] = {}
    for state in reversed(states):
        axes = replicas_of(state.shardings.used, state.shardings.grid)
        if axes and state.shardings.numel:
            kinds.setdefault((chunk_of(state.name), axes, state.parameter.dtype), []).append(state)
    result = []
    for (chunk, axes, _), of_kind in kinds.items():
        for together in _filled(of_kind, size):
            parts = zip(*(map(partial(_part, state), state.shardings.rows) for state in together), strict=True)
            result.append(Bucket(chunk, axes, tuple(parts)))
    return result


def _filled(states: Iterable[ParameterState], size: int) -> Iterator[list[ParameterState]]:
    """Consecutive states, joined until they have `size` bytes."""
    together: list[ParameterState] = []
    for state in states:
        together.append(state)
        if sum(item.shardings.numel * item.parameter.itemsize for item in together) >= size:
            yield together
            together = []
    if together:
        yield together


def _part(state: ParameterState, rows: slice) -> ShardRange:
    return ShardRange(state.name, rows.start, rows.stop, (rows.stop - rows.start) * prod(state.shardings.shape[1:]))
