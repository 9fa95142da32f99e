"""Products of torch's host tensors by the process's BLAS, which on some processors is faster than torch's own."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ...blas_library import BlasRule, at_addresses, follow_threads
from ...comm.device.arrays import dtype_name
from .strides import by_rows, row_step

if TYPE_CHECKING:
    from torch import Tensor


def multiplied(a: Tensor, b: Tensor, form: str, out: Tensor | None, alpha: float, beta: float, rule: BlasRule) -> Tensor | None:
    """out = α·op(A)·op(B) + β·out by the library of `rule`, in a new tensor without `out`.

    None, with nothing done, where that is torch's to do.

    It is torch's where the rule says so, and where torch would do more than multiply the elements in memory: record gradients,
    autocast, transform or trace. Rows may be strided; what lies neither by rows nor by columns is torch's too. The version
    counter of `out` is advanced, so that autograd notices what was overwritten.
    """
    worth = rule.worth.get(dtype_name(a)) if rule.worth else None
    rows, inner = a.shape if form[0] == "n" else a.shape[::-1]
    columns = b.shape[1 if form[1] == "n" else 0]
    if worth is None or rows * columns * inner < worth or min(rows, columns) < rule.least:
        return None
    if not _are_plain(a, b, *([] if out is None else [out])):
        return None
    multiply = at_addresses(dtype_name(a))
    first, second = by_rows(a, form[0]), by_rows(b, form[1])
    if multiply is None or first is None or second is None or (out is not None and not row_step(out)):
        return None
    import torch

    if out is None:
        out = a.new_empty((rows, columns))

    follow_threads(torch.get_num_threads())
    (left, turn_a), (right, turn_b) = first, second
    operands = (left.data_ptr(), row_step(left), right.data_ptr(), row_step(right))
    multiply(turn_a + turn_b, rows, columns, inner, alpha, *operands, beta, out.data_ptr(), row_step(out))
    torch.autograd.graph.increment_version(out)
    return out


def _are_plain(*tensors: Tensor) -> bool:
    """Return whether these are elements of one dtype in the host's memory, of which nothing but their product is wanted."""
    import torch

    if (
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return False
    recorded = torch.is_grad_enabled()
    return all(
        _has_torchs_product(type(tensor))
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype == tensors[0].dtype
        and not (tensor.is_conj() or tensor.is_neg() or (recorded and tensor.requires_grad))
        and tensor.data_ptr() != 0
        for tensor in tensors
    )


@cache
def _has_torchs_product(kind: type[Tensor]) -> bool:
    """True if torch multiplies tensors of this type as it does its own: parameters of every kind, unless they say otherwise."""
    import torch

    overrides_nothing = kind.__torch_function__ is torch.nn.Parameter.__torch_function__
    return kind is torch.Tensor or (overrides_nothing and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__)
