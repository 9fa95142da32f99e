"""The flight recorder: the last communications of each rank in a file that outlives it, and the table of who waits for whom.

A rank writes to mapped memory, so that what it did can be read however it ended. This file needs neither MPI nor numpy.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ...errors import printable
from . import flight_files, processes

if TYPE_CHECKING:
    from ..device.arrays import Array

KEPT = 256
"""Communications that a rank's file holds."""
RECORD = struct.Struct("<qddqqq16x")  # number, begin, end or 0, texts, number along the axis, state
PACK, SIZE = RECORD.pack_into, RECORD.size
WORDS = SIZE // 8
TEXTS, TEXT = 2048, 512
"""Texts that a file holds, each of this many bytes; further ones are the last."""
HEAD = 64
MOST_RANKS = 1 << 24
"""Ranks that MPI libraries can number, at most."""
NBYTES = HEAD + KEPT * SIZE + TEXTS * TEXT
BEGUN, WAITED_FOR, FAILED, DONE = range(4)
MESSAGES = ("send", "receive")
FRAMES = 12
"""Frames that are searched for the user's line."""
PACKAGE = f"{Path(__file__).resolve().parents[2]}{os.sep}"
COMM = f"{PACKAGE}comm{os.sep}"


class Recorder:
    """Writes the communications of this rank to a file. Texts are written once, and then named by their number."""

    def __init__(self, file: Path, rank: int, ranks: int) -> None:
        self.file, self.ranks, self._process = file, ranks, os.getpid()
        descriptor = flight_files.create(file)
        try:
            os.ftruncate(descriptor, NBYTES)  # pages that are never written take no memory
            self.memory = mmap.mmap(descriptor, NBYTES)
        finally:
            os.close(descriptor)
        about = rank, ranks, self._process, processes.this_node(), time.time() - time.perf_counter()
        flight_files.HEADER.pack_into(self.memory, 0, flight_files.MAGIC, *about, 0)
        records = memoryview(self.memory)[HEAD : HEAD + KEPT * SIZE]
        self.words, self.times = records.cast("q"), records.cast("d")
        self.lines: dict[tuple[int, int], int] = {}  # of the user's; and of the library's from which none of the user's was found
        self._texts: dict[Any, int] = {}
        self._axes: dict[str, int] = {}
        self._inner: dict[tuple[int, int], int] = {}
        self._codes: list[CodeType] = []
        self.number = 0

    def text(self, key: Any, make: Callable[[], str]) -> int:
        """The number of a text, which is made and written the first time that its key is seen."""
        number = self._texts.get(key)
        if number is None:
            number = self._texts[key] = min(len(self._texts), TEXTS - 1)
            said, start = make().encode()[: TEXT - 1], HEAD + KEPT * SIZE + number * TEXT
            self.memory[start : start + len(said) + 1] = said + b"\0"
        return number

    def axis(self, label: str, ranks: Sequence[int]) -> int:
        """The number of the text of one more axis of these ranks of the job."""
        self._axes[label] = number = self._axes.get(label, 0) + 1
        text = f"{label}{f'#{number}' if number > 1 else ''} (ranks {', '.join(map(str, ranks))})"
        return self.text(text, lambda: text)

    def line(self, frame: FrameType | None) -> int:
        """The number of the nearest line outside of the library and torch; else of the line that called the axis.

        Where no such line is near, as in a training step, none is looked for again: that took as long as the rest of a record.
        """
        first, outer = frame, None
        for _ in range(FRAMES):
            if frame is None:
                break
            code = frame.f_code
            kind = _kind(code.co_filename)
            if kind == USERS:
                return self._numbered(frame, self.lines)
            if kind == LIBRARY and outer is None:
                outer = frame
            frame = frame.f_back
        number = self.text("", str) if outer is None else self._numbered(outer, self._inner)
        if first is not None:
            self._codes.append(first.f_code)
            self.lines[id(first.f_code), first.f_lasti] = number
        return number

    def _numbered(self, frame: FrameType, known: dict[tuple[int, int], int]) -> int:
        """The number of the line of a frame; its text is written the first time."""
        code, at = frame.f_code, frame.f_lasti
        try:
            return known[id(code), at]
        except KeyError:
            line = frame.f_lineno
            self._codes.append(code)  # no other code gets its id
            number = self.text((code.co_filename, line), lambda: f"{_short(code.co_filename)}:{line} in {code.co_name}")
            known[id(code), at] = number
            return number

    def close(self) -> None:
        """Write that this rank has ended. The last one of the node removes the records; others may wait for a rank that ends."""
        if os.getpid() != self._process or not self.file.exists():
            return
        struct.pack_into("<d", self.memory, flight_files.HEADER.size - 8, time.time())
        with contextlib.suppress(OSError):  # another rank is the last one as well, and removes them
            heads = map(flight_files.head_of, flight_files.records_of(self.file.parent).values())
            if all(head.ended for head in heads if head is not None):
                flight_files.remove(self.file.parent)


