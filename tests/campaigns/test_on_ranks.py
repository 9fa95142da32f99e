"""Misuses, threads, forks, signals and traffic on ranks: an error of ours or right numbers, and right calls after each."""

from __future__ import annotations

import re

import devices
import jobs
import pytest

from summa3d.node_support import why_no_node_memory

pytestmark = [
    pytest.mark.skipif(devices.NAME == "pretended", reason="what is refused does not depend on the device"),
    pytest.mark.skipif(why_no_node_memory() is not None, reason=f"no node memory: {why_no_node_memory()}"),
]
SOME = {"misuses": (60, 2, 5), "threads": (12, 2, 32), "forks": (12, 3, 5), "interrupts": (12, 2, 42), "traffic": (12, 3, 8)}
SOME |= {"modules": (16, 2, 1)}
"""Cases, ranks and seed of what `make test` runs: with seeds of which few cases wait for the watchdog."""
MANY = 1000
SEEDS = {2: 1, 3: 7, 4: 2, 6: 11}


@pytest.mark.parametrize(
    ("kind", "number", "ranks", "seed"),
    [
        *(pytest.param(kind, *some, id=f"{kind}-some") for kind, some in SOME.items()),
        *(
            pytest.param(kind, MANY, ranks, seed, marks=pytest.mark.wide, id=f"{kind}-a thousand on {ranks} ranks")
            for kind in SOME
            for ranks, seed in SEEDS.items()
        ),
    ],
)
def test_what_should_not_happen_is_one_of_our_errors_or_right_and_so_is_what_follows(
    kind: str, number: int, ranks: int, seed: int
) -> None:
    program = [str(jobs.ROOT / "tests" / "campaigns" / "__main__.py"), kind]
    words = ["--cases", str(number), "--ranks", str(ranks), "--seed", str(seed)]
    ended = jobs.run_serial([*program, *words], timeout=300 + 3.0 * number)
    counts = re.search(rf"^{number} .* on {ranks} ranks: 0 findings$", ended.stdout, re.MULTILINE)
    assert ended.status == 0 and counts, ended.stdout + ended.stderr
