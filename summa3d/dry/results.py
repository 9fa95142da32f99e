"""Results of operations on tensors without memory whose shape and dtype are plain.

torch works these out in Python, which takes ten times as long, and imports its compiler for it, 2 s of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

NOWHERE = torch.device("meta")
PLAIN = (None, torch.contiguous_format, torch.preserve_format)
Rule = Callable[[tuple[Any, ...], Mapping[str, Any]], "Tensor | None"]
"""Arguments of an operation → its result, or None where torch is to be asked."""


def result_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The result of an operation, contiguous and of a storage of its own; None where torch's own result may be another."""
    rule = RULES.get(name)
    return None if rule is None else rule(args, kwargs)


def _plain(value: Any) -> bool:
    """Return whether it is a tensor without memory that is contiguous, or of one dim, so that what is made of it is."""
    return isinstance(value, Tensor) and value.is_meta and (value.dim() < 2 or value.is_contiguous())


def _empty(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=NOWHERE)


def _stays(kwargs: Mapping[str, Any]) -> bool:
    """Return whether options leave a tensor where it is, as it is laid out."""
    device = kwargs.get("device")
    return (device is None or device.type == "meta") and kwargs.get("layout") in (None, torch.strided)


def _new(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    item = args[0]
    return _empty(args[1], kwargs.get("dtype") or item.dtype) if item.is_meta and _stays(kwargs) else None


def _like(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    item, form = args[0], kwargs.get("memory_format")
    contiguous = form is torch.contiguous_format or (form in PLAIN and _plain(item))
    return _empty(item.shape, kwargs.get("dtype") or item.dtype) if item.is_meta and contiguous and _stays(kwargs) else None


def _unary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    item = args[0]
    return _empty(item.shape, item.dtype) if len(args) == 1 and not kwargs and _plain(item) and item.is_floating_point() else None


def _broadcast(args: tuple[Any, ...]) -> torch.Size | None:
    """The shape of one operand, where all others are numbers, or plain and no longer in any dim."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if len(args) != 2 or not all(map(_plain, tensors)):
        return None
    shape = max((tensor.shape for tensor in tensors), key=lambda item: (len(item), item.numel()))
    fits = all(size in (1, whole) for tensor in tensors for size, whole in zip(tensor.shape[::-1], shape[::-1], strict=False))
    return shape if fits else None


def _binary(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    shape = None if kwargs else _broadcast(args)
    dtype = None if shape is None else torch.result_type(*args)
    return None if dtype is None else _empty(shape, dtype)


def _quotient(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    return _binary(args, kwargs) if isinstance(args[0], Tensor) and args[0].is_floating_point() else None


def _comparison(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    shape = None if kwargs else _broadcast(args)
    return None if shape is None else _empty(shape, torch.bool)


def _clamp(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    item, *ends = args
    same = _plain(item) and item.dtype != torch.bool and not kwargs and all(type(end) is int for end in ends)
    return _empty(item.shape, item.dtype) if same else None


def _product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    item, other = args
    fits = item.is_meta and other.is_meta and item.dim() == other.dim() == 2 and item.shape[1] == other.shape[0]
    return _empty((item.shape[0], other.shape[1]), item.dtype) if fits and item.dtype == other.dtype and not kwargs else None


def _packs(parts: Sequence[Tensor]) -> bool:
    """Return whether tensors of one dtype and as many dims become one contiguous tensor."""
    first = parts[0]
    alike = all(part.is_meta and part.dim() == first.dim() > 0 and part.dtype == first.dtype for part in parts)
    return alike and any(suggest_memory_format(part) is torch.contiguous_format for part in parts)


def _cat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    if kwargs or not _packs(parts):
        return None
    shapes = [[*part.shape] for part in parts]
    whole = shapes[0]
    whole[dim] = sum(item.pop(dim) for item in [[*shape] for shape in shapes])
    fits = all(shape[:dim] == whole[:dim] and shape[dim:][1:] == whole[dim:][1:] for shape in shapes)
    return _empty(whole, parts[0].dtype) if fits else None


def _stack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    first = parts[0]
    if kwargs or not _packs(parts) or any(part.shape != first.shape for part in parts):
        return None
    dim %= first.dim() + 1
    if dim == first.dim() and not all(map(_plain, parts)):
        return None
    return _empty((*first.shape[:dim], len(parts), *first.shape[dim:]), first.dtype)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("new_empty", "new_zeros"), _new),
    **dict.fromkeys(("empty_like", "ones_like", "zeros_like", "clone", "_to_copy"), _like),
    **dict.fromkeys(("log", "exp", "neg", "cos", "sin", "rsqrt", "tanh", "sigmoid"), _unary),
    **dict.fromkeys(("add", "sub", "mul", "bitwise_and"), _binary),
    **dict.fromkeys(("ge", "gt", "le", "lt", "eq", "ne"), _comparison),
    "div": _quotient,
    "clamp": _clamp,
    "mm": _product,
    "cat": _cat,
    "stack": _stack,
}
