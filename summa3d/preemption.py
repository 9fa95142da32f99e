"""Signals that ask a run to save and to end: a process notices them at once, even in a call that waits for other ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

STATUS = 75
"""EX_TEMPFAIL: the exit status of a run that was asked to end, and that goes on when it is started again."""
INTERRUPTED = 130
"""The shell's exit status for SIGINT."""
SAME = 1.0
"""Seconds in which signals are one request: a launcher forwards a signal to ranks that may have received it themselves."""
REQUESTS = (signal.SIGTERM, signal.SIGINT)
"""What asks a run that trains to save and to end."""
AGAIN = "saving; Ctrl-C again stops at once"

_heard: set[int] = set()
_ending: set[int] = set()
_received: signal.Signals | None = None
_watched = False
_say: Callable[[str], object] = str
"""What shows a line to the user; nothing, as a rule."""
_told = threading.Lock()
"""Held from when the user was shown that Ctrl-C was heard."""


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is an interrupt, or what other ranks raise since one of them was interrupted."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)


def hold() -> None:
    """Let requests wait from now on until something listens to them: imports take seconds, on some file systems minutes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)


def listen(*names: str) -> None:
    """From now on these signals, as "SIGTERM", ask for the end, those that were held too; call it on the main thread.

    The first one is noted (`received`). A later one ends this process at once, with the shell's status for that signal. SIGINT
    stays ignored where it is: a shell's job in the background leaves Ctrl-C to others.
    """
    _watch_signals()
    for number in (signal.Signals[name] for name in names):
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            _heard.add(number)
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])


def stop_listening() -> None:
    """Let the signals end this process as they usually do, one that has been noted now."""
    while _heard:
        number = _heard.pop()
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if _received is not None:
        signal.raise_signal(_received)


def ignore_interrupts() -> None:
    """Leave further SIGINTs unheard: this process already ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """While the block runs, SIGINT ends this process at once with status 130, also in a call that does not return.

    Not by the signal itself: a launcher that adds up the signals by which ranks end shows a crash.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _watch_signals()
    _ending.add(signal.SIGINT)
    signal.signal(signal.SIGINT, _nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _ending.clear()


@contextlib.contextmanager
def telling(say: Callable[[str], object]) -> Iterator[None]:
    """While the block runs, `say` shows the user that Ctrl-C was heard, also before it; from any thread."""
    global _say
    before, _say = _say, say
    if _received == signal.SIGINT:
        tell()
    try:
        yield
    finally:
        _say = before


def tell() -> None:
    """Show the user, once, that this process or another of the run heard Ctrl-C."""
    if _say is not str and _told.acquire(blocking=False):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it
            _say(AGAIN)


def received() -> signal.Signals | None:
    """The first signal that asked this process to end; None where none did."""
    return _received


def _watch_signals() -> None:
    """Start the thread that hears signals, once."""
    global _watched
    if not _watched:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            threading.Thread(target=_watch, args=(reader,), name="preemption", daemon=True).start()
        except RuntimeError as error:
            from .errors import CapacityError

            raise CapacityError(f"this process is out of memory, or of threads: {error}") from error
        _watched = True


def _watch(reader: int) -> None:
    """Read the numbers of the signals, which Python's handler in C writes: its own handlers wait for a call of MPI to end."""
    global _received
    first = 0.0
    while True:
        for number in os.read(reader, 64):
            if number in _ending:
                os._exit(128 + number)
            if number not in _heard:
                continue
            if _received is None:
                first, _received = time.monotonic(), signal.Signals(number)
                if number == signal.SIGINT:
                    tell()
            elif time.monotonic() - first > SAME:
                os._exit(128 + number)


def _nothing(number: int, frame: object) -> None:
    """The handler: `_watch` has noticed the signal."""
