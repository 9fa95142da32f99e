# What a family learns from the corpus: the next token, or masked tokens and whether two pieces of text follow each other.
# Imports tokens, nn.random; torch. Every row is a function of (seed, step, its number in the step's whole batch) alone.
# Next: loop.py, which feeds them to the model.
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..nn.config import ModelConfig
from ..nn.random import bits, key
from .tokens import Tokens

SECOND_STREAM = 0x7061_6972_0000_0001
"""Keeps the windows that do not follow apart from the others of the same seed."""
MASKED, REPLACED, SHARE = 0.8, 0.1, 0.15
"""Of the tokens to be filled in: how many are masked, how many replaced; and how many of all tokens those are (BERT, §3.1)."""


class Objective(Protocol):
    """The arguments of a model's forward, for rows of a step or of the held-out text."""

    def training(self, seed: int, step: int, first_row: int, rows: int) -> dict[str, Tensor]:
        """Rows first_row…first_row+rows of the global batch of `step`; the first dim of every tensor is the rows."""
        ...

    def held_out(self, rows: int) -> dict[str, Tensor]:
        """Rows of the held-out text, always the same."""
        ...

    def counts(self, rows: int) -> dict[str, int]:
        """What the losses over a step of `rows` rows are divided by."""
        ...


@dataclass(frozen=True)
class NextToken:
    """Every token from those before it."""

    tokens: Tokens

    def training(self, seed: int, step: int, first_row: int, rows: int) -> dict[str, Tensor]:
        return _shifted(self.tokens.batch(seed, step, first_row, rows))

    def held_out(self, rows: int) -> dict[str, Tensor]:
        return _shifted(self.tokens.held_out(rows))

    def counts(self, rows: int) -> dict[str, int]:
        return {"count": rows * self.tokens.sequence}


def _shifted(windows: np.ndarray) -> dict[str, Tensor]:
    whole = torch.from_numpy(windows)
    return {"tokens": whole[:, :-1], "labels": whole[:, 1:]}


@dataclass(frozen=True)
class MaskedPairs:
    """Masked tokens from those around them, and whether the second piece of text follows the first.

    A row is [classify] first [separate] second [separate]. In half of the rows, the second piece comes from elsewhere. The same
    number of tokens is to be filled in in each row, 15 %; of them 80 % are masked, 10 % replaced by any, 10 % left. The
    three special tokens follow the tokenizer's: mask, classify, separate.
    """

    tokens: Tokens

    @property
    def specials(self) -> tuple[int, int, int]:
        """Mask, classify, separate."""
        first = self.tokens.tokenizer.vocabulary
        return first, first + 1, first + 2

    @property
    def pieces(self) -> tuple[int, int]:
        """Tokens of the first and the second piece."""
        text = self.tokens.sequence - 3
        return (text + 1) // 2, text // 2

    @property
    def filled(self) -> int:
        """Tokens to be filled in, in each row."""
        return max(1, round(SHARE * sum(self.pieces)))

    def training(self, seed: int, step: int, first_row: int, rows: int) -> dict[str, Tensor]:
        follows = self.tokens.batch(seed, step, first_row, rows)
        other = self.tokens.batch(seed, step, first_row, rows, SECOND_STREAM)
        relation = (
            bits(key(seed, "relation", step), (first_row + rows, 1), (slice(first_row, first_row + rows), slice(0, 1))) >> 31
        )
        return self._rows(follows, other, relation[:, 0], key(seed, "masks", step), first_row)

    def held_out(self, rows: int) -> dict[str, Tensor]:
        windows = self.tokens.held_out(rows)
        return self._rows(windows, np.roll(windows, rows // 2, 0), np.arange(rows) % 2, key(0, "held-out masks"), 0)

    def counts(self, rows: int) -> dict[str, int]:
        return {"count": rows * self.filled, "pairs": rows}

    def _rows(
        self, follows: np.ndarray, other: np.ndarray, relation: np.ndarray, stream: int, first_row: int
    ) -> dict[str, Tensor]:
        rows, (first, second) = len(follows), self.pieces
        mask, classify, separate = self.specials
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
        """The text as the model sees it, and its labels: the true token where one is to be filled in, else −1."""
        rows, length = text.shape
        where = (slice(first_row, first_row + rows), slice(0, length), slice(0, 3))
        draws = bits(stream, (first_row + rows, length, 3), where).astype(np.int64)  # [rows, text, 3]
        chosen = np.zeros(text.shape, bool)
        np.put_along_axis(chosen, np.argsort(draws[..., 0], 1, kind="stable")[:, : self.filled], True, 1)
        fate = draws[..., 1] / 2**32
        replacement = draws[..., 2] * self.tokens.tokenizer.vocabulary >> 32
        seen = np.where(fate < MASKED, mask, np.where(fate < MASKED + REPLACED, replacement, text))
        return np.where(chosen, seen, text), np.where(chosen, text, -1)


def objective(model: ModelConfig, tokens: Tokens) -> Objective:
    """What the model's family learns: a decoder the next token, an encoder masked pairs."""
    return NextToken(tokens) if model.traits.causal else MaskedPairs(tokens)
