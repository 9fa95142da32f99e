"""Signals that ask a run to save and to end: a process notices them at once, even in a call that waits for other ranks."""

from __future__ import annotations

import os
import signal
import threading
import time

STATUS = 75
"""EX_TEMPFAIL: the exit status of a run that was asked to end, and that goes on when it is started again."""
SAME = 1.0
"""Seconds in which signals are one request: a launcher forwards a signal to ranks that may have received it themselves."""

_heard: set[int] = set()
_received: signal.Signals | None = None


def listen(*names: str) -> None:
    """From now on these signals, as "SIGTERM", ask for the end; call it on the main thread.

    The first one is noted (`received`). A later one ends this process at once, with the shell's status for that signal.
    """
    if not _heard:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), name="preemption", daemon=True).start()
    for number in (signal.Signals[name] for name in names):
        _heard.add(number)
        signal.signal(number, _nothing)


def received() -> signal.Signals | None:
    """The first signal that asked this process to end; None where none did."""
    return _received


def _watch(reader: int) -> None:
    """Read the numbers of the signals, which Python's handler in C writes: its own handlers wait for a call of MPI to end."""
    global _received
    first = 0.0
    while True:
        for number in os.read(reader, 64):
            if number not in _heard:
                continue
            if _received is None:
                first, _received = time.monotonic(), signal.Signals(number)
            elif time.monotonic() - first > SAME:
                os._exit(128 + number)


def _nothing(number: int, frame: object) -> None:
    """The handler: `_watch` has noticed the signal."""