def waiting() -> str:
    """Describe what this process waits for, and since when; "" where it waits for nothing, or nothing is recorded."""
    flown = None if recorder is None else read(recorder.file)
    return f"waits {_in(flown.waits, time.time())}" if flown is not None and flown.waits is not None else ""


def _in(waits: Record, now: float) -> str:
    return f"{now - waits.began:.1f} s in {waits.what} over {waits.axis}{_call(waits)}"


class Neighbour(NamedTuple):
    """A rank of this node that has not ended: how many communications it has begun, and whether it waits for one."""

    rank: int
    process: int
    number: int
    waits: bool


def neighbours(folder: Path) -> list[Neighbour]:
    """The ranks of this node that have files in a folder and have not ended, by rank; this one too."""
    result = []
    for file in flight_files.records_of(folder).values():
        head = flight_files.head_of(file)
        if head is not None and head.lives:
            with contextlib.suppress(OSError, struct.error), flight_files.opened(file) as records:
                records.seek(HEAD)
                read = RECORD.iter_unpack(records.read(KEPT * SIZE))
                begun = [(number, state == WAITED_FOR and not ended) for number, _, ended, _, _, state in read]
                result.append(Neighbour(head.rank, head.process, max(begun)[0], any(waits for _, waits in begun)))
    return sorted(result)


def unrecorded() -> list[int]:
    """The ranks of the job that have no file beside this one's."""
    assert recorder is not None
    return sorted(set(range(recorder.ranks)) - flight_files.records_of(recorder.file.parent).keys())


USERS, LIBRARY, INSIDE = range(3)


@cache
def _kind(file: str) -> int:
    """A source file: the user's, the library's, or one whose lines say nothing (those of axes, and torch's)."""
    inside = file.startswith(COMM) or f"{os.sep}torch{os.sep}" in file or file.startswith("<")
    return INSIDE if inside else LIBRARY if file.startswith(PACKAGE) else USERS


def _short(file: str) -> str:
    """A file of the library from its package on; another one as it is."""
    return f"summa3d/{file.removeprefix(PACKAGE)}" if file.startswith(PACKAGE) else file


recorder: Recorder | None = None
"""That of this process; None before the first grid of several ranks, and where nothing is to be recorded."""


def start(rank: int, ranks: int) -> None:
    """Record this process's communications from now on, in the folder of its job on this node."""
    global recorder
    if recorder is not None or os.environ.get(flight_files.VARIABLE) == flight_files.NO or ranks == 1:
        return
    try:
        folder = flight_files.folder_of_job()
        recorder = Recorder(folder / f"{rank}{flight_files.SUFFIX}", rank, ranks)
    except OSError:  # a full or read-only folder is no reason to end a job that works
        return
    atexit.register(recorder.close)
    with contextlib.suppress(OSError):  # no descriptor is left
        _kept.append(flight_files.keep_open(recorder.file))
    flight_files.sweep(folder)


_kept: list[int] = []
"""The descriptor by which a launcher hears that this rank has ended."""


def _in_fork() -> None:
    """Have the end of a rank be heard while a process lives that was forked from it."""
    while _kept:
        os.close(_kept.pop())


os.register_at_fork(after_in_child=_in_fork)


def ends_others() -> None:
    """Tell a launcher that ranks which end from now on may have been ended by this one."""
    if recorder is not None:
        with contextlib.suppress(OSError):
            os.utime(recorder.file)


