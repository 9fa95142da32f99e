"""The choice of a scheme and a grid: it fits the model, and its words are those that a dry run counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from pairs import turns

from summa3d.dry.step import Setting, run
from summa3d.errors import GridError, LayoutError
from summa3d.nn.choose import FOR_MODELS, choose
from summa3d.nn.config import FAMILIES, ModelConfig
from summa3d.nn.schemes.scheme import Scheme

RANKS = (1, 2, 3, 4, 6, 8, 9, 12)
SIZES = {"layers": 2, "hidden": 72, "heads": 12, "ffn": 144}


def model(family: str) -> ModelConfig:
    text = {} if family == "vit" else {"sequence": 24, "vocabulary": 260}
    return ModelConfig(family=family, **SIZES, **text)


TURNS = [case for order in (tuple(FAMILIES), tuple(FAMILIES)[::-1]) for case in turns(RANKS, order)]


@pytest.mark.parametrize(
    "cases", [TURNS, pytest.param([*product(RANKS, FAMILIES)], marks=pytest.mark.wide)], ids=["turns", "all"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_grid_of_the_usual_numbers_of_ranks(family: str, cases: list[tuple[int, str]]) -> None:
    config = model(family)
    for ranks in (ranks for ranks, whose in cases if whose == family):
        found = choose(config, 36, ranks)
        assert ranks > 4 or found == choose(config, 36, ranks)
        words = run(Setting(replace(config, layers=1), 36, found.scheme, {"x": 1, "y": 1, "z": 1, **found.grid})).words()
        assert bool(words) == (ranks > 1)  # a step of it can be taken there


@pytest.mark.parametrize(("name", "ranks"), [("oned", 4), ("summa", 6), ("tesseract", 8), ("cuboid", 12), ("oned-sp", 3)])
def test_its_words_are_those_of_a_dry_run_but_for_norms_loss_and_lookup(name: str, ranks: int) -> None:
    config = ModelConfig(**SIZES, sequence=24, vocabulary=264)
    found = choose(config, 36, ranks, [name])
    axes = {"x": 1, "y": 1, "z": 1, **found.grid}
    counted = sum(words for axes in run(Setting(config, 36, name, axes)).words().values() for words in axes.values())
    assert 0.75 * counted <= found.words <= counted


def test_it_takes_the_fewest_words_and_of_equals_the_cuboid() -> None:
    config = ModelConfig(**SIZES, sequence=24)
    best = choose(config, 36, 12)
    assert all(best.words <= 1.01 * choose(config, 36, 12, [name]).words for name in ("oned", "summa", "cuboid", "oned-sp"))
    assert choose(config, 36, 1).scheme == "cuboid" and best.compared > 20


def test_where_nothing_fits_it_says_which_numbers_of_ranks_would() -> None:
    mixture = ModelConfig(family="mixtral", hidden=64, heads=8)
    with pytest.raises(GridError) as raised:
        choose(mixture, 24, 7, ["tesseract"])
    message = str(raised.value)
    assert "\n" not in message and "batch 24, sequence 128, heads 8, hidden 64 with scheme tesseract" in message
    assert message.endswith("Ranks that fit: 3, 4, 6, 8.")


def test_a_grid_of_like_parts_comes_before_any_other_and_there_is_one_of_unlike_parts_where_none_is() -> None:
    config = ModelConfig(hidden=64, heads=8)
    for ranks, even in ((4, True), (7, False)):
        found = choose(config, 24, ranks)
        layouts = Scheme.of(found.scheme, found.grid)
        if even:
            layouts.check_even(config, 24)
        else:
            with pytest.raises(LayoutError):
                layouts.check_even(config, 24)


def test_it_leaves_nothing_behind() -> None:
    """The model that it builds to see whether it fits has no memory."""
    assert "agarwal" not in FOR_MODELS
    choose(ModelConfig(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=50000), 16, 8)
    assert torch.get_default_device().type == "cpu"
