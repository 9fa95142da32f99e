"""`summa3d config` and the configurations that are shipped."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from summa3d.cli import main as entry
from summa3d.cli.config import commented, keys
from summa3d.cluster import load as cluster
from summa3d.errors import ConfigError, DataError, GridError
from summa3d.nn.choose import choose
from summa3d.nn.config import named_models
from summa3d.plan.search.request import request
from summa3d.train import config as configuration
from summa3d.train import toml
from summa3d.train.data import corpus
from summa3d.train.dry_run import predict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def without_empty_tables(table: dict[str, Any]) -> dict[str, Any]:
    inner = {key: without_empty_tables(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in inner.items() if value != {}}


def test_every_key_has_a_meaning() -> None:
    found = list(keys())
    assert len({key.meaning for key in found}) == len(found)
    assert [key.name for key in found if len(key.meaning) < 5] == []
    assert sorted(key.name for key in found) == sorted(toml.leaves(configuration.Config))


@pytest.mark.parametrize("name", ["", *configuration.shipped()])
def test_a_commented_file_is_the_configuration_again(name: str) -> None:
    table = configuration.read_table(name) if name else {}
    text = commented(table)
    read = without_empty_tables(tomllib.loads(text))
    assert read == table and configuration.from_table(read) == configuration.from_table(table)
    every = re.sub(r"^# (\w+ = )(?! #)", r"\1", text, flags=re.MULTILINE)
    assert configuration.from_table(tomllib.loads(every)) == configuration.from_table(table)  # the defaults are those


def test_what_nobody_sets_is_not_listed_but_found_by_name_and_kept_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["config"]) == 0
    said = capsys.readouterr().out
    assert "grid.x" in said and not any(f"\n{name} =" in said for name in configuration.HIDDEN)
    assert entry.main(["config", "chosen"]) == 0
    assert "summa3d train" in capsys.readouterr().out
    assert "# chosen =" not in commented({}) and 'chosen = "grid"' in commented({"chosen": "grid"})


def test_a_key_a_table_and_a_file_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["config", "train.learning_rate"]) == 0
    assert capsys.readouterr().out.startswith("train.learning_rate = 0.001   (a number)\n    the largest learning rate")
    assert entry.main(["config", "grid.x"]) == 0
    assert capsys.readouterr().out.startswith("grid.x = none ")  # and not 1, which would be a grid that is given
    assert entry.main(["config", "overlap"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " = " in line][:2] == [
        "overlap.gather",
        "overlap.input_gradient",
    ]
    assert entry.main(["config", "llama-tiny"]) == 0
    assert '\nfamily = "llama"\n' in capsys.readouterr().out
    assert entry.main(["config", "accumulate"]) == 0  # the last part of a key
    assert capsys.readouterr().out.startswith("train.accumulate = 1 ")
    assert entry.main(["config", "lr"]) == 1
    assert "The nearest is 'train.learning_rate'" in capsys.readouterr().err


def _fewest(config: configuration.Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
    found = choose(config.model, config.train.micro_batch, ranks, schemes, config.regather, config.vectors)
    return found.scheme, found.grid


@pytest.mark.parametrize("ranks", [4, pytest.param(2, marks=pytest.mark.wide), pytest.param(12, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", configuration.shipped())
def test_a_shipped_configuration_can_be_taken_dry_on_the_grid_that_is_chosen(name: str, ranks: int) -> None:
    """A few of its layers: the others are equal."""
    config = configuration.load_for(ranks, name, ["model.layers=1"], _fewest)
    found = predict(config, ranks_per_node=ranks)
    assert found["ranks"] == ranks and found["words"] and found["bytes"]["peak"] > found["bytes"]["parameters"]


@pytest.mark.parametrize("name", configuration.shipped())
def test_a_shipped_configuration_has_grids_of_many_numbers_of_ranks(name: str) -> None:
    config = configuration.load(name)
    fits = []
    for ranks in (1, 2, 3, 4, 6, 8, 12, 16):
        try:
            fits.append(choose(config.model, config.train.micro_batch, ranks).words)
        except GridError:
            fits.append(None)
    assert None not in fits[:7], fits


def test_every_model_that_is_planned_by_name_is_a_configuration_of_the_same_sizes() -> None:
    assert not {*named_models()} & {*configuration.shipped()}
    for name in named_models():
        config = configuration.load(name)
        assert config.model == request([name], 1, cluster("selene")).config.model
        assert config.data.vocabulary == config.model.vocabulary and config.rows % 64 == 0


def test_a_model_by_name_is_shown_taken_dry_and_trained_on_a_corpus_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["config", "gpt3-1.3b"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["model"]["hidden"] == 2048 and shown["data"] == {"tokenizer": "numbers:51200"}
    config = configuration.load("llama2-70b", ["model.layers=1", "grid.x=3", "grid.y=2", "train.batch=48"])
    assert predict(config, ranks_per_node=6)["parameters"] == 2 * 32000 * 8192 + 8192 * (2.25 * 8192 + 3 * 28672 + 3)
    with pytest.raises(DataError, match=r"(?s)no corpus\..*data\.path and data\.tokenizer"):
        corpus.check(config.data)
    corpus.check(configuration.load("llama2-70b", ["data.tokenizer=bpe:32000"]).data)
    with pytest.raises(ConfigError, match="nearest is 'llama2-70b'"):
        configuration.load("lama2-70b")


def test_a_text_of_any_characters_is_toml_that_reads_as_the_same_text() -> None:
    text = 'quoted "é" \\ back\nand\ttab\x01'
    written = commented({"train": {"sample_prompt": text}})
    assert tomllib.loads(written)["train"]["sample_prompt"] == text
