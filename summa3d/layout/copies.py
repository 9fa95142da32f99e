"""Equal copies of an array on the members of an axis, kept or sent as parts: one a member, gathered where the whole is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ..comm.axis import Axis
from .layout import split_sizes


@dataclass(frozen=True)
class Copies:
    """What cuts arrays of which the members of `axis` hold equal copies; with one member, a part is the whole."""

    axis: Axis

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """The elements of each member's part of an array: the balanced split of the flat array."""
        return split_sizes(prod(shape), self.axis.size)

    def part(self, whole: Tensor) -> Tensor:
        """This member's part, flat: a copy, so that the whole can be freed; with one member, a view. Moves nothing."""
        flat = whole.detach().reshape(-1)
        return flat if self.axis.size == 1 else flat.split(self.sizes(whole.shape))[self.axis.index].clone()

    def whole(self, part: Tensor, shape: Sequence[int]) -> Tensor:
        """The array of this shape, gathered from the parts; collective. Words n − n_r, none with one member."""
        gathered: Tensor = self.axis.all_gather(part, sizes=self.sizes(shape))
        return gathered.view(*shape)
