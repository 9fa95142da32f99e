"""Checks of the global batch that a model is given: equal shapes, and ids within their range."""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.device.arrays import dtype_name
from ...errors import DataError, ShapeError


def check_tensors(**given: object) -> None:
    """Raise ShapeError for what is no tensor of torch whose elements lie in order."""
    for name, item in given.items():
        if not isinstance(item, Tensor) or item.layout is not torch.strided:
            what = (
                "missing"
                if item is None
                else f"of layout {item.layout}"
                if isinstance(item, Tensor)
                else f"a {type(item).__name__}"
            )
            raise ShapeError(f"{name} is {what}; a model takes dense tensors of torch.")


def check_shapes(tokens: Tensor, **others: Tensor) -> None:
    """Raise ShapeError where one of `others` is no tensor, lies elsewhere than the tokens or has not their shape."""
    check_tensors(tokens=tokens, **others)
    for name, other in others.items():
        if other.device.type != tokens.device.type:
            raise ShapeError(f"tokens are on device {tokens.device}, {name} on {other.device}; they must be on one.")
        if other.shape != tokens.shape:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}, {name} {tuple(other.shape)}; they must be equal.")


def check_ids(name: str, ids: Tensor | None, count: int, known: str, ignored: bool = False) -> None:
    """Raise DataError, naming position and value, where an id is not in 0 … count−1, and for ids that are no whole numbers.

    Parameters
    ----------
    name : the name of the ids in the message
    ids : global ids of any shape, equal on every rank, so that every rank raises alike; None passes
    count : the number of valid ids
    known : the message's words for what has `count` of them
    ignored : whether ids below 0 pass, as labels that are not counted

    Only ids in host memory are checked. A meta or fake tensor has no values, and reading a device's ids would make the host
    wait for the device; so invalid ids there go unnoticed.

    >>> check_ids("labels", torch.tensor([0, -1]), 5, "there are 5 classes", ignored=True)
    >>> check_ids("labels", torch.tensor([0, 5]), 5, "there are 5 classes")
    Traceback (most recent call last):
    summa3d.errors.DataError: labels[1] is 5; there are 5 classes, 0 to 4.
    """
    if ids is not None and ids.dtype not in (torch.int64, torch.int32):
        raise DataError(f"{name} are ids, of dtype int64 or int32; they have {dtype_name(ids)}.")
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
