"""The papers' programs, as edits of the library's own traces; only tables of papers use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps

from ...dry.record import Op
from ...dtypes import dtype_of
from ..cells import Cell, OpTrace

Edit = Callable[[Cell], Cell]


def of_each_trace(edit: Callable[[OpTrace], Iterable[Op]]) -> Edit:
    """The edit of a cell's forward and of its backward alike."""

    @wraps(edit)
    def of_cell(cell: Cell) -> Cell:
        return Cell(tuple(edit(cell.forward)), tuple(edit(cell.backward)))

    return of_cell


def distributed_checkpoints(cell: Cell) -> Cell:
    """Megatron keeps a block's input split over the tensor-parallel ranks, and gathers it before it computes the block again."""
    whole = next((op for op in cell.forward if op.name == "all_reduce"), None)
    if whole is None or not any(op.phase == "recompute" for op in cell.backward):
        return cell
    gather = whole._replace(name="all_gather", phase="recompute", words=whole.words // 2, id=-2)
    return cell._replace(backward=(gather, Op("wait", "recompute", gather.layer, "", id=-2), *cell.backward))


@of_each_trace
def workspace_copies(trace: OpTrace) -> Iterable[Op]:
    """Optimus copies each panel of a product into its workspace before it broadcasts it."""
    for op in trace:
        if op.name == "broadcast":
            size = op.words * dtype_of(op.dtype).nbytes
            yield Op("elements", op.phase, op.layer, "clone", read=size, written=size, dtype=op.dtype)
        yield op


def fused_softmax(cell: Cell) -> Cell:
    """Megatron's kernel scales, masks and normalises the scores of attention in one pass."""
    return without(cell, "attention.core", ("div", "masked_fill", "ones", "tril_", "bitwise_not"))


def strided_attention(cell: Cell) -> Cell:
    """Megatron's batched products read q, k and v where the projection left them, and its bias is added by the product."""
    return without(without(cell, "attention.core", ("clone",)), "attention.qkv", ("add_",))


@of_each_trace
def sums_of_halves(trace: OpTrace) -> Iterable[Op]:
    """Megatron adds up 16-bit summands in 16 bits; ours are added in float32, in an all-reduce or one after the other."""
    for op in trace:
        if op.name == "all_reduce" and op.dtype == "float32":
            yield op._replace(dtype="bfloat16")
        elif op.kind != "elements" or not op.name.startswith(("_to_copy", "copy_", "sum_parts")):
            yield op


@of_each_trace
def unfused(trace: OpTrace) -> Iterable[Op]:
    """Before PTD-P's kernels, a bias was added in a pass of its own before GELU; before a dropout, and the residual after it."""
    for op in trace:
        if op.name.startswith(("bias_gelu", "dropout_add", "dropout_gradient")) and not op.layer.endswith("core.dropout"):
            many = 2 if op.name.startswith("dropout_add") else 1
            size = min(op.read, op.written)
            yield from [op._replace(name="add", read=size, written=size)] * many
        yield op


@of_each_trace
def causal(trace: OpTrace) -> Iterable[Op]:
    """Flash attention leaves out the blocks of scores above the diagonal: half of the products."""
    return (op._replace(batch=op.batch // 2) if op.name == "attention" else op for op in trace)


def without(cell: Cell, layer: str, names: tuple[str, ...]) -> Cell:
    """A cell without the element-wise operations of these names in a layer."""

    @of_each_trace
    def rest(trace: OpTrace) -> Iterable[Op]:
        return (op for op in trace if op.kind != "elements" or op.name not in names or not op.layer.endswith(layer))

    return rest(cell)


PROFILES: dict[str, tuple[Edit, ...]] = {
    "summa3d": (),
    "megatron-2020": (distributed_checkpoints,),
    "optimus-2021": (workspace_copies,),
    "megatron-2021": (fused_softmax, strided_attention, sums_of_halves),
    "megatron-2021-unfused": (strided_attention, sums_of_halves, unfused),
    "fsdp-2023": (causal, strided_attention),
}
"""Name of a program → its edits of a cell."""


def edited(cell: Cell, profile: str) -> Cell:
    """A cell as a profile's program runs it."""
    for edit in PROFILES[profile]:
        cell = edit(cell)
    return cell
