"""Predictions of papers' rows, in the unit of what each reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...cluster import Cluster
from ..formulas import hardware_flops, model_flops
from ..predict import Fast
from ..programs.step import HALF, block_parameters, step
from .fit import Predict


def predictor(given: Mapping[str, Any], cluster: Cluster) -> Predict:
    """The prediction of a row, in the unit of what it reports."""
    timed = Fast(step(given), cluster).seconds
    return in_unit(given, lambda numbers: timed(numbers.cluster))


def in_unit(given: Mapping[str, Any], seconds: Predict) -> Predict:
    """Seconds of a step in the unit of what a row reports: tflops (a rank's), mfu (percent), sequences (a second) or seconds."""
    sizes = [given[key] for key in ("layers", "hidden", "vocabulary", "sequence", "batch")]
    if "tflops" in given:
        work = hardware_flops(*sizes) / given["gpus"] / 1e12
        return lambda numbers: work / seconds(numbers)
    if "model_tflops" in given:  # six operations a parameter and token, and attention's, which is not recomputed
        layers, hidden, vocabulary, sequence, batch = sizes
        count = layers * block_parameters(given) + 2 * vocabulary * hidden
        rate = (6 * count + 12 * layers * hidden * sequence) * batch * sequence / given["gpus"] / 1e12
        return lambda numbers: rate / seconds(numbers)
    if "mfu" in given:
        share = 100 * model_flops(*sizes) / given["gpus"]
        return lambda numbers: share / numbers.cluster.peak(HALF) / seconds(numbers)
    if "sequences" in given:
        return lambda numbers: given["batch"] / seconds(numbers)
    return seconds
