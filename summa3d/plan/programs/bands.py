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


def kind_of(program: str, experts: object) -> str:
    """Key of a band: a program, with models without experts or with them."""
    return f"{program}, experts" if experts else program


def band_of(program: str, device: str, experts: object = None) -> tuple[float, bool]:
    """The half-width of the band, a part of the predicted seconds, and whether it is of such rows of the program on this device.

    experts : whether the model has some. Where there are no rows, it is the pooled band of machines whose own rows were left out,
    with experts that of all their rows.
    """
    own, pooled = bands()["validated"].get(kind_of(program, experts), {}), bands()["experts" if experts else "pooled"]
    return (float(own[device]), True) if device in own else (float(pooled), False)


def own_band(cluster: Cluster) -> tuple[float, bool]:
    """The same of the library's own steps: no GPU has rows of it, a host is described by measurements of it."""
    said = cluster["band.percent"] / 100
    return (said, True) if cluster["host.slots"] else (max(said, float(bands()["pooled"])), False)
