"""A collective prepared once and started often, as MPI-4's persistent ones: what `Axis.prepare` returns."""

from __future__ import annotations

from math import prod
from typing import NoReturn

import numpy as np

from .calls import Calls, Settle, alone
from .device.arrays import Array, dtype_name, into_problem, is_writable, place_of
from .pending import Completed, Pending
from .transport.call import Route

INTO = ("all_gather", "reduce_scatter", "all_reduce", "reduce")
"""Collectives whose result may go into an array of the caller's."""


class Collective:
    """One collective over an axis for arrays like one: checked, agreed on, and bound to its transport and ledger line once.

    ``gather = axis.prepare("all_gather", like=block)``, then ``gather.start(block).wait()`` or ``gather.run(block)`` for any
    block of that shape, dtype, library and memory. Words, messages, results and errors are those of the axis's method of the
    same name. An array that is not like the one of `prepare` is a ShapeError; members that start the collective rightly
    meanwhile get an AgreementError where they share a node's memory, and on any axis with check=True.

    Attributes
    ----------
    calls : carries them, and knows the axis's size and label. route : what they have in common, with words and messages.
    """

    def __init__(self, calls: Calls, like: Array, settle: Settle) -> None:
        self.calls, self._settle = calls, settle
        self._shape, self._dtype, self._place = tuple(like.shape), like.dtype, place_of(like)
        self._like = f"{dtype_name(like)} {list(like.shape)}"
        with calls.lock:
            self.route = route = settle(like, None, None)
        self._each, self._overwrites = calls.checks.debug, route.operation == "broadcast" and route.words > 0
        self._may_go = route.operation in INTO
        self._result = route.result_shape(self._shape, calls.index)

    def __repr__(self) -> str:
        return f"Collective({self.route.operation} of {self._like} over {self.calls.label} = {self.calls.size})"

    def start(self, array: Array, into: Array | None = None) -> Pending:
        """Begin the collective; `wait` of the returned Pending gives its result. into : where the result goes, optional."""
        return self.calls.begin(self._route_of, array, into)

    def run(self, array: Array, into: Array | None = None, parts: Array | None = None) -> Array:
        """Return the result of the collective. parts : workspace of a reduce-scatter through MPI, of g·n_r words."""
        return self.calls.complete(self._route_of, array, into, parts)

    def _route_of(self, array: Array, into: Array | None, parts: Array | None = None) -> Route:
        """The route; ShapeError unless the arrays are like those that were prepared for."""
        try:
            fits = array.shape == self._shape and array.dtype == self._dtype
            fits = fits and ((self._place is None and type(array) is np.ndarray) or place_of(array) == self._place)
        except AttributeError:
            fits = False
        if not fits:
            self._refuse(array)
        holds = parts is None or self.calls.checks.workspace_problem(array, parts, prod(self._result) * self.calls.size) is None
        taken = holds and (into is None or self._takes(into, array))  # the full check says why not
        if self._each or not taken or (self._overwrites and not is_writable(array)):
            return self._settle(array, into, parts)
        return self.route

    def _takes(self, into: Array, array: Array) -> bool:
        """Return whether the result may go into this array; where it may not, the full check says why."""
        if not self._may_go:
            name = self.route.operation
            self.calls.checks.refuse(name, array, {"shape": self._shape}, f"{name} over {self.calls.label} takes no into.")
        if type(into) is type(array) is np.ndarray and into.shape == self._result and into.dtype == self._dtype:
            return into.flags.writeable
        return (into is array and is_writable(array)) or into_problem(into, array, self._result) is None

    def _refuse(self, array: Array) -> NoReturn:
        """Raise ShapeError for an array that is not like the one prepared for, once the other members can know of it."""
        calls, name = self.calls, self.route.operation
        calls.checks.array(name, array)
        given = f"{dtype_name(array)} {list(array.shape)}"
        where = "" if given != self._like else ", in another library or memory"
        problem = (
            f"{name} over {calls.label} = {calls.size} was prepared for {self._like}, and is started with {given}{where}.\n"
            f"  Prepare another one for such arrays, or call axis.{name}."
        )
        calls.checks.refuse(name, array, {"shape": tuple(array.shape)}, problem)


class Copied(Collective):
    """A collective over an axis of one member, which returns its input: nothing is sent, and nothing checked."""

    def __init__(self, calls: Calls, operation: str) -> None:
        self.calls, self.route = calls, Route(operation, False, 0, 0)

    def __repr__(self) -> str:
        return f"Collective({self.route.operation} over {self.calls.label} = 1)"

    def start(self, array: Array, into: Array | None = None) -> Pending:
        """Return a Pending that is complete."""
        return Completed(self.run(array, into))

    def run(self, array: Array, into: Array | None = None, parts: Array | None = None) -> Array:
        """Return the input, or its copy in `into`."""
        return alone(array, into)
