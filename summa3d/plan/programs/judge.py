"""How well rows are predicted: errors, the band that is printed, a null model, and the order of utilisations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from ...errors import Summa3dError
from ..order import order
from .bands import band_of
from .memory import RESERVE, bytes_of
from .rows import MeasuredStep
from .step import step

FEWEST = 4
"""Rows of one GPU or cluster below which it has no null model of its own."""


def judged(rows: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Report that `summa3d plan --rows FILE --json` prints: each row, and for all and for each device a summary."""
    every = [_line(row) for row in rows]
    rows = [row for row, line in zip(rows, every, strict=True) if "refused" not in line]
    lines = [line for line in every if "refused" not in line]
    devices = dict.fromkeys(row.device for row in rows)
    groups = {device: [place for place, row in enumerate(rows) if row.device == device] for device in devices}
    return {
        "rows": every,
        "refused": len(every) - len(lines),
        "summary": summary(rows, lines) if rows else None,
        "devices": {
            device: summary([rows[place] for place in places], [lines[place] for place in places])
            for device, places in groups.items()
        },
    }


def _line(row: MeasuredStep) -> dict[str, Any]:
    """A row with what is predicted of it."""
    try:
        predicted, memory = step(row.given).seconds(row.cluster), bytes_of(row.given)
    except Summa3dError as error:
        return {"name": row.name, "program": row.program, "device": row.device, "refused": str(error)}
    width, validated = band_of(row.program, row.device, row.given.get("experts"))
    line = {"name": row.name, "program": row.program, "device": row.device, "seconds": row.seconds, "predicted": predicted}
    line |= {"error": predicted / row.seconds - 1, "band": width, "validated": validated}
    line["inside"] = abs(row.seconds / predicted - 1) <= width
    line |= {"utilisation": row.utilisation(row.seconds), "predicted_utilisation": row.utilisation(predicted)}
    tokens = row.given["batch"] * row.given["sequence"] / row.given["gpus"]
    line |= {"tokens_s_gpu": tokens / row.seconds, "predicted_tokens_s_gpu": tokens / predicted}
    line |= {"memory": row.memory or None, "predicted_memory": memory, "predicted_allocated": memory - RESERVE}
    return line | {"fits": memory <= row.cluster["device.memory"], "remarks": list(row.remarks)}


def summary(rows: Sequence[MeasuredStep], lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors as parts, how many rows lie inside their band, the null model beside it, and the order of utilisations."""
    result: dict[str, Any] = {"n": len(rows), **_sizes([line["error"] for line in lines])}
    result["bias"] = median(line["error"] for line in lines)
    result["inside"] = mean(line["inside"] for line in lines)
    result["band"] = median(line["band"] for line in lines)
    result["null"] = null_model(rows)
    result |= order([line["utilisation"] for line in lines], [line["predicted_utilisation"] for line in lines])
    memory = [line["predicted_allocated"] / line["memory"] - 1 for line in lines if line["memory"]]
    return result | {"memory": _sizes(memory) | {"n": len(memory)} if memory else None}


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"median": median(sizes), "mean": mean(sizes), "max": max(sizes)}


def null_model(rows: Sequence[MeasuredStep]) -> dict[str, float] | None:
    """The errors of one constant for each device: the median utilisation of its other rows. None where no device has enough."""
    errors = []
    for device in dict.fromkeys(row.device for row in rows):
        alike = [row for row in rows if row.device == device]
        utilisations = [row.utilisation(row.seconds) for row in alike]
        if len(alike) >= FEWEST:
            for place, own in enumerate(utilisations):
                constant = median(utilisations[:place] + utilisations[place + 1 :])
                errors.append(own / constant - 1)
    return _sizes(errors) if errors else None
