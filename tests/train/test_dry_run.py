# `train --dry-run`: the bytes of every rank before any is started, by the formulas that nn's tests hold to the measured ones.
from __future__ import annotations

from typing import Any

import pytest

from summa3d.errors import ConfigError, GridError, LayoutError
from summa3d.train import config
from summa3d.train.dry_run import TERMS, predict

CUBE = ["grid.x=2", "grid.y=2", "grid.z=2"]


def predicted(*assignments: str) -> dict[str, Any]:
    return predict(config.load("demo", [*CUBE, *assignments]))


H, F, V, S, LAYERS = 256, 1024, 256, 128, 4  # the demo's
MATRICES = V * H + LAYERS * (4 * H * H + 2 * H * F)
VECTORS = S * H + 2 * H + LAYERS * (4 * H + 5 * H + F)  # positions, norms, biases


def test_weights_gradients_and_moments_are_the_models_divided_over_the_grid() -> None:
    found = predicted("dtype=float64")
    assert set(found["bytes"]) == set(found["mean_bytes"]) == set(TERMS) and found["ranks"] == 8
    held = 8 * (MATRICES + 4 * VECTORS)  # every vector is split by one axis of the three and copied on the others
    for term, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        assert found["mean_bytes"][term] * 8 == times * held
    serial = predict(config.load("demo", ["scheme=serial", "dtype=float64"]))["bytes"]
    assert serial["parameters"] == 8 * (MATRICES + VECTORS)
    assert serial["peak"] > serial["parameters"] + serial["optimizer"] + serial["activations"]


def test_16_bits_halve_the_activations_and_keep_float32_weights_beside_their_copies() -> None:
    wide, half = predicted("dtype=float32"), predicted("dtype=bfloat16")
    assert half["bytes"]["parameters"] == 1.5 * wide["bytes"]["parameters"]
    assert half["bytes"]["optimizer"] == wide["bytes"]["optimizer"]
    assert 0.45 < half["bytes"]["activations"] / wide["bytes"]["activations"] < 0.75


def test_recomputation_micro_batches_and_more_ranks_take_less() -> None:
    base = predicted()["bytes"]
    assert predicted("recompute=full")["bytes"]["activations"] < 0.4 * base["activations"]
    assert predicted("train.batch=48", "train.accumulate=4")["bytes"]["activations"] < 0.6 * base["activations"]
    assert predict(config.load("demo", [*CUBE[:2], "grid.z=4", "train.batch=24"]))["bytes"]["peak"] < base["peak"]


@pytest.mark.parametrize(
    ("assignments", "error", "words"),
    [
        (["train.batch=6"], LayoutError, "batch 6"),
        (["scheme=summa"], GridError, "summa"),
        (["scheme=oned"], GridError, "y=8"),
        (["model.family=vit", "model.sequence=65"], ConfigError, "vit"),
    ],
)
def test_what_the_run_would_refuse_is_refused(assignments: list[str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        predicted(*assignments)
