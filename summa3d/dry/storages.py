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
WorkCallback = Callable[[str, tuple[Any, ...], list[Tensor], list[Tensor]], None]
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


OVERWRITING = frozenset({"copy_", "fill_", "zero_"})
"""Operations that write their first argument without reading it, as all do with what is given as `out`."""
TILE_ROWS = {768: 256, 192: 64, 0: 32}
"""At least so many queries → those of a tile of torch's attention on the host, with 512 keys."""


def _copy(args: tuple[Any, ...], kwargs: Any) -> int:
    """The bytes of an argument in the dtype of a reduction's result, where that is another."""
    dtype = kwargs.get("dtype")
    return 0 if dtype is None or dtype == args[0].dtype else args[0].numel() * dtype.itemsize


def _tile(q: Tensor, k: Tensor) -> tuple[int, int]:
    """The queries of a tile of scores, and the bytes of it, with what products of 16 bits copy."""
    rows = min(next(rows for least, rows in TILE_ROWS.items() if q.shape[2] >= least), q.shape[2])
    return rows, rows * min(512, k.shape[2]) * (q.itemsize if q.itemsize > 2 else 4 + 2)


def _attended(args: tuple[Any, ...], kwargs: Any) -> int:
    rows, tile = _tile(*args[:2])
    return tile + rows * (2 + args[0].shape[3]) * max(4, args[0].itemsize)


def _attended_backward(args: tuple[Any, ...], kwargs: Any) -> int:
    grad, q, k = args[:3]
    rows, tile = _tile(q, k)
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes
    return 2 * tile + rows * max(4, q.itemsize) + copied


SCRATCH: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    **dict.fromkeys(("linalg_vector_norm", "sum"), _copy),
    "_scaled_dot_product_flash_attention_for_cpu": _attended,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attended_backward,
}
"""Operations that hold memory of their own on the host while they run, and its bytes; of attention those of one thread."""


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that operations make within the block, until they are freed.

    before : called with an operation's name and arguments before it is done. work : called with its name and arguments, the
    tensors that it reads and those that it writes; a destination that is given is written alone. Not for views and for memory
    that is only made. `alive` is what is held now, without what is set apart; `apart` is that; `top` the most since it was last
    set; `fresh` the storages that were made and not yet written; `on_host` whether what operations hold of their own while they
    run is counted.
    """

    def __init__(self, before: Before, work: WorkCallback) -> None:
        super().__init__()
        self.alive = self.top = self.apart = self._before_last = 0
        self._apart: set[int] = set()
        self.fresh: set[int] = set()
        self.on_host = True
        self._before, self._work = before, work
        self._known: dict[int, tuple[int, Any]] = {}
        self._abouts: dict[int, tuple[str, bool, Any, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, 1 s of CPU, for a mode that is never compiled."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        about = self._abouts.get(id(func))  # torch hashes operations in Python
        name, makes, mutates, reads = about or self._abouts.setdefault(id(func), _about(func))
        self._before(name, args)
        if name in IN_PLACE and args[0].is_meta:
            result = args[0]
        elif name == "linalg_vector_norm" and args[0].is_meta and len(args) < 3:  # torch's own takes a millisecond
            result = torch.empty((), dtype=kwargs.get("dtype") or args[0].dtype, device="meta")
        else:
            result = result_of(name, args, kwargs)
            if result is None:
                result = func(*args, **kwargs)
        fresh = (tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in self._known)  # most are views
        made = [tensor for tensor in fresh if self._track(tensor, args, kwargs)]
        if self.on_host and name in SCRATCH:
            self.top = max(self.top, self.alive + SCRATCH[name](args, kwargs))
        if makes:
            self.fresh.update(item.untyped_storage()._cdata for item in made)
        elif made or mutates:
            if mutates:
                made += _tensors(mutates(args, kwargs))
            self._work(name, args, _tensors(reads(args, kwargs)), made)
        return result

    def _track(self, tensor: Tensor, args: Any, kwargs: Any) -> bool:
        """Count the tensor's storage, which is not known, if it is a new one and not that of an argument made elsewhere."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not tensor.is_meta:
            return False
        if any(given.untyped_storage()._cdata == key for given in _tensors((*args, *kwargs.values()))):
            return False
        size = storage.nbytes()
        self._known[key] = size, weakref.ref(storage, lambda _: self._release(key))
        self._before_last = self.top
        self.alive += size
        self.top = max(self.top, self.alive)
        return True

    def set_apart(self, tensor: Tensor) -> None:
        """Leave the storage that was made last out of `alive` and `top`, if storages are counted."""
        key = tensor.untyped_storage()._cdata
        if key not in self._known:
            return
        size = self._known[key][0]
        self._apart.add(key)
        self.apart += size
        self.alive -= size
        self.top = self._before_last

    def _release(self, key: int) -> None:
        size = self._known.pop(key)[0]
        self.fresh.discard(key)
        if key in self._apart:
            self._apart.discard(key)
            self.apart -= size
        else:
            self.alive -= size


@cache
def _about(func: Any) -> tuple[str, bool, Any, Any]:
    """An operation's name, whether it only makes memory, what picks the arguments that it writes, None for none, and reads."""
    name = func.__name__.partition(".")[0]
    schema = func._schema
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    outs = {argument.name for argument in schema.arguments if argument.is_out}
    first = int(name in OVERWRITING)

    def read(args: Any, kwargs: Any) -> list[Any]:
        return [*args[first:], *(value for key, value in kwargs.items() if key not in outs)]

    if not written:
        return name, name in MAKERS, None, read

    def pick(args: Any, kwargs: Any) -> list[Any]:
        return [args[index] if index < len(args) else kwargs.get(key) for index, key in written]

    return name, False, pick, read


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(value, Tensor):
        return [value]
    result = []
    if isinstance(value, (list, tuple)):
        for part in value:
            if isinstance(part, Tensor):
                result.append(part)
            elif isinstance(part, (list, tuple)):  # every operation passes here, mostly with numbers
                result += _tensors(part)
    return result


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of their elements."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def current_node() -> Any:
    """The node of autograd's graph that backward is at; None in forward."""
    return torch._C._current_autograd_node()
