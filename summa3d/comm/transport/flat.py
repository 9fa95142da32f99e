"""Collectives on flat, C-contiguous memory: blocks are packed into rows, results are given their dims back."""

from __future__ import annotations

from math import prod
from typing import Any

from ..arrays import Array, cast, contiguous, copy_into, count, empty, is_contiguous, is_half, move_dim, overlap, sum_parts, widen
from .call import Call, Carried, Counts, Members


class FlatTransport:
    """A transport of flat, C-contiguous memory.

    Subclasses provide all_gather, all_to_all, all_reduce, broadcast, reduce, send and receive on flat arrays, which return the
    requests in flight, and `operation` (HostTransport documents each).
    """

    waited = 0.0
    """Seconds of the last call or wait in which the host waited for the device."""

    def sums_parts(self, array: Array) -> bool:
        """Whether `reduce_scatter` is there for arrays like this one.

        Else the sum is the caller's, after an `all_to_all`, in the members' order, and the same in every run.
        """
        return False

    def on_host(self, seconds: float) -> float:
        """The part of the last call's or wait's `seconds` that the ledger counts as communication on the host."""
        waited, self.waited = self.waited, 0.0
        return max(0.0, seconds - waited)

    def carry(self: Any, call: Call, members: Members) -> Carried:
        """Begin `call`; a blocking one completes on the host. Raises ShapeError for a dtype that it does not support."""
        return getattr(self, "carry_" + call.route.operation)(call, members)

    def carry_all_gather(self: Any, call: Call, members: Members) -> Carried:
        """Begin an all-gather; along another dim than 0 the result is transposed when it has arrived."""
        dim, into = call.route.dim, call.into
        front = contiguous(move_dim(call.array, dim, 0))
        rest = prod(front.shape[1:])
        direct = into is not None and dim == 0 and is_contiguous(into) and not overlap(into, front)
        out = into if direct else empty((sum(call.route.sizes), *front.shape[1:]), call.array)
        requests = self.all_gather(members.comm, front, out, [size * rest for size in call.route.sizes], call.blocking)
        return Carried(requests, lambda: out if direct else delivered(out, dim, into), (front, out), call.array)

    def carry_reduce_scatter(self: Any, call: Call, members: Members) -> Carried:
        """Begin a reduce-scatter: the transport's own where it sums, else an all-to-all and a local sum in the members' order."""
        array, dim, sizes, into = call.array, call.route.dim, call.route.sizes, call.into
        self.operation(array, "sum")
        front = contiguous(move_dim(array, dim, 0))
        own, rest = sizes[members.index], prod(front.shape[1:])
        counts, shape = [size * rest for size in sizes], (own, *front.shape[1:])
        direct = into is not None and dim == 0
        if self.sums_parts(array):
            part = into if direct and is_contiguous(into) else empty(shape, array)
            requests = self.reduce_scatter(members.comm, front, counts, part)
            return Carried(requests, lambda: part if part is into else delivered(part, dim, into), (front, part), array)
        whole = (members.size, *shape)
        parts = members.ledger.track(empty(whole, array)) if call.parts is None else call.parts.reshape(whole)
        equal, largest = len(set(sizes)) == 1, max(count(front), members.size * max(sizes) * rest)
        cut = Counts(counts, [own * rest] * members.size, equal, largest)
        requests = self.all_to_all(members.comm, front, parts, cut, call.blocking)

        def finish() -> Array:
            out = sum_parts(parts, into if direct else empty(shape, parts))
            return out if direct else delivered(out, dim, into)

        return Carried(requests, finish, (front, parts), array)

    def carry_all_reduce(self: Any, call: Call, members: Members) -> Carried:
        """Begin an all-reduce; 16-bit floats travel and are reduced in float32."""
        array, into, send = call.array, call.into, contiguous(call.array)
        if is_half(array):
            wide = widen(send)
            requests = self.all_reduce(members.comm, wide, wide, call.route.op, call.blocking)

            def narrow() -> Array:
                return cast(wide, array) if into is None else copy_into(into, cast(wide, array))

            return Carried(requests, narrow, wide, wide)
        direct = into is not None and is_contiguous(into) and (into is array or not overlap(into, send))
        out = send if into is array and direct else into if direct else empty(array.shape, array)
        requests = self.all_reduce(members.comm, send, out, call.route.op, call.blocking)
        return Carried(requests, lambda: out if direct or into is None else copy_into(into, out), (send, out), array)

    def carry_broadcast(self: Any, call: Call, members: Members) -> Carried:
        """Begin a broadcast into the arrays of the members, in place."""
        array, buffer = call.array, contiguous(call.array)
        requests = self.broadcast(members.comm, buffer, call.route.root, call.blocking)
        direct = buffer is array or members.index == call.route.root
        return Carried(requests, lambda: array if direct else copy_into(array, buffer), buffer, array)

    def carry_reduce(self: Any, call: Call, members: Members) -> Carried:
        """Begin a reduction onto the root; 16-bit floats travel and are reduced in float32."""
        array, into, half = call.array, call.into, is_half(call.array)
        send = widen(contiguous(array)) if half else contiguous(array)
        into = into if members.index == call.route.root else None
        direct = into is not None and not half and is_contiguous(into) and (into is array or not overlap(into, send))
        out = None if members.index != call.route.root else into if direct else empty(send.shape, send)
        requests = self.reduce(members.comm, send, out, call.route.op, call.route.root, call.blocking)

        def finish() -> Array | None:
            if out is None or out is into:
                return out
            return copy_into(into, out) if into is not None else cast(out, array) if half else out

        return Carried(requests, finish, send, send)

    def carry_all_to_all(self: Any, call: Call, members: Members) -> Carried:
        """Begin an all-to-all of the pieces along `call.route.dim`."""
        front = contiguous(move_dim(call.array, call.route.dim, 0))
        rest, equal = prod(front.shape[1:]), call.route.receive_sizes is None
        received = call.route.sizes if call.route.receive_sizes is None else call.route.receive_sizes
        out = empty((sum(received), *front.shape[1:]), call.array)
        counts = Counts([size * rest for size in call.route.sizes], [size * rest for size in received], equal)
        requests = self.all_to_all(members.comm, front, out, counts, call.blocking)
        return Carried(requests, lambda: delivered(out, call.route.dim, None), (front, out), call.array)

    def carry_send(self: Any, call: Call, members: Members) -> Carried:
        """Begin sending to the member `call.route.root`."""
        buffer = contiguous(call.array)
        return Carried(self.send(members.comm, buffer, call.route.root, call.route.tag), lambda: None, buffer, call.array)

    def carry_receive(self: Any, call: Call, members: Members) -> Carried:
        """Begin receiving in place from the member `call.route.root`."""
        requests = self.receive(members.comm, call.array, call.route.root, call.route.tag)
        return Carried(requests, lambda: call.array, None, call.array)


def delivered(out: Array, dim: int, into: Array | None) -> Array:
    """`out`, gathered with its dim in front, in the caller's order of dims."""
    result = move_dim(out, 0, dim)
    return contiguous(result) if into is None else copy_into(into, result)
