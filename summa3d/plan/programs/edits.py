"""What programs do otherwise than the library, as edits of the cells of its own traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps

from ...dry.record import Op
from ...dtypes import NARROW, dtype_of
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


TENSOR_CORE = 8
"""Elements of 16 bits of which a row of an operand has a multiple where tensor cores multiply it."""


@of_each_trace
def uneven_heads(trace: OpTrace) -> Iterable[Op]:
    """Products of attention whose heads or positions are no multiple of tensor cores' rows run without them, as float32 does."""
    for op in trace:
        uneven = any(size % TENSOR_CORE for size in (op.m, op.n, op.k))
        batched = op.kind == "product" and op.name != "attention" and op.layer.endswith(".core")
        yield op._replace(dtype="float32") if batched and uneven else op


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
        if op.name.startswith(("bias_gelu", "bias_relu2", "dropout_add", "dropout_gradient")) and not op.layer.endswith(
            "core.dropout"
        ):
            many = 2 if op.name.startswith("dropout_add") else 1
            size = min(op.read, op.written)
            yield from [op._replace(name="add", read=size, written=size)] * many
        yield op


@of_each_trace
def whole_square(trace: OpTrace) -> Iterable[Op]:
    """A kernel that computes the scores above the diagonal too, which the library's leaves out."""
    return (op._replace(batch=2 * op.batch) if op.name == "attention" else op for op in trace)


OWN = ("cat", "clone", "stack", "copy_", "_to_copy", "sum_parts", "ge", "lt", "bitwise_and", "sub", "clamp")
"""Element-wise operations of our own products, collectives and tables that programs with NCCL and fused weights lack."""


@of_each_trace
def as_nccl(trace: OpTrace) -> Iterable[Op]:
    """NCCL adds up inside its collectives, and weights that are multiplied together lie together."""
    return (op for op in trace if op.kind != "elements" or not op.name.startswith(OWN))


def accumulated(dtype: str, apart: bool) -> Edit:
    """Add the gradients of weights to the sum of the micro-batches, which has this dtype.

    apart : in a pass of its own, where the product has written them in 16 bits; else by the product, which reads the sum and
    writes it: in cuBLAS, β = 1.
    """
    width = dtype_of(dtype).nbytes

    @of_each_trace
    def edit(trace: OpTrace) -> Iterable[Op]:
        for op in trace:
            is_gradient = op.kind == "product" and op.name == "tn" and op.phase == "backward"  # attention's have another form
            size = op.m * op.n * op.batch
            if is_gradient and not apart:
                op = op._replace(read=op.read + width * size, written=width * size)
            yield op
            if is_gradient and apart:
                yield Op("elements", op.phase, op.layer, "accumulate", read=(2 + width) * size, written=width * size)

    return edit


def inputs_kept(cell: Cell) -> Cell:
    """Keep gathered inputs of products: what is gathered for a forward is not gathered again for its backward."""
    gathered = {op.layer for op in cell.forward if op.name == "all_gather"}

    def is_again(op: Op) -> bool:
        return op.name == "all_gather" and op.phase == "backward" and op.layer in gathered

    return cell._replace(backward=tuple(op for op in cell.backward if not is_again(op)))


EAGER = {"rms_norm": 5.0, "rotate": 5.0, "swiglu": 1.7, "layer_norm": 1.0, "bias_gelu": 1.5, "cross_entropy": 4.0}
"""How the name of a fused operation begins → how many times its bytes its parts pass, with sums in 32 bits."""


@of_each_trace
def eager(trace: OpTrace) -> Iterable[Op]:
    """Without a compiler norms, rotations, activations and losses are several kernels, each of which passes all elements."""
    for op in trace:
        times = next((many for name, many in EAGER.items() if op.kind == "elements" and op.name.startswith(name)), 1.0)
        yield op._replace(read=int(times * op.read), written=int(times * op.written)) if times > 1 else op


def narrowed(dtype: str) -> Edit:
    """The edit that runs a block's products with weights in 8 or 4 bits: an operand of each is cast, and written transposed too.

    What is gathered is cast before: each rank casts its own part, and a half or a fourth as many words of 16 bits travel.
    """
    share = 16 // NARROW[dtype]

    @of_each_trace
    def edit(trace: OpTrace) -> Iterable[Op]:
        gathered, received = "", 0
        for op in trace:
            if op.kind == "move" and op.name == "all_gather":
                gathered, received, op = op.layer, op.words, op._replace(words=-(-op.words // share))
            elif op.kind == "product" and op.name != "attention" and not op.layer.endswith(".core"):
                size = op.m * op.k * op.batch
                size -= received if op.layer == gathered and received < size <= 2 * received else 0
                yield Op("elements", op.phase, op.layer, "cast", read=2 * size, written=4 * size // share)
                op = op._replace(dtype=dtype)
            yield op

    return edit


def recomputed(cell: Cell, again: Iterable[Op]) -> Cell:
    """A cell that takes these operations of its forward again before its backward."""
    return cell._replace(backward=(*(op._replace(phase="recompute") for op in again), *cell.backward))


def core_again(cell: Cell) -> Cell:
    """Fused attention is computed again before its backward, in place of keeping its output."""
    return recomputed(cell, (op for op in cell.forward if op.name == "attention"))


def all_but_qkv_again(cell: Cell) -> Cell:
    """JAX's save_qkv_proj: a block keeps its first product, no backward needs its last, and all between is computed again."""
    products = [op for op in cell.forward if op.kind == "product"]
    if not any(op.name == "attention" for op in products):
        return cell
    again = [*products[1:-1], *(op for op in cell.forward if op.kind == "elements")]
    return recomputed(cell, again)


def half_again(cell: Cell) -> Cell:
    """Every second product is computed again, and all element-wise work: torchtitan's selective checkpoints."""
    products = [op for op in cell.forward if op.kind == "product" and op.name != "attention"]
    again = [*products[1::2], *(op for op in cell.forward if op.kind == "elements")]
    return recomputed(cell, again)


def in_contexts(contexts: int) -> Edit:
    """Attention of a context's positions with the keys and values of all contexts, which come around a ring."""

    @of_each_trace
    def longer(trace: OpTrace) -> Iterable[Op]:
        return (op._replace(n=op.n * contexts) if op.name == "attention" else op for op in trace)

    return longer


def without(cell: Cell, layer: str, names: tuple[str, ...]) -> Cell:
    """A cell without the element-wise operations of these names in a layer."""

    @of_each_trace
    def rest(trace: OpTrace) -> Iterable[Op]:
        return (op for op in trace if op.kind != "elements" or op.name not in names or not op.layer.endswith(layer))

    return rest(cell)
