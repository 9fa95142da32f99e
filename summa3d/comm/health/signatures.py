"""What each member of an axis has called, in memory that they share: ranks that call different collectives all learn of it."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from functools import cache, lru_cache
from weakref import WeakSet

from ...errors import AgreementError, Summa3dError
from ..transport.node_memory import DISPUTED, KEPT, TEXT, Flags
from .agreement import who_passed_what
from .failure import is_alone

NUMBER_BITS = 16
"""Low bits of a signature, of the call's number; above them is a hash of its text."""
NUMBERS = (1 << NUMBER_BITS) - 1
WAITS = 2
"""Words from the flag of a member's calls to the number of the call in which it waits."""
PATIENCE = 2.0
"""Seconds that a member sleeps before it looks whether it is awaited elsewhere."""
UNTIL_TOLD = 2.0
"""Seconds that a member waits, once ranks are known to differ, for those that have not called yet, so as to name their calls."""
LOOK_EVERY = 0.001


Signed = tuple[bytes, int]
"""A call's text, as bytes that are cut or end in 0, and its hash above the bits of its number."""


@lru_cache(4096)
def signed(text: str) -> Signed:
    """The signature of a call that says this of itself: the same in every process."""
    said = text.encode()
    hashed = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")
    return (said + b"\0")[:TEXT], hashed >> 17 << NUMBER_BITS


