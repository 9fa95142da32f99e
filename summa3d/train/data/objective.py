"""Training objectives: next-token prediction, and BERT's masked tokens with next-sentence prediction.

Every row is a function of the seed, the step and the row's number in the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...layout.random import bits, key
from ...nn.config import ModelConfig
from .tokens import Tokens

SECOND_PIECE_STREAM = 0x7061_6972_0000_0001
"""Philox key word of the windows that do not follow the first piece; other windows of the same seed use another word."""
MASKED, REPLACED, SHARE = 0.8, 0.1, 0.15
"""The fractions of predicted tokens that are masked and randomly replaced; the fraction of predicted tokens (BERT, §3.1)."""


@dataclass(frozen=True)
class NextToken:
    """Next-token prediction: every token is predicted from the tokens before it."""

    tokens: Tokens

    def training(self, seed: int, step: int, first_row: int, rows: int) -> dict[str, Tensor]:
        """`tokens` and `labels`, int64 [rows, sequence]: windows of the training text, the labels shifted by one token."""
        return _shifted(self.tokens.batch(seed, step, first_row, rows))

    def held_out(self, rows: int) -> dict[str, Tensor]:
        """`tokens` and `labels`, int64 [rows, sequence]: windows of the held-out text, the labels shifted by one token."""
        return _shifted(self.tokens.held_out(rows))

    def counts(self, rows: int) -> dict[str, int]:
        """`count`: every token of every row is predicted."""
        return {"count": rows * self.tokens.sequence}


def _shifted(windows: np.ndarray) -> dict[str, Tensor]:
    whole = torch.from_numpy(windows)
    return {"tokens": whole[:, :-1], "labels": whole[:, 1:]}


@dataclass(frozen=True)
class MaskedPairs:
    """BERT's objectives: masked tokens are predicted, and whether the second piece of text follows the first.

    A row is [classify] first [separate] second [separate]. In half of the rows, the second piece is taken from elsewhere. 15 %
    of the text tokens of each row are predicted: 80 % of these are masked, 10 % are replaced by random tokens, 10 % are left
    as they are. The three special tokens follow the tokenizer's tokens in the order mask, classify, separate.
    """

    tokens: Tokens

    @property
    def special_tokens(self) -> tuple[int, int, int]:
        """The token numbers of mask, classify and separate."""
        first = self.tokens.tokenizer.vocabulary
        return first, first + 1, first + 2

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of text tokens of the first piece and of the second piece."""
        text = self.tokens.sequence - 3
        return (text + 1) // 2, text // 2

    @property
    def filled(self) -> int:
        """The number of predicted tokens of each row."""
        return max(1, round(SHARE * sum(self.pieces)))

    def training(self, seed: int, step: int, first_row: int, rows: int) -> dict[str, Tensor]:
        """`tokens`, `labels` (−1: not predicted), `types`, int64 [rows, sequence], and `relation`, int64 [rows]."""
        follows = self.tokens.batch(seed, step, first_row, rows)
        other = self.tokens.batch(seed, step, first_row, rows, SECOND_PIECE_STREAM)
        relation = (
            bits(key(seed, "relation", step), (first_row + rows, 1), (slice(first_row, first_row + rows), slice(0, 1))) >> 31
        )
        return self._rows(follows, other, relation[:, 0], key(seed, "masks", step), first_row)

    def held_out(self, rows: int) -> dict[str, Tensor]:
        """The same arguments as `training`, of the held-out text; the second piece is from elsewhere in every other row."""
        windows = self.tokens.held_out(rows)
        return self._rows(windows, np.roll(windows, rows // 2, 0), np.arange(rows) % 2, key(0, "held-out masks"), 0)

    def counts(self, rows: int) -> dict[str, int]:
        """`count`, the predicted tokens, and `pairs`, the rows."""
        return {"count": rows * self.filled, "pairs": rows}

    def _rows(
        self, follows: np.ndarray, other: np.ndarray, relation: np.ndarray, stream: int, first_row: int
    ) -> dict[str, Tensor]:
        rows, (first, second) = len(follows), self.pieces
        mask, classify, separate = self.special_tokens
        text = follows[:, : first + second].copy()
        elsewhere = relation.astype(bool)
        text[elsewhere, first:] = other[elsewhere, first : first + second]
        seen, labels = self._masked(text, mask, stream, first_row)
        special = np.full((rows, 1), -1)
        ends = [np.full((rows, 1), token) for token in (classify, separate)]
        tokens = np.concatenate([ends[0], seen[:, :first], ends[1], seen[:, first:], ends[1]], 1)
        wanted = np.concatenate([special, labels[:, :first], special, labels[:, first:], special], 1)
        types = np.broadcast_to(np.arange(self.tokens.sequence) >= first + 2, tokens.shape)
        parts = {"tokens": tokens, "labels": wanted, "types": types, "relation": relation}
        return {name: torch.from_numpy(np.ascontiguousarray(part).astype(np.int64)) for name, part in parts.items()}

    def _masked(self, text: np.ndarray, mask: int, stream: int, first_row: int) -> tuple[np.ndarray, np.ndarray]:
        """The masked text and its labels: the true token where a token is predicted, else −1."""
        rows, length = text.shape
        where = (slice(first_row, first_row + rows), slice(0, length), slice(0, 3))
        draws = bits(stream, (first_row + rows, length, 3), where).astype(np.int64)  # [rows, text, 3]
        chosen = np.zeros(text.shape, bool)
        np.put_along_axis(chosen, np.argsort(draws[..., 0], 1, kind="stable")[:, : self.filled], True, 1)
        fate = draws[..., 1] / 2**32
        replacement = draws[..., 2] * self.tokens.tokenizer.vocabulary >> 32
        seen = np.where(fate < MASKED, mask, np.where(fate < MASKED + REPLACED, replacement, text))
        return np.where(chosen, seen, text), np.where(chosen, text, -1)


Objective = NextToken | MaskedPairs
"""Makes the arguments of a model's forward; dim 0 of every tensor is the row.

training : rows first_row … first_row + rows − 1 of the global batch of a step. held_out : rows of the held-out text, the same in
every call. counts : the numbers by which the losses of a step of so many rows are divided.
"""


def objective(model: ModelConfig, tokens: Tokens) -> Objective:
    """The objective of the model's family: next-token prediction for a causal model, masked pairs for an encoder."""
    return NextToken(tokens) if model.architecture.causal else MaskedPairs(tokens)
