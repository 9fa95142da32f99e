"""Hostile files and settings are refused in a few lines, or right: no traceback, no hang, no crash, nothing outside is read."""

from __future__ import annotations

import devices
import jobs
import pytest

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="what is refused does not depend on the device")


@pytest.mark.parametrize(("number", "seed"), [(40, 5), pytest.param(1000, 1, marks=pytest.mark.wide)], ids=["some", "a thousand"])
def test_hostile_files_and_settings_are_refused_or_right(number: int, seed: int) -> None:
    """In a process of its own, which has no threads that its forks would miss."""
    words = [str(jobs.ROOT / "tests" / "campaigns" / "__main__.py"), "hostile"]
    ended = jobs.run_serial([*words, "--cases", str(number), "--seed", str(seed)], timeout=10.0 * number)
    assert ended.status == 0 and "settings: 0 findings" in ended.stdout, ended.stdout + ended.stderr
