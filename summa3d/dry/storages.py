"""The live storages of torch tensors, and a hook on every operation that reads or makes one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .results import result_of

Before = Callable[[str, tuple[Any, ...]], None]
WorkCallback = Callable[[str, list[Tensor], list[Tensor]], None]
MAKERS = ("empty", "new_empty", "empty_strided", "new_empty_strided", "empty_like")
"""Operations that make memory and neither read nor write it."""
IN_PLACE = frozenset(
    f"{name}_"
    for name in (
        *("add", "sub", "mul", "div", "copy", "fill", "zero", "exp", "neg"),
        *("clamp", "rsqrt", "square", "masked_fill", "scatter_add", "tril"),
    )
)
"""Operations that only write their first argument in place; on tensors without memory they are skipped."""


CONVERTING = ("linalg_vector_norm", "sum")
"""Reductions for which torch, on the host, first copies their argument into the dtype of the result where that is another."""


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that operations make within the block, until they are freed.

    before : called with an operation's name and arguments before it is done. work : called with its name, the tensors that it
    reads and those that it writes; not for views and for memory that is only made. `alive` is what is held now; `top` the most
    since it was last set; `fresh` the storages that were made and not yet written; `converts` whether reductions are the host's.
    """

    def __init__(self, before: Before, work: WorkCallback) -> None:
        super().__init__()
        self.alive = self.top = 0
        self.fresh: set[int] = set()
        self.converts = True
        self._before, self._work = before, work
        self._known: dict[int, tuple[int, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, 1 s of CPU, for a mode that is never compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, makes, mutates = _about(func)
        self._before(name, args)
        if name in IN_PLACE and args[0].is_meta:
            result = args[0]
        elif name == "linalg_vector_norm" and args[0].is_meta and len(args) < 3:  # torch's own takes a millisecond
            result = torch.empty((), dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
        else:
            result = result_of(name, args, kwargs)
            if result is None:
                result = func(*args, **kwargs)
        made = [one for one in _tensors(result) if self._track(one, (*args, *kwargs.values()))]
        if self.converts and name in CONVERTING:
            dtype = kwargs.get("dtype")
            if dtype is not None and dtype != args[0].dtype:
                self.top = max(self.top, self.alive + args[0].numel() * dtype.itemsize)
        if makes:
            self.fresh.update(one.untyped_storage()._cdata for one in made)
        elif made or mutates:
            given = [one for value in (*args, *kwargs.values()) for one in _tensors(value)]
            if mutates:
                made = [*made, *(one for value in mutates(args, kwargs) for one in _tensors(value))]
            self._work(name, given, made)
        return result

    def _track(self, tensor: Tensor, args: Any) -> bool:
        """Count the tensor's storage, if it is a new one and not that of an argument made elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not tensor.is_meta:
            return False
        if any(one.untyped_storage()._cdata == key for one in _tensors(args)):
            return False
        size = storage.nbytes()
        self._known[key] = size, weakref.ref(storage, lambda _: self._release(key))
        self.alive += size
        self.top = max(self.top, self.alive)
        return True

    def _release(self, key: int) -> None:
        self.alive -= self._known.pop(key)[0]
        self.fresh.discard(key)


@cache
def _about(func: Any) -> tuple[str, bool, Any]:
    """An operation's name, whether it only makes memory, and what picks the arguments that it writes; None for none."""
    name = func.__name__.partition(".")[0]
    schema = func._schema
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not written:
        return name, name in MAKERS, None

    def pick(args: Any, kwargs: Any) -> list[Any]:
        return [args[index] if index < len(args) else kwargs.get(key) for index, key in written]

    return name, False, pick


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _tensors(part)]
    return []


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def current_node() -> Any:
    """The node of autograd's graph that backward is at; None in forward."""
    return torch._C._current_autograd_node()