class Signatures:
    """The calls of the members of one axis: each posts the number and a signature of its call, and compares the others'.

    A call that waits for all members compares at once. The others (the root of a broadcast, a collective in flight through MPI)
    are compared by the member's next call that waits for all, or before its signature is overwritten, KEPT calls later.

    Members that differ all raise AgreementError, which says what each has called, as soon as they call or wait next; the axis is
    broken then. So are two axes whose members wait for each other, one in each (`_look_for_a_crossing`).

    ranks : the members' in the job. name : the axis, with its grid.
    """

    def __init__(self, flags: Flags, index: int, ranks: Callable[[], list[int]], name: str) -> None:
        lines = [flags.called(member) for member in range(flags.members)]
        self.flags, self.words, self.index, self.ranks, self.name = flags, flags.words, index, cache(ranks), name
        self.lines, self.own = lines, lines[index]
        self.others = [line for member, line in enumerate(lines) if member != index]
        self.number = self.compared = 0
        self.mine, self._texts = [0] * KEPT, [b""] * KEPT
        self._written = [flags.text_of(index, place) for place in range(KEPT)]
        self._last = lines[index] + KEPT  # the place of the first of the signatures of the last calls
        self._told, self._process = False, os.getpid()
        self._asleep_since = 0.0
        flags.review, flags.awake, flags.disputed = self.review, self.awake, self.disputed
        OPEN.add(self)

    def call(self, signature: Signed) -> int:
        """Post what this member calls next, and wake who waits for that; the number of the call."""
        number = self.post(signature)
        self.wake()
        return number

    def post(self, signature: Signed) -> int:
        """`call`, of which the caller then wakes who waits: a slot's `post` does, or `wake`."""
        words, (text, hashed) = self.words, signature
        self.number = number = self.number + 1
        if self.compared < number - KEPT:
            self.compare(number - KEPT)
        place = number % KEPT
        if self._texts[place] is not text:
            self._texts[place] = text
            self._written[place][: len(text)] = text
        words[self._last + place] = self.mine[place] = hashed + (number & NUMBERS)
        words[self.own] = number  # after the signature: who sees the number sees that too
        if words[0]:
            self.flags.check()
        return number

    def compare(self, number: int) -> None:
        """Return once every member has made call `number`, and all before it, as this one has. AgreementError if one differs."""
        words = self.words
        while self.compared < number:
            place = (self.compared + 1) % KEPT
            at, mine = KEPT + place, self.mine[place]
            for line in self.others:
                if words[line + at] != mine:
                    self._settle(line, self.compared + 1)
            self.compared += 1

    def compare_with(self, member: int, number: int) -> None:
        """Return once one member has called `number`, as this one did. Raises AgreementError if it differs."""
        line, place = self.lines[member], number % KEPT
        if self.compared < number and self.words[line + KEPT + place] != self.mine[place]:
            self._settle(line, number)

    def wake(self) -> None:
        """Wake who waits for this member's next call."""
        self.flags.set(self.own, self.words[self.own])

    def _settle(self, line: int, number: int) -> None:
        """Compare a call once the member of `line` has made it."""
        self.flags.wait(line, number)
        seen, mine = self.words[line + KEPT + number % KEPT], self.mine[number % KEPT]
        # a later call's signature stands there only if that member has found this call alike
        if seen != mine and seen & NUMBERS == number & NUMBERS:
            self._dispute(number)

    def review(self) -> None:
        """Compare what others have called so far, and look whether one waits for this member elsewhere; without waiting."""
        for number in range(self.compared + 1, self.number + 1):
            called = [line for line in self.others if self.words[line] >= number]
            for line in called:
                self._settle(line, number)
            if len(called) == len(self.others) and self.compared == number - 1:
                self.compared = number
        now = time.monotonic()
        if not self._asleep_since:
            self._asleep_since = now
        elif now - self._asleep_since > PATIENCE:
            self._asleep_since = now
            if is_alone():
                self.words[self.own + WAITS] = self.number
                self._look_for_a_crossing()

    def awake(self) -> None:
        """Wait no more."""
        self._asleep_since, self.words[self.own + WAITS] = 0.0, 0

    def _look_for_a_crossing(self) -> None:
        """Break this axis and another one, and raise, if a member that is awaited here awaits this one there."""
        late = {rank for rank, line in zip(self.ranks(), self.lines, strict=True) if self.words[line] < self.number}
        for other in list(OPEN):
            if other is self or other.words[0]:
                continue
            for member, rank in enumerate(other.ranks()):
                number = other.words[other.lines[member] + WAITS]
                if rank in late and number > other.number and number == other.words[other.lines[member]]:
                    mine, theirs = self._said(self.index, self.number), other._said(member, number)
                    text = (
                        f"rank {self.ranks()[self.index]} waits over {self.name} for rank {rank}, in {mine}, which waits over "
                        f"{other.name} for it, in {theirs}: they use the two in different orders"
                    )
                    other.flags.report(other.index, text)
                    other.wake()
                    self.flags.report(self.index, text)
                    self.wake()
                    self.flags.check()

    def post_end(self, text: str) -> None:
        """Say, without waiting, that this member makes no more calls."""
        if os.getpid() == self._process and not self.words[0] and self.compared >= self.number + 1 - KEPT:
            with contextlib.suppress(Summa3dError):
                self.call(signed(text))

    def close(self) -> None:
        """Post nothing more."""
        OPEN.discard(self)
        self._written.clear()  # views that would keep the memory mapped

    def _dispute(self, number: int) -> None:
        """Break the axis, and raise."""
        if not self.words[0]:
            self.words[1] = number
            self.flags.report(self.index, f"its members differ in their call {number}", DISPUTED)
        self.wake()
        self.flags.check()

    def disputed(self) -> None:
        """Raise AgreementError, once, if members differ in a call: what each called."""
        if self._told or self.words[0] != DISPUTED:
            return
        self._told = True
        number, until = self.words[1], time.monotonic() + UNTIL_TOLD
        while any(self.words[line] < number for line in self.others) and time.monotonic() < until:
            time.sleep(LOOK_EVERY)
        said = who_passed_what([self._said(member, number) for member in range(len(self.lines))], self.ranks())
        raise AgreementError(f"the ranks of axis {self.flags.label} do not agree on their call {number} over it:\n  {said}")

    def _said(self, member: int, number: int) -> str:
        count = self.words[self.lines[member]]
        if count >= number:
            return self.flags.text(member, number % KEPT)
        return "nothing yet" + (f" after {self.flags.text(member, count % KEPT)}, its call {count}," if count else "")


OPEN: WeakSet[Signatures] = WeakSet()
"""Those whose axes have not been freed."""


@atexit.register
def _end_of_program() -> None:
    """Say that this process calls nothing more, before it waits in MPI_Finalize for those that wait for its calls."""
    for signatures in list(OPEN):
        signatures.post_end("the end of the program")
