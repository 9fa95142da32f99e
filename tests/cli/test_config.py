"""`summa3d config` and the configurations that are shipped."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from summa3d.cli import main as entry
from summa3d.cli.config import commented, keys
from summa3d.errors import GridError
from summa3d.nn.choose import choose
from summa3d.train import config as configuration
from summa3d.train import toml
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
    every = re.sub(r"^# (\w+ = )(?!none$)", r"\1", text, flags=re.MULTILINE)
    assert configuration.from_table(tomllib.loads(every)) == configuration.from_table(table)  # the defaults are those


def test_what_nobody_sets_is_not_listed_but_found_by_name_and_kept_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["config"]) == 0
    said = capsys.readouterr().out
    assert "grid.x" in said and not any(f"\n{name} =" in said for name in configuration.HIDDEN) and "not available" not in said
    assert entry.main(["config", "grid.cp"]) == 0
    assert "not available yet" in capsys.readouterr().out
    assert "# cp" not in commented({}) and 'chosen = "grid"' in commented({"chosen": "grid"})


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


def test_a_text_of_any_characters_is_toml_that_reads_as_the_same_text() -> None:
    text = 'quoted "é" \\ back\nand\ttab\x01'
    written = commented({"train": {"sample_prompt": text}})
    assert tomllib.loads(written)["train"]["sample_prompt"] == text
