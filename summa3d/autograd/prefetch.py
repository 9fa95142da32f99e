"""Prefetch of gathered weights: all-gathers in flight ahead of the layers that use them, in the recorded order of use.

A pass is one forward of a followed module, or one backward together with the forwards that it recomputes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.pending import Pending
from .deferred import MicroBatchKey, PassState

Stamp = tuple[tuple[Any, ...], ...]


class PrefetchSource:
    """Where the prefetch finds the weight block B of one layer's products.

    Parameters
    ----------
    ahead : the prefetch of the model
    parts : returns the parameters that the layer uses at the time of the call
    make : computes B's block from those parameters

    Attributes
    ----------
    used : the parameters that the forward of the micro-batch that runs used; a recomputation prefetches from them
    saved : B's block as that forward saved it for backward
    start : starts the all-gather of a block of B

    `used` and `saved` are held until the micro-batch's backward has gathered them, or has ended.
    """

    def __init__(
        self, prefetcher: Prefetcher, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self.prefetcher, self.parts, self.make = prefetcher, parts, make
        self.start: Callable[[Tensor], Pending] | None = None
        self._used: dict[MicroBatchKey, Sequence[Tensor]] = {}
        self._saved: dict[MicroBatchKey, Tensor] = {}

    def __reduce__(self) -> tuple[type[PrefetchSource], tuple[Any, ...]]:
        """Return what a copied layer's source is made of: it reads the copy's parameters and holds no tensor yet."""
        return PrefetchSource, (self.prefetcher, self.parts, self.make)

    @property
    def used(self) -> Sequence[Tensor] | None:
        """None where the micro-batch has had no forward."""
        return self._used.get(self.prefetcher.state.key)

    @used.setter
    def used(self, parts: Sequence[Tensor]) -> None:
        self._used[self.prefetcher.state.key] = parts

    @property
    def saved(self) -> Tensor | None:
        """None where the micro-batch has had no forward, or backward has gathered it."""
        return self._saved.get(self.prefetcher.state.key)

    @saved.setter
    def saved(self, block: Tensor) -> None:
        self._saved[self.prefetcher.state.key] = block

    def forget(self) -> None:
        """Release the tensors of the micro-batch."""
        self._used.pop(self.prefetcher.state.key, None)
        self.release()

    def release(self) -> None:
        """Release the block of B of the micro-batch."""
        self._saved.pop(self.prefetcher.state.key, None)


class Use(NamedTuple):
    """One all-gather of a pass: whose B it gathers, and whether for the product (`forward`) or for its gradient."""

    source: PrefetchSource
    forward: bool


class _Prefetch(NamedTuple):
    """An all-gather in flight: its use, the version of what it gathers, and the pending result."""

    use: Use
    stamp: Stamp
    pending: Pending


def _stamp(tensors: Sequence[Tensor]) -> Stamp:
    """Identify the values of `tensors` by storage, offset and version; valid while the tensors are alive."""
    return tuple((tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor._version) for tensor in tensors)


class _GatherPass:
    """The all-gathers of one pass: those seen so far, those expected from the last pass of its kind, those in flight."""

    def __init__(self, expected: list[Use], depth: int, backward: bool) -> None:
        self.expected, self.depth, self.backward = expected, depth, backward
        self.seen: list[Use] = []
        self._in_flight: deque[_Prefetch] = deque()

    def gather(self, use: Use, b: Tensor, start: Callable[[Tensor], Pending]) -> Tensor:
        """Return B gathered for `use`, from the prefetch if it matches, else by a new all-gather; start the next prefetches."""
        stamp = _stamp(use.source.parts() if use.forward else (b,))
        prefetched = self._in_flight.popleft() if self._in_flight else None
        if len(self.seen) >= len(self.expected) or self.expected[len(self.seen)] != use:
            self.expected = []  # the order of use has changed since the last pass
        if prefetched is not None and (prefetched.use != use or prefetched.stamp != stamp):
            self.expected = []  # the prefetched weight is not the one used
            self._in_flight.appendleft(prefetched)
            self.drain()
            prefetched = None
        self.seen.append(use)
        if not use.forward:
            use.source.release()
        gathered: Tensor = (start(b) if prefetched is None else prefetched.pending).wait()
        self.start_prefetches()
        return gathered

    def start_prefetches(self) -> None:
        """Start the expected next all-gathers until `depth` are in flight."""
        first = len(self.seen)
        for use in self.expected[first + len(self._in_flight) : first + self.depth]:
            prefetched = self._start(use)
            if prefetched is None:
                return
            self._in_flight.append(prefetched)

    def _start(self, use: Use) -> _Prefetch | None:
        """Start the all-gather of `use`; return None where its operand is not known yet."""
        source = use.source
        with torch.no_grad():
            if use.forward:
                parts = source.used if self.backward else source.parts()
                operand = None if parts is None else source.make(parts)
            else:
                parts = None if source.saved is None else (source.saved,)
                operand = source.saved
        if parts is None or operand is None or source.start is None:
            return None
        return _Prefetch(use, _stamp(parts), source.start(operand.detach()))

    def drain(self) -> None:
        """Wait for the unused prefetches: every member of the axis started them, so every member must complete them."""
        while self._in_flight:
            self._in_flight.popleft().pending.wait()


class Prefetcher:
    """Prefetch of gathered weights: up to `depth` all-gathers in flight ahead of the layers that use them.

    Each chunk of a pipeline stage has orders of its own, and each of its micro-batches the tensors of its own forward: `state`
    says which of them runs.

    All ranks of the grid use it alike, in the same order. A forward of a followed module prefetches in the order of the last
    forward; a backward prefetches in the order of the last backward, which includes the layers that it recomputes. The first
    pass of each kind prefetches nothing. If a pass leaves the recorded order, the all-gathers in flight are completed and
    dropped (their words are counted), and the rest of the pass prefetches nothing. Nothing is in flight between passes, so
    weights may change there.

    Memory: `depth` gathered weights beside the one in use.
    """

    def __init__(self, depth: int, state: PassState) -> None:
        self.depth, self.state = depth, state
        self._forward: _GatherPass | None = None
        self._backward: _GatherPass | None = None
        self._inside = 0
        self._records_gradient = False
        self._order: dict[tuple[int, bool], list[Use]] = {}

    def follow(self, module: nn.Module) -> None:
        """Make each forward of `module` a pass. A followed module inside another one is part of the outer pass."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end, always_call=True)

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[int, PassState]]:
        """Return what a copied model's prefetch is made of: nothing in flight, no order. Torch copies the hooks of `follow`."""
        return Prefetcher, (self.depth, self.state)

    def forget(self) -> None:
        """Drop the recorded order of use; call it when the order is about to change."""
        self._order.clear()

    def gather(self, source: PrefetchSource, forward: bool, b: Tensor, start: Callable[[Tensor], Pending]) -> Tensor | None:
        """Return B gathered, in a new buffer; None outside a pass.

        Parameters
        ----------
        source : the layer's source
        forward : True for the product itself, False for its gradient
        b : this rank's block of B
        start : starts the all-gather of a block of B
        """
        source.start = start
        current = self._current()
        if current is None:
            return None
        if forward and current is self._forward and self._records_gradient:
            source.used = [part.detach() for part in source.parts()]
        return current.gather(Use(source, forward), b, start)

    def _current(self) -> _GatherPass | None:
        if torch._C._current_graph_task_id() < 0:
            return self._forward
        if self._backward is None:  # a backward's first gather comes before any recomputed graph runs
            self._backward = _GatherPass(self._order.get((self.state.key.chunk, True), []), self.depth, True)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        return self._backward

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """The block is one pass: a forward that calls parts of a model, without the hooks of `follow`."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, module: nn.Module | None = None, inputs: Any = None) -> None:
        self._inside += 1
        if self._inside > 1:
            return
        if self._backward is not None:  # a failed backward left it
            self._backward.drain()
            self._backward = None
        self._records_gradient = torch.is_grad_enabled()
        self._forward = _GatherPass(self._order.get((self.state.key.chunk, False), []), self.depth, False)
        self._forward.start_prefetches()

    def _end(self, module: nn.Module | None = None, inputs: Any = None, output: Any = None) -> None:
        self._inside -= 1
        if self._inside == 0 and self._forward is not None:
            self._forward.drain()
            self._order[self.state.key.chunk, False], self._forward = self._forward.seen, None

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.drain()
            self._order[self.state.key.chunk, True] = self._backward.seen
            for use in self._backward.seen:
                use.source.forget()
            self._backward = None
