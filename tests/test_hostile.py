"""Hostile files and settings are refused in a few lines, or right: no traceback, no hang, no crash, nothing outside is read."""

from __future__ import annotations

import devices
import hostile
import pytest

pytestmark = pytest.mark.skipif(devices.NAME == "pretended", reason="what is refused does not depend on the device")


@pytest.mark.parametrize(("number", "seed"), [(40, 5), pytest.param(1000, 1, marks=pytest.mark.wide)], ids=["some", "a thousand"])
def test_hostile_files_and_settings_are_refused_or_right(number: int, seed: int) -> None:
    counts, findings = hostile.campaign(number, seed)
    assert sum(counts.values()) >= number and not findings, "\n".join(findings)