class Described(Protocol):
    """A call, as far as the recorder knows it: transport.call.Route."""

    operation: str
    recorded: int

    def described(self, array: Array) -> str:
        """Describe it in words."""


class AxisRecords:
    """What an axis writes to the recorder of its process, where there is one.

    label : the axis's. ranks : the ranks of its members in the job; None of a dry run's axis, which has none and is not recorded.
    """

    def __init__(self, label: str, ranks: Callable[[], Sequence[int]] | None) -> None:
        self.label, self.ranks = label, ranks
        self.count, self.text = 0, -1

    def begin(self, route: Described, array: Array, began: float, state: int) -> int:
        """Write that a call has begun; the number by which `mark` and `end` know it, 0 without a recorder.

        The caller of the caller of what calls this is where the user's line is looked for first.
        """
        mine = recorder
        if mine is None or self.ranks is None:
            return 0
        texts = route.recorded
        if texts < 0:
            texts = self._texts(mine, route, array)
        try:
            frame: FrameType | None = sys._getframe(3)
        except ValueError:  # an axis's method that the interpreter itself calls, at its end
            frame = None
        line = None if frame is None else mine.lines.get((id(frame.f_code), frame.f_lasti))
        if line is None:
            line = mine.line(frame)
        mine.number = number = mine.number + 1
        count = 0
        if route.operation not in MESSAGES:  # of which members have different numbers
            self.count = count = self.count + 1
        PACK(mine.memory, HEAD + number % KEPT * SIZE, number, began, 0.0, texts | line, count, state)
        return number

    def _texts(self, mine: Recorder, route: Described, array: Array) -> int:
        """The numbers of the texts of a call and of this axis, above the bits of that of a line."""
        assert self.ranks is not None
        if self.text < 0:
            self.text = mine.axis(self.label, self.ranks())
        said = route.described(array)
        route.recorded = mine.text(said, lambda: said) << 32 | self.text << 16
        return route.recorded


def mark(number: int, state: int) -> None:
    """Write that a communication is waited for now, or has failed; nothing for number 0."""
    if number and recorder is not None:
        words, at = recorder.words, number % KEPT * WORDS
        if words[at] == number:
            words[at + 5] = state


def end(number: int, when: float) -> None:
    """Write that a communication has completed; nothing for number 0."""
    if number and recorder is not None:
        at = number % KEPT * WORDS
        if recorder.words[at] == number:
            recorder.times[at + 2] = when


@contextlib.contextmanager
def waiting_in(what: str, where: str) -> Iterator[None]:
    """Record that this rank waits for others in the block, not in a call of an axis: it may sleep there as long as they work."""
    mine = recorder
    if mine is None:
        yield
        return
    texts = mine.text(what, lambda: what) << 32 | mine.text(where, lambda: where) << 16 | mine.line(sys._getframe(2))
    mine.number = number = mine.number + 1
    PACK(mine.memory, HEAD + number % KEPT * SIZE, number, time.perf_counter(), 0.0, texts, 0, WAITED_FOR)
    try:
        yield
    except BaseException:
        mark(number, FAILED)
        raise
    end(number, time.perf_counter())


def keep_in(folder: Path) -> None:
    """Have the records of a job that fails kept in `folder`, not in the one in which it runs."""
    if recorder is not None:
        flight_files.keep_in(folder, recorder.file.parent)


def claim_node() -> bool:
    """Take this job's one place to print on this node; False where another rank has it."""
    return flight_files.claim(None if recorder is None else recorder.file.parent)


