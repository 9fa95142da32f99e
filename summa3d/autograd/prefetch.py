"""Prefetch of gathered weights: all-gathers in flight ahead of the layers that use them, in the known order of use.

A pass is one forward of a followed module, or one backward together with the forwards that it recomputes. Each gather of a pass
starts that of its successor in the last pass of its kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ..comm.pending import Pending
from .deferred import MicroBatchKey, PassState

Stamp = tuple[tuple[Any, ...], ...]


class PrefetchSource:
    """Where the prefetch finds the weight block B of one layer's products.

    Parameters
    ----------
    prefetcher : the prefetch of the model
    parts : returns the parameters that the layer uses at the time of the call
    make : computes B's block from those parameters

    Attributes
    ----------
    used : of each micro-batch, the parameters that its forward used; a recomputation prefetches from them
    saved : of each micro-batch, B's block as its forward saved it for backward
    starts : what starts the all-gather of a block of B, for the product itself (True) and for its gradient
    has_graph : whether the last product has a backward

    `used` and `saved` are held until the micro-batch's backward has gathered them, or has ended.
    """

    def __init__(
        self, prefetcher: Prefetcher, parts: Callable[[], Sequence[Tensor]], make: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self.prefetcher, self.parts, self.make = prefetcher, parts, make
        self.starts: dict[bool, Callable[[Tensor], Pending]] = {}
        self.has_graph = False
        self.used: dict[MicroBatchKey, Sequence[Tensor]] = {}
        self.saved: dict[MicroBatchKey, Tensor] = {}

    def __reduce__(self) -> tuple[type[PrefetchSource], tuple[Any, ...]]:
        """Return what a copied layer's source is made of: it reads the copy's parameters and holds no tensor yet."""
        return PrefetchSource, (self.prefetcher, self.parts, self.make)

    def prepare(self, b: Tensor | None) -> None:
        """Keep what the next product leaves its backward. b : B's block, if backward gathers it again"""
        self.has_graph = torch.is_grad_enabled()
        if self.has_graph and b is not None:
            self.saved[self.prefetcher.state.key] = b.detach()


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
    """The all-gathers of one pass of a micro-batch: those seen so far, those expected, those in flight."""

    def __init__(self, key: MicroBatchKey, expected: list[Use], depth: int, backward: bool) -> None:
        self.key, self.expected, self.depth, self.backward = key, expected, depth, backward
        self.has_backward = not backward and torch.is_grad_enabled()
        self.seen: list[Use] = []
        self._in_flight: deque[_Prefetch] = deque()

    def gather(self, use: Use, b: Tensor, start: Callable[[Tensor], Pending], take: Callable[[Pending], Any]) -> Any:
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
            use.source.saved.pop(self.key, None)
        gathered = take(start(b) if prefetched is None else prefetched.pending)
        self.start_prefetches()
        if self.backward and len(self.seen) == len(self.expected):
            self.release()
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
                if not self.backward:
                    source.prefetcher.state.await_weights(source.parts)
                parts = source.used.get(self.key) if self.backward else source.parts()
                operand = None if parts is None else source.make(parts)
            else:
                operand = source.saved.get(self.key)
                parts = None if operand is None else (operand,)
        start = source.starts.get(use.forward)
        if parts is None or operand is None or start is None:
            return None
        return _Prefetch(use, _stamp(parts), start(operand.detach()))

    def drain(self) -> None:
        """Wait for the unused prefetches: every member of the axis started them, so every member must complete them."""
        while self._in_flight:
            self._in_flight.popleft().pending.wait()

    def release(self) -> None:
        """Release what forward has left for this backward."""
        for use in self.seen:
            use.source.used.pop(self.key, None)
            use.source.saved.pop(self.key, None)


