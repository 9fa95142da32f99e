"""What a model asks of the global batch that it is given, before it cuts any of it: equal shapes, and ids that it knows."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError, ShapeError


def check_shapes(tokens: Tensor, **others: Tensor | None) -> None:
    """Raise ShapeError where a tensor that goes with the tokens [b, s] has another shape."""
    for name, other in others.items():
        if other is not None and other.shape != tokens.shape:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}, {name} {tuple(other.shape)}; they must be equal.")


def check_ids(name: str, ids: Tensor | None, count: int, known: str, ignored: bool = False) -> None:
    """Raise DataError, naming position and value, where an id is not among 0 … count−1.

    Parameters
    ----------
    name : what the ids are called in the message
    ids : global ids of any shape, equal on every rank, so that every rank raises alike; None passes
    known : what has `count` of them, as the message says it
    ignored : whether ids below 0 pass, as labels that are not counted

    Only ids in the host's memory are read: a tensor without memory (meta, fake) has no values, and a device would have to
    be waited for. There ids that are not known are not noticed.
    """
    if ids is None or type(ids) is not Tensor or ids.device.type != "cpu" or ids.numel() == 0:
        return
    lowest, highest = (int(end) for end in torch.aminmax(ids))
    if highest < count and (ignored or lowest >= 0):
        return
    wrong = (ids >= count) if ignored else (ids < 0) | (ids >= count)
    position = wrong.nonzero()[0].tolist()
    what = f"{name}[{', '.join(map(str, position))}] is {int(ids[tuple(position)])}; {known}"
    also = "; labels below 0 are not counted" if ignored else ""
    raise DataError(f"{what}, 0 to {count - 1}{also}.")
