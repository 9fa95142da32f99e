"""Configurations: what is accepted, and what is answered to what is not.

No MPI, no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest

from summa3d.cli.train import picker
from summa3d.errors import ConfigError
from summa3d.train import config, toml


def test_a_written_configuration_reads_back_equal(tmp_path: Path) -> None:
    settings = ["grid.tile=x=2,y=2", "grid.x=2", "model.ffn=100", "train.betas=[0.8, 0.99]", "regather=false", "data.path=a b"]
    written = config.load("demo", settings)
    config.write(config.to_table(written), tmp_path / "config.toml")
    assert config.load(str(tmp_path / "config.toml")) == written
    assert (written.grid.tile, written.model.ffn, written.train.betas, written.regather) == (
        {"x": 2, "y": 2},
        100,
        (0.8, 0.99),
        False,
    )


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_grid_that_was_chosen_is_chosen_again_when_replicas_or_stages_change(axis: str, tmp_path: Path) -> None:
    def choose(asked: config.Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
        return "oned", {"y": ranks}

    file, words = tmp_path / "config.toml", ["model.layers=2", "train.batch=4"]
    config.write(config.to_table(config.load_for(2, "demo", words, choose)), file)
    assert config.load_for(2, str(file), [], choose).grid.axes["y"] == 2
    again = config.load_for(2, str(file), [f"grid.{axis}=2"], choose)
    assert (again.grid.axes["y"], again.grid.axes[axis], again.chosen) == (1, 2, "scheme and grid")
    with pytest.raises(ConfigError, match="cannot be divided into 3 equal parts"):
        config.load_for(2, str(file), [f"grid.{axis}=3", "model.layers=3", "train.batch=12"], choose)


@pytest.mark.parametrize("text", ["The ", " ", "  a  b\t", '"', "\n", '"The "\nsteps = 1', "# no comment ", "8 "])
def test_text_is_set_as_it_is_typed(text: str, tmp_path: Path) -> None:
    read = config.load("demo", [f"train.sample_prompt={text}", f"data.separator={text}", "train.steps= 7 "])
    assert (read.train.sample_prompt, read.data.separator, read.train.steps) == (text, text, 7)
    config.write(config.to_table(read), tmp_path / "config.toml")
    assert config.load(str(tmp_path / "config.toml")) == read


@pytest.mark.parametrize("text", ['"The "', " 'The ' "])
def test_quotes_of_toml_around_a_text_are_none_of_it(text: str) -> None:
    assert config.load("demo", [f"train.sample_prompt={text}"]).train.sample_prompt == "The "


def test_an_override_wins_over_the_file_and_none_unsets(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nffn = 100\nhidden = 64\n")
    read = config.load(str(tmp_path / "run.toml"), ["model.ffn=none", "train.steps=7"])
    assert (read.model.ffn, read.model.hidden, read.train.steps) == (None, 64, 7)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("train.step", "train.steps"),
        ("model.hiden", "model.hidden"),
        ("lr", "train.learning_rate"),
        ("overlap.gathers", "overlap.gather"),
        ("steps", "train.steps"),
        ("shceme", "scheme"),
        ("grid.tp", "grid.y"),  # what other libraries call it
        ("train.micro-batch-size", "train.accumulate"),
        ("zero_stage", "replicas.zero"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", [f"{wrong}=3"])
    assert repr(wrong) in str(raised.value) and repr(nearest) in str(raised.value)


def test_an_unknown_key_in_a_file_is_found_too(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nbatches = 4\n")
    with pytest.raises(ConfigError, match=r"'train\.batches'.*'train\.batch'"):
        config.load(str(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("train.steps=many", ["train.steps", "'many'", "an integer"]),
        ("train.steps=1.5", ["train.steps", "1.5", "an integer"]),
        ("train.steps=true", ["train.steps", "True", "an integer"]),
        ("train.clip=x", ["train.clip", "a number"]),
        ("regather=1", ["regather", "true or false"]),
        ("overlap.input_gradient=2", ["overlap.input_gradient", "true or false"]),
        ("grid.tile=3", ["grid.tile", "a table of integers"]),
        ("train.betas=[0.9]", ["train.betas", "a list of 2 numbers"]),
        ("train.sample_prompts=[1]", ["train.sample_prompts", "takes text"]),
        ('train.sample_prompts=[""]', ["train.sample_prompts", "at least one character"]),
        ("train=3", ["train is a table", "train.steps"]),
        ("train.steps", ["--set", "key=value"]),
    ],
)
def test_a_value_of_another_type_is_refused_with_key_value_and_type(assignment: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", [assignment])
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["train.batch=16", "train.accumulate=3"], ["batch 16", "accumulate = 3", "1, 2, 4, 8, 16"]),
        (["train.steps=0"], ["train.steps is 0", "at least 1"]),
        (["train.seed=-1"], ["train.seed is -1", "at least 0"]),
        (["scheme=cubiod"], ["'cubiod'", "'cuboid'"]),
        (["dtype=float61"], ["float61", "float16", "float32, float64"]),
        (["model.heads=7"], ["hidden 256", "heads 7", "8"]),
        (["data.tokenizer=words"], ["'words'", "bpe:N"]),
        (["data.tokenizer=bpe:500"], ["model.vocabulary 256", "500"]),
        (["train.schedule=step"], ["train.schedule = 'step' is not known", "cosine, linear, constant, wsd"]),
        (["train.decay_steps=5"], ["train.decay_steps = 5 is of train.schedule = \"wsd\" (it is 'cosine')"]),
        (["train.schedule=wsd", "train.decay_steps=290"], ["train.decay_steps = 290", "at most train.steps = 240"]),
        (["train.learning_rate=nan"], ["train.learning_rate is nan", "at least 0, and finite"]),
        (["train.clip=inf"], ["train.clip is inf", "finite"]),
        (["train.epsilon=nan"], ["train.epsilon = nan", "positive and finite"]),
        (["grid.d=0"], ["grid.d is 0"]),
        (["overlap.gather=-1"], ["overlap.gather is -1", "'auto'", "0 for none"]),
    ],
)
def test_a_value_that_no_run_can_have_is_refused(assignments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", assignments)
    assert all(word in str(raised.value) for word in words)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'dmeo'.*demo"):
        config.load("dmeo")
    (tmp_path / "broken.toml").write_text("[train\nsteps = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        config.load(str(tmp_path / "broken.toml"))


def test_a_number_may_be_written_as_an_integer() -> None:
    assert config.load("demo", ["train.clip=2"]).train.clip == 2.0


def test_a_key_that_was_removed_is_unknown_and_the_error_says_so(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[overlap]\ngather = 1\nweight_gradient = 1\n")
    for load in (lambda: config.load("demo", ["overlap.weight_gradient=1"]), lambda: config.load(str(file))):
        with pytest.raises(ConfigError) as raised:
            load()
        assert "Unknown configuration key 'overlap.weight_gradient'" in str(raised.value)
        assert "\n  It was removed: every layer waits" in str(raised.value)


def _taken(config: config.Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
    """A choice that shows its arguments: the first scheme that may be taken, on a line."""
    return schemes[0], {"x": ranks, "y": 1, "z": 1, "d": 1}


def test_a_grid_is_chosen_only_where_none_is_given(tmp_path: Path) -> None:
    def loaded(ranks: int, source: str, *assignments: str) -> tuple[str, str, str]:
        found = config.load_for(ranks, source, assignments, _taken)
        config.write(config.to_table(found), tmp_path / "run.toml")
        return found.scheme, str(found.grid), found.chosen

    run = str(tmp_path / "run.toml")
    first = config.SCHEMES[0]
    assert loaded(4, "demo", "grid.y=2") == ("cuboid", "x=1,y=2,z=1", "")
    assert loaded(4, run) == ("cuboid", "x=1,y=2,z=1", "")  # given once, it stays, though it does not fit
    assert loaded(4, "demo", "scheme=summa") == ("summa", "x=4,y=1,z=1", "grid")
    assert loaded(2, run) == ("summa", "x=2,y=1,z=1", "grid")  # on other ranks the grid is chosen again, not the scheme
    assert loaded(4, "demo") == (first, "x=4,y=1,z=1", "scheme and grid")
    assert loaded(4, run, "train.steps=9") == (first, "x=4,y=1,z=1", "scheme and grid")
    assert loaded(4, run, "scheme=oned") == ("oned", "x=4,y=1,z=1", "grid")
    assert loaded(6, run, "grid.x=3") == ("oned", "x=3,y=1,z=1", "")


def test_replicas_and_stages_have_an_order_of_axes() -> None:
    grid = config.load("demo", ["grid.x=2", "grid.z=2", "grid.order=z,y,x,d,dp,pp"]).grid
    assert grid.axes == {"x": 2, "y": 1, "z": 2} and grid.rank_order == ("z", "y", "x")
    assert config.load("demo", []).grid.rank_order == ("z", "y", "x")


def test_replicas_divide_the_batch_and_a_chosen_grid_leaves_them_alone():
    found = config.load("demo", ["grid.dp=3", "grid.z=2", "train.batch=12", "train.accumulate=2"])
    assert (found.rows, found.grid.rank_order, found.grid.axes) == (2, ("z", "y", "x"), {"x": 1, "y": 1, "z": 2, "dp": 3})
    with pytest.raises(ConfigError, match=r"batch 16 .* = 2 .* grid.dp = 3 .* fit: 12, 18, 24.* 16: 1, 2, 4, 8\."):
        config.load("demo", ["grid.dp=3", "train.batch=16", "train.accumulate=2"])
    with pytest.raises(ConfigError, match=r"zero is 4; it must be 0 \(all is copied\), 1 .* or 3 \(weights too\)\.$"):
        config.load("demo", ["replicas.zero=4"])
    with pytest.raises(ConfigError, match=r"replicas.bucket is 0; it must be at least 1"):
        config.load("demo", ["replicas.bucket=0"])
    chosen = config.load_for(6, "demo", ["grid.dp=3", "train.batch=12", "train.accumulate=1"], picker("train"))
    assert chosen.grid.dp == 3 and prod(chosen.grid.axes.values()) == 6 and chosen.chosen
    with pytest.raises(ConfigError, match=r"4 ranks cannot be divided into 3 equal parts .* fit: 3, 6"):
        config.load_for(4, "demo", ["grid.dp=3", "train.batch=12"], picker("train"))


def test_replicas_that_were_chosen_are_chosen_again_and_those_that_were_given_stay(tmp_path: Path) -> None:
    def choose(asked: config.Config, ranks: int, schemes: Sequence[str]) -> tuple[str, dict[str, int]]:
        free = "replicas" in asked.chosen
        return "cuboid", {"x": ranks // 2, "dp": 2} if free else {"x": ranks}

    def loaded(ranks: int, source: str, *assignments: str) -> tuple[str, str]:
        found = config.load_for(ranks, source, assignments, choose)
        config.write(config.to_table(found), tmp_path / "run.toml")
        return str(found.grid), found.chosen

    run = str(tmp_path / "run.toml")
    assert loaded(4, "demo") == ("x=2,y=1,z=1,dp=2", "scheme, grid and replicas")
    assert loaded(4, run, "train.steps=9") == ("x=2,y=1,z=1,dp=2", "scheme, grid and replicas")
    assert loaded(6, run) == ("x=3,y=1,z=1,dp=2", "scheme, grid and replicas")
    assert loaded(6, run, "grid.dp=3") == ("x=2,y=1,z=1,dp=3", "scheme and grid")
    assert loaded(12, run) == ("x=4,y=1,z=1,dp=3", "scheme and grid")  # given once, they stay
    assert loaded(4, "demo", "scheme=cuboid") == ("x=2,y=1,z=1,dp=2", "grid and replicas")
    assert loaded(8, run) == ("x=4,y=1,z=1,dp=2", "grid and replicas")
    assert loaded(8, run, "grid.x=8") == ("x=8,y=1,z=1", "")  # where some sizes are given, the others are 1


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["grid.pp=3", "pipeline.schedule=1f1v"], ["1f1v", "did you mean '1f1b'", "gpipe, 1f1b, interleaved"]),
        (["grid.pp=3", "pipeline.schedule=interleaved"], ["at least 2 chunks", "grid.pp = 3"]),
        (["grid.pp=2", "pipeline.schedule=interleaved", "pipeline.chunks=2", "train.accumulate=1"], ["multiple of 2", "fit: 2"]),
        (
            ["grid.pp=4", "pipeline.schedule=zb-v", "pipeline.chunks=2", "train.accumulate=3"],
            ["3 are fewer than 4", "4 and more"],
        ),
        (["grid.pp=4", "pipeline.schedule=zb-v", "train.accumulate=4"], ["has 2 chunks a rank, not 1", "Use chunks 2"]),
        (["grid.pp=4", "model.layers=3"], ["3 layers cannot fill the 4 stages", "3 ranks × 1"]),
        (["grid.pp=2", "model.layers=3", "pipeline.layers=2,2"], ["sum to 3", "sum to 4", "2,1"]),
        (["grid.pp=3", "model.layers=3", "pipeline.layers=3,0,0"], ["only the first and the last stage"]),
        (["grid.pp=2", "pipeline.layers=even"], ["pipeline.layers = 'even'", '"4,3"']),
        (["pipeline.chunks=2"], ["one rank has one chunk, not 2"]),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused_with_what_fits(assignments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("demo", assignments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_grid_is_chosen_for_the_ranks_of_one_stage() -> None:
    asked = []

    def choose(chosen: config.Config, ranks: int, schemes: object) -> tuple[str, dict[str, int]]:
        asked.append(ranks)
        return "cuboid", {"x": ranks, "y": 1, "z": 1}

    assert config.load_for(8, "demo", ["grid.pp=2"], choose).grid.axes == {"x": 4, "y": 1, "z": 1, "pp": 2} and asked == [4]
    with pytest.raises(ConfigError, match=r"3 ranks cannot be divided into 2 equal parts .* fit: 2, 4"):
        config.load_for(3, "demo", ["grid.pp=2"], choose)


def test_names_of_other_libraries_lead_to_keys_that_there_are() -> None:
    assert toml.ELSEWHERE.keys() <= set(toml.leaves(config.Config))
    names = " ".join(toml.ELSEWHERE.values()).split()
    assert len(names) == len(set(names))
