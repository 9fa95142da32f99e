"""Collectives on flat, C-contiguous memory: blocks are packed into rows, results are given their dims back."""

from __future__ import annotations

from math import prod
from typing import Any

from ..device.arrays import Array, cast, contiguous, copy_into, empty, is_contiguous, is_half, move_dim, overlap, sum_parts, widen
from .call import Carried, Counts, Members, Route


class FlatTransport:
    """A transport of flat, C-contiguous memory.

    Subclasses provide all_gather, all_to_all, all_reduce, broadcast, reduce, send and receive on flat arrays, which return the
    requests in flight, and `operation` (HostTransport documents each).
    """

    waited = 0.0
    """Seconds of the last call or wait in which the host waited for the device."""

    def sums_parts(self, array: Array) -> bool:
        """Return whether `reduce_scatter` is there for arrays like this one.

        Else the sum is the caller's, after an `all_to_all`, in the members' order, and the same in every run.
        """
        return False

    def on_host(self, seconds: float) -> float:
        """The part of the last call's or wait's `seconds` that the ledger counts as communication on the host."""
        waited, self.waited = self.waited, 0.0
        return max(0.0, seconds - waited)

    def carry(
        self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool, parts: Array | None = None
    ) -> Carried:
        """Begin a call of `route`; a blocking one completes on the host. Raises ShapeError for a dtype that it does not support.

        array : what is sent, or overwritten. into : where the result goes; None, a new array. parts : workspace of a
        reduce-scatter.
        """
        if route.operation == "reduce_scatter":
            return self.carry_reduce_scatter(members, route, array, into, blocking, parts)
        return getattr(self, "carry_" + route.operation)(members, route, array, into, blocking)

    def carry_all_gather(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin an all-gather; along another dim than 0 the result is transposed when it has arrived."""
        dim = route.dim
        front = contiguous(move_dim(array, dim, 0))
        rest = prod(front.shape[1:])
        direct = into is not None and dim == 0 and is_contiguous(into) and not overlap(into, front)
        out = into if direct else empty((sum(route.sizes), *front.shape[1:]), array)
        requests = self.all_gather(members.comm, front, out, [size * rest for size in route.sizes], blocking)
        return Carried(requests, lambda: out if direct else delivered(out, dim, into), (front, out), array)

    def carry_reduce_scatter(
        self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool, parts: Array | None
    ) -> Carried:
        """Begin a reduce-scatter: the transport's own where it sums, else an all-to-all and a local sum in the members' order."""
        dim, sizes = route.dim, route.sizes
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
        parts = members.ledger.track(empty(whole, array)) if parts is None else parts.reshape(whole)
        equal, largest = len(set(sizes)) == 1, max(prod(front.shape), members.size * max(sizes) * rest)
        cut = Counts(counts, [own * rest] * members.size, equal, largest)
        requests = self.all_to_all(members.comm, front, parts, cut, blocking)

        def finish() -> Array:
            out = sum_parts(parts, into if direct else empty(shape, parts))
            return out if direct else delivered(out, dim, into)

        return Carried(requests, finish, (front, parts), array)

    def carry_all_reduce(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin an all-reduce; 16-bit floats travel and are reduced in float32."""
        half = is_half(array)
        send = widen(contiguous(array)) if half else contiguous(array)
        like = array if half else send  # what is in flight keeps no array that was copied
        direct = into is not None and not half and is_contiguous(into) and (into is array or not overlap(into, send))
        out = send if half or (into is array and direct) else into if direct else empty(array.shape, array)
        requests = self.all_reduce(members.comm, send, out, route.op, blocking)
        return Carried(requests, lambda: narrowed(out, like, into), (send, out), send)

    def carry_broadcast(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin a broadcast into the arrays of the members, in place."""
        buffer = contiguous(array)
        requests = self.broadcast(members.comm, buffer, route.root, blocking)
        direct = buffer is array or members.index == route.root
        return Carried(requests, lambda: array if direct else copy_into(array, buffer), buffer, array)

    def carry_reduce(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin a reduction onto the root; 16-bit floats travel and are reduced in float32."""
        half = is_half(array)
        send = widen(contiguous(array)) if half else contiguous(array)
        into = into if members.index == route.root else None
        direct = into is not None and not half and is_contiguous(into) and (into is array or not overlap(into, send))
        out = None if members.index != route.root else into if direct else empty(send.shape, send)
        requests = self.reduce(members.comm, send, out, route.op, route.root, blocking)
        return Carried(requests, lambda: None if out is None else narrowed(out, array, into), send, send)

    def carry_all_to_all(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin an all-to-all of the pieces along `route.dim`."""
        front = contiguous(move_dim(array, route.dim, 0))
        rest, equal = prod(front.shape[1:]), route.receive_sizes is None
        received = route.sizes if route.receive_sizes is None else route.receive_sizes
        out = empty((sum(received), *front.shape[1:]), array)
        counts = Counts([size * rest for size in route.sizes], [size * rest for size in received], equal)
        requests = self.all_to_all(members.comm, front, out, counts, blocking)
        return Carried(requests, lambda: delivered(out, route.dim, None), (front, out), array)

    def carry_send(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin sending to the member `route.root`."""
        buffer = contiguous(array)
        return Carried(self.send(members.comm, buffer, route.root, route.tag), lambda: None, buffer, array)

    def carry_receive(self: Any, members: Members, route: Route, array: Array, into: Array | None, blocking: bool) -> Carried:
        """Begin receiving in place from the member `route.root`."""
        requests = self.receive(members.comm, array, route.root, route.tag)
        return Carried(requests, lambda: array, None, array)


def delivered(out: Array, dim: int, into: Array | None) -> Array:
    """`out`, gathered with its dim in front, in the caller's order of dims."""
    result = move_dim(out, 0, dim)
    return contiguous(result) if into is None else copy_into(into, result)


def narrowed(out: Array, array: Array, into: Array | None) -> Array:
    """`out`, in which arrays like `array` were reduced, in their dtype, and in `into` if there is one."""
    result = cast(out, array) if is_half(array) else out
    return result if into is None or result is into else copy_into(into, result)
