"""A pytest plugin: `@pytest.mark.pairs` runs, of all combinations of a test's parameters, a few that hold every pair of values.

`@pytest.mark.turns` runs one for each value of the parameter that has the most, and the others' take turns. World sizes are
a parameter too. The other combinations carry the marker `wide`: `make test` leaves them out, `make test-all`
runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

Case = tuple[tuple[str, int], ...]
"""Each parameter's name and the identity of its value."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pairs: of all combinations of its parameters, `make test` runs a cover of all pairs")
    config.addinivalue_line("markers", "turns: of all combinations of its parameters, `make test` runs each value once at least")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as wide what a cover does without."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("wide") is None and hasattr(item, "callspec"):
            for name in COVERS:
                if item.get_closest_marker(name) is not None:
                    tests.setdefault((name, item.nodeid.partition("[")[0]), []).append(item)
    for (name, _), same in tests.items():
        cases = [_case(item.callspec.params) for item in same]  # type: ignore[attr-defined]
        kept = set(COVERS[name](cases))
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


def rotation(cases: Sequence[Case]) -> list[Case]:
    """Return of `cases` one for each value of the longest parameter, the others' values in turn; and those of values left out."""
    values: dict[str, dict[int, None]] = {}
    for case in cases:
        for name, value in case:
            values.setdefault(name, {})[value] = None
    lists = {name: list(found) for name, found in values.items()}
    count = max(map(len, lists.values()), default=0)
    wanted = [tuple((name, found[turn % len(found)]) for name, found in lists.items()) for turn in range(count)]
    kept = [case for case in wanted if case in cases]
    left = {value for case in cases for value in case} - {value for case in kept for value in case}
    for case in cases:
        if left & set(case):
            kept.append(case)
            left -= set(case)
    return kept


COVERS: dict[str, Callable[[Sequence[Case]], list[Case]]] = {"pairs": cover, "turns": rotation}


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
