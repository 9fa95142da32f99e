"""A clock that tests move: what is timed takes exactly what a test says, whatever else the machine does."""

from __future__ import annotations

import time

import pytest


class FakeClock:
    """Wall and processor seconds of this process; they stand still but for `passes`."""

    def __init__(self) -> None:
        self.wall, self.cpu = 1024.0, 512.0

    def passes(self, wall: float, cpu: float = 0.0) -> None:
        """Let wall seconds pass, of which the process worked `cpu`."""
        self.wall, self.cpu = self.wall + wall, self.cpu + cpu

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
        """Have this process read its times here; sleeps and deadlines by `time.monotonic` are real."""
        monkeypatch.setattr(time, "perf_counter", lambda: self.wall)
        for name in ("thread_time", "process_time"):
            monkeypatch.setattr(time, name, lambda: self.cpu)
        return self
