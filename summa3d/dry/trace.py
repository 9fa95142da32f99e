"""Trace a model: the phase, layer and cell of every operation, and the memory held between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..autograd.deferred import PassState
from ..comm.device.arrays import Array, dtype_name
from ..comm.profile.ledger import Amounts
from ..nn.models.base import Body
from .place import DryLedger
from .record import ENTER, LEAVE, OPTIMIZER, Op, Segment
from .storages import Storages, bytes_of, current_node

RECOMPUTE, ACCUMULATE = "_RecomputeBackward", "torch::autograd::AccumulateGrad"
"""Nodes of autograd's graph: one runs a forward again, the other belongs to no layer."""
PRODUCTS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}
"""torch's products, and how many dims their operands have."""
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu": 2, "_scaled_dot_product_flash_attention_for_cpu_backward": 5}
"""Fused attention, and how many products of a head's scores it is; half as many where it leaves out those above the diagonal."""


class Owner(NamedTuple):
    """A layer by its module's name, and the cell that it belongs to."""

    layer: str
    cell: str


class Owners:
    """The layer of every operation: in forward the entered module, in backward the sequence number of autograd's node."""

    def __init__(self) -> None:
        self._names: list[Owner] = []
        self._starts: list[int] = []
        self._owners: list[Owner] = []
        self._parameters: dict[int, Owner] = {}
        self._cells: Sequence[str] = ()
        self._root = self._left = ENTER
        self._state = PassState()
        self.current = Owner(ENTER, ENTER)

    def follow(self, model: nn.Module, cells: Sequence[str]) -> None:
        """Know the model's layers by name, and the cell of each of its blocks."""
        self._cells = cells
        self._state = model.context.state if isinstance(model, Body) else self._state
        for root, method in ((ENTER, "enter"), (LEAVE, "leave")):
            if hasattr(model, method):  # a single layer has no cells
                setattr(model, method, self._rooted(root, getattr(model, method)))
        for name, module in model.named_modules():
            if isinstance(module, nn.ModuleList):
                continue
            module.register_forward_pre_hook(lambda module, given, name=name: self.enter(name))
            module.register_forward_hook(lambda module, given, result, name=name: self.leave(name), always_call=True)
            head = getattr(module, "head", None)  # a method that is called beside `forward`
            if callable(head) and not isinstance(head, nn.Module):
                module.head = self._within("head")(head)
            for parameter in module.parameters(recurse=False):
                self._parameters[parameter.untyped_storage()._cdata] = self._owner(name)

    def begin(self) -> None:
        """Forget the graphs so far: a step begins."""
        self._left = ENTER
        self._starts, self._owners, self._root = [-1], [Owner(ENTER, ENTER)], ENTER

    def enter(self, name: str) -> None:
        """A layer is entered."""
        owner, forward = self._owner(name), current_node() is None
        if forward and not torch.is_grad_enabled() and not any(name.cell == owner.cell for name in self._names):
            self._own(owner, before=1)  # blocks that are computed again: the node that does so was made just before
        self._names.append(owner)
        self._own(owner)

    def leave(self, name: str) -> None:
        """A layer is left."""
        self._left = self._names.pop().cell
        self._own(self.inside)

    @property
    def inside(self) -> Owner:
        """The owner of operations in forward now."""
        owner = self._names[-1] if self._names else Owner("", "")
        return owner if owner.layer else Owner(self._root, self._root)

    @property
    def saving(self) -> str:
        """The cell of a tensor saved for backward now; a module may save its inputs just after it has been left."""
        inside = self.inside
        return self._left if inside.layer == inside.cell else inside.cell

    def find(self, phase: str, name: str, given: Sequence[Any]) -> str:
        """Set `current` for the operation `name` of `given` in the ledger's `phase`; returns its phase."""
        node = current_node()
        if node is None:
            self.current = self._forward(phase, name, given)
            return phase
        kind = node.name()
        if kind == RECOMPUTE and self._names:
            self.current = self._names[-1]
            return "recompute"
        if kind != ACCUMULATE:
            self.current = self._maker(node)
            if kind == RECOMPUTE and self._owners[-1] != self.current:
                self._own(self.current, before=1)  # nodes that are made while a part of a layer is computed again
        return "recompute" if kind == RECOMPUTE else "backward"

    def _forward(self, phase: str, name: str, given: Sequence[Any]) -> Owner:
        if phase == OPTIMIZER:
            return Owner(OPTIMIZER, OPTIMIZER)
        if name == "_to_copy" and not self._names:  # a 16-bit copy of a weight
            owner = self._parameters.get(given[0].untyped_storage()._cdata, Owner(ENTER, ENTER))
            self._own(owner, before=1)  # the node of the copy was made just before
            return owner
        running = self._state.running
        return self.inside if running is None else self._maker(running.root.grad_fn)

    def _maker(self, node: Any) -> Owner:
        """The layer that made a node of autograd's graph."""
        return self._owners[bisect_right(self._starts, node._sequence_nr()) - 1]

    def _owner(self, name: str) -> Owner:
        parts = name.split(".")
        return Owner(name, self._cells[int(parts[1])] if parts[0] == "blocks" else self._root)

    def _own(self, owner: Owner, before: int = 0) -> None:
        """Nodes made from now on are of `owner`; with `before`, the last ones too."""
        number: int = torch.autograd._get_sequence_nr() - before
        while len(self._starts) > 1 and self._starts[-1] >= number:
            self._starts.pop()
            self._owners.pop()
        self._starts.append(number)
        self._owners.append(owner if owner.layer else Owner(self._root, self._root))

    def _rooted(self, root: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the model outside whose layers operations are those of the cell `root`."""

        @wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            self._root = root
            self._own(self.inside)
            return method(*args, **options)

        return call

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        """Within the block, or a method that this decorates, the layer `name` has been entered."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)


class Tracer:
    """Records what a model does on a dry grid that counts in `ledger`.

    Within `storages`, storages are counted; within `recording`, operations are recorded too, in segments, one after the other.
    """

    def __init__(self) -> None:
        self.ledger = DryLedger(self._issued, self._waited, self._multiplied, self._begin_op, self._keep, self._repeating)
        self.storages = Storages(self._before, self._worked)
        self.owners = Owners()
        self.inside = 0
        self._segments: list[Segment] = []
        self._ops: list[list[Segment]] = []
        self._recording = False
        self._begun, self._moves, self._phase = 0, 0, "forward"
        self._shifted: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[list[list[Segment]]]:
        """Record what the block does; yields the segments of each op of a program, complete when the block has ended.

        The first list is what comes before the first op.
        """
        self._segments = []
        self._ops, self._recording = [self._segments], True
        self.owners.begin()
        self._begun = self.storages.top = self.storages.alive
        try:
            yield self._ops
        finally:
            self._close()
            self._recording = False

    def _begin_op(self) -> None:
        """An op of a program begins: what follows, until the next one begins, is its own."""
        if not self._recording:
            return
        self._close()
        self._segments = [Segment(ENTER, False)]  # what is released before the first operation
        self._ops.append(self._segments)

    def _find(self, name: str = "", given: Sequence[Any] = ()) -> Segment:
        """The segment of an operation that comes now."""
        self._phase = self.owners.find(self.ledger.current_phase, name, given)
        cell, backward = self.owners.current.cell, self._phase in ("backward", "recompute")
        last = self._segments[-1] if self._segments else None
        if last is None or last.cell != cell or last.backward != backward:
            self._close()
            last = Segment(cell, backward)
            self._segments.append(last)
        return last

    def _close(self) -> None:
        """End the last segment: what is held now is held at its end."""
        storages = self.storages
        if self._segments:
            last = self._segments[-1]
            last.net, last.top = storages.alive - self._begun, max(0, storages.top - self._begun)
        self._begun = storages.top = storages.alive

    def _before(self, name: str, given: tuple[Any, ...]) -> None:
        if self._recording and not self.inside:
            self._find(name, given)

    def _worked(self, name: str, args: Sequence[Any], read: list[Tensor], written: list[Tensor]) -> None:
        if not self._recording or self.inside:
            return
        op = Op("elements", *self._about(), name, dtype=dtype_name(written[0]) if written else "")
        if name in PRODUCTS:
            left, right = [item for item in read if item.dim() == PRODUCTS[name]][-2:]
            batch = left.shape[:-2].numel()
            op = op._replace(kind="product", name="nn", m=left.shape[-2], n=right.shape[-1], k=left.shape[-1], batch=batch)
        elif name in ATTENTION:
            q, k = [item for item in read if item.dim() == 4][(0 if ATTENTION[name] == 2 else 1) :][:2]
            batch = ATTENTION[name] * q.shape[0] * q.shape[1]
            batch = (
                -(-batch // 2) if any(argument is True for argument in args) else batch
            )  # whose flag is whether the scores are causal
            op = op._replace(kind="product", name="attention", m=q.shape[2], n=k.shape[2], k=q.shape[3], batch=batch)
        self._segments[-1].ops.append(op._replace(read=bytes_of(read), written=bytes_of(written)))

    def _about(self) -> tuple[str, str]:
        return self._phase, self.owners.current.layer

    def launched(self, kernel: str, tensors: Sequence[Tensor]) -> None:
        """Record a kernel launch. Tensors in memory not yet written count as written, and the first three of AdamW.

        Of a sum of parts it is the second: the parts have arrived, which leaves no write behind.
        """
        if not self._recording:
            return
        segment, fresh, updates = self._find(kernel), self.storages.fresh, kernel.startswith("adamw")
        written = list(tensors[:3]) if updates else [tensor for tensor in tensors if tensor.untyped_storage()._cdata in fresh]
        written = [tensors[1]] if kernel.startswith("sum_parts") else written
        fresh.difference_update(item.untyped_storage()._cdata for item in written)
        read = bytes_of(list(tensors)) - (0 if updates else bytes_of(written))
        segment.ops.append(Op("elements", *self._about(), kernel, read=read, written=bytes_of(written)))

    def _multiplied(self, a: Array, b: Array, form: str, out: Array) -> Any:
        if self._recording:
            segment = self._find()
            (m, k), n = a.shape if form[0] == "n" else a.shape[::-1], b.shape[1 if form[1] == "n" else 0]
            product = Op("product", *self._about(), form, m, n, k, read=bytes_of([a, b]), written=m * n * out.itemsize)
            segment.ops.append(product._replace(dtype=dtype_name(a)))
        return self._inside()

    def _keep(self, array: Array) -> None:
        if isinstance(array, Tensor):
            self.storages.set_apart(array)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Around a local product, in which torch's operations are not recorded again."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def _issued(self, collective: str, axis: str, dtype: str, amounts: Amounts) -> int | None:
        if not self._recording:
            return None
        segment = self._find()
        self._moves += 1
        move = Op("move", *self._about(), collective, axis=axis, dtype=dtype, id=self._moves)
        move = move._replace(words=amounts.words, messages=amounts.messages, written=amounts.bytes)
        segment.ops.append(move)
        return self._moves

    def _waited(self, move: int) -> None:
        if self._recording:
            self._find().ops.append(Op("wait", *self._about(), "", id=self._shifted.pop(move, move)))

    @contextmanager
    def _repeating(self, times: int) -> Iterator[None]:
        """Around a turn of a loop that stands for `times` turns, in which one layer does the same and holds as much.

        A move that is waited for in the next turn is so in each; behind the last one, that of the last turn is.
        """
        if not self._recording:
            yield
            return
        segment, first, before = self._segments[-1], len(self._segments[-1].ops), self._moves
        yield
        assert self._segments[-1] is segment, "a turn is of one layer"
        turn, moves = segment.ops[first:], self._moves - before
        for number in range(1, times):
            shift = number * moves
            segment.ops += [op if op.id < 0 else op._replace(id=op.id + shift) for op in turn]
        self._shifted |= {item: item + (times - 1) * moves for item in range(before + 1, self._moves + 1)}
        self._moves += (times - 1) * moves