def ended(folder: Path) -> float:
    """Time at which the job ended whose records a folder has; now, of records that were not saved."""
    try:
        return float((folder / flight_files.ENDED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return time.time()


@dataclass(frozen=True)
class Record:
    """One communication in a rank's file: `count` is its number along the axis. Times are those of the clock on the wall."""

    number: int
    what: str
    axis: str
    line: str
    count: int
    state: int
    began: float
    ended: float


@dataclass(frozen=True)
class Flight:
    """What one rank's file says: its last communications, oldest first."""

    rank: int
    ranks: int
    process: int
    ended: float
    records: list[Record]

    @property
    def waits(self) -> Record | None:
        """Communication that the rank waits for: of several, the one that it asked for last."""
        return next((record for record in reversed(self.records) if record.state == WAITED_FOR), None)

    def count(self, axis: str) -> int:
        """Number of communications that it has begun along an axis."""
        return max((record.count for record in self.records if record.axis == axis), default=0)


def read(file: Path) -> Flight | None:
    """A rank's file; None if it is none, or cut short."""
    try:
        with flight_files.opened(file, anybodys=True) as stream:
            data = stream.read(NBYTES + 1)
    except OSError:
        return None
    if len(data) != NBYTES or not data.startswith(flight_files.MAGIC):
        return None
    _, rank, ranks, process, _, offset, end = flight_files.HEADER.unpack_from(data)
    if not 0 <= rank < ranks <= MOST_RANKS:
        return None

    def text(number: int) -> str:
        start = HEAD + KEPT * SIZE + number * TEXT
        return printable(data[start : start + TEXT].partition(b"\0")[0].decode(errors="replace"))

    records = []
    for place in range(KEPT):
        number, began, ended, ids, count, state = RECORD.unpack_from(data, HEAD + place * SIZE)
        state = DONE if ended and state != FAILED else state
        if number:
            what, axis, line = text(ids >> 32), text(ids >> 16 & 0xFFFF), text(ids & 0xFFFF)
            records.append(Record(number, what, axis, line, count, state, began + offset, ended + offset))
    return Flight(rank, ranks, process, end, sorted(records, key=lambda item: item.number))


def read_folder(folder: Path) -> list[Flight]:
    """The files of a folder, by rank."""
    flights = [read(file) for file in flight_files.records_of(folder).values()]
    return sorted((item for item in flights if item is not None), key=lambda item: item.rank)


def table(flights: Sequence[Flight], now: float) -> list[str]:
    """Table of waiting ranks: call, awaited ranks, start, differing calls; empty if none waits. `now` is when the job ended."""
    if not any(flight.waits for flight in flights):
        return []
    now = max(
        [now, *(max(record.began, record.ended) for flight in flights for record in flight.records)]
    )  # clocks differ by a little
    lines = ["what each rank was doing:"]
    for flight in flights:
        waits = flight.waits
        if waits is None:
            lines.append(f"  rank {flight.rank}: {_free(flight, now)}")
            continue
        lines.append(f"  rank {flight.rank}: waits {_in(waits, now)}{_whom(flight, waits, flights)}; {waits.line}")
    silent = sorted(set(range(flights[0].ranks)) - {flight.rank for flight in flights})
    return lines + ([f"  ranks {', '.join(map(str, silent))}: no record on this node"] if silent else [])


def _free(flight: Flight, now: float) -> str:
    """Describe what a rank does that waits for nothing."""
    ended = f"has ended {now - flight.ended:.1f} s ago" if flight.ended else ""
    if not flight.records:
        return f"{ended or 'runs'}, and has communicated nothing"
    last = flight.records[-1]
    how = "failed in" if last.state == FAILED else f"{ended or 'runs'}, and communicates nothing since"
    return f"{how} {last.what} over {last.axis}{_call(last)}, {now - max(last.began, last.ended):.1f} s ago; {last.line}"


def _call(record: Record) -> str:
    """The number of a collective along its axis."""
    return f", call {record.count}" if record.count else ""


def _whom(flight: Flight, waits: Record, flights: Sequence[Flight]) -> str:
    """For which ranks of the axis a rank waits, and which of them have called something else."""
    if waits.count == 0:  # a message, which names its other end
        return ""
    others = [other for other in flights if other.rank != flight.rank and other.rank in members(waits.axis)]
    late = [other.rank for other in others if other.count(waits.axis) < waits.count]
    called = [(other.rank, record) for other in others for record in other.records if record.axis == waits.axis]
    differ = [f"rank {rank} called {item.what}" for rank, item in called if item.count == waits.count and item.what != waits.what]
    parts = [f"for rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}"] if late else []
    return "".join(f", {part}" for part in parts + differ)


def members(axis: str) -> list[int]:
    """The ranks that an axis's text names.

    >>> members("x (ranks 0, 2)")
    [0, 2]
    """
    return [int(item) for item in axis.rpartition("(ranks ")[2].rstrip(")").split(", ") if item.isdigit()]
