# GPT: embedding, blocks, final norm, tied head, loss; on any scheme. Imports everything in nn.
# Next: volume.py (the words a step moves); train/loop.py (what drives it).
from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ShapeError
from ..layout.distribute import collect
from .block import Block
from .config import ModelConfig
from .dropout import Batch, Dropout
from .embedding import Embedding, Positions
from .loss import cross_entropy
from .norm import LayerNorm
from .parameter import initialise
from .scheme import Scheme


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a tied head (the GPT-2 family).

    Parameters
    ----------
    config : sizes
    scheme : how every tensor is split
    dtype : of parameters and activations
    seed : keys weights and dropout masks; both depend on global indices only, so every grid computes the same numbers

    ``model(tokens, labels)`` takes the *global* batch [b, s] (int64, equal on every rank; each rank uses its rows) and
    returns the global mean loss on every rank. After ``loss.backward()`` each parameter's ``.grad`` is its block of the
    gradient of that loss. Raises LayoutError or ShapeError for a batch that the scheme cannot split or sequences too long.
    """

    def __init__(self, config: ModelConfig, scheme: Scheme, dtype: torch.dtype = torch.float32, seed: int = 1) -> None:
        super().__init__()
        self.config, self.scheme, self.seed = config, scheme, seed
        scheme.check(
            config, scheme.stream.ways(0, scheme.grid.shape) * scheme.after_linear(scheme.stream).ways(0, scheme.grid.shape)
        )
        self.embedding = Embedding(config.vocabulary, config.hidden, scheme, dtype=dtype)
        self.positions = Positions(config.sequence, config.hidden, scheme, dtype=dtype)
        self.dropout = Dropout(config.dropout, "embedding", scheme, scheme.stream)
        self.blocks = nn.ModuleList(Block(config, scheme, f"blocks.{index}", dtype) for index in range(config.layers))
        self.norm = LayerNorm(config.hidden, scheme, dtype=dtype)
        initialise(self, scheme, seed)

    def forward(self, tokens: Tensor, labels: Tensor, step: int = 0, first_row: int = 0, count: int | None = None) -> Tensor:
        """The loss of a micro-batch.

        Parameters
        ----------
        tokens, labels : global [b, s]; labels < 0 are not counted
        step, first_row : of the run, and of row 0 in the step's whole batch: they key the dropout masks
        count : the labels that the loss is divided by; default those of this micro-batch. With gradient accumulation, pass
            the count of the whole step.
        """
        if tokens.shape != labels.shape:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}, labels {tuple(labels.shape)}; they must be equal.")
        count = max(int((labels >= 0).sum()), 1) if count is None else count
        logits = self.embedding.head(self._stream(tokens, Batch(len(tokens), tokens.shape[-1], self.seed, step, first_row)))
        layout = self.embedding.logits_layout
        mine = self.scheme.block_of(labels, layout)
        return cross_entropy(logits, mine, self.scheme, layout, self.config.vocabulary, count)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """Global logits [b, v] of the token after each row, on every rank. tokens: global [b, s]."""
        logits = self.embedding.head(
            self.scheme.last_tokens(self._stream(tokens, Batch(len(tokens), tokens.shape[-1], self.seed))), self.scheme.pooled
        )
        layout = self.scheme.after_linear(self.scheme.pooled)
        return collect(logits, self.scheme.grid, layout, (len(tokens), self.config.vocabulary))

    def _stream(self, tokens: Tensor, batch: Batch) -> Tensor:
        """The normalised residual stream after the last block, [b/(XY), s, h/Z]."""
        self.scheme.check(self.config, len(tokens))
        if tokens.dim() != 2 or not 1 <= tokens.shape[1] <= self.config.sequence:
            raise ShapeError(f"tokens have shape {tuple(tokens.shape)}; the model takes [batch, 1 … {self.config.sequence}].")
        mine = self.scheme.block_of(tokens, self.embedding.tokens_layout)
        x = self.positions(self.embedding(mine), tokens.shape[1])
        x = self.dropout(x, (batch.sequence, self.config.hidden), batch)
        for block in self.blocks:
            x = block(x, batch)
        return self.norm(x)
