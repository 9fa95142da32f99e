"""Which tests take the processors: user and system time of a test's ranks and of all that they start.

`--durations` measures waiting too, which says little where groups of tests share the cores.
"""

from __future__ import annotations

import re
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


def used() -> float:
    """Seconds of processor time that this process and those that it has waited for have taken."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def note(file: Path, environment: dict[str, str], usage: resource.struct_rusage) -> None:
    """Add to `file` what a process has taken, and the test that pytest says in its environment."""
    test = re.sub(r" \(\w+\)$", "", environment.get("PYTEST_CURRENT_TEST", ""))
    with open(file, "a") as lines:
        lines.write(f"{usage.ru_utime + usage.ru_stime:.4f} {test}\n")


class Account:
    """Seconds of processor time by test."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()
        self.files: list[Path] = []
        """Lines of `note`, of processes that this one does not wait for: forks of the Python of jobs."""

    def lines(self, count: int) -> Iterator[str]:
        """The whole, what is of no test, and the `count` tests that take the most; 0: all tests."""
        whole = used()
        for line in [line for file in self.files if file.exists() for line in file.read_text().splitlines()]:
            seconds, _, test = line.partition(" ")
            whole += float(seconds)
            self.tests[test] += float(seconds)
        outside = whole - sum(self.tests.values())
        yield f"{whole:.0f} s in all; {outside:.0f} s outside tests: imports, collection, starts and ends of ranks"
        yield from (f"{seconds:.2f}s {test or '(no test)'}" for test, seconds in self.tests.most_common(count or None))
