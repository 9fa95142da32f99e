"""Predictions of papers' rows, in the unit of what each reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from summa3d.cluster import Cluster
from summa3d.plan.formulas import hardware_flops, model_flops
from summa3d.plan.predict import PredictedStep
from summa3d.plan.programs.experts import HALF
from summa3d.plan.programs.sizes import block_parameters
from summa3d.plan.programs.step import step

from .fit import Predict


class FastStep:
    """`PredictedStep.seconds` for fits: the closed form, times what the simulation makes of it on the cluster of the paper."""

    def __init__(self, step: PredictedStep, cluster: Cluster) -> None:
        self.step = step
        self.ratio = step.pipeline(cluster) / step.closed(step.durations(cluster))

    def seconds(self, cluster: Cluster) -> float:
        """Seconds of the step; exact on the cluster that it was made with."""
        parts = self.step.durations(cluster)
        return (self.ratio * self.step.closed(parts) + parts.after) * self.step.slowest(cluster)


def predictor(given: Mapping[str, Any], cluster: Cluster) -> Predict:
    """The prediction of a row, in the unit of what it reports."""
    timed = FastStep(step(given), cluster).seconds
    return in_unit(given, timed)


def in_unit(given: Mapping[str, Any], seconds: Predict) -> Predict:
    """Seconds of a step in the unit of what a row reports: tflops (a rank's), mfu (percent), sequences (a second) or seconds."""
    sizes = [given[key] for key in ("layers", "hidden", "vocabulary", "sequence", "batch")]
    if "tflops" in given:
        work = hardware_flops(*sizes) / given["gpus"] / 1e12
        return lambda cluster: work / seconds(cluster)
    if "model_tflops" in given:  # six operations a parameter and token, and attention's, which is not recomputed
        layers, hidden, vocabulary, sequence, batch = sizes
        count = layers * block_parameters(given) + 2 * vocabulary * hidden
        rate = (6 * count + 12 * layers * hidden * sequence) * batch * sequence / given["gpus"] / 1e12
        return lambda cluster: rate / seconds(cluster)
    if "mfu" in given:
        share = 100 * model_flops(*sizes) / given["gpus"]
        return lambda cluster: share / cluster.peak(HALF) / seconds(cluster)
    if "sequences" in given:
        return lambda cluster: given["batch"] / seconds(cluster)
    return seconds