class Prefetcher:
    """Prefetch of gathered weights: up to `depth` all-gathers in flight ahead of the layers that use them.

    Each chunk of a pipeline stage has orders of its own, and each of its micro-batches the tensors of its own forward: `state`
    says which of them runs.

    All ranks of the grid use it alike, in the same order. A forward of a followed module prefetches in the order of the last
    forward; a backward prefetches in the order of the last backward, which includes the layers that it recomputes. The first
    pass of each kind prefetches nothing. If a pass leaves the known order, the all-gathers in flight are completed and
    dropped (their words are counted), and the rest of the pass prefetches nothing. A backward that ends before its order does, as
    `torch.autograd.grad` of some weights may, leaves gathers in flight until the next pass begins. Weights may change between
    passes: what has been gathered of a weight that has changed is dropped.

    Memory: `depth` gathered weights beside the one in use.
    """

    def __init__(self, depth: int, state: PassState) -> None:
        self.depth, self.state = depth, state
        self._forward: _GatherPass | None = None
        self._backward: _GatherPass | None = None
        self._inside = 0
        self._order: dict[tuple[int, bool], list[Use]] = {}

    def __reduce__(self) -> tuple[type[Prefetcher], tuple[int, PassState]]:
        """Return what a copied model's prefetch is made of: nothing in flight, no order. Torch copies the hooks of `follow`."""
        return Prefetcher, (self.depth, self.state)

    def follow(self, module: nn.Module) -> None:
        """Make each forward of `module`, and each backward from its output, a pass; inside another one it is part of that."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def forget(self) -> None:
        """Drop the known orders of use; call it when the order is about to change."""
        self._end_backward()
        self._order.clear()

    def gather(
        self,
        source: PrefetchSource,
        forward: bool,
        b: Tensor,
        start: Callable[[Tensor], Pending],
        take: Callable[[Pending], Any] = lambda pending: pending.wait(),
    ) -> Any:
        """Return B gathered, in a new buffer; None outside a pass.

        Parameters
        ----------
        source : the layer's source
        forward : True for the product itself, False for its gradient
        b : this rank's block of B
        start : starts the all-gather of a block of B
        take : what is returned of a gather in flight, before the next ones start; by default its result
        """
        use = Use(source, forward)
        source.starts[forward] = start
        current = self._current(use)
        if current is None:
            return None
        if forward and current.has_backward:
            source.used[current.key] = [part.detach() for part in source.parts()]
        return current.gather(use, b, start, take)

    def _current(self, use: Use) -> _GatherPass | None:
        """Return the pass that a gather belongs to.

        Outside a forward, a product with a graph is one that backward computes again, if there is a backward.
        """
        if self._forward is not None:
            return self._forward
        if not use.forward and self._backward is None:
            self._begin_backward()
        return self._backward if not use.forward or use.source.has_graph else None

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Run the block as one pass: a forward that calls parts of a model, without the hooks of `follow`."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Run the block as one pass, a backward. After an error, the next pass completes what is in flight."""
        self._begin_backward()
        yield
        self._end_backward()

    def _new_pass(self, backward: bool) -> _GatherPass:
        return _GatherPass(self.state.key, self._order.get((self.state.key.chunk, backward), []), self.depth, backward)

    def _enter(self, module: nn.Module | None = None, inputs: Any = None) -> None:
        self._inside += 1
        if self._inside == 1:
            self._end_backward()
            self._forward = self._new_pass(backward=False)
            self._forward.start_prefetches()

    def _leave(self, module: nn.Module | None = None, inputs: Any = None, output: Any = None) -> None:
        self._inside -= 1
        if self._inside == 0 and self._forward is not None:
            self._forward.drain()
            self._order[self._forward.key.chunk, False], self._forward = self._forward.seen, None
            outputs = output if isinstance(output, (tuple, list)) else [output]
            with_gradient = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.requires_grad]
            if with_gradient:
                register_multi_grad_hook(with_gradient, self._begin_backward, mode="any")

    def _begin_backward(self, gradient: Tensor | None = None) -> None:
        self._end_backward()  # nothing else ends one that `follow` has begun
        self._backward = self._new_pass(backward=True)

    def _end_backward(self) -> None:
        ended, self._backward = self._backward, None
        if ended is not None:
            ended.drain()
            ended.release()
            self._order[ended.key.chunk, True] = ended.seen
