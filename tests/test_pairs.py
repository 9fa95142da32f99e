"""What the plugin pairs promises: every pair of values is run, the other combinations are wide."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from math import prod
from pathlib import Path

import pytest
from pairs import Case, cover

SWEPT = """
import pytest

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(4))
def test_swept(a, b, c):
    pass

@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
def test_whole(a, b):
    pass
"""


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (2, 3, 4), (4, 4, 4), (2, 2, 2, 2, 5)], ids=str)
def test_every_pair_is_covered_by_few_combinations(sizes: tuple[int, ...]) -> None:
    cases = [enumerate_names(values) for values in product(*map(range, sizes))]
    kept = cover(cases)
    together = min(len(sizes), 2)
    assert pairs_of(kept, together) == pairs_of(cases, together)
    assert len(kept) <= 1.5 * prod(sorted(sizes)[-together:])
    assert kept == cover(cases)


def pairs_of(cases: list[Case], together: int) -> set[Case]:
    return {pair for case in cases for pair in combinations(case, together)}


def enumerate_names(values: tuple[int, ...]) -> Case:
    return tuple(("abcde"[place], value) for place, value in enumerate(values))


def test_of_combinations_that_do_not_all_occur_those_that_do_are_covered() -> None:
    cases = [(("a", 0), ("b", 0), ("c", 0)), (("a", 1), ("b", 1), ("c", 0)), (("a", 1), ("b", 1), ("c", 1))]
    assert set(cover(cases)) == set(cases)


@pytest.mark.parametrize(("options", "ran"), [(("-m", "not wide"), 9 + 12), ((), 9 + 36)], ids=["test", "test-all"])
def test_the_rest_is_wide(tmp_path: Path, options: tuple[str, ...], ran: int) -> None:
    (tmp_path / "test_swept.py").write_text(SWEPT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = wide: left out\n")
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-p", "pairs", "-p", "no:cacheprovider", *options]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout.rstrip().splitlines()[-1].startswith(f"{ran} passed"), done.stdout
