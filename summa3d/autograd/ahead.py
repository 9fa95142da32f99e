# Weights gathered ahead of the layers that use them, in the order in which they were last used. Needs torch.
# Imports comm. A pass is one forward of a module that is followed, or one backward with what it computes again.
# Next: products.py, whose gathers come through here; nn/body.py, which has its forward followed.
from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.pending import Pending

Stamp = tuple[tuple[Any, ...], ...]


class Source:
    """Where the B of one layer's products comes from.

    parts : the tensors that the layer finds at the time. make : B's block from them.
    What backward gathers is what forward found and saved: it is remembered until backward has gathered it, or has ended.
    """

    def __init__(self, ahead: Ahead, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor]) -> None:
        self.ahead, self.parts, self.make = ahead, parts, make
        self.start: Callable[[Tensor], Pending] | None = None
        self.found: Sequence[Tensor] | None = None
        self.saved: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        """A copied layer's source: it asks the copy for its weights, and has found none yet."""
        copied = memo[id(self)] = copy.copy(self)
        copied.ahead, copied.parts, copied.make = copy.deepcopy((self.ahead, self.parts, self.make), memo)
        copied.start = copied.found = copied.saved = None
        return copied

    def forget(self) -> None:
        """Hold no tensor any longer."""
        self.found = self.saved = None


class Use(NamedTuple):
    """A gather of a pass: of whose B, and for the product itself or for its gradient."""

    source: Source
    forward: bool


class _Flight(NamedTuple):
    use: Use
    stamp: Stamp
    pending: Pending


def _stamp(tensors: Sequence[Tensor]) -> Stamp:
    """What tells the values of tensors from others, as long as somebody holds these."""
    return tuple((tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor._version) for tensor in tensors)


class _Pass:
    """The gathers of one pass so far, those that the last pass of its kind had, and those that are in flight."""

    def __init__(self, expected: list[Use], depth: int, backward: bool) -> None:
        self.expected, self.depth, self.backward = expected, depth, backward
        self.seen: list[Use] = []
        self._flying: deque[_Flight] = deque()

    def gather(self, use: Use, b: Tensor, start: Callable[[Tensor], Pending]) -> Tensor:
        """B gathered for `use`, by what is in flight or now; what comes next is in flight when this returns."""
        stamp = _stamp(use.source.parts() if use.forward else (b,))
        flight = self._flying.popleft() if self._flying else None
        if len(self.seen) >= len(self.expected) or self.expected[len(self.seen)] != use:
            self.expected = []  # another order than the last time
        if flight is not None and (flight.use != use or flight.stamp != stamp):
            self.expected = []  # ... or other weights
            self._flying.appendleft(flight)
            self.land()
            flight = None
        self.seen.append(use)
        if not use.forward:
            use.source.saved = None
        gathered: Tensor = (start(b) if flight is None else flight.pending).wait()
        self.start_ahead()
        return gathered

    def start_ahead(self) -> None:
        """Start the gathers that are expected next, up to the depth."""
        first = len(self.seen)
        for use in self.expected[first + len(self._flying) : first + self.depth]:
            flight = self._started(use)
            if flight is None:
                return
            self._flying.append(flight)

    def _started(self, use: Use) -> _Flight | None:
        """The gather of `use` in flight; None where what it gathers is not known yet."""
        source = use.source
        with torch.no_grad():
            if use.forward:
                parts = source.found if self.backward else source.parts()
                operand = None if parts is None else source.make(parts)
            else:
                parts = None if source.saved is None else (source.saved,)
                operand = source.saved
        if parts is None or operand is None or source.start is None:
            return None
        return _Flight(use, _stamp(parts), source.start(operand.detach()))

    def land(self) -> None:
        """Complete what is in flight and was not used: every member started it."""
        while self._flying:
            self._flying.popleft().pending.wait()


class Ahead:
    """Up to `depth` gathers of weights in flight ahead of the layers that use them; of one grid, all members alike.

    The order of use is recorded: a forward of the module that `follow` was given goes by the last one, a backward by the last
    backward, in which stretches that are computed again have their place. The first of each kind gathers nothing ahead. Where a
    pass takes another way than the last one, what is in flight is completed and dropped, its words counted, and the rest of
    the pass gathers nothing ahead. Nothing is in flight between passes, in which weights may change.
    Holds depth gathered weights beside the one in use.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._forward: _Pass | None = None
        self._backward: _Pass | None = None
        self._inside = 0
        self._records_gradient = False
        self._order: dict[bool, list[Use]] = {}

    def follow(self, module: nn.Module) -> None:
        """From now on each forward of `module` is a pass. A followed module inside another is part of the other's."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        """A copied model's own: nothing in flight, no order recorded yet. The hooks of `follow` are copied with the module."""
        return Ahead(self.depth)

    def forget(self) -> None:
        """Record the order of use anew, where it is known to change."""
        self._order.clear()

    def gather(self, source: Source, forward: bool, b: Tensor, start: Callable[[Tensor], Pending]) -> Tensor | None:
        """B gathered, into memory of its own; None outside of a pass.

        forward : whether for the product itself; otherwise for its gradient. start : starts the gather of a block of B.
        """
        source.start = start
        current = self._current()
        if current is None:
            return None
        if forward and current is self._forward and self._records_gradient:
            source.found = [part.detach() for part in source.parts()]
        return current.gather(Use(source, forward), b, start)

    def _current(self) -> _Pass | None:
        if torch._C._current_graph_task_id() < 0:
            return self._forward
        if self._backward is None:  # the first gather of a backward is outside of the graphs that it computes again
            self._backward = _Pass(self._order.get(True, []), self.depth, True)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        return self._backward

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        if self._backward is not None:  # of a backward that failed
            self._backward.land()
            self._backward = None
        self._records_gradient = torch.is_grad_enabled()
        self._forward = _Pass(self._order.get(False, []), self.depth, False)
        self._forward.start_ahead()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside -= 1
        if self._inside == 0 and self._forward is not None:
            self._forward.land()
            self._order[False], self._forward = self._forward.seen, None

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.land()
            self._order[True] = self._backward.seen
            for use in self._backward.seen:
                use.source.forget()
            self._backward = None
