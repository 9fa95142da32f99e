"""The band that a prediction prints: of measured rows of its program on its machine, else of machines that were left out."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ...cluster import Cluster
from ...files import read_toml

FILE = Path(__file__).with_name("bands.toml")


@cache
def bands() -> dict[str, Any]:
    """The stored bands, as `python -m papers bands` makes them."""
    return read_toml(FILE)


def band_of(program: str, device: str) -> tuple[float, bool]:
    """The half-width of the band, a part of the predicted seconds, and whether it is of rows of this program on this device.

    Where there are none, it is the pooled band of machines whose own rows were left out.
    """
    own = bands()["validated"].get(program, {})
    return (float(own[device]), True) if device in own else (float(bands()["pooled"]), False)


def own_band(cluster: Cluster) -> tuple[float, bool]:
    """The same of the library's own steps: no GPU has rows of it, a host is described by measurements of it."""
    said = cluster["band.percent"] / 100
    return (said, True) if cluster["host.slots"] else (max(said, float(bands()["pooled"])), False)
