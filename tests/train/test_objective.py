"""What a family learns: rows that depend on seed, step and number alone, and BERT's masks and pairs as its paper has them."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI
from small_runs import write_corpus

from summa3d.errors import ConfigError
from summa3d.nn.config import ModelConfig
from summa3d.train import config
from summa3d.train.config import DataConfig
from summa3d.train.data import tokens
from summa3d.train.data.objective import MaskedPairs, NextToken, objective

SEQUENCE = 40
MASK, CLASSIFY, SEPARATE = 256, 257, 258


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> MaskedPairs:
    folder = tmp_path_factory.mktemp("pairs")
    path = write_corpus(folder / "text")
    return MaskedPairs(tokens.prepare(DataConfig(path=str(path)), SEQUENCE, folder / "data", MPI.COMM_SELF))


def test_a_family_has_its_objective(pairs: MaskedPairs) -> None:
    for family, kind in (("gpt2", NextToken), ("llama", NextToken), ("bert", MaskedPairs)):
        assert type(objective(ModelConfig(family=family), pairs.tokens)) is kind


def test_next_tokens_are_the_tokens_moved_by_one(pairs: MaskedPairs) -> None:
    learns = NextToken(pairs.tokens)
    row = learns.training(seed=1, step=2, first_row=3, rows=2)
    windows = torch.from_numpy(pairs.tokens.batch(1, 2, 3, 2))
    assert torch.equal(row["tokens"], windows[:, :-1]) and torch.equal(row["labels"], windows[:, 1:])
    assert learns.counts(6) == {"count": 6 * SEQUENCE}


def test_a_row_depends_on_seed_step_and_its_number_alone(pairs: MaskedPairs) -> None:
    whole = pairs.training(seed=3, step=11, first_row=0, rows=12)
    for first, rows in ((0, 4), (4, 8), (7, 1), (11, 1)):
        for name, part in pairs.training(3, 11, first, rows).items():
            assert torch.equal(part, whole[name][first : first + rows]), name
    for other in ((4, 11), (3, 12)):
        found = pairs.training(*other, 0, 12)
        assert (found["tokens"] != whole["tokens"]).any(1).all()
        assert ((found["labels"] >= 0) != (whole["labels"] >= 0)).any(1).sum() >= 11
    held = pairs.held_out(6)
    assert all(torch.equal(part, pairs.held_out(6)[name]) for name, part in held.items())


def test_a_row_is_two_pieces_between_special_tokens(pairs: MaskedPairs) -> None:
    first, second = pairs.pieces
    assert first + second + 3 == SEQUENCE
    for row in (pairs.training(1, 0, 0, 20), pairs.held_out(20)):
        special = [0, first + 1, SEQUENCE - 1]
        assert (row["tokens"][:, special] == torch.tensor([CLASSIFY, SEPARATE, SEPARATE])).all()
        assert (row["labels"][:, special] == -1).all()
        assert row["types"].sum(1).eq(second + 1).all() and row["types"][:, first + 2 :].all()
        assert {name: part.dtype for name, part in row.items()} == dict.fromkeys(row, torch.int64)


def original(row: dict[str, torch.Tensor]) -> torch.Tensor:
    """The text before anything was masked."""
    return torch.where(row["labels"] >= 0, row["labels"], row["tokens"])


def test_the_second_piece_follows_the_first_in_half_of_the_rows(pairs: MaskedPairs) -> None:
    text = bytes(pairs.tokens.train)
    first, _ = pairs.pieces
    row = pairs.training(1, 0, 0, 200)
    for whole, relation in zip(original(row).tolist(), row["relation"].tolist(), strict=True):
        one, two = bytes(whole[1 : 1 + first]), bytes(whole[2 + first : -1])
        assert one in text and two in text
        assert (one + two in text) == (relation == 0)
    assert 80 < row["relation"].sum() < 120
    assert pairs.held_out(20)["relation"].sum() == 10


def test_the_same_number_of_tokens_is_to_be_filled_in_in_each_row(pairs: MaskedPairs) -> None:
    row = pairs.training(1, 5, 0, 1000)
    wanted = row["labels"] >= 0
    assert wanted.sum(1).eq(pairs.filled).all() and pairs.filled == round(0.15 * (SEQUENCE - 3))
    assert pairs.counts(1000) == {"count": int(wanted.sum()), "pairs": 1000}
    assert (wanted.sum(0)[[index for index in range(SEQUENCE) if index not in (0, 20, 39)]] > 100).all()  # anywhere
    seen, true = row["tokens"][wanted], row["labels"][wanted]
    masked, left = (seen == MASK).double().mean(), (seen == true).double().mean()
    assert abs(masked - 0.8) < 0.02 and abs(left - 0.1) < 0.02
    replaced = seen[(seen != MASK) & (seen != true)]
    assert len(replaced.unique()) > 150 and replaced.max() < 256
    assert (row["tokens"][~wanted] != MASK).all()


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["model.family=bert"], ["vocabulary 256", "256 tokens", "3 special", "259"]),
        (["model.family=bert", "model.vocabulary=259", "model.sequence=4"], ["sequence is 4", "need 5"]),
        (["model.family=vit", "model.sequence=65"], ["A vit model cannot be trained on text", "gpt2, llama, mixtral"]),
    ],
)
def test_a_family_that_the_corpus_does_not_fit_is_refused(assignments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config.load("demo", assignments).check_text()
    assert all(word in str(raised.value) for word in words)
