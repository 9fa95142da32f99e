"""`summa3d ARGS…` on ranks of which one stops, sleeps or works for long at a moment; started by comm/test_watchdog.py.

AT="RANK HOW MODULE FUNCTION": what the rank does when FUNCTION of MODULE is called: `stop` or `kill` itself, `lock` (wait for a
lock that nobody gives back), or `work` for WORKS seconds in a call that holds the interpreter's lock. "RANK HOW" alone: at once.
AT_FILE: receives the time.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from summa3d.comm.health.processes import launched_as

WORKS = 8.0
SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}


def digits(bits: int) -> float:
    """Seconds of one long call: an odd power of 3 as a number."""
    began = time.perf_counter()
    _ = 3**bits
    return time.perf_counter() - began


def work() -> None:
    bits = 1 << 18
    while (seconds := digits(bits)) < WORKS:
        bits = int(bits * (1.5 if seconds > WORKS / 8 else 2))


def disturb(how: str) -> None:
    Path(os.environ["AT_FILE"]).write_text(str(time.time()))
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    else:
        work()


def main() -> int:
    rank, how, *place = os.environ["AT"].split()
    launched = launched_as()
    assert launched is not None
    if launched[1] == int(rank):
        if not place:
            disturb(how)
        else:
            module, name = importlib.import_module(place[0]), place[1]
            function = getattr(module, name)

            def disturbed(*arguments: Any, **options: Any) -> Any:
                setattr(module, name, function)
                disturb(how)
                return function(*arguments, **options)

            setattr(module, name, disturbed)
    from summa3d.cli.main import main as command

    return command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
