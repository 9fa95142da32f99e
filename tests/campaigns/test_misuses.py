"""Wrong calls of the API raise one of ours or are right, and the calls after them are right: no hang, no wrong number."""

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
SOME, MANY = 60, 1000


@pytest.mark.parametrize(
    ("number", "ranks", "seed"),
    [
        pytest.param(SOME, 2, 5, id="some"),
        *(
            pytest.param(MANY, ranks, seed, marks=pytest.mark.wide, id=f"a thousand on {ranks} ranks")
            for ranks, seed in ((2, 1), (3, 7), (4, 2), (6, 11))
        ),
    ],
)
def test_misuses_raise_one_of_ours_or_are_right_and_so_is_what_follows(number: int, ranks: int, seed: int) -> None:
    program = str(jobs.ROOT / "tests" / "campaigns" / "__main__.py")
    words = [program, "misuses", "--cases", str(number), "--ranks", str(ranks), "--seed", str(seed)]
    ended = jobs.run_serial(words, timeout=300 + 2.0 * number)
    counts = re.search(rf"^{number} misuses on {ranks} ranks: 0 findings$", ended.stdout, re.MULTILINE)
    assert ended.status == 0 and counts, ended.stdout + ended.stderr
