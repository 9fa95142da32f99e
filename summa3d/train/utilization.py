"""Model FLOPs of a step, and the peak that model FLOPs utilization (MFU) is measured against."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from ..gemm.local.multiply import multiply
from ..node_support import load_average
from ..parallel.states import named_parameters

if TYPE_CHECKING:
    from ..comm.grid import BaseGrid
    from ..nn.config import ModelConfig
    from ..nn.models.registry import Model
    from .config import TrainConfig

MEASURED_SIZE = {"cpu": 512, "cuda": 8192}
"""The side of the square product that is measured, by device."""
MEASURED_TIMES = 10
TERA = 1e12
LOOKUPS = ("positions.weight", "token_types.weight")
FIRST_TOKEN = ("pooler.weight", "relation.weight")
"""The matrices of BERT that multiply one token of a sequence."""


@dataclass(frozen=True)
class StepWork:
    """What a step's use of the ranks is measured against.

    Attributes
    ----------
    flops : model FLOPs of the step
    peak : FLOP/s of the products of all ranks together
    on_host : whether ranks compute on the host, where nothing is computed inside communication calls
    load : load average of rank 0's node when the peak was measured; None where it is stated, or unknown
    """

    flops: float = 0.0
    peak: float = 0.0
    on_host: bool = True
    load: float | None = None

    def measured_again(self, settings: TrainConfig, grid: BaseGrid, device: torch.device, dtype: torch.dtype) -> StepWork:
        """The same against the higher of its peak and another measured one: other work may have slowed the first. Collective."""
        if settings.peak_tflops or not self.flops:
            return self
        peak, load = peak_flops(settings, grid, device, dtype), load_average()
        return replace(self, peak=peak, load=load) if peak > self.peak else self


def model_flops(model: Model, config: ModelConfig, rows: int) -> int:
    """The FLOPs of forward and backward over `rows` sequences, by the usual count: recomputation adds none.

    6 for every token and element of a matrix that multiplies it, and 12 · layers · sequence · hidden for every token in attention
    (Chowdhery et al. 2022, appendix B). Tables that are looked up do not count; a head that shares one does. Of a
    layer's experts those count that a token goes to.
    """
    lookups = LOOKUPS if config.tied else (*LOOKUPS, "embedding.weight")
    products = 0
    for name, p in named_parameters(model):
        if p.decay and name not in lookups:
            elements = prod(p.sharding.shape) * (1 if name in FIRST_TOKEN else config.sequence)
            products += elements * config.num_chosen // config.num_experts if ".experts." in name else elements
    return rows * (6 * products + 12 * config.layers * config.sequence**2 * config.attention_width)


def peak_flops(settings: TrainConfig, grid: BaseGrid, device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s of all ranks' products together: `train.peak_tflops` a rank, or the best of some that all run at once.

    Collective.
    """
    if settings.peak_tflops:
        return settings.peak_tflops * TERA * grid.size
    n = MEASURED_SIZE[device.type]
    a = torch.ones((n, n), dtype=dtype, device=device)
    seconds = []
    for _ in range(1 + MEASURED_TIMES):  # the first is slower, and all ranks' are
        grid.comm.Barrier()
        began = time.perf_counter()
        multiply(a, a, "nn", rule=grid.job.blas)[0, 0].item()
        grid.comm.Barrier()
        seconds.append(time.perf_counter() - began)
    return 2 * n**3 * grid.size / min(seconds[1:])
