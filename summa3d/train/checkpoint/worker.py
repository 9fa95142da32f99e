"""A thread that works beside the main thread, and whose start cannot hang."""

from __future__ import annotations

import _thread
import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

BEGINS = 30.0
"""Seconds in which a thread begins, however loaded the machine is."""


class Worker:
    """A thread that does in order what is submitted; a context manager, which waits for its end.

    Python's own threads, and so its pools, wait for ever where memory ends in a thread that has just been made. Of this one
    `submit` raises MemoryError then.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._begun, self._ended = threading.Event(), threading.Event()
        self._closed = False

    def submit(self, act: Callable[[], Any]) -> Future[Any]:
        """Have the thread call `act`. The first call makes it: MemoryError or RuntimeError where memory is too short."""
        future: Future[Any] = Future()
        if not self._begun.is_set():
            _thread.start_new_thread(self._run, ())
            if not self._begun.wait(BEGINS):
                raise MemoryError("there is not enough for another thread")
            atexit.register(self.close)
        self._jobs.put((future, act))
        return future

    def close(self, wait: bool = True) -> None:
        """Start no more of what was submitted; `wait` for the end of what is under way."""
        if self._begun.is_set() and not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            if not wait:
                atexit.register(self._ended.wait)
            self._jobs.put(None)
        if self._begun.is_set() and wait:
            self._ended.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        self._begun.set()
        try:
            while (job := self._jobs.get()) is not None:
                future, act = job
                if self._closed:
                    future.cancel()
                    continue
                try:
                    future.set_result(act())
                except BaseException as error:
                    future.set_exception(error)
                del job, future, act  # a thread that waits keeps nothing
        finally:
            self._ended.set()
