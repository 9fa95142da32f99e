"""Arrays, numbers and sizes that are not what a call takes, and what is read of arguments afterwards."""

from __future__ import annotations

import contextlib
import random
from typing import Any


class MustRefuse(Exception):
    """What the oracle raises for arguments that have no right result."""


def read_only(array: Any) -> Any:
    """A copy that cannot be written."""
    array = array.copy()
    array.flags.writeable = False
    return array


def tensor(array: Any) -> Any:
    """A torch tensor of the same numbers."""
    import torch

    return torch.from_numpy(array.copy())


def spoilt_arrays(array: Any) -> dict[str, Any]:
    """An array's like of other types, shapes, orders and kinds; not all of them are wrong."""
    import numpy as np
    import torch

    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    names = (
        "int8",
        "uint16",
        "uint64",
        "complex64",
        "complex128",
        "float16",
        "float32",
        "int32",
        "int64",
        "bool",
        "object",
        "S4",
    )
    return {
        **{f"dtype {name}": array.astype(name) for name in names},
        "dtype longdouble": array.astype(np.longdouble),
        "dtype datetime": array.astype("int64").astype("datetime64[s]"),
        "dtype of two fields": np.zeros(array.shape, [("a", "f4"), ("b", "i4")]),
        "big-endian": array.astype(">f8"),
        "a list": array.tolist(),
        "None": None,
        "a number": 3.5,
        "a text": "abc",
        "0-d": array.reshape(-1)[0].reshape(()),
        "no elements": array[:0],
        "no columns": array[..., :0],
        "every other column": wide[..., ::2],
        "Fortran order": np.asfortranarray(array),
        "backwards": array[::-1],
        "read-only": read_only(array),
        "one more row": np.concatenate([array, array[:1]]),
        "one more dim": array[None],
        "tensor": tensor(array),
        "tensor with gradient": tensor(array).requires_grad_(),
        "tensor, conjugate": torch.complex(tensor(array), tensor(array)).conj(),
        "tensor, transposed": tensor(array).transpose(0, 1).contiguous().transpose(0, 1),
        "tensor, bfloat16": tensor(array).bfloat16(),
        "tensor, sparse": tensor(array).to_sparse(),
        "tensor without memory": tensor(array).to("meta"),
        "tensor, expanded": tensor(array[:1]).expand(array.shape),
        "masked": np.ma.masked_array(array),
        "matrix": np.asmatrix(array),
    }


NUMBERS: dict[str, Any] = {
    **{repr(one): one for one in (-1, 7, -9, 0.0, 1.5, "0", None, True, 2**40, -(2**70), [0], (1,), float("nan"), b"0", {}, 1j)},
}


def spoilt_sizes(sizes: list[int]) -> dict[str, Any]:
    """Sizes of other types, signs, numbers and sums."""
    import numpy as np

    first, *rest = sizes
    others: dict[str, Any] = {
        "floats": [float(one) for one in sizes],
        "texts": [str(one) for one in sizes],
        "negative": [-first, *rest[:-1], rest[-1] + 2 * first],
        "one too few": rest,
        "one too many": [*sizes, 0],
        "another sum": [first + 1, *rest],
        "a number": first,
        "a text": "44",
        "None inside": [None, *rest],
        "nested": [sizes],
        "numpy": np.array(sizes),
        "numpy floats": np.array(sizes, float),
        "numpy 2-d": np.array([sizes]),
        "shifted": [first + 1, *rest[:-1], rest[-1] - 1],
        "empty": [],
        "huge": [2**62] * len(sizes),
        "a dict": dict.fromkeys(range(len(sizes)), first),
        "a generator": range(len(sizes)),
        "nan": [float("nan"), *rest],
    }
    return others


OPS: dict[str, Any] = {repr(one): one for one in ("prod", None, 3, ["sum"], "SUM", b"sum", "", "max", "min", ("sum",), {})}


def spoilt_into(into: Any) -> dict[str, Any]:
    """A place for a result, of another kind, shape or type."""
    import numpy as np

    wide = np.zeros((*into.shape[:-1], 2 * into.shape[-1]), into.dtype)
    return {
        "a list": into.tolist(),
        "a number": 0.0,
        "a text": "abc",
        "float32": into.astype("f4"),
        "complex": into.astype(complex),
        "one row less": into[1:].copy(),
        "one more dim": into[None].copy(),
        "flat": into.reshape(-1).copy(),
        "read-only": read_only(into),
        "tensor": tensor(into),
        "every other column": wide[..., ::2],
        "Fortran order": np.asfortranarray(into),
        "broadcast": np.broadcast_to(into[:1], into.shape),
        "big-endian": into.astype(">f8"),
    }


def as_numpy(array: Any) -> Any:
    """The elements of an array, a tensor or a list, copied."""
    import numpy as np

    if hasattr(array, "data_ptr"):
        return array.detach().resolve_conj().float().numpy().copy() if "bfloat16" in str(array.dtype) else as_host(array)
    return np.array(array)


def as_host(array: Any) -> Any:
    """A tensor's elements."""
    return array.detach().resolve_conj().to_dense().cpu().numpy().copy()


def type_name(array: Any) -> str:
    """The name of the dtype, numpy's or torch's."""
    return str(array.dtype).removeprefix("torch.")


def snapshot(value: Any) -> Any:
    """An argument as it is now: its elements, where it has any."""
    if hasattr(value, "shape"):
        with contextlib.suppress(Exception):  # what cannot be copied has no right result either
            return type_name(value), as_numpy(value)
        return MustRefuse
    return value


def one_rank(chance: random.Random, size: int) -> int | None:
    """A rank that alone calls otherwise; half of the time None, all of them do."""
    return chance.randrange(size) if chance.random() < 0.5 else None


def place_like(array: Any) -> Any:
    """A place for what is like an array, where it is one."""
    import numpy as np
    import torch

    if isinstance(array, np.ndarray):
        return np.zeros(array.shape, array.dtype)
    usable = isinstance(array, torch.Tensor) and array.layout is torch.strided and not array.is_meta
    return torch.zeros(array.shape, dtype=array.dtype) if usable else np.zeros((2, 3))
