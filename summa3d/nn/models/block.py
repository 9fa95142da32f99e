"""One transformer block of any family."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..context import Context
from ..experts.moe import MoE
from ..layers.attention import new_attention
from ..layers.attention_mask import Visible
from ..layers.dropout import Batch, Dropout
from ..layers.joint_sums import JointSums
from ..layers.mlp import new_mlp
from ..layers.norm import new_norm


class Block(nn.Module):
    """Attention and a feed-forward layer, or experts, as two branches of the residual stream, whose layout is unchanged.

    Pre-norm (GPT-2, Llama, ViT): x + dropout(branch(norm(x))), twice. Post-norm (BERT): norm(x + dropout(branch(x))), twice.
    The first weights of the two projections onto the residual stream are smaller by √(2l), as in GPT-2.

    name : the block's name in the model, which keys its dropout masks
    experts : whether the layer has experts in place of a feed-forward layer; default where the model does
    """

    def __init__(
        self, config: ModelConfig, scheme: Context, name: str, dtype: torch.dtype = torch.float32, experts: bool | None = None
    ) -> None:
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * config.layers)
        self.hidden, self.post_norm, self._context = config.hidden, config.architecture.post_norm, scheme
        self.attention_norm = new_norm(config, scheme, dtype=dtype)
        self.attention = new_attention(config, scheme, name, out_std, dtype)
        self.mlp_norm = new_norm(config, scheme, dtype=dtype)
        experts = bool(config.num_experts) if experts is None else experts
        self.moe = MoE(config, scheme, out_std, dtype) if experts else None
        self.mlp = None if experts else new_mlp(config, scheme, out_std, dtype)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention_branch", scheme, scheme.residual)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp_branch", scheme, scheme.residual)
        self._joint_sums = JointSums(scheme.grid.shape, self)

    def forward(self, x: Tensor, batch: Batch, visible: Visible) -> Tensor:
        """This rank's block of the residual stream, [b/(XY), s, h/Z] in the cuboid → the same layout."""
        with self._joint_sums():
            return self._run(x, batch, visible)

    def _run(self, x: Tensor, batch: Batch, visible: Visible) -> Tensor:
        if self.post_norm:  # both branches return their last bias, and `_add` fuses it
            x = self.attention_norm(self._add(self.attention_dropout, self.attention(x, batch, visible, True), batch, x))
            return self.mlp_norm(self._add(self.mlp_dropout, self._fed(x, batch), batch, x))
        # No variable names a branch's output: it would keep the tensor alive while the next branch runs.
        x = self._add(self.attention_dropout, self.attention(self.attention_norm(x), batch, visible, True), batch, x)
        return self._add(self.mlp_dropout, self._fed(self.mlp_norm(x), batch), batch, x)

    def _fed(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The feed-forward layer's output and its last bias, or those of the experts."""
        if self.moe is not None:
            return self.moe(x, batch), None
        assert self.mlp is not None, "a block has experts or a feed-forward layer"
        return self.mlp(x, self._context.scheme.rows(batch.rows, batch.sequence), skip_bias_add=True)

    def _add(self, dropout: Dropout, branch: tuple[Tensor, Tensor | None], batch: Batch, residual: Tensor) -> Tensor:
        """residual + dropout(branch + its last bias); on a device one kernel (bias fusion)."""
        return dropout(branch[0], (batch.sequence, self.hidden), batch, residual, branch[1])
