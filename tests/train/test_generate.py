"""Generation: the choice of a token, and the same text from every grid."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from small_runs import train_small

from summa3d.errors import CheckpointError, ConfigError, GridError
from summa3d.nn import ModelConfig, build, scheme
from summa3d.train import generate
from summa3d.train.data.corpus import ByteTokenizer

LOGITS = np.log([0.1, 0.6, 0.05, 0.25])


def test_a_token_is_chosen_as_often_as_its_probability_says() -> None:
    numbers = (np.arange(1000) + 0.5) / 1000
    counts = np.bincount([generate.choose(LOGITS, 1.0, 0, number) for number in numbers], minlength=4)
    assert counts.tolist() == [100, 600, 50, 250]


def test_temperature_sharpens_and_zero_takes_the_likeliest() -> None:
    numbers = (np.arange(1000) + 0.5) / 1000
    cold = np.bincount([generate.choose(LOGITS, 0.5, 0, number) for number in numbers], minlength=4)
    assert cold[1] == pytest.approx(1000 * 0.36 / (0.01 + 0.36 + 0.0025 + 0.0625), abs=1)
    assert {generate.choose(LOGITS, 0.0, 0, number) for number in numbers} == {1}


def test_top_k_chooses_among_the_k_likeliest() -> None:
    assert {generate.choose(LOGITS, 1.0, 2, number) for number in np.linspace(0, 1, 200)} == {1, 3}
    assert {generate.choose(LOGITS, 1.0, 9, number) for number in np.linspace(0, 1, 200)} == {0, 1, 2, 3}


def test_the_random_number_depends_on_seed_and_position() -> None:
    drawn = {generate.uniform(seed, position) for seed in (1, 2) for position in range(50)}
    assert len(drawn) == 100 and all(0 <= number < 1 for number in drawn)
    assert generate.uniform(1, 3) == generate.uniform(1, 3)


def test_a_model_sees_as_many_of_the_last_tokens_as_it_has_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, plan, seen = ModelConfig(layers=1, hidden=8, heads=2, sequence=8, vocabulary=256), scheme("serial"), []
    model = build(settings, plan, torch.float32)

    def next_logits(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(bytes(tokens[0].tolist()))
        return torch.zeros(len(tokens), 256)

    monkeypatch.setattr(model, "next_logits", next_logits)
    text = generate.sample(model, plan, settings, ByteTokenizer(), "abcde", 6, temperature=0)
    assert text == "abcde" + 6 * "\0"
    assert seen == [(b"abcde" + bytes(count))[-8:] for count in range(6)]


def continued(folder: Path, comm: Any, of: Sequence[dict[str, Any]]) -> list[str]:
    model, plan, settings, tokenizer = generate.load(folder, comm)
    texts = [generate.sample(model, plan, settings.model, tokenizer, "abc d", 12, **options) for options in of]
    plan.grid.free()
    return texts


@pytest.mark.mpi(sizes=(8,))
def test_the_grid_of_a_run_continues_a_prompt_as_one_rank_does(comm: Any, shared_tmp_path: Path) -> None:
    train_small(comm, shared_tmp_path, grid__x=2, grid__y=2, grid__z=2, train__steps=6)
    folder = shared_tmp_path / "run"
    every: list[dict[str, Any]] = [{"seed": 5}, {"seed": 6}, {"temperature": 0.0}, {"top_k": 3, "temperature": 1.5}]
    texts = continued(folder, comm, every)
    assert comm.allgather(texts) == [texts] * comm.size
    assert all(text.startswith("abc d") and len(text.encode(errors="replace")) >= 17 for text in texts)
    if comm.rank == 0:
        assert continued(folder, MPI.COMM_SELF, every) == texts
    assert texts[0] != texts[1]

    part = comm.Split(color=0 if comm.rank < 2 else MPI.UNDEFINED)
    if part != MPI.COMM_NULL:
        with pytest.raises(GridError, match=r"x=2,y=2,z=2 has 8 places, but there are 2 ranks"):
            generate.load(folder, part)
        part.Free()
    comm.Barrier()


@pytest.mark.mpi(sizes=(2,))
def test_a_run_without_a_checkpoint_is_refused(comm: Any, shared_tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a run folder"):
        generate.load(shared_tmp_path, comm)
    train_small(comm, shared_tmp_path, grid__y=2, train__steps=1)
    if comm.rank == 0:
        shutil.rmtree(shared_tmp_path / "run" / "checkpoints")
    comm.Barrier()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        generate.load(shared_tmp_path / "run", comm)


def test_text_is_shown_as_it_comes_but_no_half_character() -> None:
    said: list[str] = []
    shown, text = generate.TextStream(said.append), "dé — ".encode() + b"\xff"
    for end in range(1, len(text) + 1):
        shown.update(text[:end].decode(errors="replace"), last=end == len(text))
    assert said == ["d", "é", " ", "—", " ", "\ufffd"]
