"""A pytest plugin: `@pytest.mark.pairs` runs, of all combinations of a test's parameters, a few that hold every pair of values.

World sizes are a parameter too. The other combinations carry the marker `wide`: `make test` leaves them out, `make test-all`
runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

Case = tuple[tuple[str, int], ...]
"""Each parameter's name and the identity of its value."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairs: of all combinations of its parameters, `make test` runs a cover of all pairs")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as wide what a cover of pairs does without."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairs") is not None and hasattr(item, "callspec"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in tests.values():
        cases = [_case(item.callspec.params) for item in same]  # type: ignore[attr-defined]
        kept = set(cover(cases))
        for item, case in zip(same, cases, strict=True):
            if case not in kept:
                item.add_marker(pytest.mark.wide)


def cover(cases: Sequence[Case]) -> list[Case]:
    """Return a few of `cases`, in which each pair of values that occurs in one of them occurs; the same ones every time."""
    left = set().union(*map(_pairs, cases)) if cases else set()
    kept = []
    while left:
        best = max(cases, key=lambda case: len(left & _pairs(case)))  # the first of equals
        kept.append(best)
        left -= _pairs(best)
    return kept


def some(cases: Iterable[tuple[Hashable, ...]]) -> set[tuple[Hashable, ...]]:
    """Of `cases`, tuples of values, a few that hold every pair of values: for a test that loops over them."""
    by_place = {tuple((str(place), hash(value)) for place, value in enumerate(case)): case for case in cases}
    return {by_place[case] for case in cover(list(by_place))}


def turns(cases: Iterable[Hashable], others: Sequence[Hashable]) -> list[tuple[Hashable, Hashable]]:
    """Each case with one of `others`, which take turns."""
    return [(case, others[number % len(others)]) for number, case in enumerate(cases)]


def _case(values: Mapping[str, object]) -> Case:
    return tuple((name, id(values[name])) for name in sorted(values))


def _pairs(case: Case) -> set[Case]:
    """The pairs of values of a combination; a single parameter's value counts as a pair of its own."""
    return {*combinations(case, min(len(case), 2))}
